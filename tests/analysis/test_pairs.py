"""Ratios of interleaved pairs: what slows both runs of a pair down cancels."""

import numpy as np
import pytest

from eejax.analysis import interleave, median_ratio, total_ratio


def test_common_slowness_cancels():
    rng = np.random.default_rng(0)
    load = rng.uniform(1, 5, 40)
    ratio = median_ratio(2.0 * load, load)
    assert ratio == pytest.approx((2.0, 2.0, 2.0))


def test_interval_holds_the_median_of_the_population():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        noise = np.exp(rng.normal(0, 0.2, 25))
        ratio = median_ratio(1.5 * noise, np.ones(25))
        assert ratio.low <= ratio.median <= ratio.high
        inside += ratio.low <= 1.5 <= ratio.high
    assert 0.88 <= inside / 200 <= 0.995  # 95 %, give or take the sampling error


@pytest.mark.parametrize("n", [2, 3, 40])
def test_intervals_are_percentiles_over_resampled_pairs(n):
    baseline, other = np.random.default_rng(n).uniform(1, 5, (2, n))
    picks = np.random.default_rng(0).integers(0, n, (2000, n))
    a, b = baseline[picks], other[picks]
    of = {median_ratio: np.median(a / b, 1), total_ratio: a.sum(1) / b.sum(1)}
    for ratio, resampled in of.items():
        got = ratio(baseline, other)
        assert got[1:] == pytest.approx(np.quantile(resampled, (0.025, 0.975)))
    assert total_ratio(baseline, other).median == pytest.approx(baseline.sum() / other.sum())


def test_a_single_pair_has_no_spread():
    assert median_ratio([3.0], [2.0]) == total_ratio([3.0], [2.0]) == (1.5, 1.5, 1.5)


def test_interleave_turns_the_order_and_leaves_the_first_call_out():
    calls, now = [], [0.0]

    def run(name, seconds):
        def go(i):
            calls.append((name, i))
            now[0] += seconds * (100 if len(calls) <= 2 else 1)

        return go

    seconds = interleave([run("a", 1.0), run("b", 3.0)], 3, lambda: now[0])
    np.testing.assert_allclose(seconds, [[1, 1, 1], [3, 3, 3]])
    assert calls[2:] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
