"""Loading of models in a thread while others serve, and handling of its failures."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable

from eejax.helios.choices import ModelDepth
from eejax.inference.partial import PartialModel


def failure(change: Callable[[], object]) -> str:
    """Run a change and return why it failed, or "".

    The device may have less room than was counted. Arrays that an error references are released
    with it.
    """
    try:
        change()
    except (RuntimeError, MemoryError) as error:
        return str(error) or type(error).__name__
    return ""


class ModelLoad:
    """A model that has been loading since `begin`."""

    def __init__(
        self, begin: float, choice: ModelDepth, make: Callable[[ModelDepth], PartialModel]
    ):
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
        """Wait for the model. Raises the error that making it raised."""
        return self._future.result()
