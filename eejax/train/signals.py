"""Stop of a run by signals: the first stops it after the step, a second Ctrl-C at once.

Several processes stop at the same step, whichever of them received the signal.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import jax
from jax.sharding import Mesh

from eejax.sharding import distributed

SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPEATS = 0.5  # seconds in which a wrapper may deliver the same Ctrl-C once more


class StopRequest:
    """Context in which SIGINT and SIGTERM only set `signal`; a second SIGINT ends the process.

    A second SIGINT within `REPEATS` seconds is the same Ctrl-C and is ignored. The second one is
    noticed even while the main thread is inside a compilation, where Python runs no handlers.
    Outside the main thread no signal is caught and `signal` stays None.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None

    def __enter__(self) -> StopRequest:
        self._old = None
        if threading.current_thread() is not threading.main_thread():
            return self
        self._old = {s: signal.signal(s, self._ask) for s in SIGNALS}
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._old_wakeup = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        if self._old is None:
            return
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._write.close()  # ends the watcher

    def _ask(self, number: int, _) -> None:
        self.signal = self.signal or signal.Signals(number)

    def _watch(self) -> None:
        """Read interrupts as the C handler writes them, one byte for each signal."""
        first = None
        with self._read:
            while received := self._read.recv(1):
                if received[0] != signal.SIGINT:
                    continue
                first = first or time.monotonic()
                if time.monotonic() - first > REPEATS:
                    os.write(2, b"interrupted twice: ended without a checkpoint of this step\n")
                    os._exit(128 + signal.SIGINT)


class Stopping:
    """Agreement of all processes of a run on the signal at which they stop.

    Each process votes after every step, and counts the votes when it fetches that step's metrics.
    All count the same votes after the same step, so all learn of a signal at the same place. A
    single process stops at its own signal at once.
    """

    def __init__(self, stop: StopRequest, mesh: Mesh):
        self._stop, self._agreed = stop, 0
        self._ballot = distributed.MaxVote(mesh) if distributed.is_multiprocess() else None

    @property
    def signal(self) -> signal.Signals | None:
        """Signal to stop at, None until it is time."""
        if self._ballot is None:
            return self._stop.signal
        return signal.Signals(self._agreed) if self._agreed else None

    def vote(self) -> jax.Array | None:
        """Vote on stopping, in all processes after the same steps; pass the result to `count`."""
        return None if self._ballot is None else self._ballot.cast(int(self._stop.signal or 0))

    def count(self, vote: jax.Array | None) -> None:
        """Take in the result of `vote`."""
        if vote is not None:
            self._agreed = self._agreed or int(vote)
