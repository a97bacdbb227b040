"""Predicted speed of drafts, by brute force."""

import dataclasses
import itertools

import numpy as np
import pytest

from eejax.calibration import drafting
from eejax.calibration.prediction import DecodingTimes
from eejax.inference.options import EngineOptions, draft_cost, verify_cost
from eejax.models.config import ExitConfig, ModelConfig

CONFIG = ModelConfig(
    vocab_size=50,
    n_layers=8,
    d_model=16,
    n_heads=2,
    context_length=32,
    exits=(ExitConfig(2), ExitConfig(6)),
)
TIMES = DecodingTimes(
    layer=1.0,
    heads=(0.5, 0.5, 2.0),
    step=1.5,
    rows=((1, 1.0), (2, 1.2), (4, 1.5), (5, 1.6)),
    draft_step=0.8,
)


def tokens_of_a_step(acceptance, drafts):
    """The expected number of tokens: each way in which drafts may be right, one after the other."""
    total = 0.0
    for right in itertools.product((True, False), repeat=drafts):
        chance = np.prod([acceptance if r else 1 - acceptance for r in right])
        total += chance * (1 + sum(1 for _ in itertools.takewhile(bool, right)))
    return total


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("cost, verify", [(0.1, (0.3, 0.12)), (0.3, (0.02, 0.02)), (0.9, (0, 0))])
def test_the_number_of_drafts_is_the_best_of_all(acceptance, cost, verify):
    def speed(k):
        time = 1 + cost * k + (verify[0] + verify[1] * (k - 1) if k else 0)
        return tokens_of_a_step(acceptance, k) / time

    best = drafting.number_of_drafts(acceptance, cost, verify, 4)
    assert speed(best) == pytest.approx(max(map(speed, range(5))))
    for k in range(5):
        assert drafting.draft_speed(acceptance, k, cost, verify) == pytest.approx(speed(k))


@pytest.mark.parametrize(
    "shares, expected",
    [
        ((None, None), 2),  # the engine finds out
        ((0.9, 0.9), 2),
        ((0.01, 0.99), 6),
        ((0.01, 0.1), None),
        ((0.01, None), 6),
    ],
)
def test_the_exit_that_drafts_promises_most(shares, expected):
    def speed(exit):
        alone, options = CONFIG.replace(exits=(exit,)), EngineOptions("speculative")
        cost, verify = draft_cost(alone, options), verify_cost(alone, options, 1)
        return max(
            tokens_of_a_step(exit.acceptance, k) / (1 + cost * k + verify[0] + verify[1] * (k - 1))
            for k in range(1, 5)
        )

    exits = tuple(
        dataclasses.replace(e, acceptance=share)
        for e, share in zip(CONFIG.exits, shares, strict=True)
    )
    speeds = {e.boundary: speed(e) for e in exits if e.acceptance is not None}
    assert drafting.drafting_exit(CONFIG.replace(exits=exits)) == expected
    paying = {b: s for b, s in speeds.items() if s > 1}
    assert expected == max(paying, key=paying.get) if paying else expected not in speeds


def test_an_exit_above_all_layers_drafts_nothing():
    assert drafting.drafting_exit(CONFIG.replace(exits=(ExitConfig(8),))) is None
    assert drafting.drafting_exit(CONFIG.replace(exits=())) is None


def test_a_prediction_counted_by_hand():
    """Four drafts after 2 of 8 layers: 5 rows go through 6 layers and the final head at once."""
    found = drafting.predict_drafts(CONFIG, TIMES, 0, 0.9, tuned=True)
    alone = CONFIG.replace(exits=CONFIG.exits[:1])
    options = EngineOptions("speculative", draft_exit=2)
    cost, verify = draft_cost(alone, options), verify_cost(alone, options, 1)
    assert found.drafts == 4 and found.boundary == 2 and found.tuned
    tokens = tokens_of_a_step(0.9, 4)
    assert found.speed == pytest.approx(
        tokens / (1 + 4 * cost + verify[0] + 3 * verify[1]), rel=1e-5
    )
    full = 8 * 1.0 + 2.0 + 1.5
    seconds = full + 0.8 + 4 * (2 * 1.0 + 0.5) + 0.6 * (6 * 1.0 + 2.0)
    assert found.timed == pytest.approx(tokens * full / seconds)
    seconds = full + 0.8 + 2 * 1.0 + 0.5 + 0.2 * (6 * 1.0 + 2.0)
    assert found.single == pytest.approx(1.9 * full / seconds)


def test_drafts_that_are_never_right_are_not_made():
    found = drafting.predict_drafts(CONFIG, TIMES, 1, 0.0, tuned=False)
    assert (found.drafts, found.speed) == (0, 1.0) and found.single < 1
    assert found.timed == pytest.approx(11.5 / (11.5 + 0.8))  # what the engine takes all the same
