"""Training throughput."""

from __future__ import annotations

import time

SMOOTHING = 0.9  # weight of a step relative to the one after it


class StepClock:
    """Tokens per second over the last steps, without evaluation and saving."""

    def __init__(self):
        self._begin = self._last = time.perf_counter()
        self._seconds, self._tokens = 0.0, 0.0
        self._warm = False

    def tick(self, tokens: int) -> None:
        """Count a fetched step of `tokens` tokens; the first step is ignored, as it compiles."""
        now = time.perf_counter()
        if self._warm:
            self._seconds = SMOOTHING * self._seconds + now - self._last
            self._tokens = SMOOTHING * self._tokens + tokens
        self._last, self._warm = now, True

    @property
    def rate(self) -> float | None:
        """Tokens per second; None before there are two steps."""
        return self._tokens / self._seconds if self._seconds else None

    @property
    def total(self) -> float:
        """Seconds since the clock was created."""
        return time.perf_counter() - self._begin

    def paused(self) -> StepClock:
        """Return a context whose time does not count."""
        return self

    def __enter__(self) -> None:
        self._paused = time.perf_counter()

    def __exit__(self, *_) -> None:
        self._last += time.perf_counter() - self._paused
