"""Ratios of interleaved pairs: what slows both runs of a pair down cancels."""

import numpy as np
import pytest

from eejax.analysis import interleave, median_ratio


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
