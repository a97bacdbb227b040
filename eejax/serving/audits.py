"""How often tokens are not the whole model's, by a share of answers that is looked at again."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eejax.common.errors import require, require_count


class Verdict(NamedTuple):
    """Of a text's tokens behind its prompt [n]: whether the whole model goes on with each, and its
    natural log-probability of them."""

    same: np.ndarray
    logprob: np.ndarray


class Audit:
    """What audits of a model said lately: of the last `window` answers.

    Each answer counts as one, by the share of its tokens that are not the whole model's. low, high:
    between which that share lies of answers like these, each with `confidence`, whenever it is
    looked at, for as long as the window does not slide; of a window that does, at any one time.
    best: what `high` would be, had there been none.
    """

    def __init__(self, window: int = 400, confidence: float = 0.95):
        require_count("window", window)
        require(0 < confidence < 1, "confidence", confidence, "must lie strictly between 0 and 1")
        self.confidence = confidence
        self._shares: collections.deque[float] = collections.deque(maxlen=window)
        self._logprobs: collections.deque[tuple[float, int]] = collections.deque(maxlen=window)
        self.low, self.high, self.best = 0.0, 1.0, 1.0

    def add(self, verdict: Verdict) -> None:
        if len(verdict.same):
            self._shares.append(1.0 - float(np.mean(verdict.same)))
            self._logprobs.append((float(np.sum(verdict.logprob)), len(verdict.logprob)))
            delta = 1 - self.confidence
            self.low = 1.0 - upper_bound([1.0 - share for share in self._shares], delta)
            self.high = upper_bound(self._shares, delta)
            self.best = upper_bound([0.0] * self.count, delta)

    @property
    def count(self) -> int:
        return len(self._shares)

    @property
    def share(self) -> float:
        """Disagreement with the whole model, mean over answers; 0 of none."""
        return float(np.mean(self._shares)) if self._shares else 0.0

    @property
    def perplexity(self) -> float:
        """Of the answers, by the whole model; NaN of none."""
        tokens = sum(n for _, n in self._logprobs)
        return math.exp(-sum(p for p, _ in self._logprobs) / tokens) if tokens else math.nan


def upper_bound(values: Sequence[float], delta: float, grid: int = 1000) -> float:
    """Above the mean of what `values` in [0, 1] are drawn from, but for a share `delta` of all
    sequences, however often it is asked as they come; 1 of none.

    By betting against each mean (Waudby-Smith and Ramdas, "Estimating means of bounded random
    variables by betting", 2024, section 4.2): a capital of product(1 + bet (mean - value)), with
    bets that know the values before alone, passes 1 / delta with a probability of at most delta if
    it is the mean, or less than that.
    """
    x = np.asarray(values, np.float64)
    if not x.size:
        return 1.0
    require(bool(np.all((x >= 0) & (x <= 1))), "values", values, "must lie in [0, 1]")
    t = np.arange(1, len(x) + 1)
    mean = (0.5 + np.cumsum(x)) / (t + 1)
    spread = (0.25 + np.cumsum((x - mean) ** 2)) / (t + 1)
    known = np.append(0.25, spread[:-1])  # before each
    bets = np.sqrt(2 * math.log(1 / delta) / (known * t * np.log(1 + t)))
    means = np.linspace(0, 1, grid + 1)[:-1]
    most = 0.75 / (1 - means)  # so that no value takes more than three quarters of what is there
    stakes = np.minimum(bets[:, None], most)
    capital = np.max(np.cumsum(np.log1p(stakes * (means - x[:, None])), axis=0), axis=0)
    possible = np.flatnonzero(capital < math.log(1 / delta))
    return float(means[possible[-1]] + 1 / grid) if len(possible) else float(1 / grid)
