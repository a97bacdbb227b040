import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from eejax.train.signals import REPEATS, StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_only_asks(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.signal is None
        signal.raise_signal(number)
        assert stop.signal == number
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == number  # the first is what ended the run
    assert signal.getsignal(number) is before


def test_outside_the_main_thread_nothing_is_caught():
    seen = []

    def body():
        with StopRequest() as stop:
            seen.append(stop.signal)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [None]


def test_a_second_interrupt_ends_at_once_even_inside_a_long_call():
    # The hash stands for a compilation: minutes without a Python handler being run.
    program = """
        import hashlib
        from eejax.train.signals import StopRequest
        with StopRequest():
            print("ready", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 10**9)
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
        process.send_signal(signal.SIGINT)  # the same Ctrl-C, from a wrapper
        time.sleep(2 * REPEATS)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
