"""What happened lately, for the dashboard: load, latency and depth of the last minutes."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

SECONDS = 2.0  # of a span
KEEP = 300  # spans


@dataclasses.dataclass
class Span:
    """What came in one span of time. number: seconds of its begin over SECONDS; running, waiting,
    held: the last ones told; first, between: seconds of requests to their first tokens, and between
    tokens; layers: tokens by the layers below their exits."""

    number: int
    running: int = 0
    waiting: int = 0
    held: float = 0.0
    first: list[float] = dataclasses.field(default_factory=list)
    between: list[float] = dataclasses.field(default_factory=list)
    layers: collections.Counter = dataclasses.field(default_factory=collections.Counter)


class History:
    """Of one model. Spans in which nothing is told are left out; an engine tells of its load twice
    a second at least."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._now: Span | None = None
        self._told: collections.deque[dict] = collections.deque(maxlen=KEEP)

    def load(self, running: int, waiting: int, held: float) -> None:
        span = self._span()
        span.running, span.waiting, span.held = running, waiting, held

    def tokens(
        self, layers: Sequence[int], first: float | None = None, between: Sequence[float] = ()
    ) -> None:
        """Tokens that came together."""
        span = self._span()
        span.layers.update(layers)
        span.between += between
        if first is not None:
            span.first.append(first)

    def _span(self) -> Span:
        number = int(self._clock() // SECONDS)
        if self._now is None or number != self._now.number:
            before, self._now = self._now, Span(number)
            if before is not None:
                self._told.append(summary(before))
                # Until it is told again, the load is as it was.
                self._now.running, self._now.waiting = before.running, before.waiting
                self._now.held = before.held
        return self._now

    @property
    def spans(self) -> list[dict]:
        """Those that are over, oldest first."""
        if self._now is not None:
            self._span()
        return list(self._told)


def summary(span: Span) -> dict:
    """As JSON: times in seconds, None where there are none; depth: mean layers of its tokens."""
    count = span.layers.total()
    depth = sum(n * c for n, c in span.layers.items()) / count if count else None
    return dict(
        begin=span.number * SECONDS, running=span.running, waiting=span.waiting, held=span.held,
        tokens_per_s=count / SECONDS, depth=depth, exits=ordered(span.layers),
        first=percentiles(span.first), between=percentiles(span.between),
    )  # fmt: skip


def ordered(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(layer): counts[layer] for layer in sorted(counts)}


def percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    """(median, 99th percentile) by nearest rank."""
    if not values:
        return None
    rank = lambda share: sorted(values)[min(len(values) - 1, int(share * len(values)))]
    return rank(0.5), rank(0.99)
