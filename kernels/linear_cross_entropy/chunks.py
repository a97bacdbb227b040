"""The loop over chunks of tokens that every chunked cross entropy runs.

A `ChunkLoss` computes the costs of a chunk's tokens and the gradient of its logits. The loop adds
the costs up and, if gradients are requested, turns each chunk's logits into the gradients of the
states and of the table on the spot, so that a backward pass only scales them. That is three matrix
products, as plain autodiff needs, and the memory of one chunk of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.trees import Tree, varying_zero

IGNORE = -1
"""Label of a token whose loss does not count."""


class Sums(NamedTuple):
    """Sums over tokens.

    Attributes:
      cost: float32 [], sum of weight * cost.
      nll: float32 [], sum of weight * -log p(label), in nats.
    """

    cost: jax.Array
    nll: jax.Array


class Gradients(NamedTuple):
    """Gradients of `Sums.cost`.

    Attributes:
      h: [n, d] in h's dtype.
      table: [v, d] float32, or [d, v] (`ChunkLoss.transposed`).
      bias: [v] float32, or None without a bias.
      weights: [n] float32, or None without weights.
    """

    h: jax.Array
    table: jax.Array
    bias: jax.Array | None
    weights: jax.Array | None


class LossTokens(NamedTuple):
    """Tokens of a loss.

    Attributes:
      labels: [n] int32, each token's row of the table, -1 where another shard has it.
      weights: [n] float32, 0 for a token that does not count, NaN for a bad label.
      counted: [n] float32, 1 for tokens that count (NaN for a bad label), or None without weights.
      teacher: [n, d] states of another exit, for a `ChunkLoss` that reads them, or None.
    """

    labels: jax.Array
    weights: jax.Array
    counted: jax.Array | None
    teacher: jax.Array | None = None


class TokenCosts(NamedTuple):
    """Costs of the tokens of a chunk, over all shards of the vocabulary.

    Attributes:
      cost: [c] float32.
      nll: [c] float32, -log p(label), in nats.
      kept: input of `ChunkLoss.gradient`.
    """

    cost: jax.Array
    nll: jax.Array
    kept: Any


class ChunkLoss(NamedTuple):
    """A linear head, and the costs of a chunk's tokens by it.

    Attributes:
      table: [v, d] in h's dtype. It may have more rows and columns than h and the gradients: they
        are padded to its shape, and cut back.
      bias: [v] or None.
      costs: (h [c, d], `LossTokens`, whether a gradient follows) -> `TokenCosts`.
      gradient: (kept, `LossTokens`, scale [c]) -> (gradient [c, v] of sum(scale * cost) in
        h @ table.T + bias, in h's dtype, and its sum over tokens [v] float32, None without a bias).
      transposed: whether the table's gradient is summed as [d, v], a faster product on a CPU.
    """

    table: jax.Array
    bias: jax.Array | None
    costs: Callable[[jax.Array, LossTokens, bool], TokenCosts]
    gradient: Callable[[Any, LossTokens, jax.Array], tuple[jax.Array, jax.Array | None]]
    transposed: bool = False


def vary_alike(inputs: Tree, axis: str | None) -> Tree:
    """Make inputs vary over every mesh axis that any of them varies over, and over `axis`.

    A custom VJP returns cotangents that vary as its inputs do. With inputs made alike beforehand,
    each cotangent may vary freely, and the transpose of the broadcast here sums it over the axes
    that the input did not vary over.
    """
    zero = varying_zero(inputs)
    if axis:
        zero = zero + lax.axis_index(axis) * 0
    return jax.tree.map(lambda a: a + lax.stop_gradient(zero).astype(a.dtype), inputs)


def over_shards(reduce: Callable, a: jax.Array, axis: str | None) -> jax.Array:
    """Return reduce(a, axis), or `a` if the vocabulary is not split."""
    return reduce(a, axis) if axis else a


def loss_tokens(
    labels: jax.Array, weights: jax.Array | None, vocab_size: int, rows: int, axis: str | None
) -> LossTokens:
    """Return tokens of labels [n] and weights [n] or None, for a shard with `rows` of the table."""
    counted = (labels != IGNORE).astype(jnp.float32)
    counted = jnp.where((labels < IGNORE) | (labels >= vocab_size), jnp.nan, counted)
    own = labels.astype(jnp.int32) - (lax.axis_index(axis) * rows if axis else 0)
    own = jnp.where((own >= 0) & (own < rows), own, -1)
    if weights is None:
        return LossTokens(own, counted, None)
    return LossTokens(own, counted * weights.astype(jnp.float32), counted)


def sum_chunks(
    loss: ChunkLoss,
    h: jax.Array,
    tokens: LossTokens,
    size: int,
    *,
    scale: jax.Array | float = 1.0,
    into: jax.Array | None = None,
    skip: jax.Array | None = None,
) -> tuple[Sums, Gradients | None]:
    """Sum a loss over tokens, chunk by chunk, and form its gradients if `into` is given.

    Args:
      loss: costs and gradient of a chunk.
      h: [n, d] states.
      tokens: the n tokens.
      size: tokens of a chunk.
      scale: float32 [], a factor of the gradients in h, table and bias.
      into: float32 in the shape of `Gradients.table`, to which the table's gradient is added, so
        that several heads of one table share one gradient.
      skip: bool []; if true nothing is computed, and sums and gradients are 0.

    Returns:
      The sums, equal on all shards of a vocabulary, and the gradients or None. With a split
      vocabulary the gradient in h is this shard's contribution.
    """
    (n, d), (rows, width) = h.shape, loss.table.shape
    fill = -n % size if n else size
    zero = varying_zero((h, loss.table, loss.bias, tokens, scale, into)).astype(jnp.float32)
    states = jnp.pad(h, ((0, fill), (0, width - d)))
    labels = jnp.pad(tokens.labels, (0, fill), constant_values=-1)
    tokens = LossTokens(
        labels,
        _pad_rows(tokens.weights, fill),
        None if tokens.counted is None else _pad_rows(tokens.counted, fill),
        None if tokens.teacher is None else _pad_rows(tokens.teacher, fill),
    )
    begin = None
    if into is not None:
        shape = (width, rows) if loss.transposed else (rows, width)
        begin = Gradients(
            states,
            jnp.pad(into, [(0, a - b) for a, b in zip(shape, into.shape, strict=True)]),
            None if loss.bias is None else jnp.zeros((rows,), jnp.float32) + zero,
            None if tokens.counted is None else jnp.zeros((n + fill,), jnp.float32) + zero,
        )

    def body(i, carry):
        total, d = carry
        cut = partial(lax.dynamic_slice_in_dim, start_index=i * size, slice_size=size)
        chunk = cut(states if d is None else d.h)
        part = jax.tree.map(cut, tokens)
        costs = loss.costs(chunk, part, d is not None)
        more = jnp.sum(costs.cost * part.weights), jnp.sum(costs.nll * part.weights)
        total = Sums(total.cost + more[0], total.nll + more[1])
        if d is not None:
            d = add_gradients(i, d, chunk, part, costs)
        return total, d

    def add_gradients(i, d, chunk, part, costs) -> Gradients:
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        paste = partial(lax.dynamic_update_slice_in_dim, start_index=i * size, axis=0)
        g, d_bias = loss.gradient(costs.kept, part, part.weights * scale)
        more = product("nd,nv->dv", chunk, g) if loss.transposed else product("nv,nd->vd", g, chunk)
        return Gradients(
            # A chunk's states are not read again, so their gradient overwrites them.
            paste(d.h, product("nv,vd->nd", g, loss.table).astype(h.dtype)),
            d.table + more,
            None if d.bias is None else d.bias + d_bias,
            None if d.weights is None else paste(d.weights, costs.cost * part.counted),
        )

    count = (n + fill) // size
    count = count if skip is None else jnp.where(skip, 0, count)
    total, gradients = lax.fori_loop(0, count, body, (Sums(zero, zero), begin))
    if into is None or gradients is None:
        return total, None
    d_h, d_table, d_bias, d_weights = gradients
    if skip is not None:  # a skipped loop left the states in place of their gradient
        d_h = jnp.where(skip, jnp.zeros((), h.dtype), d_h)
    return total, Gradients(
        d_h[:n, :d],
        d_table[: into.shape[0], : into.shape[1]],
        None if d_bias is None else d_bias[: into.shape[loss.transposed]],
        None if d_weights is None else d_weights[:n],
    )


def _pad_rows(a: jax.Array, fill: int) -> jax.Array:
    return jnp.pad(a, [(0, fill)] + [(0, 0)] * (a.ndim - 1))
