"""AUC against counting pairs, calibration error and Platt scaling against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from eejax.calibration.quality import auc, calibration_error, platt


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40))
def test_auc_is_the_share_of_pairs_in_order(rows):
    said, positive = np.array([r[0] for r in rows]) / 5, np.array([r[1] for r in rows])
    pairs = [(a > b) + 0.5 * (a == b) for a in said[positive] for b in said[~positive]]
    found = auc(said, positive)
    assert np.isnan(found) if not pairs else found == pytest.approx(np.mean(pairs))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=1, max_size=40))
def test_calibration_error_is_that_of_its_bins(rows):
    said, positive = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    place = np.minimum((said.astype(np.float64) * 15).astype(int), 14)
    want = sum(
        abs(said[place == b].mean() - positive[place == b].mean()) * (place == b).mean()
        for b in set(place.tolist())
    )
    assert calibration_error(said, positive) == pytest.approx(want, abs=1e-6)


def test_platt_finds_the_line_that_made_the_labels_and_keeps_the_order():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(200_000) * 2
    positive = rng.random(len(x)) < 1 / (1 + np.exp(-(0.6 * x - 1.2)))
    a, b = platt(x, positive)
    assert a == pytest.approx(0.6, abs=0.02) and b == pytest.approx(-1.2, abs=0.03)
    # Told apart without a mistake: still finite. All alike, or the wrong way round: left alone.
    a, b = platt(np.array([-1.0, -0.5, 0.5, 1.0]), np.array([False, False, True, True]))
    assert 0 < a < 100 and abs(b) < 10
    assert platt(np.array([3.0, 1.0, -1.0, -3.0]), np.array([False, False, True, True])) == (1, 0)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-9, 9), st.booleans()), min_size=4, max_size=40),
    st.sampled_from([0.01, 1.0, 300.0]),
    st.sampled_from([0.0, -50.0]),
)
def test_platt_is_the_most_likely_line(rows, scale, shift):
    x = np.array([r[0] for r in rows]) * scale + shift
    positive = np.array([r[1] for r in rows])
    a, b = platt(x, positive)
    n, m = positive.sum(), (~positive).sum()
    target = np.where(positive, (n + 1) / (n + 2), 1 / (m + 2))
    if (a, b) == (1, 0):  # targets do not rise with x
        assert np.mean((target - target.mean()) * (x - x.mean())) <= 1e-9 * x.std()
        return
    assert a > 0
    off = special.expit(a * x + b) - target
    # At the maximum of the likelihood its slope is 0.
    assert abs(off.mean()) < 1e-6 and abs((off * (x - x.mean())).mean()) < 1e-6 * x.std()


@pytest.mark.parametrize(
    "x, positive",
    [
        ([1.0, 2.0, 3.0], [True, True, True]),
        ([1.0, 2.0, 3.0], [False, False, False]),
        ([2.0, 2.0, 2.0], [True, False, True]),
        ([1.0, -1.0, 1.0, -1.0], [True, True, False, False]),
    ],
)
def test_platt_leaves_alone_what_teaches_nothing(x, positive):
    assert platt(np.array(x), np.array(positive)) == (1, 0)


def test_platt_is_finite_for_far_apart_classes():
    x = np.array([-800.0, -700.0, 600.0, 900.0])
    a, b = platt(x, x > 0)
    # Targets are 3/4 and 1/4, so that the logits' ends are near log 3.
    assert special.expit(a * x + b) == pytest.approx([0.25, 0.25, 0.75, 0.75], abs=0.05)
