"""What happened lately, for the dashboard: load, latency and depth of the last minutes."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from eejax.serving.choices import Decision
from eejax.serving.messages import FleetReport
from eejax.serving.timeline import AnswerTimeline

SECONDS = 2.0  # of a span
KEEP = 300  # spans
DECISIONS = 100  # that are kept


@dataclasses.dataclass
class Span:
    """What came in one span of time. number: seconds of its begin over SECONDS; running, waiting,
    held: the last ones told; first, between: seconds of requests to their first tokens, and between
    tokens; layers: tokens by the layers below their exits; member, loaded: of a fleet, which model
    served last, and with how many layers loaded."""

    number: int
    running: int = 0
    waiting: int = 0
    held: float = 0.0
    first: list[float] = dataclasses.field(default_factory=list)
    between: list[float] = dataclasses.field(default_factory=list)
    layers: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    member: str | None = None
    loaded: int | None = None


class History:
    """Of one model. Spans in which nothing is told are left out; an engine tells of its load twice
    a second at least."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._now: Span | None = None
        self._told: collections.deque[dict] = collections.deque(maxlen=KEEP)
        self.members: set[str] = set()  # of a fleet, that served
        self.decisions: collections.deque[Decision] = collections.deque(maxlen=DECISIONS)
        self.timeline = AnswerTimeline(KEEP)

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

    def serves(self, report: FleetReport) -> None:
        """Of a fleet."""
        span = self._span()
        span.member, span.loaded = report.model, report.layers
        self.members.add(report.model)
        self.decisions += report.decisions
        for point in report.points:
            self.timeline.add(point)

    def _span(self) -> Span:
        number = int(self._clock() // SECONDS)
        if self._now is None or number != self._now.number:
            before, self._now = self._now, Span(number)
            if before is not None:
                self._told.append(summary(before))
                # Until it is told again, the load is as it was.
                self._now.running, self._now.waiting = before.running, before.waiting
                self._now.held = before.held
                self._now.member, self._now.loaded = before.member, before.loaded
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
        first=percentiles(span.first), between=percentiles(span.between), member=span.member,
        loaded=span.loaded,
    )  # fmt: skip


def ordered(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(layer): counts[layer] for layer in sorted(counts)}


def percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    """(median, 99th percentile) by nearest rank."""
    if not values:
        return None
    rank = lambda share: sorted(values)[min(len(values) - 1, int(share * len(values)))]
    return rank(0.5), rank(0.99)
