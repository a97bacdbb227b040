"""Tensor parallelism: the same layers inside shard_map give the single device's results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eejax.common.axes import Axes
from eejax.losses.multi_exit import multi_exit_loss
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig

SPLIT = {"n": "model", "k": "model", "f": "model", "v": "model"}

CONFIGS = {
    "llama": dict(
        qk_norm="full", exits=(ExitConfig(0, norm=False), ExitConfig(2, mlp=True, head="own"))
    ),
    "alibi": dict(
        position="alibi", norm="layernorm", mlp_gated=False, qkv_bias=True, o_bias=True,
        mlp_bias=True, head="tied", head_bias=True, exits=(ExitConfig(1, block=True),),
    ),
    "shared": dict(
        residual="parallel", head="shared", logit_softcap=5.0,
        exits=(ExitConfig(1, head="shared", temperature=1.7),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ways", [4])
def test_model_axis_gives_the_same_loss_and_gradients(name, ways):
    config = ModelConfig(
        vocab_size=37, vocab_multiple=8, n_layers=3, d_model=32, n_heads=8, n_kv_heads=4,
        d_ff=48, context_length=16, **CONFIGS[name],
    )  # fmt: skip
    p = params.init(config, jax.random.key(0))
    p = jax.tree.map(
        lambda a: (
            a
            + 0.05 * jnp.asarray(np.random.default_rng(a.size).standard_normal(a.shape, np.float32))
        ),
        p,
    )
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 37)
    labels = jnp.roll(tokens, -1, 1).at[:, -1].set(-1)
    weights = jnp.linspace(0.3, 1.0, config.n_exits + 1)

    def loss(p, axes):
        return multi_exit_loss(p, config, tokens, labels, weights, axes=axes)[0]

    want, want_grads = jax.jit(jax.value_and_grad(lambda p: loss(p, Axes())))(p)
    mesh = jax.make_mesh((ways,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = params.map_params(lambda q: P(*(SPLIT.get(a) for a in q.axes)), params.abstract(config))
    sharded = jax.shard_map(
        jax.value_and_grad(lambda p: loss(p, Axes(model="model"))),
        mesh=mesh, in_specs=(specs,), out_specs=(P(), specs),
    )  # fmt: skip
    got, grads = jax.jit(sharded)(p)
    assert abs(float(got - want)) < 1e-5 * abs(float(want))
    largest = max(float(jnp.abs(a).max()) for a in jax.tree.leaves(want_grads))
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        w = want_grads
        for key in path:
            w = w[key.key]
        # Without rotary positions a key bias shifts all scores alike: its gradient is 0 but for
        # rounding, so no leaf's scale is taken below a thousandth of the largest.
        scale = max(float(jnp.abs(w).max()), 1e-3 * largest)
        assert float(jnp.abs(g - w).max()) < 2e-5 * scale, jax.tree_util.keystr(path)
