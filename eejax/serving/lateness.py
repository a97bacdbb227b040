"""How long requests wait for their first tokens, as tokens that others are to have before.

So what was measured of one choice says something of another, which is through with as many by its
own tokens a second.
"""

from __future__ import annotations

import collections
import math

from eejax.serving.choices import Choice
from eejax.serving.objectives import Telemetry

KEPT, LEAST = 200, 20  # waits that are looked at: the last ones, and no fewer
MOST = 6  # times in a row that a limit was missed, which are told apart


class Lateness:
    """Of all requests but one in a hundred."""

    def __init__(self):
        self._waits: collections.deque[float] = collections.deque(maxlen=KEPT)
        self._choice: Choice | None = None  # that they are of
        self._ahead: dict[Choice, float] = {}  # tokens
        self._last: Choice | None = None  # that was found of
        self._missed: collections.Counter[Choice] = collections.Counter()

    def add(self, choice: Choice, seconds: float, told: Telemetry) -> None:
        """What a request waited for its first token; told: of what serves it, by itself."""
        if choice != self._choice:
            self._choice = choice
            self._waits.clear()
        self._waits.append(seconds)
        if len(self._waits) >= LEAST:
            late = sorted(self._waits)[math.ceil(0.99 * len(self._waits)) - 1]
            self._ahead[choice] = max(late - told.ttft, 0.0) * told.throughput
            self._last = choice

    def of(self, choice: Choice, told: Telemetry) -> float:
        """Seconds to the first token, by what a choice is like by itself, where as many tokens are
        ahead as there were last, or more where there were more with it."""
        ahead = max(self._ahead.get(c, 0.0) for c in (choice, self._last))
        return told.ttft + ahead / max(told.throughput, 1e-12)

    def forget(self, serves: Choice, missed: bool) -> None:
        """Fewer may come now than when another choice served, so that it is tried again: where the
        limit was `missed` with it, each time after up to twice as many calls of this."""
        self._missed[serves] = min(self._missed[serves] + 1, MOST) if missed else 0
        for choice in self._ahead.keys() - {serves}:
            self._ahead[choice] *= 0.5 ** (0.5 ** self._missed[choice])
