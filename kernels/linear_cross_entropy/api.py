"""`linear_cross_entropy`: costs of tokens by a linear head, and their gradients, without all
logits.

Kernels compute a chunk's costs and gradient on GPUs; `triton` explains why the gradient is formed
at once. `losses.cross_entropy`, which is differentiable, calls the op.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.errors import require
from eejax.kernels import call
from eejax.kernels.linear_cross_entropy import reference
from eejax.kernels.linear_cross_entropy.chunks import (
    ChunkLoss,
    Gradients,
    LossTokens,
    Sums,
    TokenCosts,
    loss_tokens,
    over_shards,
    sum_chunks,
    vary_alike,
)
from eejax.kernels.linear_cross_entropy.reference import LossOptions

DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)

SCRATCH = 2**29
"""Maximum bytes kept for a chunk's logits, in h's dtype (up to a row or two)."""

FEW = 1024
"""Up to this many tokens are one chunk, and more are at least two, if `SCRATCH` allows."""

MULTIPLE, WIDTH = 8, 64
"""Numbers of rows, and the width of states, are padded to multiples of these: tensor cores take 16
bytes at a time, and the kernel 64 columns. Most models' width is such a multiple."""


def linear_cross_entropy(
    h: jax.Array,
    table: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array,
    weights: jax.Array | None = None,
    *,
    options: LossOptions,
    axis: str | None = None,
    scale: jax.Array | float = 1.0,
    into: jax.Array | None = None,
    skip: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[Sums, Gradients | None]:
    """Sum the costs of tokens by `options`, and form the gradients if `into` is given.

    Products are in h's dtype and accumulated in float32; the logits' gradient is rounded to h's
    dtype. A label that is no token makes sums and gradients NaN.

    Args:
      h: [n, d] states. The kernels take float32, float16 and bfloat16; for any other dtype the
        reference runs, with a warning.
      table: [v, d], under a mesh `axis` this shard's rows.
      bias: [v] or None, as the table.
      labels: [n] int32, `chunks.IGNORE` where a token does not count.
      weights: [n] of the tokens, by default 1.
      options: the logits, and the cost of a token.
      axis: the mesh axis, inside a `shard_map`, that the vocabulary is split over.
      scale: float32 [], a factor of the gradients in h, table and bias.
      into: float32 [v, d], to which the table's gradient is added; None forms no gradients.
      skip: bool []; if true nothing is computed, and sums and gradients are 0.
      implementation: one of `call.IMPLEMENTATIONS`.

    Returns:
      The sums, whole on every shard, and the gradients or None. Under an `axis` those in table and
      bias are of this shard's rows, that in h is what this shard adds to it (its sum over shards is
      whole), and that in the weights is whole.

    Raises:
      ConfigError: shapes that do not fit together.
    """
    implementation = _checked(h, table, bias, labels, weights, options, axis, implementation)
    require(jnp.shape(scale) == (), "scale", jnp.shape(scale), "must be one number")
    if into is not None:
        fits = into.shape == table.shape and into.dtype == jnp.float32
        given = into.shape, into.dtype.name
        require(fits, "into", given, f"must be float32 of shape {table.shape}")
    inputs = (h, table, bias, labels, weights, jnp.float32(scale), into)
    h, table, bias, labels, weights, scale, into = vary_alike(inputs, axis)
    (n, d), v = h.shape, table.shape[0]
    tokens = loss_tokens(labels, weights, options.vocab_size, v, axis)
    work = jnp.pad(table.astype(h.dtype), ((0, -v % MULTIPLE), (0, -d % WIDTH)))
    if bias is not None:
        bias = jnp.pad(bias.astype(jnp.float32), (0, -v % MULTIPLE))
    first = lax.axis_index(axis) * v if axis else 0
    count = jnp.clip(jnp.full((1,), options.vocab_size, jnp.int32) - first, 0, v)
    loss = _chunk_loss(options, axis, implementation, work, bias, count)
    size = chunk_size(n, v, h.dtype.itemsize)
    return sum_chunks(loss, h, tokens, size, scale=scale, into=into, skip=skip)


def _checked(h, table, bias, labels, weights, options, axis, implementation) -> str | None:
    """Return the implementation for h's dtype; raise `ConfigError` for shapes that do not fit."""
    require(h.ndim == 2, "h", h.shape, "must be states [n, d]", "Reshape them.")
    call.require_floating("h", h)
    fits = table.ndim == 2 and table.shape[1] == h.shape[1]
    require(
        fits, "table", table.shape, f"must be rows of the vocabulary, of shape (v, {h.shape[1]})"
    )
    (n, d), v = h.shape, table.shape[0]
    given = dict(table=table, bias=bias, labels=labels, weights=weights)
    for name, shape in dict(table=(v, d), bias=(v,), labels=(n,), weights=(n,)).items():
        if given[name] is not None:
            require(
                given[name].shape == shape,
                name,
                given[name].shape,
                f"must be of shape {shape} beside h of shape {h.shape}",
            )
    require(
        jnp.issubdtype(labels.dtype, jnp.signedinteger),
        "labels",
        labels.dtype,
        "must be signed integers",
    )
    require(
        axis is not None or options.vocab_size <= v,
        "options.vocab_size",
        options.vocab_size,
        f"must be at most the table's {v} rows",
    )
    return call.chosen(
        "linear_cross_entropy", implementation, h.dtype in DTYPES, f"{h.dtype} states"
    )


def chunk_size(n: int, v: int, itemsize: int) -> int:
    """Return the tokens of a chunk, which divide n evenly up to `MULTIPLE`."""
    chunks = max(-(-n * v * itemsize // SCRATCH), min(2, -(-n // FEW)), 1)
    even = -(-max(n, 1) // chunks)
    return even + -even % MULTIPLE


def _chunk_loss(
    options: LossOptions,
    axis: str | None,
    implementation: str | None,
    table: jax.Array,
    bias: jax.Array | None,
    count: jax.Array,
) -> ChunkLoss:
    """Return costs and gradient of a chunk by kernels or their reference.

    count: [1] int32, number of rows of the table [v, d] that stand for tokens.
    """
    o, temperature = options, options.temperature

    def costs(h: jax.Array, tokens: LossTokens, keep: bool) -> TokenCosts:
        statistics = _by(implementation, "statistics", options, keep)
        s = statistics(h, table, bias, tokens.labels, count)
        top = over_shards(lax.pmax, s.peaks.max(0), axis)
        total = jnp.sum(s.totals * jnp.exp(s.peaks - top[None, :]), 0)
        lse = top + jnp.log(over_shards(lax.psum, total, axis))
        nll = lse - over_shards(lax.psum, s.picked, axis)
        factor = jnp.exp(top - lse) if o.confidence_weighted else 1.0
        return TokenCosts(nll * factor + o.z_loss * jnp.square(lse), nll, (s, lse, factor))

    def gradient(kept, tokens: LossTokens, scale: jax.Array):
        s, lse, factor = kept
        fall = factor * (scale / temperature)
        rise = fall + 2 * o.z_loss * lse * (scale / temperature)
        # The label's probability is near 1 if training succeeds, and its kept value is rounded.
        own = jnp.exp(s.picked - lse) * rise - fall
        if o.softcap is not None:
            own = own * (1.0 - jnp.square(s.picked * (temperature / o.softcap)))
        combine = _by(implementation, "gradient", options)
        return combine(s.kept, s.peaks, lse, rise, own, tokens.labels, bias)

    return ChunkLoss(table, bias, costs, gradient)


@cache
def _by(implementation: str | None, name: str, *static) -> Callable:
    """Return `reference.<name>` with its static arguments, by one of its implementations."""

    def kernel(launch, *args):
        from eejax.kernels.linear_cross_entropy import triton

        return getattr(triton, name)(launch, *static, *args)

    plain = partial(getattr(reference, name), *static)
    return call.folded(call.op(kernel, plain, implementation), rows=())
