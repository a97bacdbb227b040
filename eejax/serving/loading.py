"""Changes of what is loaded: a model that is made in a thread, while others go on, and what becomes
of one that fails."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

from eejax.inference.partial import PartialModel
from eejax.serving.choices import Choice


def failure(change: Callable[[], object]) -> str:
    """What kept a change from being made: there may be too little room on the device, whatever was
    counted; "" where nothing did. Arrays that an error holds on to are let go with it."""
    try:
        change()
    except (RuntimeError, MemoryError) as error:
        return str(error) or type(error).__name__
    return ""


class Loading:
    """A model on its way, since `begin`."""

    def __init__(self, begin: float, choice: Choice, make: Callable[[Choice], PartialModel]):
        self.begin, self.choice = begin, choice
        self._future = concurrent.futures.Future()

        def run() -> None:
            try:
                self._future.set_result(make(choice))
            except BaseException as error:
                self._future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> PartialModel:
        """Waits for it. Raises what making it did."""
        return self._future.result()
