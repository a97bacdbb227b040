"""Stopping a run politely: the first signal asks, a second Ctrl-C insists."""

from __future__ import annotations

import os
import signal
import socket
import threading

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, SIGINT and SIGTERM only set `signal`; a second SIGINT ends the process.

    The second is noticed even while the main thread is inside a compilation, where Python runs no
    handlers. Outside the main thread nothing is caught and `signal` stays None.
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
        """Counts interrupts as the C handler writes them, one byte for each signal."""
        interrupts = 0
        with self._read:
            while received := self._read.recv(16):
                interrupts += received.count(signal.SIGINT)
                if interrupts > 1:
                    os._exit(128 + signal.SIGINT)
