"""Whether exits pay here: measured while serving, so that they never make anything slower."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Hashable


class Payoff:
    """Decides call by call whether the next one uses exits.

    Begins with `pairs` pairs of ways, with exits and without, in turning order; then takes what was
    faster by the median over pairs of the seconds of a token (of their logarithms: who came first,
    and was slower for it, was so in half of the pairs), and after every `calls` calls repeats the
    pairs, since the text changes what exits save. The window slides: the newest `pairs` pairs
    decide. A way has two calls, of which the second counts: the first makes up for tokens that the
    other way left waiting, and compiles nothing new.

    Who generates asks `next()`, runs, and tells `add(...)`. Calls that emitted nothing, and the
    first of a program, which compiles, are told as None and count for nothing. A pair is of calls
    of one `kind` (a program): where another comes between, it begins anew.
    """

    def __init__(self, pairs: int = 4, calls: int = 64):
        self._pairs, self._calls = pairs, calls
        self._found: collections.deque[float] = collections.deque(maxlen=pairs)
        self._pair: dict[bool, float] = {}
        self._kind: Hashable = None
        self._first, self._step = True, 0  # the way a pair begins with; calls of it that were told
        self._left, self._between = pairs, 0  # pairs still to be measured; calls until then

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

    def next(self) -> bool:
        """Whether the next call uses exits."""
        return self.exits if self._between else self._first == (self._step < 2)

    def add(self, seconds: float | None, tokens: int = 0, kind: Hashable = None) -> None:
        """What the call that was asked for took."""
        if seconds is None or not tokens:
            return
        if self._between:
            self._between -= 1
            return
        if kind != self._kind:
            self._kind, asked = kind, self.next()
            self._step = 0
            if asked != self._first:
                return  # of the way that comes later
        self._pair[self.next()] = seconds / tokens  # of two calls of a way the second stays
        self._step += 1
        if self._step < 4:
            return
        self._found.append(self._pair[False] / self._pair[True])
        self._first, self._step, self._left = not self._first, 0, self._left - 1
        if not self._left:
            self._left, self._between = self._pairs, self._calls
