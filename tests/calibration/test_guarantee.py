"""Learn-then-Test against exact fractions, direct formulas and simulations of its promise."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.calibration import (
    ExitScores,
    calibrate,
    learn_then_test,
    text_risks,
    unit_risks,
    unlike,
)
from eejax.calibration.guarantee import CANDIDATES, p_values
from eejax.common.errors import ConfigError, DataError
from eejax.inference import EngineOptions, Generator
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig

SIGMAS = 5  # of a simulation: one false alarm in 3 million comparisons


def exact_cdf(k: int, n: int, p: Fraction) -> Fraction:
    return sum((math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1)), Fraction(0))


@pytest.mark.parametrize("n, p", [(1, "1/2"), (7, "1/20"), (60, "1/10"), (200, "3/4")])
def test_binomial_tails_are_those_of_fractions(n, p):
    errors = np.arange(n)[:, None] < np.arange(n + 1)  # in column k, k of them
    got = p_values(errors.astype(float), float(Fraction(p)), binary=True)
    want = [float(exact_cdf(k, n, Fraction(p))) for k in range(n + 1)]
    np.testing.assert_allclose(got, want, rtol=1e-10)
    assert got[-1] == 1.0 and (got <= 1).all()


@settings(max_examples=50)
@given(
    losses=st.lists(st.floats(0, 1), min_size=1, max_size=40),
    delta=st.integers(1, 39).map(lambda i: Fraction(i, 40)),
)
def test_p_values_are_the_formula(losses, delta):
    n, d = len(losses), float(delta)
    mean = math.fsum(losses) / n
    a = min(mean, d)
    entropy = (a * math.log(a / d) if a else 0) + (1 - a) * math.log((1 - a) / (1 - d))
    bentkus = math.e * float(exact_cdf(math.ceil(math.fsum(losses)), n, delta))
    want = min(math.exp(-n * entropy), bentkus, 1.0)
    assert p_values(np.array(losses)[:, None], d)[0] == pytest.approx(want, rel=1e-9)
    coins = np.round(losses)[:, None]
    exact = float(exact_cdf(int(coins.sum()), n, delta))
    assert p_values(coins, d, binary=True)[0] == pytest.approx(exact, rel=1e-9)


def check_valid(p):
    """P(p <= u) <= u, of simulated p-values under the hypothesis."""
    for u in (0.01, 0.05, 0.1, 0.3, 0.7):
        error = math.sqrt(u * (1 - u) / len(p))
        assert np.mean(p <= u) <= u + SIGMAS * error, u


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 120),
    delta=st.floats(0.02, 0.6),
    excess=st.sampled_from([1.0, 1.02, 1.3]),
    spread=st.sampled_from([None, 0.3, 2.0, 20.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_p_values_are_valid_where_the_hypothesis_holds(n, delta, excess, spread, seed):
    """Losses whose mean is just above delta, coins (no spread) or a beta distribution's."""
    rng, mean = np.random.default_rng(seed), min(delta * excess + 1e-12, 0.99)
    if spread is None:
        losses = (rng.random((n, 4000)) < mean).astype(float)
        check_valid(p_values(losses, delta, binary=True))
    else:
        losses = rng.beta(mean * spread, (1 - mean) * spread, (n, 4000))
    check_valid(p_values(losses, delta))


def test_p_values_fall_with_the_risk_and_with_more_units():
    for binary in (False, True):

        def column(bad, n):
            return np.repeat([1.0, 0.0], [bad, n - bad])[:, None]

        p = [p_values(column(bad, 100), 0.1, binary=binary)[0] for bad in range(101)]
        assert (np.diff(p) >= 0).all() and p[0] < 1e-4 and p[-1] == 1.0
        p = [p_values(column(0, n), 0.1, binary=binary)[0] for n in (10, 100, 1000)]
        assert (np.diff(p) < 0).all()


def test_an_example_by_hand():
    """Ten units, delta 1/2. No error: (1/2)^10 = 1/1024; one: 11/1024; three: 176/1024."""
    errors = [0, 1, 3, 1]
    risks = np.stack([np.arange(10) < k for k in errors], 1).astype(float)
    got = learn_then_test(risks, [0.9, 0.8, 0.7, 0.6], 0.5, 0.1, binary=True)
    np.testing.assert_allclose(got.p_values, [1 / 1024, 11 / 1024, 176 / 1024, 11 / 1024])
    # The last one would pass, but the one before it did not: it is never tested.
    assert (got.threshold, got.passed, got.units) == (0.8, 2, 10)
    np.testing.assert_allclose(got.risks, [0.0, 0.1, 0.3, 0.1])
    assert learn_then_test(risks, [0.9, 0.8, 0.7, 0.6], 0.5, 0.2, binary=True).threshold == 0.6
    # 11/1024 is above this level, 1/1024 above that one: nothing is promised, so nothing exits.
    assert learn_then_test(risks, [0.9, 0.8, 0.7, 0.6], 0.5, 0.01, binary=True).threshold == 0.9
    none = learn_then_test(risks, [0.9, 0.8, 0.7, 0.6], 0.5, 0.0009, binary=True)
    assert (none.threshold, none.passed) == (1.0, 0)
    # A bounded loss is Hoeffding-Bentkus': exp(-10 log 2) = 1/1024 is less than e/1024.
    assert learn_then_test(risks, [0.9, 0.8, 0.7, 0.6], 0.5, 0.5).p_values[0] * 1024 == (
        pytest.approx(1.0)
    )


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("means", ["falling safety", "not monotone"])
def test_the_promise_is_kept_over_many_calibrations(binary, means):
    """Of many calibrations at most epsilon choose a threshold whose true risk exceeds delta."""
    delta, epsilon, units, trials = 0.1, 0.2, 80, 3000
    rng = np.random.default_rng(1)
    true = np.array(
        [0.0, 0.03, 0.06, 0.09, *np.linspace(0.1001, 0.12, 12)]
        if means == "falling safety"
        else [0.0, 0.02, 0.11, 0.01, 0.02, *[0.11, 0.105] * 5, 0.13]
    )
    thresholds = np.linspace(0.95, 0.2, len(true))
    wrong = some = unordered = 0
    for _ in range(trials):
        if binary:
            risks = (rng.random((units, len(true))) < true).astype(float)
        else:  # one quantile for a unit at all thresholds: risks of one prompt go together
            risks = np.clip(2 * rng.random((units, 1)) * true, 0, 1)
        got = learn_then_test(risks, thresholds, delta, epsilon, binary=binary)
        chosen = got.passed - 1
        wrong += chosen >= 0 and true[chosen] > delta
        some += got.threshold < 0.95
        unordered += bool(np.any((np.array(got.p_values) <= epsilon) & (true > delta)))
    error = math.sqrt(epsilon * (1 - epsilon) / trials)
    assert wrong / trials <= epsilon + SIGMAS * error
    assert some / trials > 0.3  # and something is promised
    if binary:  # and the order is what keeps it: any threshold that passes would not do
        assert unordered / trials > epsilon + SIGMAS * error


def scores_of(units, early, late):
    """Scores of one early exit that is surer than 0.9, 0.8 .. in turn, of given tokens."""
    config = ModelConfig(
        vocab_size=5, n_layers=2, d_model=8, n_heads=2, context_length=8, exits=(ExitConfig(1),)
    )
    n = len(units)
    confidences = np.linspace(0.9, 0.1, n)
    return ExitScores(
        config,
        np.zeros(n, int),
        np.array(units),
        np.array([early, late]),
        np.zeros((2, n)),
        {"max_probability": np.stack([confidences, np.ones(n)])},
    )


def test_risks_are_counted_text_by_text():
    scores = scores_of([4, 4, 4, 2, 2], early=[0, 1, 2, 3, 4], late=[0, 0, 2, 0, 0])
    # Confidences 0.9, 0.7, 0.5, 0.3, 0.1; units in the order of their numbers: 2, then 4.
    got = unit_risks(scores, [0.95, 0.6, 0.2, 0.0])
    np.testing.assert_allclose(got, [[0, 0, 1 / 2, 1], [0, 1 / 3, 1 / 3, 1 / 3]])
    assert (unit_risks(scores, [0.0], exits=[]) == 0).all()
    assert (unit_risks(scores, [0.0], min_exit_layer=2) == 0).all()


def test_calibration_of_scores_is_the_test_of_their_risks():
    n = 90  # of 30 texts: one text's early tokens are wrong where they are least sure
    units = np.tile(np.arange(30), 3)
    late = np.zeros(n, int)
    early = (np.arange(n) >= 60).astype(int)
    scores = scores_of(units, early, late)
    got = calibrate(scores, 0.2, 0.1)
    want = learn_then_test(unit_risks(scores, CANDIDATES), CANDIDATES, 0.2, 0.1)
    assert got == want and 0.3 < got.threshold < 0.9 and got.units == 30
    assert calibrate(scores, 0.2, 0.1, exits=[]).threshold == 0.0  # nobody leaves: no risk
    assert calibrate(scores, 0.01, 0.1).threshold == 1.0  # 30 texts cannot show that


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(delta=0.0), ConfigError, "delta = 0.0: must lie strictly"),
        (dict(delta=math.nan), ConfigError, "delta = nan"),
        (dict(epsilon=1.0), ConfigError, "epsilon = 1.0: must lie strictly"),
        (dict(epsilon=math.nan), ConfigError, "epsilon = nan"),
        (dict(thresholds=[0.5, 0.9]), ConfigError, "strictly decreasing"),
        (dict(thresholds=[0.5, 0.5]), ConfigError, "strictly decreasing"),
        (dict(thresholds=[1.5, 0.5]), ConfigError, "thresholds"),
        (dict(thresholds=[math.nan, 0.5]), ConfigError, "thresholds"),
        (dict(thresholds=[]), ConfigError, "thresholds"),
        (dict(risks=np.zeros((4, 3))), DataError, r"shape \(4, 3\)"),
        (dict(risks=np.zeros(2)), DataError, r"shape \(2,\)"),
        (dict(risks=np.zeros((0, 2))), DataError, r"shape \(0, 2\)"),
        (dict(risks=[[0.0, math.nan]]), DataError, "nan is among them"),
        (dict(risks=[[0.0, 1.1]]), DataError, "1.1 is among them"),
        (dict(risks=[[0.0, -0.1]]), DataError, "-0.1 is among them"),
        (dict(risks=[[0.0, 0.5]], binary=True), DataError, "0.5 is among them: with binary"),
    ],
)
def test_what_cannot_be_tested_is_refused(change, error, message):
    values = dict(risks=np.zeros((4, 2)), thresholds=[0.9, 0.5], delta=0.1, epsilon=0.1) | change
    with pytest.raises(error, match=message):
        learn_then_test(**values)


texts = st.lists(st.integers(0, 2), max_size=7)


@given(texts, texts)
def test_the_loss_of_a_text_is_by_its_longest_common_subsequence(a, b):
    def within(part, whole):
        rest = iter(whole)
        return all(x in rest for x in part)

    common = max(
        n for n in range(len(a) + 1) for part in itertools.combinations(a, n) if within(part, b)
    )
    precision, recall = common / max(1, len(a)), common / max(1, len(b))
    same = 2 * precision * recall / (precision + recall) if common else float(a == b)
    assert unlike(a, b) == pytest.approx(1 - same)


def test_risks_of_the_pass_that_is_deployed():
    """`recompute` and `propagate` write other texts at one threshold, and have other risks."""
    config = ModelConfig(
        vocab_size=31, n_layers=3, d_model=32, n_heads=2, context_length=32, exits=(ExitConfig(1),)
    )
    # Large weights: tokens are sure of themselves, and of what they attend to.
    p = jax.tree.map(lambda a: a * 4, params.init(config, jax.random.key(0)))

    def make(engine):
        return Generator.make(p, config, EngineOptions(engine, cap=4, buckets=(1,)))

    full, asked, middle = make("full"), [[1, 2, 3], [9, 4], [30]], 0.2
    risks = {
        e: text_risks(make(e), full, asked, [1.0, middle], 20) for e in ("recompute", "propagate")
    }
    for engine, got in risks.items():
        assert got.shape == (3, 2) and (got[:, 0] == 0).all() and (got[:, 1] > 0).any()
        want = make(engine).generate(asked[1:2], 20, threshold=middle).ids(0)
        assert got[1, 1] == unlike(want, full.generate(asked[1:2], 20).ids(0))
    assert (risks["recompute"] != risks["propagate"]).any()
    found = learn_then_test(risks["propagate"], [1.0, middle], 0.5, 0.1)
    assert found.threshold == 1.0
