"""End of a launcher by Ctrl-C: one line and status 130, at any time.

`experiments/__init__.py` calls `install` before anything else is imported, so this module imports
only small modules of the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

STATUS = 128 + signal.SIGINT
# Seconds in which Python answers a signal, unless the main thread is inside C code, and in which a
# wrapper may deliver the same Ctrl-C once more.
ANSWERS = 0.5

_line = "interrupted"
_raises = False  # whether an interrupt unwinds the main thread; else it ends the process
_answered = -float("inf")  # when Python's handler last ran for an interrupt of its own
_ending = threading.Lock()


def install() -> None:
    """Catch SIGINT for the rest of this process; do nothing outside the main thread.

    An interrupt during imports ends the process: a KeyboardInterrupt that is raised in the callback
    of a weak reference, as imports have them, would only be printed by Python.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) in (_handle, signal.SIG_IGN):
        return
    signal.signal(signal.SIGINT, _handle)
    sys.unraisablehook = _unraisable
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read,), daemon=True).start()


@contextlib.contextmanager
def unwinding(line: str) -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT inside the block, so that open resources are closed.

    A second SIGINT ends the process at once, and prints `line`, if Python left the first unanswered
    for `ANSWERS` seconds, as while the main thread compiles. A SIGINT that comes sooner after an
    answered one is the same Ctrl-C and is ignored.
    """
    global _line, _raises
    before, _line, _raises = _line, line, True
    try:
        yield
    finally:
        _line, _raises = before, False


def came_of_one(error: BaseException | None) -> bool:
    """Return whether an error was caused by an interrupt.

    Libraries turn a KeyboardInterrupt that is raised in their callbacks into errors of their own.
    """
    while error is not None:
        if "KeyboardInterrupt" in repr(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def end(line: str) -> None:
    """Print the line and end the process with `STATUS`.

    Python's own shutdown is skipped: while JAX compiles in a thread, it ends in a segmentation
    fault. Nothing depends on it: data workers end with their input, engines with their parent, and
    a half-written checkpoint has no name yet.
    """
    if not _ending.acquire(blocking=False):
        return  # another thread, or the frame that this handler interrupted, is ending it
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the interrupted code may have been writing here
            stream.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
    os._exit(STATUS)


def _handle(number: int, frame: object) -> None:
    global _answered
    now = time.monotonic()
    if now - _answered < ANSWERS:
        return
    _answered = now
    if _raises:
        raise KeyboardInterrupt
    end(_line)


def _unraisable(unraisable) -> None:
    """End on an interrupt raised in a callback whose errors Python only prints."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        end(_line)
    sys.__unraisablehook__(unraisable)


def _watch(read: int) -> None:
    """Read interrupts as the handler in C writes them, one byte for each signal."""
    first = None  # time of the first interrupt that may still be unanswered
    while received := os.read(read, 1):
        if received[0] != signal.SIGINT:
            continue
        now = time.monotonic()
        # Python's handler may have run before this thread read the byte.
        if first is None or _answered > first - ANSWERS:
            first = now
        elif now - first > ANSWERS:
            end(_line)
