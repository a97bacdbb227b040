"""Whether exits pay here: measured while serving, so that they never make anything slower."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Hashable

from eejax.common.errors import require_count

LONGEST = 16


@dataclasses.dataclass
class Pair:
    """Calls of one kind, two with exits and two without: those of the way `first` come first."""

    first: bool
    told: int = 0
    seconds: dict[bool, float] = dataclasses.field(default_factory=dict)  # of a token

    @property
    def way(self) -> bool:
        """Whether the next call uses exits."""
        return self.first == (self.told < 2)

    def add(self, seconds: float) -> None:
        self.seconds[self.way] = seconds  # of two calls of a way the second stays
        self.told += 1


class Payoff:
    """Decides call by call whether the next one uses exits.

    Begins with `pairs` pairs of ways, with exits and without, in turning order; then takes what was
    faster by the median over pairs of the seconds of a token (of their logarithms: who came first,
    and was slower for it, was so in half of the pairs), and after `calls` calls repeats the pairs,
    since the text changes what exits save; after twice as many when the answer was the same as
    before, and again, up to `LONGEST` times as many. The window slides: the newest `pairs` pairs
    decide. A way has two calls, of which the second counts: the first makes up for tokens that the
    other way left waiting, and compiles nothing new.

    Who generates asks `next(kind)`, runs, and tells `add(...)`. Calls that emitted nothing, those
    in which exits could make no difference, and the first of a program, which compiles, are told as
    None and count for nothing; nor do those that the clock saw take no time. A pair is of calls of
    one `kind` (a program); pairs of several kinds may be under way.
    """

    def __init__(self, pairs: int = 4, calls: int = 64):
        require_count("pairs", pairs)
        require_count("calls", calls)
        self._pairs, self._calls = pairs, calls
        self._found: collections.deque[float] = collections.deque(maxlen=pairs)
        self._open: dict[Hashable, Pair] = {}
        self._first = True  # the way that the next pair begins with
        self._left, self._between = pairs, 0  # pairs still to be measured; calls until then
        self._answer: bool | None = None
        self._longer = 1

    @property
    def ratio(self) -> float | None:
        """Seconds of a token without exits over those with; None before enough pairs are done."""
        if len(self._found) < self._pairs:
            return None
        return math.exp(statistics.median(map(math.log, self._found)))

    @property
    def exits(self) -> bool:
        """Whether exits are used between measurements."""
        return self.ratio is None or self.ratio > 1.0

    @property
    def measuring(self) -> bool:
        """Whether the next call is one of a pair."""
        return not self._between

    @property
    def midway(self) -> bool:
        """Whether a pair is under way."""
        return self.measuring and any(pair.told for pair in self._open.values())

    def next(self, kind: Hashable = None) -> bool:
        """Whether the next call, of this kind, uses exits."""
        return self.exits if self._between else self._pair(kind).way

    def add(self, seconds: float | None, tokens: int = 0, kind: Hashable = None) -> None:
        """What the call that was asked for took."""
        if seconds is None or not tokens:
            return
        if self._between:
            self._between -= 1
            return
        if not 0 < seconds < math.inf:
            return
        pair = self._pair(kind)
        pair.add(seconds / tokens)
        if pair.told < 4:
            return
        del self._open[kind]
        self._found.append(pair.seconds[False] / pair.seconds[True])
        self._left -= 1
        if not self._left:
            same, self._answer = self._answer == self.exits, self.exits
            self._longer = min(2 * self._longer, LONGEST) if same else 1
            self._left, self._between = self._pairs, self._calls * self._longer
            self._open.clear()  # their seconds are of long ago when they would go on

    def _pair(self, kind: Hashable) -> Pair:
        if kind not in self._open:
            self._open[kind] = Pair(self._first)
            self._first = not self._first
        return self._open[kind]
