"""What a model makes of given texts, beside the logits of a plain pass."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from eejax.common.errors import ConfigError
from eejax.inference import sharded
from eejax.inference.logits_params import MAX_TOP_LOGPROBS
from eejax.inference.scoring import score, score_lengths
from eejax.inference.weights import prepare
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig, known_mesh

CONFIG = ModelConfig(
    vocab_size=70,
    vocab_multiple=4,
    n_layers=3,
    d_model=32,
    n_heads=4,
    context_length=200,
    exits=(ExitConfig(1, mlp=True), ExitConfig(2, block=True, head="own")),
    logit_softcap=9.0,
)


@pytest.fixture(scope="module")
def model():
    def grow(a):
        return a * 1.5 if a.ndim > 1 else a

    return jax.tree.map(grow, params.init(CONFIG, jax.random.key(1)))


@jax.jit
def logits(model, tokens):
    """Those of every exit."""
    states = transformer.exit_states(model, CONFIG, tokens)
    return [exits.logits(exits.head(model, CONFIG, e), h) for e, h in enumerate(states)]


def plain(model, tokens):
    """Log-probabilities [t - 1, v] of every exit, in float64."""
    found = []
    for y in logits(model, np.array([tokens], np.int32)):
        y = np.asarray(y[0, :-1, :70], np.float64)
        found.append(y - np.log(np.exp(y).sum(-1, keepdims=True)))
    return found


def test_texts_of_any_length_take_few_programs(model, compiled):
    """It comes first: what another test had compiled would not be seen."""
    assert score_lengths(CONFIG.context_length) == [200]
    assert score_lengths(8192) == [512, 2048, 8192] and score_lengths(3000) == [512, 2048, 3000]
    weights = prepare(model, CONFIG)
    score(weights, CONFIG, [1, 2])
    assert compiled  # the listener works
    compiled.clear()
    for length in (3, 64, 65, 200):
        score(weights, CONFIG, [5] * length)
    assert not compiled


@pytest.mark.parametrize(
    "length, mesh",
    [
        (2, None),
        (16, None),
        pytest.param(17, None, marks=pytest.mark.slow),
        (200, None),  # chunks of positions, the last one not full
        (200, MeshConfig(model=2)),
    ],
)
def test_scores_are_those_of_a_plain_pass(model, length, mesh):
    tokens = np.random.default_rng(length).integers(0, 70, length).tolist()
    weights = prepare(model, CONFIG)
    if mesh is not None:
        weights = sharded.place(model, CONFIG, None, known_mesh(mesh))
    wanted = plain(model, tokens)
    for e in (0, 1, 2, None):
        want = wanted[2 if e is None else e]
        got = score(weights, CONFIG, tokens, exit=e, top_logprobs=e == 1)
        picked = want[np.arange(length - 1), tokens[1:]]
        np.testing.assert_allclose(got.logprob, picked, atol=2e-4)
        gap = want.max(-1) - picked
        assert (got.top == (gap == 0))[(gap == 0) | (gap > 1e-4)].all()
        assert (got.top_logprobs is None) == (e != 1)
        if e == 1:
            ranked = -np.sort(-want, -1)[:, :MAX_TOP_LOGPROBS]
            np.testing.assert_allclose(got.top_logprobs.logprob, ranked, atol=2e-4)
            taken = np.take_along_axis(want, np.asarray(got.top_logprobs.token), -1)
            np.testing.assert_allclose(got.top_logprobs.logprob, taken, atol=2e-4)


def test_a_part_of_a_model_scores_by_the_exits_it_has(model):
    tokens = list(range(20))
    got = score(prepare(model, CONFIG, 2), CONFIG, tokens)
    want = score(prepare(model, CONFIG), CONFIG, tokens, exit=1)
    np.testing.assert_allclose(got.logprob, want.logprob, atol=1e-5)


def test_what_cannot_be_scored_is_named(model):
    weights = prepare(model, CONFIG)
    with pytest.raises(ConfigError, match="tokens = '1 tokens': must be at least two"):
        score(weights, CONFIG, [3])
    with pytest.raises(ConfigError, match="exit = 3: must be in 0..2"):
        score(weights, CONFIG, [3, 4], exit=3)
    with pytest.raises(ConfigError, match=r"prompts\[0\] = '201 tokens'"):
        score(weights, CONFIG, [3] * 201)
    with pytest.raises(ConfigError, match="70"):
        score(weights, CONFIG, [3, 70])
