"""Thresholds by exit against trying all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eejax.calibration.frontier import ExitScores, at_threshold
from eejax.calibration.thresholds import thresholds_for
from eejax.common.errors import ConfigError
from eejax.models.config import ExitConfig, ModelConfig


def scores_of(seed: int, n: int, exits: int, levels: int) -> ExitScores:
    """Confidences on a few levels; the surer an exit, the more often it is right."""
    rng = np.random.default_rng(seed)
    config = ModelConfig(
        vocab_size=5,
        n_layers=exits + 1,
        d_model=8,
        n_heads=2,
        context_length=8,
        exits=tuple(ExitConfig(b + 1, router=4) for b in range(exits)),
    )
    said = rng.integers(0, levels, (exits + 1, n)) / levels
    said = np.maximum.accumulate(said).astype(np.float32)
    right = rng.random(said.shape) < 0.5 + said / 2
    tokens = np.where(right, 1, 2).astype(np.int32)
    tokens[-1] = 1
    nothing = np.zeros(said.shape, np.float32)
    return ExitScores(config, tokens[0], np.arange(n), tokens, nothing, {"router": said})


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("agreement", [0.99, 0.95, 0.9])
def test_no_thresholds_on_a_grid_are_much_better(seed, agreement):
    scores = scores_of(seed, 400, 3, 8)
    found = thresholds_for(scores, "router", agreement)
    assert found.agreement >= agreement
    assert found == at_threshold(scores, found.threshold, gate="router")
    grid = [*(i / 8 for i in range(8)), 1.0]
    points = [
        at_threshold(scores, list(t), gate="router") for t in itertools.product(grid, repeat=3)
    ]
    best = min(p.depth for p in points if p.agreement >= agreement)
    # Prices reach convex corners of the frontier only: a few tokens may be left.
    assert best <= found.depth <= best + 0.15
    one = min(
        at_threshold(scores, t, gate="router").depth
        for t in grid
        if at_threshold(scores, t, gate="router").agreement >= agreement
    )
    assert found.depth <= one + 1e-9


def test_exits_that_are_never_right_are_not_used_and_threshold_one_is_left():
    scores = scores_of(0, 200, 2, 4)
    scores.tokens[:-1] = 3
    point = thresholds_for(scores, "router", 0.9)
    assert point.agreement == 1.0 and point.depth == 3.0
    # Surest of all is below threshold 1 too: its tokens can leave.
    scores.tokens[:] = 1
    scores.confidences["router"][:] = 1.0
    assert thresholds_for(scores, "router", 1.0).depth == 1.0
    with pytest.raises(ConfigError, match="agreement = 1.5: must lie in"):
        thresholds_for(scores, "router", 1.5)
    with pytest.raises(ConfigError, match="gate = 'margin': must be one of"):
        thresholds_for(scores, "margin", 0.9)
