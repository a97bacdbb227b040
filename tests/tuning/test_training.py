"""Exits on stored states: a step beside autodiff of the whole loss, and which pass is kept."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eejax.common.errors import ConfigError, DataError
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.tuning import states
from eejax.tuning.training import TuningOptions, train_exits

V, LENGTH, WINDOWS = 19, 6, 4
BOUNDARIES = (0, 1, 2)
CONFIG = ModelConfig(
    vocab_size=V,
    n_layers=3,
    d_model=16,
    n_heads=2,
    context_length=LENGTH,
    exits=(
        ExitConfig(0, head_rank=5),
        ExitConfig(1, block=True, mlp=True),
        ExitConfig(2, mlp=True, head="own"),
    ),
)


def quiet(text):
    pass


def text():
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, V, (WINDOWS, LENGTH)).astype(np.int32)
    labels = np.where(rng.random(tokens.shape) < 0.3, -1, tokens).astype(np.int32)
    return tokens, labels


@pytest.fixture(scope="module")
def whole():
    return params.init(CONFIG, jax.random.key(4))


@pytest.fixture(scope="module")
def stored(whole, tmp_path_factory):
    """All predictions are kept, so that the teacher's distribution is whole."""
    tokens, labels = text()
    batches = [{"tokens": tokens, "labels": labels}]
    folder = tmp_path_factory.mktemp("states")
    return states.collect(whole, CONFIG, BOUNDARIES, batches, WINDOWS, folder, k=V, watch=quiet)


def test_a_step_is_that_of_autodiff_through_the_model(whole, stored):
    """One pass of one step: gradients of the sum of the exits' losses on the three windows."""
    options = TuningOptions(
        passes=1, windows=3, learning_rate=1e-2, weight_decay=0.1, held_out=0.25, predictions=V
    )
    found = train_exits(whole, CONFIG, stored, options, watch=quiet)
    tokens, labels = text()
    order = np.random.default_rng(0).permutation(WINDOWS)
    held, own = order[:1], np.sort(order[1:])

    @jax.jit
    def losses(tree, tokens, labels):
        p = whole | {"exits": tree}
        *early, last = transformer.exit_states(p, CONFIG, tokens)
        final = exits.logits(exits.head(whole, CONFIG, 3), last)
        q = jax.lax.stop_gradient(jax.nn.softmax(final))
        counted = labels >= 0
        found = []
        for e, h in enumerate(early):
            logp = jax.nn.log_softmax(exits.logits(exits.head(p, CONFIG, e), h))
            agree = (jnp.argmax(logp, -1) == jnp.argmax(final, -1)) & counted
            loss = -jnp.sum(jnp.where(counted[..., None], q * logp, 0.0), -1)
            n = jnp.sum(counted.astype(jnp.float32))
            found.append((jnp.sum(loss) / n, jnp.sum(agree.astype(jnp.float32)) / n))
        return found

    before = losses(whole["exits"], tokens[held], labels[held])
    for quality, (loss, agreement), boundary in zip(found.before, before, BOUNDARIES, strict=True):
        assert quality.boundary == boundary and quality.loss == pytest.approx(float(loss), rel=5e-3)
        assert quality.agreement == pytest.approx(float(agreement))
    assert found.tokens == (labels[own] >= 0).sum()
    gradient_of = jax.jit(
        jax.grad(lambda tree: sum(a for a, _ in losses(tree, tokens[own], labels[own])))
    )
    gradient = gradient_of(whole["exits"])
    moved = jax.tree.map(lambda new, old: np.asarray(new - old), found.exits, whole["exits"])
    head = moved["exit_2"].pop("head")
    assert not head.any()  # a head is not trained
    for name, tree in moved.items():
        declared = params.abstract(CONFIG)["exits"][name]
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        for path, step in leaves:
            g, p, old = gradient[name], declared, whole["exits"][name]
            for key in path:
                g, p, old = g[key.key], p[key.key], old[key.key]
            # The first step of Adam goes by the sign; states are kept in 8 bits of mantissa.
            sure = np.abs(g) > 0.1 * np.abs(g).max()
            expected = -1e-2 * (np.sign(g) + 0.1 * p.decay * np.asarray(old))
            assert np.allclose(step[sure], expected[sure], rtol=1e-3, atol=1e-6), path


def test_tokens_that_an_exit_does_not_know_count_nowhere(whole, stored):
    """The loss of an exit of 7 tokens, beside numpy in float64."""
    known = 7
    of_seven = (*CONFIG.exits[:2], dataclasses.replace(CONFIG.exits[2], vocabulary=known))
    config = CONFIG.replace(exits=of_seven)
    options = TuningOptions(passes=1, held_out=0.25, predictions=V, learning_rate=1e-2)
    found = train_exits(whole, config, stored, options, watch=quiet)
    held = np.random.default_rng(0).permutation(WINDOWS)[:1]
    tokens, labels = (a[held] for a in text())
    *early, last = transformer.exit_states(whole, CONFIG, tokens)
    y, z = (
        np.asarray(exits.logits(exits.head(whole, CONFIG, e), h), np.float64)
        for e, h in ((2, early[2]), (3, last))
    )
    q = np.exp(z - z.max(-1, keepdims=True))
    q = (q / q.sum(-1, keepdims=True))[..., :known]
    p = y[..., :known] - y[..., :known].max(-1, keepdims=True)
    logp = p - np.log(np.exp(p).sum(-1, keepdims=True))
    counted = labels >= 0
    loss = -(q * logp).sum(-1)[counted].mean()
    agree = (y[..., :known].argmax(-1) == z.argmax(-1))[counted].mean()
    assert found.before[2].loss == pytest.approx(loss, rel=5e-3)
    assert found.before[2].agreement == pytest.approx(agree)
    assert found.exits["exit_2"]["head"].shape == (V, 16)  # the model keeps its own


def test_the_best_pass_is_kept(whole, stored):
    lines = []
    options = TuningOptions(passes=3, windows=2, learning_rate=30.0, predictions=V)
    found = train_exits(whole, CONFIG, stored, options, watch=lines.append)
    assert len(lines) == 4 and found.after == found.before  # so large a step makes all worse
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), found.exits, whole["exits"])
    assert all(jax.tree.leaves(same))
    options = TuningOptions(passes=3, windows=2, learning_rate=1e-3, predictions=V)
    better = train_exits(whole, CONFIG, stored, options, watch=quiet)
    assert all(a.loss < b.loss for a, b in zip(better.after, better.before, strict=True))


def test_a_bfloat16_model_is_tuned_in_float32(whole, stored):
    config = CONFIG.replace(dtype="bfloat16")
    model = params.for_compute(whole, jnp.bfloat16)
    one = dataclasses.replace(stored, boundaries=(2,), states=stored.states[2:])
    options = TuningOptions(passes=2, windows=3, learning_rate=1e-3, predictions=V)
    found = train_exits(model, config, one, options, watch=quiet).exits["exit_2"]
    assert found.pop("head").dtype == jnp.bfloat16  # a head is not trained
    assert {a.dtype for a in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    up = found["mlp"]["up"]
    assert (up != up.astype(jnp.bfloat16).astype(jnp.float32)).any()


def test_blowing_up_is_an_error(whole, stored):
    options = TuningOptions(passes=1, learning_rate=1e38, predictions=V)
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        train_exits(whole, CONFIG, stored, options, watch=quiet)


def test_bad_settings():
    for wrong in (0.0, 1.0, "a"):
        with pytest.raises(ConfigError, match="held_out"):
            TuningOptions(held_out=wrong)
    with pytest.raises(ConfigError, match="passes"):
        TuningOptions(passes=0)


def test_one_window_is_too_few(whole, stored):
    with pytest.raises(DataError, match="at least 2"):
        train_exits(whole, CONFIG, stored.first(1), TuningOptions(), watch=quiet)
