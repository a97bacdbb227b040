"""Model of the time to first token, as the number of tokens queued ahead of a request.

A measurement of one choice therefore predicts another, which works through the same number of
tokens at its own rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from eejax.common.ranks import nearest_rank
from eejax.helios.choices import FrozenMappings, ModelDepth
from eejax.helios.objectives import Telemetry

MAX_WAITS, MIN_WAITS = 200, 20  # how many of the last waits a percentile is computed of
MAX_MISSES = 6  # consecutive misses of a limit that are counted


@dataclasses.dataclass(frozen=True)
class LatenessModel(FrozenMappings):
    """The 99th percentile of the number of tokens ahead of a request.

    Attributes:
      choice: the choice for which the waits were measured.
      waits: last times to first token of that choice in seconds, oldest first.
      ahead: tokens ahead, by choice, as far as measured.
      last: the choice that was measured last.
      missed: by choice, consecutive times that the limit was missed, up to `MAX_MISSES`.
    """

    choice: ModelDepth | None = None
    waits: tuple[float, ...] = ()
    ahead: Mapping[ModelDepth, float] = dataclasses.field(default_factory=dict)
    last: ModelDepth | None = None
    missed: Mapping[ModelDepth, int] = dataclasses.field(default_factory=dict)

    def add(self, choice: ModelDepth, seconds: float, telemetry: Telemetry) -> LatenessModel:
        """Return the model with another time to first token.

        telemetry: telemetry of a lone request with the choice.
        """
        waits = (*(self.waits if choice == self.choice else ()), seconds)[-MAX_WAITS:]
        found = self.replaced(choice=choice, waits=waits)
        if len(waits) < MIN_WAITS:
            return found
        late = nearest_rank(waits, 0.99)
        tokens = max(late - telemetry.ttft, 0.0) * telemetry.throughput
        return found.replaced(ahead={**self.ahead, choice: tokens}, last=choice)

    def of(self, choice: ModelDepth, telemetry: Telemetry) -> float:
        """Predict the seconds to the first token.

        It assumes as many tokens ahead as were measured last, or more if there were more with this
        choice.

        telemetry: telemetry of a lone request with the choice.
        """
        ahead = max(self.ahead.get(c, 0.0) for c in (choice, self.last or choice))
        return telemetry.ttft + ahead / max(telemetry.throughput, 1e-12)

    def forget(self, serves: ModelDepth, missed: bool) -> LatenessModel:
        """Expect fewer tokens ahead than when another choice served, so that it is tried again.

        If the limit was `missed` with it, each retry comes after up to twice as many calls.
        """
        count = min(self.missed.get(serves, 0) + 1, MAX_MISSES) if missed else 0
        counts = {**self.missed, serves: count}
        ahead = {
            choice: tokens if choice == serves else tokens * 0.5 ** (0.5 ** counts.get(choice, 0))
            for choice, tokens in self.ahead.items()
        }
        return self.replaced(ahead=ahead, missed=counts)
