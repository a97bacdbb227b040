"""What stays in float32 while the model computes in bf16: norms, biases, and their gradients.

The bf16 activations and their gradients are taken as they are, exactly, into float64: what is
compared is only how they are added up over 600 tokens. A bf16 accumulation stops growing once a
sum is 256 times an addend, and even a single rounding of the result to bf16 is 2^-9 = 2e-3.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eejax.models import layers, params, transformer
from eejax.models.config import ExitConfig, ModelConfig

CONFIG = ModelConfig(
    vocab_size=11,
    n_layers=2,
    d_model=16,
    n_heads=4,
    context_length=300,
    n_kv_heads=2,
    norm="layernorm",
    position="learned",
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    dtype="bfloat16",
    exits=(ExitConfig(1),),
)
B, T, BOUND = 2, 300, 1e-5  # 600 float32 roundings of 6e-8 at random


def bf16(rng, *shape, offset=0.0):
    return jnp.asarray(rng.standard_normal(shape) + offset, jnp.bfloat16)


def f64(a):
    return np.asarray(a.astype(jnp.float32), np.float64)


def check(got, want):
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=BOUND * np.abs(want).max())


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_gradients_are_sums_in_float32(kind):
    rng = np.random.default_rng(0)
    config = CONFIG.replace(norm=kind)
    x, g = bf16(rng, B, T, 16), bf16(rng, B, T, 16, offset=1.0)
    p = params.for_compute(params.init(config, jax.random.key(0))["final"], config.dtype)["norm"]
    got = jax.jit(lambda p: jax.vjp(lambda p: layers.norm(p, x, config), p)[1](g)[0])(p)
    y, g = f64(x), f64(g)
    if kind == "layernorm":
        y = y - y.mean(-1, keepdims=True)
        check(got["bias"], g.sum((0, 1)))
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + config.norm_eps)
    want = (g * y).sum((0, 1))
    assert got["scale"].dtype == jnp.float32
    # The normalised values, of which the sum is made, are themselves rounded in float32.
    np.testing.assert_allclose(got["scale"], want, rtol=0, atol=BOUND * np.abs(g * y).sum(1).max())


def test_bias_gradients_are_sums_in_float32():
    rng = np.random.default_rng(1)
    p = params.for_compute(params.init(CONFIG, jax.random.key(0))["layers"], CONFIG.dtype)
    p = jax.tree.map(lambda a: a[0], p)
    x, g = bf16(rng, B, T, 16), bf16(rng, B, T, 16, offset=1.0)
    context = layers.make_context(CONFIG, jnp.arange(T)[None])

    def both(attn, mlp):
        return layers.self_attention(attn, x, CONFIG, context)[0], layers.mlp(mlp, x, CONFIG)

    attn, mlp = jax.jit(lambda *p: jax.vjp(both, *p)[1]((g, g)))(p["attn"], p["mlp"])
    check(attn["o_bias"], f64(g).sum((0, 1)))
    check(mlp["down_bias"], f64(g).sum((0, 1)))

    # The gradient of an inner bias is the sum of the gradients of what it is added to.
    gate = layers._linear(p["mlp"], "gate", layers._rows(x))
    up = layers._linear(p["mlp"], "up", layers._rows(x))

    def rest(gate, up):
        y = layers.ACTIVATION[CONFIG.activation](gate) * up
        return layers._product(y, p["mlp"]["down"])

    d_gate, d_up = jax.jit(lambda *a: jax.vjp(rest, *a)[1](layers._rows(g)))(gate, up)
    for name, d in (("gate_bias", d_gate), ("up_bias", d_up)):
        want = f64(d).sum(0)
        assert mlp[name].dtype == jnp.float32
        # XLA may keep a product in float32 where it fuses it, so each addend differs by 2^-9 of
        # itself at random; 600 of them by a 24th of that.
        noise = 2**-9 * np.sqrt((f64(d) ** 2).sum(0))
        assert (np.abs(np.asarray(mlp[name]) - want) < 4 * noise).all(), name


def test_a_small_change_of_a_scale_is_not_rounded_away():
    p = params.init(CONFIG, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (B, T), 0, 11)
    grown = p | {
        "final": p["final"] | {"norm": {"scale": jnp.full(16, 1.003), "bias": jnp.zeros(16)}}
    }

    states = jax.jit(lambda p: transformer.exit_states(p, CONFIG, tokens, which=[1]))

    def last(p):
        return f64(states(p)[0])

    # bf16 has no number between 1 and 1.0078; the rounding of 9600 outputs averages out.
    ratio = np.abs(last(grown)).sum() / np.abs(last(p)).sum()
    assert abs(ratio - 1.003) < 5e-4


def test_every_small_leaf_stays_and_every_matrix_is_cast():
    tree = params.init(CONFIG.replace(head_bias=True, qk_norm="head"), jax.random.key(0))
    cast = params.for_compute(tree, "bfloat16")
    for path, a in jax.tree_util.tree_leaves_with_path(cast):
        name = jax.tree_util.keystr(path)
        small = name.endswith(("scale']", "bias']"))
        assert a.dtype == (jnp.float32 if small else jnp.bfloat16), name


def test_positions_shared_by_a_batch_sum_their_gradients_in_float32():
    config = CONFIG.replace(n_layers=1, exits=(ExitConfig(0, norm=False),))
    p = params.init(config, jax.random.key(0))
    n = 600
    tokens = jax.random.randint(jax.random.key(1), (n, 3), 0, 11)
    g = bf16(np.random.default_rng(2), n, 3, 16, offset=1.0)

    def state(positions):
        changed = p | {"embed": p["embed"] | {"positions": positions}}
        return transformer.exit_states(changed, config, tokens, which=[0])[0]

    got = jax.jit(lambda a: jax.vjp(state, a)[1](g)[0])(p["embed"]["positions"])
    check(got[:3], f64(g).sum(0))
