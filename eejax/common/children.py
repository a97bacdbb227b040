"""Child processes that a terminal's Ctrl-C does not reach while they start."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM from this thread and from what it starts inside of the block.

    A terminal sends its signals to a whole job, also to children that have not come as far as
    ignoring them. A child inherits the mask and keeps it; this process hears what came meanwhile
    at the end of the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
