"""The multi-exit loss against plain autodiff through whole logits."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eejax.common.errors import ConfigError
from eejax.losses import multi_exit
from eejax.losses.cross_entropy import IGNORE
from eejax.losses.multi_exit import exits_by_table, multi_exit_loss
from eejax.losses.objective import LossObjective
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig

BASE = ModelConfig(
    vocab_size=29, n_layers=3, d_model=12, n_heads=2, context_length=10, d_ff=16, vocab_multiple=8
)
LAYOUTS = {
    "none": BASE,
    "tied": BASE.replace(
        head="tied", exits=(ExitConfig(0), ExitConfig(1), ExitConfig(3, mlp=True))
    ),
    "shared": BASE.replace(
        head="shared",
        exits=(ExitConfig(1, head="shared", temperature=1.5), ExitConfig(2, head="own")),
    ),
    "mixed": BASE.replace(
        head="own",
        logit_softcap=4.0,
        head_bias=True,
        exits=(
            ExitConfig(1, head="shared"),
            ExitConfig(2, head="shared", block=True),
            ExitConfig(3),
        ),
    ),
}


def make_batch(config, seed=0, b=3, t=8):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (b, t)).astype(np.int32)
    labels = np.roll(tokens, -1, 1)
    labels[:, -1] = IGNORE
    labels[0, 2] = IGNORE
    return jnp.asarray(tokens), jnp.asarray(labels)


def plain_loss(p, config, tokens, labels, weights):
    """Eq. 1 of EE-LLM with every exit's logits in full."""
    hs = transformer.exit_states(p, config, tokens)
    sums = []
    for e, h in enumerate(hs):
        log_p = jax.nn.log_softmax(exits.logits(exits.head(p, config, e), h), -1)
        at = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        sums.append(-jnp.sum(jnp.where(labels == IGNORE, 0.0, at)))
    sums = jnp.stack(sums)
    return jnp.sum(weights * sums), sums


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "shared")) for n in LAYOUTS]
)
def test_gradient_of_every_parameter_is_that_of_whole_logits(name):
    config = LAYOUTS[name]
    p = params.init(config, jax.random.key(1))
    tokens, labels = make_batch(config)
    weights = jnp.asarray([0.25, 0.5, 0.75, 1.0][-config.n_exits - 1 :], jnp.float32)

    def gradient(f):
        return jax.jit(
            jax.value_and_grad(lambda p, w: f(p, config, tokens, labels, w), (0, 1), has_aux=True)
        )(p, weights)

    (total, sums), got = gradient(multi_exit_loss)
    (want_total, want_sums), want = gradient(plain_loss)
    np.testing.assert_allclose(sums.sums, want_sums, rtol=1e-5)
    np.testing.assert_allclose(total, want_total, rtol=1e-5)
    assert sums.num_tokens == (np.asarray(labels) != IGNORE).sum()

    def check(a, b):  # both sides round in float32; relative to the leaf's largest entry
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max())

    jax.tree.map(check, got, want)


def test_exits_of_one_table_meet_and_others_do_not():
    groups = {}
    for name, config in LAYOUTS.items():
        p = params.init(config, jax.random.key(0))
        groups[name] = exits_by_table([exits.head(p, config, e) for e in range(config.n_exits + 1)])
    assert groups == {
        "none": [[0]],
        "tied": [[0, 1, 2, 3]],
        "shared": [[0, 2], [1]],
        "mixed": [[0, 1], [2], [3]],
    }


def test_parts_of_a_batch_add_up_to_the_batch():
    config = LAYOUTS["tied"]
    p = params.init(config, jax.random.key(2))
    tokens, labels = make_batch(config, b=4)
    weights = jnp.asarray([0.1, 0.2, 0.3, 1.0])
    f = jax.jit(
        jax.value_and_grad(lambda p, x, y: multi_exit_loss(p, config, x, y, weights), has_aux=True)
    )
    whole = f(p, tokens, labels)
    parts = [f(p, tokens[i : i + 2], labels[i : i + 2]) for i in (0, 2)]
    jax.tree.map(
        lambda a, b, c: np.testing.assert_allclose(
            a, np.add(b, c), rtol=0, atol=2e-5 * max(1e-3, np.abs(a).max())
        ),
        whole,
        *parts,
    )


def test_an_exit_of_weight_zero_leaves_its_own_parameters_alone():
    config = LAYOUTS["shared"]
    p = params.init(config, jax.random.key(3))
    tokens, labels = make_batch(config)

    def loss(p):
        return multi_exit_loss(p, config, tokens, labels, jnp.asarray([0.5, 0.0, 1.0]))[0]

    gradient = jax.jit(jax.grad(loss))(p)
    assert all((g == 0).all() for g in jax.tree.leaves(gradient["exits"]["exit_2"]))
    assert all((g != 0).any() for g in jax.tree.leaves(gradient["exits"]["exit_1"]))


def test_weights_of_another_number_of_exits_are_refused():
    config = LAYOUTS["tied"]
    p = params.init(config, jax.random.key(0))
    tokens, labels = make_batch(config)
    with pytest.raises(ConfigError, match="final one included"):
        multi_exit_loss(p, config, tokens, labels, jnp.ones(3))


def test_an_exit_adds_no_more_than_an_eighth_of_its_logits():
    """Nor does what it adds grow with the vocabulary: a few hidden states, whose width is fixed."""
    b, t = 4, 128

    def temporary(v, exits):
        config = ModelConfig(
            vocab_size=v,
            n_layers=4,
            d_model=96,
            n_heads=2,
            context_length=t,
            head="tied",
            exits=tuple(ExitConfig(n + 1) for n in range(exits)),
        )
        tokens = jax.ShapeDtypeStruct((b, t), jnp.int32)
        weights = jnp.ones(exits + 1)

        def loss(p, x, y):
            return multi_exit_loss(p, config, x, y, weights)[0]

        compiled = jax.jit(jax.grad(loss)).lower(params.shapes(config), tokens, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    v = 8192
    sizes = {exits: temporary(v, exits) for exits in (0, 1, 3)}
    growth = [(size - sizes[0]) / n for n, size in sizes.items() if n]
    assert max(growth) <= 0.125 * b * t * v * 4, growth
    assert temporary(2 * v, 3) - temporary(2 * v, 0) == sizes[3] - sizes[0]


def drawn_loss(config, share, **more):
    """key -> (total, sums, gradient) of a batch with tokens of exits drawn by the key."""
    p = params.init(config, jax.random.key(1))
    tokens, labels = make_batch(config)
    weights = jnp.asarray([0.25, 0.5, 0.75, 1.0][-config.n_exits - 1 :], jnp.float32)
    objective = LossObjective(exit_tokens=share, **more)

    def one(key):
        def loss(p):
            return multi_exit_loss(
                p,
                config,
                tokens,
                labels,
                weights,
                objective=objective,
                dropout_keys=jnp.broadcast_to(key, (len(tokens),)),
            )

        (total, sums), gradient = jax.value_and_grad(loss, has_aux=True)(p)
        return total, sums.sums, gradient

    return one


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.slow, id=""),
        pytest.param({"distillation": 0.5, "z_loss": 1e-3}, id="distilled"),
    ],
)
@pytest.mark.parametrize("name", [pytest.param("tied", marks=pytest.mark.slow), "mixed"])
def test_drawn_tokens_keep_the_expectation(name, more, monkeypatch):
    # Every choice of two tokens of eight once, which is the exact expectation; all samples alike.
    config, t = LAYOUTS[name], 8
    pairs = jnp.asarray(list(itertools.combinations(range(t), 2)))
    assert multi_exit.draw_tokens(jax.random.split(jax.random.key(0), 3), t, 0.25).shape == (3, 2)

    def draw(keys, length, share):
        return jnp.broadcast_to(pairs[jax.random.key_data(keys)[0, -1]], (len(keys), 2))

    monkeypatch.setattr(multi_exit, "draw_tokens", draw)
    one = drawn_loss(config, 0.25, **more)
    keys = jax.random.wrap_key_data(jnp.asarray([[0, i] for i in range(len(pairs))], jnp.uint32))
    results = jax.jit(lambda keys: jax.lax.map(one, keys))(keys)
    assert np.std(results[0]) > 0
    mean = jax.tree.map(lambda a: np.asarray(a, np.float64).mean(0), results)
    whole = jax.jit(drawn_loss(config, 1.0, **more))(jax.random.key(0))
    for a, b in zip(jax.tree.leaves(mean), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())


def test_tokens_are_drawn_evenly_without_replacement_and_by_the_key_alone():
    keys = jax.random.split(jax.random.key(3), 4000)
    drawn = np.asarray(multi_exit.draw_tokens(keys, 10, 0.3))
    assert drawn.shape == (4000, 3) and (np.diff(np.sort(drawn), axis=1) > 0).all()
    counts = np.bincount(drawn.ravel(), minlength=10)
    assert np.abs(counts - 1200).max() < 5 * np.sqrt(4000 * 0.3 * 0.7)
    np.testing.assert_array_equal(multi_exit.draw_tokens(keys[7:9], 10, 0.3), drawn[7:9])


def test_drawn_tokens_need_keys():
    tokens, labels = make_batch(BASE)
    with pytest.raises(ConfigError, match="objective.exit_tokens = 0.5: needs dropout_keys"):
        multi_exit_loss(
            params.init(BASE, jax.random.key(1)),
            BASE,
            tokens,
            labels,
            jnp.ones(1),
            objective=LossObjective(exit_tokens=0.5),
        )
