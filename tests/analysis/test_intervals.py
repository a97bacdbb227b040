"""Intervals against other people's formulas and against resampling."""

import math

import numpy as np
import pytest
from scipy import stats

from eejax.analysis.intervals import mean_interval, share_interval


@pytest.mark.parametrize("n, of", [(0, 192), (3, 192), (96, 192), (192, 192), (1, 2)])
def test_a_share_is_wilsons(n, of):
    got = share_interval(n, of)
    z = stats.norm.ppf(0.975)
    share, shrunk = n / of, 1 + z * z / of
    middle = (share + z * z / (2 * of)) / shrunk
    half = z / shrunk * math.sqrt(share * (1 - share) / of + (z / (2 * of)) ** 2)
    assert got == pytest.approx((share, middle - half, middle + half), abs=1e-12)


def test_a_mean_is_the_textbooks():
    values = np.random.default_rng(0).exponential(size=300)
    got = mean_interval(values)
    error = stats.sem(values)
    assert got == pytest.approx(
        (values.mean(), values.mean() - 1.96 * error, values.mean() + 1.96 * error)
    )


def test_texts_of_unequal_length_are_resampled_whole():
    rng = np.random.default_rng(1)
    counts = rng.integers(5, 60, 400)
    level = rng.normal(2.0, 0.5, 400)  # a text's own: its tokens are not independent
    sums = counts * level
    picks = rng.integers(0, 400, (4000, 400))
    means = sums[picks].sum(1) / counts[picks].sum(1)
    got = mean_interval(sums, counts)
    assert got.score == pytest.approx(sums.sum() / counts.sum())
    half = (got.high - got.low) / 2
    # Of 4000 resamples a standard deviation is known to about 1 %.
    assert half == pytest.approx(1.96 * means.std(), rel=0.05)
