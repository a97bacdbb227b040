"""Load, latency and depth of the last minutes, for the dashboard."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from eejax.common.ranks import nearest_rank
from eejax.helios.choices import Decision
from eejax.helios.report import FleetReport
from eejax.helios.timeline import AnswerTimeline

SECONDS = 2.0  # length of a span
KEEP = 300  # spans that are kept
DECISIONS = 100  # decisions that are kept


@dataclasses.dataclass
class HistorySpan:
    """Load and latency of one span of time.

    Attributes:
      number: its begin in seconds, divided by SECONDS.
      running: the last reported number of running requests.
      waiting: the last reported number of waiting requests.
      slot_use: the last reported use of the slots.
      first: seconds from requests to their first tokens.
      between: seconds between tokens.
      layers: number of tokens by the layers below their exits.
      member: of a fleet, the model that served last.
      loaded: loaded layers of that model.
    """

    number: int
    running: int = 0
    waiting: int = 0
    slot_use: float = 0.0
    first: list[float] = dataclasses.field(default_factory=list)
    between: list[float] = dataclasses.field(default_factory=list)
    layers: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    member: str | None = None
    loaded: int | None = None


class LoadHistory:
    """History of one model.

    Spans without a report are left out; an engine reports its load at least twice a second.
    """

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._now: HistorySpan | None = None
        self._summaries: collections.deque[dict] = collections.deque(maxlen=KEEP)
        self.members: set[str] = set()  # models of a fleet that have served
        self.decisions: collections.deque[Decision] = collections.deque(maxlen=DECISIONS)
        self.timeline = AnswerTimeline(KEEP)

    def load(self, running: int, waiting: int, slot_use: float) -> None:
        span = self._span()
        span.running, span.waiting, span.slot_use = running, waiting, slot_use

    def tokens(
        self, layers: Sequence[int], first: float | None = None, between: Sequence[float] = ()
    ) -> None:
        """Record tokens that came together."""
        span = self._span()
        span.layers.update(layers)
        span.between += between
        if first is not None:
            span.first.append(first)

    def serves(self, report: FleetReport) -> None:
        """Record which model of a fleet serves."""
        span = self._span()
        span.member, span.loaded = report.model, report.layers
        self.members.add(report.model)
        self.decisions += report.decisions
        for point in report.points:
            self.timeline.add(point)

    def _span(self) -> HistorySpan:
        number = int(self._clock() // SECONDS)
        if self._now is None or number != self._now.number:
            before, self._now = self._now, HistorySpan(number)
            if before is not None:
                self._summaries.append(summary(before))
                # The load stays as it was until the next report.
                self._now.running, self._now.waiting = before.running, before.waiting
                self._now.slot_use = before.slot_use
                self._now.member, self._now.loaded = before.member, before.loaded
        return self._now

    @property
    def spans(self) -> list[dict]:
        """Finished spans, oldest first."""
        if self._now is not None:
            self._span()
        return list(self._summaries)


def summary(span: HistorySpan) -> dict:
    """Return a span as JSON: times in seconds, None where there are none; depth in mean layers."""
    count = span.layers.total()
    depth = sum(n * c for n, c in span.layers.items()) / count if count else None
    return dict(
        begin=span.number * SECONDS,
        running=span.running,
        waiting=span.waiting,
        cache_use=span.slot_use,
        tokens_per_s=count / SECONDS,
        depth=depth,
        exits=ordered(span.layers),
        first=percentiles(span.first),
        between=percentiles(span.between),
        member=span.member,
        loaded=span.loaded,
    )


def ordered(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(layer): counts[layer] for layer in sorted(counts)}


def percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    """Return (median, 99th percentile) by nearest rank."""
    return (nearest_rank(values, 0.5), nearest_rank(values, 0.99)) if values else None
