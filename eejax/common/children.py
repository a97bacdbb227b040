"""Start of child processes without interruption by a terminal's Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Block SIGINT and SIGTERM for this thread and for the processes it starts inside the block.

    A terminal sends its signals to every process of a job, including children that have not yet
    installed their handlers. A child inherits the mask and keeps it. This process receives the
    signals that arrived meanwhile when the block ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
