"""95 % intervals of scores that were taken on a number of texts."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

Z = 1.96


class Interval(NamedTuple):
    """A score, and the limits of its 95 % interval."""

    score: float
    low: float
    high: float


def mean_interval(sums: np.ndarray, counts: np.ndarray | None = None) -> Interval:
    """sum(sums) / sum(counts), both [n texts]; without counts the mean of `sums`.

    By the linearised standard error of a ratio (Cochran 1977, Sampling Techniques, section 6.4):
    texts are drawn, and not what is counted in them.
    """
    counts = np.ones(len(sums)) if counts is None else np.asarray(counts, np.float64)
    mean = float(np.sum(sums) / counts.sum())
    off, n = sums - mean * counts, len(sums)
    half = Z * math.sqrt(n / max(n - 1, 1) * float(off @ off)) / float(counts.sum())
    return Interval(mean, mean - half, mean + half)


def share_interval(n: int, of: int) -> Interval:
    """n / of, by Wilson's score interval (1927), which 0 of many does not make empty."""
    share, shrunk = n / of, 1 + Z * Z / of
    middle = (share + Z * Z / (2 * of)) / shrunk
    half = Z / shrunk * math.sqrt(share * (1 - share) / of + (Z / (2 * of)) ** 2)
    return Interval(share, middle - half, middle + half)
