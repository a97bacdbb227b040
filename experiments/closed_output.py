"""Quiet end of a process whose standard output is closed, as in `eejax --help | head`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ends_quietly() -> Iterator[None]:
    """End the process with status 1, and without a message, when it writes to a closed output.

    Any other error that ends the block keeps its message and its status.
    """
    try:
        yield
    except BrokenPipeError:
        sys.exit(1)
    finally:
        try:
            print(end="", flush=True)
        except BrokenPipeError:  # Python flushes it once more at exit, and would print an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
