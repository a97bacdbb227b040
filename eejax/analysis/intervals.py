"""95 % intervals of scores over a number of texts."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

Z = 1.96


class Interval(NamedTuple):
    """A score and its 95 % interval."""

    score: float
    low: float
    high: float


def mean_interval(sums: np.ndarray, counts: np.ndarray | None = None) -> Interval:
    """Return sum(sums) / sum(counts), both [n texts], or the mean of `sums` without counts.

    The interval uses the linearised standard error of a ratio (Cochran 1977, Sampling Techniques,
    section 6.4): texts are the sampling units, not what is counted in them.
    """
    counts = np.ones(len(sums)) if counts is None else np.asarray(counts, np.float64)
    mean = float(np.sum(sums) / counts.sum())
    off, n = sums - mean * counts, len(sums)
    half = Z * math.sqrt(n / max(n - 1, 1) * float(off @ off)) / float(counts.sum())
    return Interval(mean, mean - half, mean + half)


def share_interval(n: int, of: int) -> Interval:
    """Return n / of with Wilson's score interval (1927).

    The interval is not empty where n is 0 or `of`.
    """
    from scipy import stats  # takes a second to import

    low, high = stats.binomtest(n, of).proportion_ci(0.95, method="wilson")
    return Interval(n / of, float(low), float(high))
