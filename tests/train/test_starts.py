"""An exit that starts as a copy is the logit lens, whatever it is made of."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.common.trees import join
from eejax.losses.multi_exit import exits_loss
from eejax.models import exits, layers, params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.train.starts import copied_exit

B, T = 2, 6


@st.composite
def drawn(draw) -> ModelConfig:
    """A model with one exit, of all that an exit meets; of one size, to compile little."""

    def maybe(*values):
        return draw(st.sampled_from(values))

    placement = maybe("pre", "post", "pre_post", "output")
    own = maybe("tied", "shared", "own")
    e = ExitConfig(
        boundary=maybe(0, 1, 2),
        mlp=maybe(True, False),
        norm=maybe(True, True, False),
        block=placement != "post" and maybe(True, False),
        temperature=maybe(1.0, 0.7),
        head=maybe("tied", "own", *["shared"] * (own == "shared")),
        head_rank=maybe(0, 0, 3, 23),
    )
    if e.mlp:
        e = dataclasses.replace(e, mlp_width=maybe(0, 1, 7, 20))
    parallel = ("sequential", "parallel", "parallel_one_norm")
    return ModelConfig(
        23,
        2,
        24,
        2,
        16,
        d_ff=20,
        norm_placement=placement,
        head=own,
        exits=(e,),
        residual=maybe(*parallel) if placement == "pre" else "sequential",
        norm=maybe("rmsnorm", "layernorm"),
        norm_plus_one=maybe(True, False),
        norm_bias=maybe(True, False),
        final_norm=maybe(True, True, False),
        o_bias=maybe(True, False),
        mlp_bias=maybe(True, False),
        mlp_gated=maybe(True, False),
        head_bias=maybe(True, False),
        logit_softcap=maybe(None, 3.0),
    )


def trained(config: ModelConfig, seed: int):
    """Parameters of which none, norms and biases too, is what a model begins with."""
    rng = np.random.default_rng(seed)

    def values(p):
        return p.fill + 0.3 * rng.standard_normal(p.shape)

    return params.map_params(lambda p: jnp.asarray(values(p), jnp.float32), params.abstract(config))


def untrained(config: ModelConfig):
    """The constants that leaves begin with, and 1 where they are drawn."""

    def one(p):
        return jnp.full(p.shape, p.fill if p.std is None else 1.0, jnp.float32)

    return params.map_params(one, params.abstract(config))


def lens(config: ModelConfig, base, e: ExitConfig, x: np.ndarray, labels: np.ndarray) -> float:
    """Mean cross entropy of the final norm and head on a state [b, t, d], in float64 by hand."""
    x = np.asarray(x, np.float64)
    if e.norm:
        p = base["final"].get("norm")
        if config.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps)
        if p is not None:
            x = x * (np.asarray(p["scale"], np.float64) + config.norm_plus_one)
            x = x + np.asarray(p.get("bias", 0.0), np.float64)
    final = {
        "own": base["final"].get("head"),
        "tied": base["embed"]["tokens"],
        "shared": base.get("shared_head"),
    }
    table = np.asarray(final[config.head if e.head == "own" else e.head], np.float64)
    if e.head_rank:  # the part of the state that the table's best approximation reads
        _, _, vectors = np.linalg.svd(table, full_matrices=False)
        x = x @ vectors[: e.head_rank].T @ vectors[: e.head_rank]
    y = x @ table.T + np.asarray(base["final"].get("head_bias", 0.0))
    if config.logit_softcap is not None:
        y = config.logit_softcap * np.tanh(y / config.logit_softcap)
    y = (y / e.temperature)[..., : config.vocab_size]
    y = y - y.max(-1, keepdims=True)
    logp = y - np.log(np.exp(y).sum(-1, keepdims=True))
    return float(-np.take_along_axis(logp, labels[..., None], -1).mean())


@settings(max_examples=15)
@given(drawn(), st.integers(0, 9))
def test_a_copied_exit_begins_at_the_logit_lens(config, seed):
    """Equal, up to the rounding of float32 against float64."""
    (e,), without = config.exits, config.replace(exits=())
    base = trained(without, seed)
    own = join(untrained(config)["exits"][e.name], copied_exit(base, without, e))
    declared = params.map_params(lambda p: p.shape, params.exit_(config, e))
    assert jax.tree.map(jnp.shape, own) == declared
    if e.mlp:  # the first columns of the MLP of the layer below
        layer = jax.tree.map(lambda a: a[max(e.boundary, 1) - 1], base["layers"]["mlp"])
        for name in {"up", "gate", "up_bias", "gate_bias"} & {*layer}:
            first = layer[name][..., : e.mlp_width or config.d_ff]
            np.testing.assert_array_equal(own["mlp"][name], first)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((B, T, config.d_model)).astype(np.float32) * 3
    labels = rng.integers(0, config.vocab_size, (B, T)).astype(np.int32)
    tree = base | {"exits": {e.name: own}}
    context = layers.make_context(config, jnp.arange(T)[None])
    h = exits.state(tree, config, 0, jnp.asarray(x), context)
    _, sums = exits_loss(tree, config, [h], jnp.asarray(labels), jnp.ones(1), (0,))
    assert float(sums[0]) / labels.size == pytest.approx(
        lens(without, base, e, x, labels), abs=1e-5
    )


def test_training_lets_in_what_starts_at_zero():
    """The gradient in what was set to zero is none, so that an MLP and a block are learned."""
    for placement in ("pre", "pre_post"):
        config = ModelConfig(
            23, 2, 24, 2, 16, norm_placement=placement, exits=(ExitConfig(1, mlp=True, block=True),)
        )
        base = trained(config.replace(exits=()), 0)
        own = copied_exit(base, config.replace(exits=()), config.exits[0])
        context = layers.make_context(config, jnp.arange(T)[None])
        x = jax.random.normal(jax.random.key(1), (B, T, 24))

        def loss(own, config=config, base=base, context=context, x=x):
            tree = base | {"exits": {"exit_1": own}}
            h = exits.state(tree, config, 0, x, context)
            labels = jnp.zeros((B, T), jnp.int32)
            return exits_loss(tree, config, [h], labels, jnp.ones(1), (0,))[0]

        grads = jax.jit(jax.grad(loss))(own)
        assert float(jnp.abs(grads["mlp"]["down"]).max()) > 0
        silenced = grads["block"]["mlp"]["down"]
        if placement == "pre_post":
            silenced = grads["block"]["mlp_out_norm"]["scale"]
        assert float(jnp.abs(silenced).max()) > 0
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(grads))


def test_a_block_that_cannot_be_the_lens_is_refused():
    config = ModelConfig(23, 2, 24, 2, 16, norm_placement="post")
    with pytest.raises(ConfigError, match="tune.start = 'copy': gives exit 1 no block.*'random'"):
        copied_exit(trained(config, 0), config, ExitConfig(1, block=True))
