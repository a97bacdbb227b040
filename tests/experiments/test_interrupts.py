"""Ctrl-C at any moment of a launcher: one line, status 130, and nothing else."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from eejax.experiments import interrupts, launch
from eejax.sharding import distributed

ROOT = pathlib.Path(__file__).resolve().parents[2]
INTERRUPTED = 128 + signal.SIGINT
TRAIN = (
    "--config=configs/tiny.py",
    "--config.train.steps=100000",
    "--config.data.max_bytes=100000",
    "--config.train.eval_every=0",
    "--workdir={folder}/run",
)
LAUNCHERS = {
    "train": TRAIN,
    "evaluate": ("--workdir={folder}",),
    "generate": ("--workdir={folder}", "--prompt=a"),
    "serve": ("--model=m={folder}", "--port=0"),
    "calibrate": ("--base={folder}", "--workdir={folder}/new"),
    "tune": ("--base={folder}", "--exits=1", "--workdir={folder}/new"),
    "sweep": ("--workdir={folder}",),
    "chat": ("{folder}", "--prompt=a"),
    "quickstart": ("--model={folder}", "--workdir={folder}/run"),
    "train-demo": ("--tiny", "--workdir={folder}/run"),
}


@contextlib.contextmanager
def started(name, folder, flags):
    """(the command, the lines that it wrote, growing). Python writes a line for each import."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-X",
            "importtime",
            "-m",
            "eejax",
            name,
            *(flag.format(folder=folder) for flag in LAUNCHERS[name]),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=flags,
    )
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    reader.start()
    try:
        yield process, lines
        reader.join(60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def until(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)


def said(lines):
    return [line for line in lines if not line.startswith("import time:") and line.strip()]


def check(process, lines, about):
    assert process.returncode == INTERRUPTED, (about, process.returncode, said(lines)[-20:])
    left = said(lines)
    assert "interrupted" in left[-1], (about, left[-20:])
    assert not any("Traceback" in line or "KeyboardInterrupt" in line for line in left), about


def interrupt_while_importing(name, folder, draw, one_device):
    """Behind a drawn number of imports, from that of the package of launchers on."""
    flags = os.environ | {"XLA_FLAGS": one_device}
    with started(name, folder, flags) as (process, lines):
        until(
            lambda: any(line.endswith(" eejax.experiments.interrupts\n") for line in lines), process
        )
        wanted = len(lines) + draw.randrange(1, 700)
        until(lambda: len(lines) >= wanted, process, 20)
        ended = process.poll() is not None
        if not ended:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    if ended:  # it has fewer imports, and no model that it could use
        assert process.returncode == 1, (name, process.returncode, said(lines)[-20:])
        assert said(lines)[-1].startswith("error: "), (name, said(lines)[-20:])
        return
    check(process, lines, (name, wanted))
    assert len(said(lines)) == 1, said(lines)


def interrupt_while_training(folder, seconds, one_device):
    """So many seconds after the text was packed: initial values and the first step compile."""
    flags = os.environ | {"XLA_FLAGS": one_device, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    with started("train", folder, flags) as (process, lines):
        until((folder / "run" / "data").exists, process)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        process.wait(120)
    left = said(lines)
    assert process.returncode == INTERRUPTED, (seconds, process.returncode, left[-20:])
    assert "interrupted" in left[-1] or "stopped by SIGINT" in left[-1], (seconds, left[-20:])
    assert not any("Traceback" in line or "Fatal" in line for line in left), (seconds, left)


def test_while_modules_are_imported(tmp_path, one_device):
    interrupt_while_importing("train", tmp_path, random.Random(0), one_device)


def test_while_the_first_step_compiles(tmp_path, one_device):
    interrupt_while_training(tmp_path, 1.0, one_device)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_launcher_at_drawn_moments(name, tmp_path, one_device):
    draw = random.Random(name)
    for number in range(5):
        interrupt_while_importing(name, tmp_path / str(number), draw, one_device)


@pytest.mark.slow
def test_training_at_drawn_moments(tmp_path, one_device):
    draw = random.Random(1)
    for number in range(12):
        interrupt_while_training(tmp_path / str(number), draw.uniform(0, 5), one_device)


@pytest.mark.parametrize(
    "body, line",
    [
        # Python prints what a callback of a weak reference raises, and goes on.
        ("import weakref; a = type('A', (), {})(); r = weakref.ref(a, hit); del a", "by main"),
        # Libraries make errors of their own of what is raised in their callbacks.
        ("\ntry:\n hit()\nexcept BaseException as e:\n raise ValueError('lost') from e", "by main"),
        # The hash stands for a compilation: minutes without a Python handler being run.
        (
            "import threading, hashlib; threading.Timer(0.2, hit).start(); "
            "threading.Timer(1.2, hit).start(); hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",
            "by main",
        ),
        # A wrapper may deliver one Ctrl-C twice: what is open is closed all the same.
        (
            "\nimport threading, time\ntry:\n threading.Timer(0.01, hit).start()\n hit()\n"
            "finally:\n"
            " time.sleep(0.1)\n print('closed', file=sys.stderr)",
            "closed\nby main",
        ),
        (
            "\nimport threading, time, hashlib\ntry:\n for t in (0.1, 0.11):\n"
            "  threading.Timer(t, hit).start()\n hashlib.pbkdf2_hmac('sha256', b'', b'', 10**6)\n"
            " time.sleep(9)\nfinally:\n print('closed', file=sys.stderr)",
            "closed\nby main",
        ),
        ("import atexit; atexit.register(hit)", "interrupted"),
    ],
    ids=[
        "in a callback",
        "as another error",
        "twice while Python cannot answer",
        "delivered twice",
        "delivered twice while Python cannot answer",
        "at the end",
    ],
)
def test_wherever_it_is_raised(body, line):
    body = body.replace("\n", "\n    ")
    program = f"""
import os, signal, sys
from absl import app
from eejax.experiments import launch

def hit(*_):
    os.kill(os.getpid(), signal.SIGINT)

def main():
    {body}

launch.run(main, interrupted="by main")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == INTERRUPTED and done.stderr == f"{line}\n", done.stderr


def test_tests_keep_the_handler_of_their_own():
    assert signal.getsignal(signal.SIGINT) is not interrupts._handle


def test_an_error_that_counts_as_another_process_s_end_keeps_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr(launch, "_joined", lambda: True)
    died = "another process has died"
    monkeypatch.setattr(distributed, "peer_failure_message", lambda error: died)
    monkeypatch.setattr(distributed, "exit_process", lambda status, alone: None)
    launch._end(RuntimeError("INTERNAL: the compiler failed"), "unused")
    *_, cause, last = capsys.readouterr().err.splitlines()
    assert "the compiler failed" in cause and last == f"error: {died}"
