"""Attention in causal blocks of queries: sequences long enough to be cut, values and gradients.

Values stand beside the float64 numpy model, gradients beside autodiff of one whole score matrix
in float64, written out below.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model

from eejax.common.axes import LOCAL
from eejax.models import attention, layers, params
from eejax.models.config import ModelConfig
from eejax.models.positions import alibi_slopes

CASES = {
    "grouped": dict(n_kv_heads=2),
    "window": dict(sliding_window=37),
    "alibi": dict(position="alibi"),
    "softcap": dict(attention_softcap=2.0),
    "documents": dict(),
    "documents_window": dict(n_kv_heads=2, sliding_window=20, position="alibi"),
}
# Two blocks, three uneven ones, four.
LENGTHS = [
    pytest.param(128, marks=pytest.mark.slow),
    200,
    pytest.param(256, marks=pytest.mark.slow),
]


def setup(case, t, dtype="float32"):
    config = ModelConfig(
        vocab_size=7,
        n_layers=1,
        d_model=12,
        n_heads=4,
        head_dim=6,
        context_length=256,
        qkv_bias=True,
        o_bias=True,
        dtype=dtype,
        **CASES[case],
    )
    rng = np.random.default_rng(t)
    p = params.map_params(
        lambda a: jnp.asarray(rng.standard_normal(a.shape, np.float32) * (a.std or 0.3)),
        params.layer(config)["attn"],
    )
    x = jnp.asarray(rng.standard_normal((2, t, 12), np.float32))
    positions, segments = np.tile(np.arange(t), (2, 1)), np.zeros((2, t), np.int32)
    if case.startswith("documents"):  # documents end within blocks and at their borders
        for row, ends in enumerate([(10, 64, 65, 150), (32, 100, 128)]):
            for end in ends:
                segments[row, end:] += 1
                positions[row, end:] = np.arange(t)[: max(0, t - end)]
    return config, p, x, positions, segments


def blocked(p, x, config, positions, segments):
    context = layers.make_context(
        config, jnp.asarray(positions, jnp.int32), segment_ids=jnp.asarray(segments)
    )
    window = config.window(0)
    return layers.self_attention(p, x, config, context, window=window, axes=LOCAL)[0]


def mix64(q, k, v, config, positions, segments):
    """q [b, t, n, h], k and v [b, t, k, h] -> [b, t, n, h] by whole [t, t] score matrices."""
    b, t, n, h = q.shape
    k, v = (jnp.repeat(a, n // a.shape[2], 2) for a in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(h)
    if config.attention_softcap:
        s = config.attention_softcap * jnp.tanh(s / config.attention_softcap)
    gap = positions[:, :, None] - positions[:, None]
    if config.position == "alibi":
        s = s - np.array(reference_model.slopes(n))[None, :, None, None] * gap[:, None]
    seen = np.tril(np.ones((t, t), bool))[None] & (segments[:, :, None] == segments[:, None])
    if config.sliding_window:
        seen &= gap < config.sliding_window
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen[:, None], s, -jnp.inf)), v)


def attention64(p, x, config, positions, segments):
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, p[w]) + p[f"{w}_bias"][None, None] for w in "qkv")
    if config.position == "rotary":
        r = config.head_dim // 2
        angle = positions[..., None, None] * 10000.0 ** (-np.arange(r) / r)

        def turn(a):
            return jax.lax.complex(a[..., :r], a[..., r:]) * np.exp(1j * angle)

        q, k = (jnp.concatenate([turn(a).real, turn(a).imag], -1) for a in (q, k))
    y = mix64(q, k, v, config, positions, segments)
    return jnp.einsum("btnh,nhd->btd", y, p["o"]) + p["o_bias"][None, None]


def pulled_back(f, pull, *inputs):
    """f(*inputs), and the gradients of its product with `pull`, as one program."""

    def run(pull, *inputs):
        y, back = jax.vjp(f, *inputs)
        return y, back(pull)

    return jax.jit(run)(pull, *inputs)


def close(got, want, bound):
    """Every leaf within `bound` of its largest entry, or of a hundredth of the largest leaf's.

    Without rotary positions a key bias shifts all scores of a query alike: its gradient is nought
    but for the rounding of a sum over all tokens.
    """
    largest = max(np.abs(w).max() for w in jax.tree.leaves(want))
    for (path, w), g in zip(
        jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True
    ):
        scale = max(np.abs(w).max(), 1e-2 * largest)
        error = np.abs(np.asarray(g, np.float64) - w).max()
        assert error < bound * scale, (jax.tree_util.keystr(path), error / scale)


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_parameters_and_inputs(case, t):
    config, p, x, positions, segments = setup(case, t)
    pull = np.random.default_rng(1).standard_normal((2, t, 12))

    def ours(p, x):
        return blocked(p, x, config, positions, segments)

    y, grads = pulled_back(ours, pull.astype(np.float32), p, x)
    p64, x64 = reference_model.tree64(p), np.asarray(x, np.float64)
    with jax.enable_x64(True):
        y64, grads64 = pulled_back(
            lambda p, x: attention64(p, x, config, positions, segments), pull, p64, x64
        )
        assert y64.dtype == jnp.float64
        y64, grads64 = jax.tree.map(np.asarray, (y64, grads64))
    for row in range(2):
        want = reference_model.attention(
            p64, x64[row], config, config.window(0), positions[row], segments[row]
        )
        np.testing.assert_allclose(y64[row], want, atol=1e-12)  # the two references are one
    # float32 rounds by 6e-8; scores of a few units and sums over t tokens make some hundred of it.
    close(y, y64, 1e-5)
    close(grads, grads64, 3e-5)


@pytest.mark.parametrize("case", CASES)
def test_queries_keys_and_values(case):
    t = 200
    config, _, _, positions, segments = setup(case, t)
    rng = np.random.default_rng(2)
    n, n_kv, h = config.n_heads, config.n_kv_heads, config.head_dim
    shapes = [(2, t, n, h), (2, t, n_kv, h), (2, t, n_kv, h)]
    qkv = [rng.standard_normal(s) for s in shapes]
    pull = rng.standard_normal(shapes[0])
    context = layers.make_context(
        config, jnp.asarray(positions, jnp.int32), segment_ids=jnp.asarray(segments)
    )
    mask = context.mask
    if config.sliding_window:
        mask = mask & (context.distance < config.sliding_window)
    slopes = None
    if config.position == "alibi":
        slopes = jnp.array(alibi_slopes(n), jnp.float32).reshape(n_kv, n // n_kv)

    def ours(q, k, v):
        def rows(a):
            return jnp.swapaxes(a, 1, 2).reshape(2 * n_kv, t, h)

        q = q.reshape(2, t, n_kv, n // n_kv, h)
        y = attention.causal_attention(q, rows(k), rows(v), mask, context.distance, slopes, config)
        return y.reshape(2, t, n, h)

    y, grads = pulled_back(ours, pull.astype(np.float32), *(a.astype(np.float32) for a in qkv))
    with jax.enable_x64(True):
        found64 = pulled_back(lambda *a: mix64(*a, config, positions, segments), pull, *qkv)
        y64, grads64 = jax.tree.map(np.asarray, found64)
    close(y, y64, 1e-5)
    close(grads, grads64, 3e-5)


@pytest.mark.parametrize("case", CASES)
def test_values_in_bf16(case):
    config, p, x, positions, segments = setup(case, 256, "bfloat16")

    def half(tree):
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)

    p, x = half((p, x))
    y = jax.jit(lambda p, x: blocked(p, x, config, positions, segments))(p, x)
    assert y.dtype == jnp.bfloat16
    p, x = reference_model.tree64(p), np.asarray(x, np.float64)  # the rounded inputs are the same
    for row in range(2):
        want = reference_model.attention(
            p, x[row], config, config.window(0), positions[row], segments[row]
        )
        # Queries, keys, weights, values, mixture and output are each rounded by up to 2^-9.
        np.testing.assert_allclose(
            y[row].astype(jnp.float32), want, atol=6 * 2**-9 * np.abs(want).max(), rtol=0
        )


def test_long_sequences_are_cut():
    config, p, x, positions, segments = setup("grouped", 200)
    text = str(jax.make_jaxpr(lambda p, x: blocked(p, x, config, positions, segments))(p, x))
    sizes = [f"{stop}]" for stop in (66, 133, 200)]  # the keys of the three blocks
    assert all(f"f32[4,{2 * rows},{s}" in text for rows, s in zip((66, 67, 67), sizes, strict=True))
    assert "f32[4,400,200]" not in text
