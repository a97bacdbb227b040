"""Training throughput."""

from __future__ import annotations

import time


class StepClock:
    """Tokens per second over the last steps, without evaluation and saving."""

    def __init__(self, smoothing: float = 0.9):
        self._begin = self._last = time.perf_counter()
        self._smoothing, self._seconds, self._tokens = smoothing, 0.0, 0.0
        self._warm = False

    def tick(self, tokens: int) -> None:
        """Count a fetched step of `tokens` tokens; the first step is ignored, as it compiles."""
        now = time.perf_counter()
        if self._warm:
            keep = self._smoothing
            self._seconds = keep * self._seconds + now - self._last
            self._tokens = keep * self._tokens + tokens
        self._last, self._warm = now, True

    @property
    def rate(self) -> float | None:
        return self._tokens / self._seconds if self._seconds else None

    @property
    def total(self) -> float:
        """Seconds since the clock was created."""
        return time.perf_counter() - self._begin

    def paused(self) -> StepClock:
        return self

    def __enter__(self) -> None:
        self._paused = time.perf_counter()

    def __exit__(self, *_) -> None:
        self._last += time.perf_counter() - self._paused
