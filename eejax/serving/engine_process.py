"""The process of an engine, with threads that send it messages and receive its own."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import queue
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

from eejax.common.children import block_signals
from eejax.serving import worker
from eejax.serving.messages import Build


class EngineProcess:
    """An engine's process, and the threads that write to it and read from it.

    Attributes:
      heard: time of its last sign of life.
    """

    def __init__(self, build: Build, steps: int):
        context = multiprocessing.get_context("spawn")  # JAX does not survive a fork
        self._pipe, theirs = context.Pipe()
        self.failure, self.heard = "", 0.0
        self.process = context.Process(
            target=worker.main, args=(theirs, build, steps), name="eejax-engine", daemon=True
        )
        resource_tracker.ensure_running()  # its start would let signals through again
        with block_signals():
            self.process.start()
        # A daemon, since it ignores signals: a parent that did not stop it would wait forever.
        atexit.register(self.process.kill)
        theirs.close()
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()

    def send(self, message: Any) -> None:
        self._outbox.put(message)

    def listen(self, on_message: Callable[[Any], object]) -> None:
        """Call `on_message` in a thread with each message, and with None at the end."""

        def read() -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed
                with contextlib.suppress(EOFError, OSError):
                    while True:
                        on_message(self._pipe.recv())
                on_message(None)

        threading.Thread(target=read, daemon=True).start()

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._pipe.send(message)

    def end(self) -> str:
        """Wait for a process that is ending, and return why it ends."""
        self._outbox.put(None)
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._pipe.close()
        atexit.unregister(self.process.kill)
        return self.failure or f"its process ended with status {self.process.exitcode}"

    def close(self) -> None:
        """End the process."""
        self._outbox.put(None)
        self.process.kill()
        self.process.join()
        self._pipe.close()
        atexit.unregister(self.process.kill)
