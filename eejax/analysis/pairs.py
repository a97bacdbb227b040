"""Speed-ups from interleaved pairs of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 2000


class Ratio(NamedTuple):
    """Median over pairs of (time of the baseline ÷ time of the other), and its 95 % interval."""

    median: float
    low: float
    high: float


def median_ratio(baseline: Sequence[float], other: Sequence[float]) -> Ratio:
    """Return the median ratio of paired times [n], each pair run one right after the other.

    The interval is a bootstrap over pairs (Efron 1979, percentile), so that a slowdown of both runs
    of a pair counts against neither.
    """

    def of(baseline, other, axis=-1):
        return np.median(baseline / other, axis)

    return _bootstrapped(of, baseline, other)


def total_ratio(baseline: Sequence[float], other: Sequence[float]) -> Ratio:
    """Return the ratio of summed times, for pairs that are different parts of one task.

    The interval is a bootstrap over pairs, as in `median_ratio`, but of the ratio of sums; `median`
    is the ratio of all.
    """

    def of(baseline, other, axis=-1):
        return baseline.sum(axis) / other.sum(axis)

    return _bootstrapped(of, baseline, other)


def interleave(
    runs: Sequence[Callable[[int], Any]],
    pairs: int,
    clock: Callable[[], float],
    before: Callable[[int], Any] = lambda r: None,
) -> np.ndarray:
    """Time runs in pairs, in rotating order; return the seconds [runs, pairs].

    `run(i)` does the work of pair i and returns when it is done. `before(r)` is called ahead of run
    number r and is not timed. One call of each run comes first and is not counted, so that
    compilation is excluded.
    """
    for r, run in enumerate(runs):
        before(r)
        run(0)
    seconds = np.zeros((len(runs), pairs))
    for i in range(pairs):
        order = range(len(runs)) if i % 2 == 0 else reversed(range(len(runs)))
        for r in order:
            before(r)
            begin = clock()
            runs[r](i)
            seconds[r, i] = clock() - begin
    return seconds


def _bootstrapped(
    statistic: Callable[..., Any], baseline: Sequence[float], other: Sequence[float]
) -> Ratio:
    """Return the statistic of the pairs, and the interval of its bootstrap over pairs."""
    from scipy import stats  # takes a second to import

    pairs = np.asarray(baseline, np.float64), np.asarray(other, np.float64)
    value = float(statistic(*pairs))
    if len(pairs[0]) == 1:  # scipy refuses what has no spread
        return Ratio(value, value, value)
    low, high = stats.bootstrap(
        pairs,
        statistic,
        n_resamples=RESAMPLES,
        paired=True,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Ratio(value, float(low), float(high))
