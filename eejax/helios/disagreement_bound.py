"""Bounds on the mean shortfall of answers, which is 1 minus their quality, from judged answers."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eejax.common.errors import require, require_count

MIN_ANSWERS = 4  # smallest number of answers that may differ from those before


def perplexity_of(nats: float, tokens: int) -> float:
    """Return the perplexity of tokens whose negative log-probabilities have the sum `nats`.

    It is NaN without tokens. The exponent is at most 700, so that the result is finite.
    """
    return math.exp(min(float(nats) / tokens, 700.0)) if tokens else math.nan


class AnswerAudit(NamedTuple):
    """Verdict on the n tokens of an answer.

    Attributes:
      same: [n] bool, whether the judge would have chosen the token, given the text before it.
      logprob: [n] natural log-probability of the token under the judge.
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
      window: maximum number of answers.
      confidence: confidence of each bound.
      shortfalls: of the last answers, since a change of their mean was detected.
      logprobs: for each of them, the sum over its tokens, and their number.
      low, high: bounds on the mean shortfall of answers like these. They hold at all times together
        until the window slides, and then at any single time.
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
        """Return the statistics with another answer; an answer without tokens changes nothing.

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
        # Bounds are widened to include the observed mean.
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
        """Mean shortfall of the answers; 0 without answers."""
        return float(np.mean(self.shortfalls)) if self.shortfalls else 0.0

    def had_been(self, share: float) -> float:
        """Return what `high` would be if these answers had a mean shortfall of at most `share`.

        Each answer's shortfall is then reduced in proportion.
        """
        scale = min(1.0, share / self.share) if self.share else 1.0
        return upper_bound([scale * x for x in self.shortfalls], 1 - self.confidence)

    @property
    def perplexity(self) -> float:
        """Perplexity of the answers under the judge; NaN without answers."""
        tokens = sum(n for _, n in self.logprobs)
        return perplexity_of(-sum(p for p, _ in self.logprobs), tokens)


def since_change(values: Sequence[float], delta: float) -> int:
    """Return how many of the last values in [0, 1] have one mean, as far as the data show.

    The result is the smallest of 4, 8, 16 and so on such that the last values differ from all
    earlier ones by more than chance explains, except in a share `delta` of all sequences; without
    a difference it is the number of all values.

    Bifet and Gavalda, "Learning from time-changing data with adaptive windowing" (2007), section
    3.2.
    """
    x, last = np.asarray(values, np.float64), MIN_ANSWERS
    while last <= len(x) - MIN_ANSWERS:
        sizes = np.array([len(x) - last, last])
        m, odds = 1 / (1 / sizes).sum(), math.log(2 * len(x) / delta)
        chance = math.sqrt(2 / m * x.var() * odds) + 2 / (3 * m) * odds
        if abs(x[:-last].mean() - x[-last:].mean()) > chance:
            return last
        last *= 2
    return len(x)


def upper_bound(values: Sequence[float], delta: float, grid: int = 1000) -> float:
    """Return an upper bound on the mean that `values` in [0, 1] are drawn with; 1 without values.

    It holds at all times together, except for a share `delta` of all sequences.

    The bound bets against each mean (Waudby-Smith and Ramdas, "Estimating means of bounded random
    variables by betting", 2024, section 4.2): a capital of product(1 + bet (mean - value)), with
    bets that depend on earlier values only, exceeds 1 / delta with a probability of at most delta
    if the true mean is that mean or less.
    """
    x = np.asarray(values, np.float64)
    if not x.size:
        return 1.0
    require(bool(np.all((x >= 0) & (x <= 1))), "values", values, "must lie in [0, 1]")
    t = np.arange(1, len(x) + 1)
    mean = (0.5 + np.cumsum(x)) / (t + 1)
    spread = (0.25 + np.cumsum((x - mean) ** 2)) / (t + 1)
    known = np.append(0.25, spread[:-1])  # spread before each value
    bets = np.sqrt(2 * math.log(1 / delta) / (known * t * np.log(1 + t)))

    def possible(i: int) -> bool:
        """Return whether i / grid may be the mean, which is false from some i on."""
        mean = i / grid
        stakes = np.minimum(bets, 0.75 / (1 - mean))  # no value loses more than 3/4 of the capital
        capital = np.cumsum(np.log1p(stakes * (mean - x)))
        return bool(capital.max() < math.log(1 / delta))

    return max(bisect.bisect_left(range(grid), True, key=lambda i: not possible(i)), 1) / grid
