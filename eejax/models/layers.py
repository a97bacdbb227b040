"""Norms, attention and MLP: one implementation for one device and for shard_map.

Every function takes `Axes` (or an axis name): with a name for the model axis its weights are
the local shard of a Megatron-style split (q, k, v, gate, up by columns; o, down by rows) and it
sums over that axis where the split needs it; local head counts come from the weights' shapes.
With a sequence axis the residual stream is [b, t/shards, d] between `shards.reduce_to_stream`
and `shards.gather_from_stream`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eejax.common.axes import LOCAL, Axes
from eejax.common.trees import Tree
from eejax.kernels import call, norms
from eejax.models import attention
from eejax.models.attention import NEGATIVE as NEGATIVE  # masks logits too
from eejax.models.config import ModelConfig, RopeKind
from eejax.models.positions import alibi_slopes, rotary_tables, rotate
from eejax.models.rotary_config import RotaryConfig
from eejax.models.shards import gather_from_stream, own_kv_head, own_positions, reduce_to_stream


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """Compute the exact GELU, x times the normal distribution's cumulative probability at x.

    Its derivative is written out because jax 0.12 cannot trace the derivative of erfc inside a
    `shard_map`: the coefficients of its polynomials vary along no axis, but their argument does.
    """
    return jax.nn.gelu(x, approximate=False)


@gelu.defjvp
def _gelu_derivative(primals, tangents):
    (x,), (x_dot,) = primals, tangents
    cumulative = 0.5 * lax.erfc(-x * np.sqrt(0.5).astype(x.dtype))
    density = jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return gelu(x), x_dot * (cumulative + x * density)


ACTIVATION = {
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
}


class LayerContext(NamedTuple):
    """Inputs that all layers of one pass share.

    Attributes:
      mask: [b or 1, t, s] True where attention is allowed, by causality and documents.
      distance: [b or 1, t, s] int32 query minus key position; None where no layer needs it.
      rope, local_rope: cos and sin, each [b or 1, t, r/2] float32, or None.
      dropout_keys: [b] one key per sample, or None.
      start: [b] first position of the rows in the KV cache, or None without a cache.
      reach: scalar, number of leading positions of a KV cache that any row attends to; None without
        a cache.
      packed: places of rows [t, 1] of several requests in a KV cache of slots, instead of `start`.
      documents: [b, t] int32 ids of documents, to which attention is confined; None for one per
        sequence.
      kernel_rows: places of the rows in a KV cache for attention by a kernel, which ignores `mask`;
        None where XLA's own operations attend.
    """

    mask: jax.Array
    distance: jax.Array | None = None
    rope: tuple[jax.Array, jax.Array] | None = None
    local_rope: tuple[jax.Array, jax.Array] | None = None
    dropout_keys: jax.Array | None = None
    start: jax.Array | None = None
    reach: jax.Array | None = None
    packed: attention.PackedRows | None = None
    documents: jax.Array | None = None
    kernel_rows: attention.PackedRows | None = None


def norm(
    p: Tree,
    x: jax.Array,
    config: ModelConfig,
    axes: tuple[int, ...] = (-1,),
    shard: str | None = None,
) -> jax.Array:
    """Apply RMSNorm or LayerNorm over the trailing `axes`, in float32, and return x's dtype.

    `shard` names the mesh axis over which the normalised dimensions are split, if they are.
    """

    def mean(a):
        return (
            lax.pmean(jnp.mean(a, axes, keepdims=True), shard)
            if shard
            else jnp.mean(a, axes, keepdims=True)
        )

    return norms.norm(x, p["scale"], p.get("bias"), norm_options(config), mean)


def norm_options(config: ModelConfig) -> norms.NormOptions:
    """Return the options of the model's norms for kernels."""
    return norms.NormOptions(config.norm, config.norm_eps, config.norm_plus_one)


def make_context(
    config: ModelConfig,
    positions: jax.Array,
    *,
    key_positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    dropout_keys: jax.Array | None = None,
    start: jax.Array | None = None,
    packed: attention.PackedRows | None = None,
    visible: jax.Array | None = None,
) -> LayerContext:
    """Make the shared inputs of a pass over rows.

    Args:
      config: the model's.
      positions: [b or 1, t] of the rows.
      key_positions: [b or 1, s] of a KV cache; by default those of the rows.
      segment_ids: [b, t] ids of documents, to which attention is confined.
      dropout_keys: as in `LayerContext`.
      start: as in `LayerContext`. With it or `packed`, one kernel attends where there is one
        (`attention.use_kernel`).
      packed: as in `LayerContext`.
      visible: [b, s] positions of a KV cache that may be attended to, which rules the kernel out;
        by default all.
    """
    keys = positions if key_positions is None else key_positions
    distance = positions[:, :, None] - keys[:, None, :]  # [b, t, s]
    if key_positions is None:
        # Causal by order in the row: positions may start again with every document.
        order = jnp.arange(positions.shape[1])
        mask = (order[:, None] >= order[None])[None]
    else:
        mask = distance >= 0
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    if visible is not None:
        mask = mask & visible[:, None]
    kernel_rows = None
    if (
        visible is None
        and (start is not None or packed is not None)
        and attention.use_kernel(config)
    ):
        kernel_rows = packed
        if start is not None and packed is None:
            kernel_rows = attention.spans(start, positions.shape[1])
    reach = None if key_positions is None else jnp.max(positions) + 1
    rope = local_rope = None
    if config.position == "rotary":
        rope = rotary_tables(config.rotary, config.rotary_dims, positions)
        if config.rotary.local_theta is not None:
            local = RotaryConfig(theta=config.rotary.local_theta, fraction=config.rotary.fraction)
            local_rope = rotary_tables(local, config.rotary_dims, positions)
    needs_distance = config.position == "alibi" or config.sliding_window is not None
    return LayerContext(
        mask,
        distance if needs_distance else None,
        rope,
        local_rope,
        dropout_keys,
        start,
        reach,
        packed,
        segment_ids,
        kernel_rows,
    )


def dropout(
    x: jax.Array, rate: float, keys: jax.Array | None, layer, site: int, axes: Axes = LOCAL
) -> jax.Array:
    """Apply inverted dropout to a residual stream, keyed by (sample, layer, site) and nothing else.

    A shard of the sequence draws the mask of all positions, so the mask equals that of one device.
    """
    if keys is None or rate == 0:
        return x
    t, d = x.shape[1] * (lax.axis_size(axes.sequence) if axes.sequence else 1), x.shape[2]

    def one(key):
        return jax.random.fold_in(jax.random.fold_in(key, layer), site)

    keep = jax.vmap(lambda k: jax.random.bernoulli(one(k), 1 - rate, (t, d)))(keys)
    keep = own_positions(keep, axes)
    return jnp.where(keep, x / (1 - rate), jnp.zeros((), x.dtype))


def keep_samples(keys: jax.Array, layer: jax.Array, rate: jax.Array) -> jax.Array:
    """Draw which samples keep a layer: [b] bool, False with probability `rate`.

    Layer dropout (LayerSkip, Elhoushi et al. 2024, section 4.1): the residual stream passes a
    dropped layer by. Nothing is rescaled, as inference runs every layer below its exit.
    """

    def one(key):
        return jax.random.fold_in(jax.random.fold_in(key, layer), 3)

    return jax.vmap(lambda key: jax.random.bernoulli(one(key), 1.0 - rate))(keys)


def self_attention(
    p: Tree,
    x: jax.Array,
    config: ModelConfig,
    context: LayerContext,
    *,
    window: int | jax.Array | None = None,
    rope: int | jax.Array = RopeKind.GLOBAL,
    cache: tuple[jax.Array, jax.Array] | None = None,
    axes: Axes = LOCAL,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Apply self-attention to all positions x [b, t, d] (`shards.gather_from_stream`).

    Returns:
      The output in the layout of the residual stream, and keys and values: those of the rows, [b,
        t, k, h], or, with a `cache` ([b * k, s, h] each), the cache with the rows written at
        `context.start`.
    """
    b, t, _ = x.shape
    dtype = x.dtype
    q, k, v = heads(p, x, config, context, rope, axes)
    mask = context.mask
    if window is not None:
        assert context.distance is not None  # `make_context` computes it if a layer has a window
        mask = mask & (context.distance < window)
    n, n_kv = q.shape[2], k.shape[2]
    q = q.reshape(b, t, n_kv, n // n_kv, config.head_dim)
    slopes = None
    if config.position == "alibi":
        slopes = jnp.array(alibi_slopes(config.n_heads), jnp.float32)
        if axes.model:
            slopes = lax.dynamic_slice_in_dim(slopes, lax.axis_index(axes.model) * n, n)
        slopes = slopes.reshape(n_kv, n // n_kv)
    distance = context.distance if slopes is not None else None
    # The library handles causality and windows of a fixed size without a mask.
    fixed = window if isinstance(window, int) else None
    known = context.documents is None and window is fixed
    if cache is None and attention.use_library(q, slopes, not known, config):
        out = attention.cudnn_attention(
            q, k, v, None if known else mask, fixed if known else None, config
        )
    elif cache is None:
        flat_k, flat_v = (jnp.swapaxes(a, 1, 2).reshape(b * n_kv, t, -1) for a in (k, v))
        out = attention.causal_attention(q, flat_k, flat_v, mask, distance, slopes, config)
    elif context.kernel_rows is not None:
        assert window is fixed  # a kernel is compiled for its window
        out, (k, v) = attention.kernel_attention(
            q, k, v, cache, slopes, fixed, config, context.kernel_rows
        )
    elif context.packed is not None:
        out, (k, v) = attention.packed_attention(
            q, k, v, cache, mask, distance, slopes, config, context.packed
        )
    else:
        assert context.start is not None and context.reach is not None
        k, v = attention.write(cache, k, v, context.start)
        flat = k.astype(dtype), v.astype(dtype)
        out = attention.cached_attention(q, *flat, mask, distance, slopes, config, context.reach)
    out = _product(_rows(out), p["o"], p["o"].ndim - 1).reshape(b, t, -1)
    return _add_bias(reduce_to_stream(out, axes), p.get("o_bias")), (k, v)


def heads(
    p: Tree,
    x: jax.Array,
    config: ModelConfig,
    context: LayerContext,
    rope: int | jax.Array = RopeKind.GLOBAL,
    axes: Axes = LOCAL,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute queries [b, t, n, h] and keys and values [b, t, k, h] of x [b, t, d]."""
    if "qkv" not in p:  # `cache.unstack_segments` takes the head before it fuses
        p = own_kv_head(p, config, axes)
    q, k, v = _qkv(p, x, config.head_dim)
    if config.qk_norm == "head":
        q, k = norm(p["q_norm"], q, config), norm(p["k_norm"], k, config)
    elif config.qk_norm == "full":
        q = norm(p["q_norm"], q, config, (-2, -1), axes.model)
        k = norm(p["k_norm"], k, config, (-2, -1), axes.model)
    if context.rope is not None:
        cos, sin = context.rope
        if context.local_rope is not None:
            cos, sin = (
                jnp.where(rope == RopeKind.LOCAL, a, c)
                for a, c in zip(context.local_rope, (cos, sin), strict=True)
            )
        if config.no_rope_layers:
            cos = jnp.where(rope == RopeKind.NONE, 1.0, cos)
            sin = jnp.where(rope == RopeKind.NONE, 0.0, sin)

        def turn(a):
            return rotate(a, (cos, sin), config.rotary.interleaved)

        if call.for_gpu():  # one launch for the heads of both
            q, k = jnp.split(turn(jnp.concatenate([q, k], 2)), (q.shape[2],), 2)
        else:
            q, k = turn(q), turn(k)
    return q, k, v


FEW_ROWS = 4


def _product(rows: jax.Array, w: jax.Array, contracted: int = 1) -> jax.Array:
    """Multiply rows [r, i] by w, whose first `contracted` dimensions have i elements together.

    Rows are the tokens of all sequences: with b and t apart, XLA's CPU backend forms w's gradient
    from a transposed copy of the whole output gradient, and a training step takes 1.8 times as
    long. A product of few rows (a decoding step that carries waiting tokens) is formed as its
    transpose: its kernel takes columns in fours, and repacks w's rows either way.
    """
    w2 = w.reshape(rows.shape[1], -1)
    if call.for_gpu():
        y = two_rows(lambda rows: rows @ w2, rows)
        return y.reshape(len(rows), *w.shape[contracted:])
    few = 1 < len(rows) <= FEW_ROWS
    y = lax.dot_general(w2, rows, (((0,), (1,)), ((), ()))).T if few else rows @ w2
    return y.reshape(len(rows), *w.shape[contracted:])


def two_rows(product: Callable[[jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """Compute a product of rows such that on a GPU one row gives the same result as several.

    XLA makes a product of one row a sum of products, and writes out the rounded products of the
    whole matrix: three times the bytes, and other roundings than with several rows. One row is
    therefore computed as two.

    Args:
      product: maps rows [n, i] to [n, o].
      rows: [r, i].

    Returns:
      [r, o].
    """
    if len(rows) > 1:
        return product(rows)
    # Without a barrier XLA would compute the product for the row that is read alone.
    return lax.optimization_barrier(product(jnp.broadcast_to(rows, (2, rows.shape[1]))))[:1]


def _rows(x: jax.Array) -> jax.Array:
    """Reshape x [b, t, ...] to [b t, ...].

    It is done once for all products with x; each would keep a copy for its backward pass otherwise.
    """
    return x.reshape(-1, math.prod(x.shape[2:]))


def _qkv(p: Tree, x: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute projections [b, t, n, h] and twice [b, t, k, h], from separate or fused weights."""
    (b, t, _), x = x.shape, _rows(x)
    if "qkv" not in p:
        q, k, v = (_linear(p, name, x).reshape(b, t, -1, head_dim) for name in "qkv")
        return q, k, v
    y = _linear(p, "qkv", x)
    n = p["o"].shape[0] * head_dim
    width = (y.shape[-1] - n) // 2
    q, k, v = (a.reshape(b, t, -1, head_dim) for a in jnp.split(y, (n, n + width), -1))
    return q, k, v


def _linear(p: Tree, name: str, rows: jax.Array) -> jax.Array:
    """Multiply rows [r, d] by weight `name`, and add its bias if there is one."""
    return _add_bias(_product(rows, p[name]), p.get(f"{name}_bias"))


def _add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Add a bias [*] to y [..., *] in float32, and return y's dtype.

    The bias's gradient is a sum over all tokens: in bf16 such a sum stops growing.
    """
    if bias is None:
        return y
    bias = bias.astype(jnp.float32).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
    return (y.astype(jnp.float32) + bias).astype(y.dtype)


def project(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply states x [b, t, i] by w [i, o]."""
    return _product(_rows(x), w).reshape(*x.shape[:2], -1)


def mlp(p: Tree, x: jax.Array, config: ModelConfig, axes: Axes = LOCAL) -> jax.Array:
    """Apply the MLP: down(act(gate x) * up x), or down(act(up x)).

    x [b, t, d] are all positions (`shards.gather_from_stream`); the result has the layout of the
    residual stream.
    """
    act = ACTIVATION[config.activation]
    (b, t, _), x = x.shape, _rows(x)
    if not config.mlp_gated:
        y = act(_linear(p, "up", x))
    elif "gate_up" in p:
        gate, up = jnp.split(_linear(p, "gate_up", x), 2, -1)
        y = act(gate) * up
    else:
        y = act(_linear(p, "gate", x)) * _linear(p, "up", x)
    y = _product(y, p["down"]).reshape(b, t, -1)
    return _add_bias(reduce_to_stream(y, axes), p.get("down_bias"))


def layer(
    p: Tree,
    x: jax.Array,
    config: ModelConfig,
    context: LayerContext,
    *,
    index: int | jax.Array = 0,
    window: int | jax.Array | None = None,
    rope: int | jax.Array = RopeKind.GLOBAL,
    cache: tuple[jax.Array, jax.Array] | None = None,
    axes: Axes = LOCAL,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Run one transformer layer on x [b, t, d].

    With a sequence axis x is [b, t/shards, d], this shard's positions. `index` (the layer's number,
    for dropout), `window` and `rope` (`ModelConfig.rope`) may be traced, so that one compiled body
    serves a scan over layers that differ in them.

    Returns:
      The new x, and keys and values as `self_attention` returns them.
    """

    def drop(y, site):
        return dropout(y, config.dropout, context.dropout_keys, index, site, axes)

    def attend(y):
        return self_attention(
            p["attn"], y, config, context, window=window, rope=rope, cache=cache, axes=axes
        )

    def feed(y):
        return mlp(p["mlp"], y, config, axes)

    def normed(name, y):
        return norm(p[name], y, config) if name in p else y

    def read(name, y):
        return gather_from_stream(normed(name, y), axes)

    placement = config.norm_placement
    if config.residual != "sequential":
        h = read("attn_norm", x)
        a, kv = attend(h)
        m = feed(h if config.residual == "parallel_one_norm" else read("mlp_norm", x))
        return x + drop(a, 0) + drop(m, 1), kv
    a, kv = attend(read("attn_norm", x))
    if placement == "post":
        x = norm(p["attn_out_norm"], x + drop(a, 0), config)
        return norm(p["mlp_out_norm"], x + drop(feed(gather_from_stream(x, axes)), 1), config), kv
    x = x + drop(normed("attn_out_norm", a), 0)
    m = feed(read("mlp_norm", x))
    return x + drop(normed("mlp_out_norm", m), 1), kv
