"""End quietly once nobody reads standard output, as in `eejax --help | head`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ends_quietly() -> Iterator[None]:
    """End the process with status 1, and without a message, when it writes to a closed output.

    What ends the block otherwise keeps its message and its status.
    """
    try:
        yield
    except BrokenPipeError:
        sys.exit(1)
    finally:
        try:
            print(end="", flush=True)
        except BrokenPipeError:  # Python flushes it once more at its end, and would complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
