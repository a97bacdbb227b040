"""Whether exits pay here: measured while serving, so that they never make anything slower."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterator


class Payoff:
    """Decides call by call whether the next one uses exits.

    Begins with `pairs` pairs of calls, one with exits and one without, in turning order; then takes
    what was faster by the median over pairs of the seconds of a token, and after every `calls`
    calls repeats the pairs, since the text changes what exits save. The window slides: the newest
    `pairs` pairs decide.

    Who generates asks `next()`, runs, and tells `add(...)`. Calls that emitted nothing, and the
    first of a program, which compiles, are told as None and count for nothing.
    """

    def __init__(self, pairs: int = 4, calls: int = 64):
        self._pairs, self._calls = pairs, calls
        self._found: collections.deque[float] = collections.deque(maxlen=pairs)
        self._pair: dict[bool, float] = {}
        self._turn = self._turns()
        self._asked = next(self._turn)

    @property
    def ratio(self) -> float | None:
        """Seconds of a token without exits over those with; None before enough pairs are done."""
        return statistics.median(self._found) if len(self._found) == self._pairs else None

    @property
    def exits(self) -> bool:
        """Whether exits are used between measurements."""
        return self.ratio is None or self.ratio > 1.0

    def next(self) -> bool:
        """Whether the next call uses exits."""
        return self._asked

    def add(self, seconds: float | None, tokens: int = 0) -> None:
        """What the call that was asked for took."""
        if seconds is None or not tokens:
            return
        self._pair[self._asked] = seconds / tokens
        self._asked = next(self._turn)

    def _turns(self) -> Iterator[bool]:
        first = True
        while True:
            for _ in range(self._pairs):
                self._pair.clear()
                yield first
                yield not first
                self._found.append(self._pair[False] / self._pair[True])
                first = not first
            for _ in range(self._calls):
                yield self.exits
