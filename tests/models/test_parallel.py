"""Tensor parallelism: the same layers inside shard_map give the single device's results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eejax.common.axes import Axes
from eejax.losses.multi_exit import multi_exit_loss
from eejax.models import layers, params, shards, transformer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding import rules
from eejax.sharding.mesh import Layout, MeshConfig, make_mesh, mesh_axes

SPLIT = {"n": "model", "k": "model", "f": "model", "v": "model"}

CONFIGS = {
    "llama": dict(
        qk_norm="full", exits=(ExitConfig(0, norm=False), ExitConfig(2, mlp=True, head="own"))
    ),
    "alibi": dict(
        position="alibi",
        norm="layernorm",
        mlp_gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head="tied",
        head_bias=True,
        exits=(ExitConfig(1, block=True),),
    ),
    "shared": dict(
        residual="parallel",
        head="shared",
        logit_softcap=5.0,
        exits=(ExitConfig(1, head="shared", temperature=1.7),),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ways", [4])
def test_model_axis_gives_the_same_loss_and_gradients(name, ways):
    config = ModelConfig(
        vocab_size=37,
        vocab_multiple=8,
        n_layers=3,
        d_model=32,
        n_heads=8,
        n_kv_heads=4,
        d_ff=48,
        context_length=16,
        **CONFIGS[name],
    )
    p = params.init(config, jax.random.key(0))

    def shifted(a):
        noise = np.random.default_rng(a.size).standard_normal(a.shape, np.float32)
        return np.asarray(a) + np.float32(0.05) * noise

    p = jax.tree.map(shifted, p)
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 37)
    labels = jnp.roll(tokens, -1, 1).at[:, -1].set(-1)
    weights = jnp.linspace(0.3, 1.0, config.n_exits + 1)

    def loss(p, axes):
        return multi_exit_loss(p, config, tokens, labels, weights, axes=axes)[0]

    whole = jax.jit(jax.value_and_grad(lambda p: loss(p, Axes())))
    want, want_grads = jax.device_get(whole(p))
    mesh = jax.make_mesh((ways,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = params.map_params(lambda q: P(*(SPLIT.get(a) for a in q.axes)), params.abstract(config))
    sharded = jax.shard_map(
        jax.value_and_grad(lambda p: loss(p, Axes(model="model"))),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(P(), specs),
    )
    got, grads = jax.device_get(jax.jit(sharded)(p))
    assert abs(got - want) < 1e-5 * abs(want)
    largest = max(np.abs(a).max() for a in jax.tree.leaves(want_grads))
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        parent = want_grads
        for key in path[:-1]:
            parent = parent[key.key]
        w = like = parent[path[-1].key]
        if path[-1].key == "k_bias" and config.position == "alibi":
            # Without rotary positions a key bias shifts all scores alike: its gradient is 0, and
            # what is left are roundings of the terms that cancel, which are those of k's gradient.
            assert np.abs(w).max() < 1e-5 * np.abs(parent["k"]).max()
            like = parent["k"]
        scale = max(np.abs(like).max(), 1e-3 * largest)
        assert np.abs(g - w).max() < 2e-5 * scale, jax.tree_util.keystr(path)


@pytest.mark.parametrize("sequence", [False, True])
def test_layers_that_some_stages_pass_by(sequence):
    """Inside a conditional that stages take differently, shards of the model axis communicate."""
    config = ModelConfig(
        vocab_size=8,
        n_layers=4,
        d_model=32,
        n_heads=8,
        n_kv_heads=1,
        d_ff=48,
        context_length=8,
        norm="layernorm",
        o_bias=True,
        mlp_bias=True,
        qk_norm="full",
    )
    stack = params.init(config, jax.random.key(0))["layers"]
    x = jax.random.normal(jax.random.key(1), (2, 8, 32))
    mesh = make_mesh(MeshConfig(pipe=2, model=4, sequence=sequence))
    axes = mesh_axes(mesh, Layout(sequence=sequence))
    # Every stage holds the whole stack here.
    specs = rules.specs(params.abstract(config)["layers"], mesh)
    by_model = jax.tree.map(lambda s: P(None, *s[1:]), specs)

    def run(stack, x, n, axes):
        """The first n layers, without those above."""
        context = layers.make_context(config, jnp.arange(8)[None])
        numbers = jnp.arange(4)
        return transformer.run_layers(
            stack, x, config, context, numbers, active=numbers < n, axes=axes
        )[0]

    def stage(stack, x):
        stack, x = jax.lax.pcast((stack, x), ("data", "pipe"), to="varying")
        i = jax.lax.axis_index("pipe")

        def loss(stack, x):
            return jnp.sum(run(stack, shards.own_positions(x, axes), 1 + 2 * i, axes) ** 3)

        value, grads = jax.value_and_grad(loss, (0, 1))(stack, x)
        if sequence:
            value = jax.lax.psum(value, "model")
        return jax.lax.psum((value, grads), ("data", "pipe"))

    mapped = jax.shard_map(
        stage, mesh=mesh, in_specs=(by_model, P()), out_specs=(P(), (by_model, P()))
    )
    value, grads = jax.device_get(jax.jit(mapped)(stack, x))

    def loss(stack, x):
        return sum(jnp.sum(run(stack, x, n, Axes()) ** 3) for n in (1, 3))

    want, wanted = jax.device_get(jax.jit(jax.value_and_grad(loss, (0, 1)))(stack, x))
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for g, w in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert np.abs(g - w).max() <= 1e-5 * np.abs(w).max()
