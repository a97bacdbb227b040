"""Bounds on how often tokens differ from the whole model's, from judged answers."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eejax.common.errors import require, require_count

FEWEST = 4  # answers that may differ from those before


def perplexity_of(nats: float, tokens: int) -> float:
    """Return the perplexity of so many tokens with a sum `nats` of negative log-probabilities.

    NaN for none. The exponent is at most 700, so that it is finite.
    """
    return math.exp(min(float(nats) / tokens, 700.0)) if tokens else math.nan


class AnswerAudit(NamedTuple):
    """Verdict on the n tokens of an answer.

    Attributes:
      same: [n] bool, whether the judge would have chosen the token, given the text before it.
      logprob: [n] its natural log-probability under the judge.
    """

    same: np.ndarray
    logprob: np.ndarray

    @property
    def perplexity(self) -> float:
        return perplexity_of(-np.sum(self.logprob), len(self.logprob))


@dataclasses.dataclass(frozen=True)
class DisagreementBound:
    """Statistics of a model's recent audits, and bounds on their mean shortfall.

    Each answer counts as one, by its shortfall: 1 minus its quality.

    Attributes:
      window: answers that are kept at most.
      confidence: of each of the bounds.
      shortfalls: of the last answers, those since their mean was seen to change.
      logprobs: of each of them, the sum over its tokens, and their number.
      low, high: bounds on the mean shortfall of answers like these, at any time as long as the
        window does not slide; once it slides, at any one time.
    """

    window: int = 400
    confidence: float = 0.95
    shortfalls: tuple[float, ...] = ()
    logprobs: tuple[tuple[float, int], ...] = ()
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self):
        require_count("window", self.window)
        allowed = "must lie strictly between 0 and 1"
        require(0 < self.confidence < 1, "confidence", self.confidence, allowed)

    def with_answer(self, verdict: AnswerAudit, quality: float | None = None) -> DisagreementBound:
        """Return the statistics with another answer; one of no tokens changes nothing.

        quality: in [0, 1]; by default the share of its tokens that the judge would have chosen.
        """
        tokens = len(verdict.same)
        if not tokens:
            return self
        quality = float(np.mean(verdict.same)) if quality is None else quality
        delta = 1 - self.confidence
        shortfalls = (*self.shortfalls, 1.0 - quality)[-self.window :]
        last = since_change(shortfalls, delta)
        shortfalls = shortfalls[-last:]
        logprobs = (*self.logprobs, (float(np.sum(verdict.logprob)), tokens))[-last:]
        share = float(np.mean(shortfalls))
        low = 1.0 - upper_bound([1.0 - shortfall for shortfall in shortfalls], delta)
        # Whatever is on its way to change, what was seen lies between them.
        return dataclasses.replace(
            self,
            shortfalls=shortfalls,
            logprobs=logprobs,
            low=min(low, share),
            high=max(upper_bound(shortfalls, delta), share),
        )

    @property
    def count(self) -> int:
        return len(self.shortfalls)

    @property
    def share(self) -> float:
        """Mean shortfall of the answers; 0 of none."""
        return float(np.mean(self.shortfalls)) if self.shortfalls else 0.0

    def had_been(self, share: float) -> float:
        """Return what `high` would be if these answers had a mean shortfall of at most `share`.

        Each answer's shortfall is then reduced in proportion.
        """
        scale = min(1.0, share / self.share) if self.share else 1.0
        return upper_bound([scale * x for x in self.shortfalls], 1 - self.confidence)

    @property
    def perplexity(self) -> float:
        """Perplexity of the answers under the judge; NaN of none."""
        tokens = sum(n for _, n in self.logprobs)
        return perplexity_of(-sum(p for p, _ in self.logprobs), tokens)


def since_change(values: Sequence[float], delta: float) -> int:
    """Return how many of the last values in [0, 1] have one mean, as far as can be seen.

    These are all of them, or the last 4, 8, 16 and so on, the first of which differ from all before
    by more than chance makes them but for a share `delta` of all sequences.

    Bifet and Gavalda, "Learning from time-changing data with adaptive windowing" (2007), section
    3.2.
    """
    x, last = np.asarray(values, np.float64), FEWEST
    while last <= len(x) - FEWEST:
        sizes = np.array([len(x) - last, last])
        m, odds = 1 / (1 / sizes).sum(), math.log(2 * len(x) / delta)
        chance = math.sqrt(2 / m * x.var() * odds) + 2 / (3 * m) * odds
        if abs(x[:-last].mean() - x[-last:].mean()) > chance:
            return last
        last *= 2
    return len(x)


def upper_bound(values: Sequence[float], delta: float, grid: int = 1000) -> float:
    """Return an upper bound on the mean of what `values` in [0, 1] are drawn from; 1 of none.

    It holds but for a share `delta` of all sequences, however often it is asked as they come.

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

    def possible(i: int) -> bool:
        """Return whether i / grid may be the mean: the less so the greater it is."""
        mean = i / grid
        stakes = np.minimum(bets, 0.75 / (1 - mean))  # no value takes more than three quarters
        capital = np.cumsum(np.log1p(stakes * (mean - x)))
        return bool(capital.max() < math.log(1 / delta))

    return max(bisect.bisect_left(range(grid), True, key=lambda i: not possible(i)), 1) / grid
