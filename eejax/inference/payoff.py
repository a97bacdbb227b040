"""Measure, while serving, whether exits pay, and turn them off while they do not."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Hashable

from eejax.common.errors import require_count

MAX_INTERVAL_GROWTH = 16  # factor on `Payoff`'s `calls` between measurements


@dataclasses.dataclass
class Pair:
    """Two calls with exits and two without, of one kind.

    Attributes:
      first: whether the calls with exits come first.
      num_calls: calls that are done.
      seconds: per token, with (True) and without exits.
    """

    first: bool
    num_calls: int = 0
    seconds: dict[bool, float] = dataclasses.field(default_factory=dict)

    @property
    def way(self) -> bool:
        """True if the next call uses exits."""
        return self.first == (self.num_calls < 2)

    def add(self, seconds: float) -> None:
        self.seconds[self.way] = seconds  # the second of two calls overwrites the first
        self.num_calls += 1


class Payoff:
    """The decision for each call whether it uses exits.

    It begins with `pairs` pairs of calls with and without exits, in alternating order, and then
    uses the faster way: the median over pairs of the log ratio of seconds per token, so that a
    call that is slower because it comes first is so in half of the pairs. After `calls` calls it
    repeats the pairs, because what exits save changes with the text; after twice as many if the
    answer was the same, and so on up to `MAX_INTERVAL_GROWTH` times as many. The newest `pairs`
    pairs decide. Each side of a pair has two calls, of which the second counts: the first catches
    up with tokens that the other side left waiting, and compiles nothing new.

    The caller asks `next(kind)`, runs the call, and reports it with `add(...)`. Calls that emitted
    nothing, calls in which exits could make no difference, and the first call of a program, which
    compiles, are reported as None and do not count; neither do calls for which the clock shows no
    time. A pair has calls of one `kind` (a program); pairs of several kinds may be open.
    """

    def __init__(self, pairs: int = 4, calls: int = 64):
        require_count("pairs", pairs)
        require_count("calls", calls)
        self._pairs, self._calls = pairs, calls
        self._found: collections.deque[float] = collections.deque(maxlen=pairs)
        self._open: dict[Hashable, Pair] = {}
        self._first = True  # whether the next pair begins with exits
        self._left, self._between = pairs, 0  # pairs to measure; calls until then
        self._answer: bool | None = None
        self._longer = 1

    @property
    def ratio(self) -> float | None:
        """Seconds per token without exits over those with; None before enough pairs exist."""
        if len(self._found) < self._pairs:
            return None
        return math.exp(statistics.median(map(math.log, self._found)))

    @property
    def exits(self) -> bool:
        """True if exits are used between measurements."""
        return self.ratio is None or self.ratio > 1.0

    @property
    def measuring(self) -> bool:
        """True if the next call belongs to a pair."""
        return not self._between

    @property
    def midway(self) -> bool:
        """True if a pair is open."""
        return self.measuring and any(pair.num_calls for pair in self._open.values())

    def next(self, kind: Hashable = None) -> bool:
        """Return whether the next call, of this kind, uses exits."""
        return self.exits if self._between else self._pair(kind).way

    def add(self, seconds: float | None, tokens: int = 0, kind: Hashable = None) -> None:
        """Report the seconds and tokens of the call that the last `next` was about."""
        if seconds is None or not tokens:
            return
        if self._between:
            self._between -= 1
            return
        if not 0 < seconds < math.inf:
            return
        pair = self._pair(kind)
        pair.add(seconds / tokens)
        if pair.num_calls < 4:
            return
        del self._open[kind]
        self._found.append(pair.seconds[False] / pair.seconds[True])
        self._left -= 1
        if not self._left:
            same, self._answer = self._answer == self.exits, self.exits
            self._longer = min(2 * self._longer, MAX_INTERVAL_GROWTH) if same else 1
            self._left, self._between = self._pairs, self._calls * self._longer
            self._open.clear()  # their seconds would be outdated when they continue

    def _pair(self, kind: Hashable) -> Pair:
        if kind not in self._open:
            self._open[kind] = Pair(self._first)
            self._first = not self._first
        return self._open[kind]
