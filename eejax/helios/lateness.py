"""Model of the time to first token, as the number of tokens queued ahead of a request.

So what was measured of one choice predicts another one, which is through with as many tokens at its
own rate.
"""

from __future__ import annotations

import collections
import math

from eejax.helios.choices import ModelDepth
from eejax.helios.objectives import Telemetry

KEPT, LEAST = 200, 20  # waits that are looked at: the last ones, and no fewer
MOST = 6  # times in a row that a limit was missed, which are told apart


class LatenessModel:
    """Tokens ahead of all requests but one in a hundred."""

    def __init__(self):
        self._waits: collections.deque[float] = collections.deque(maxlen=KEPT)
        self._choice: ModelDepth | None = None  # that they are of
        self._ahead: dict[ModelDepth, float] = {}  # tokens
        self._last: ModelDepth | None = None  # that was found of
        self._missed: collections.Counter[ModelDepth] = collections.Counter()

    def add(self, choice: ModelDepth, seconds: float, telemetry: Telemetry) -> None:
        """Record a time to first token. telemetry: of a lone request on what serves it."""
        if choice != self._choice:
            self._choice = choice
            self._waits.clear()
        self._waits.append(seconds)
        if len(self._waits) >= LEAST:
            late = sorted(self._waits)[math.ceil(0.99 * len(self._waits)) - 1]
            self._ahead[choice] = max(late - telemetry.ttft, 0.0) * telemetry.throughput
            self._last = choice

    def of(self, choice: ModelDepth, telemetry: Telemetry) -> float:
        """Predict the seconds to the first token.

        As many tokens are ahead as there were last, or more where there were more with this choice.
        telemetry: of a lone request on it.
        """
        ahead = max(self._ahead.get(c, 0.0) for c in (choice, self._last))
        return telemetry.ttft + ahead / max(telemetry.throughput, 1e-12)

    def forget(self, serves: ModelDepth, missed: bool) -> None:
        """Expect fewer tokens ahead than when another choice served, so that it is tried again.

        Where the limit was `missed` with it, each time after up to twice as many calls.
        """
        self._missed[serves] = min(self._missed[serves] + 1, MOST) if missed else 0
        for choice in self._ahead.keys() - {serves}:
            self._ahead[choice] *= 0.5 ** (0.5 ** self._missed[choice])
