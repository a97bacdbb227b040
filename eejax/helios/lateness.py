"""Model of the time to first token, as the number of tokens queued ahead of a request.

What was measured of one choice therefore predicts another, which works through the same number of
tokens at its own rate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from eejax.helios.choices import FrozenMappings, ModelDepth
from eejax.helios.objectives import Telemetry

KEPT, LEAST = 200, 20  # waits that are looked at: the last ones, and no fewer
MOST = 6  # times in a row that a limit was missed, which are told apart


@dataclasses.dataclass(frozen=True)
class LatenessModel(FrozenMappings):
    """Tokens ahead of all requests but one in a hundred.

    Attributes:
      choice: what the waits were measured of.
      waits: last seconds to first tokens of that choice, oldest first.
      ahead: tokens ahead, by the choices of which that was found.
      last: choice of which it was found last.
      missed: times in a row, up to `MOST`, that the limit was missed with a choice.
    """

    choice: ModelDepth | None = None
    waits: tuple[float, ...] = ()
    ahead: Mapping[ModelDepth, float] = dataclasses.field(default_factory=dict)
    last: ModelDepth | None = None
    missed: Mapping[ModelDepth, int] = dataclasses.field(default_factory=dict)

    def add(self, choice: ModelDepth, seconds: float, telemetry: Telemetry) -> LatenessModel:
        """Return the model with a time to first token.

        telemetry: of a lone request on what serves it.
        """
        waits = (*(self.waits if choice == self.choice else ()), seconds)[-KEPT:]
        found = self.replaced(choice=choice, waits=waits)
        if len(waits) < LEAST:
            return found
        late = sorted(waits)[math.ceil(0.99 * len(waits)) - 1]
        tokens = max(late - telemetry.ttft, 0.0) * telemetry.throughput
        return found.replaced(ahead={**self.ahead, choice: tokens}, last=choice)

    def of(self, choice: ModelDepth, telemetry: Telemetry) -> float:
        """Predict the seconds to the first token.

        As many tokens are ahead as there were last, or more where there were more with this choice.
        telemetry: of a lone request on it.
        """
        ahead = max(self.ahead.get(c, 0.0) for c in (choice, self.last or choice))
        return telemetry.ttft + ahead / max(telemetry.throughput, 1e-12)

    def forget(self, serves: ModelDepth, missed: bool) -> LatenessModel:
        """Expect fewer tokens ahead than when another choice served, so that it is tried again.

        Where the limit was `missed` with it, each time after up to twice as many calls.
        """
        count = min(self.missed.get(serves, 0) + 1, MOST) if missed else 0
        counts = {**self.missed, serves: count}
        ahead = {
            choice: tokens if choice == serves else tokens * 0.5 ** (0.5 ** counts.get(choice, 0))
            for choice, tokens in self.ahead.items()
        }
        return self.replaced(ahead=ahead, missed=counts)
