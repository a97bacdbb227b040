"""`linear_cross_entropy`: what tokens cost by a linear head, and its gradients, without logits.

The tokens are taken in chunks. Where gradients are asked for, a chunk's logits are formed once and
become its gradients on the spot (`triton` tells why), so that a backward pass only scales them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.errors import require
from eejax.common.trees import varying_zero
from eejax.kernels import call
from eejax.kernels.linear_cross_entropy import reference
from eejax.kernels.linear_cross_entropy.reference import LossOptions

DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)

IGNORE = -1
"""Label of a token whose loss does not count."""

SCRATCH = 2**29
"""Bytes of what is kept of a chunk's logits, in h's dtype, at most (but for a row or two)."""

FEW = 1024
"""As many tokens or fewer are one chunk, and more are at least two, if `SCRATCH` allows."""

MULTIPLE, WIDTH = 8, 64
"""What numbers of rows, and the states' width, are padded to multiples of: tensor cores are fed
with 16 bytes at a time, and the kernel takes 64 columns. Few models' width is not one."""


class Sums(NamedTuple):
    """Over tokens, float32 []: weight * cost, and weight * -log p(label)."""

    cost: jax.Array
    nll: jax.Array


class Gradients(NamedTuple):
    """Gradients of `Sums.cost`.

    In h [n, d], in h's dtype; table [v, d] float32; bias [v] float32, or None; weights [n] float32.
    """

    h: jax.Array
    table: jax.Array
    bias: jax.Array | None
    weights: jax.Array


class _Static(NamedTuple):
    options: LossOptions
    axis: str | None
    implementation: str | None


class _Tokens(NamedTuple):
    """Tokens [n] of a loss.

    labels: row of the table, -1 where another shard has it. weights: 0 for tokens that do not
    count, NaN for a bad label. counted: the weights, if all tokens that count had weight 1.
    """

    labels: jax.Array
    weights: jax.Array
    counted: jax.Array


def linear_cross_entropy(
    h: jax.Array,
    table: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array,
    weights: jax.Array | None = None,
    *,
    options: LossOptions,
    axis: str | None = None,
    implementation: str | None = None,
) -> Sums:
    """`Sums` of weight * what a token costs by `options`, of states h [n, d] and a head.

    table [v, d], bias [v] or None; labels [n] int32, `IGNORE` where a token does not count; weights
    [n], by default 1. Products are in h's dtype and accumulated in float32; the logits' gradient is
    rounded to h's dtype. Under a mesh `axis`, inside of a `shard_map`, table and bias are this
    shard's rows, and the results and gradients those of the whole vocabulary. A label that is no
    token makes them NaN. The cost is differentiable once, backwards, in h, table, bias and weights,
    and the second sum is not. `implementation`: one of `call.IMPLEMENTATIONS`.

    Raises `ConfigError` for shapes that do not fit together. The kernels take float32, float16 and
    bfloat16 states; anything else is the reference's, with a warning.
    """
    implementation = _checked(h, table, bias, labels, weights, options, axis, implementation)
    weights = jnp.ones(labels.shape, jnp.float32) if weights is None else weights
    static = _Static(options, axis, implementation)
    cost, nll = _differentiable(static, *_alike((h, table, bias, labels, weights), axis))
    return Sums(cost, lax.stop_gradient(nll))


def sums(
    h: jax.Array,
    table: jax.Array,
    bias: jax.Array | None,
    labels: jax.Array,
    weights: jax.Array | None = None,
    *,
    options: LossOptions,
    axis: str | None = None,
    skip: jax.Array | None = None,
    implementation: str | None = None,
) -> Sums:
    """Compute `linear_cross_entropy` without gradients; each shard of `axis` has the whole sums.

    Where `skip`, bool [], is true, nothing is computed, and they are 0.
    """
    implementation = _checked(h, table, bias, labels, weights, options, axis, implementation)
    inputs = _alike((h, table, bias, labels, weights), axis)
    return _sums(_Static(options, axis, implementation), *inputs, skip)


def sums_and_gradients(
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
) -> tuple[Sums, Gradients]:
    """`sums`, and the gradients of scale * cost in h, table and bias, and of cost in the weights.

    scale: float32 []. into: what the table's gradient is added to, float32 [v, d], by default 0: so
    that the exits of a model need one gradient of the table between them. Under an `axis` the
    gradients in table and bias are those of this shard's rows, that in h is what this shard adds to
    it (its sum over shards is whole), and that in the weights is whole.
    """
    implementation = _checked(h, table, bias, labels, weights, options, axis, implementation)
    require(jnp.shape(scale) == (), "scale", jnp.shape(scale), "must be one number")
    if into is not None:
        fits = into.shape == table.shape and into.dtype == jnp.float32
        told = into.shape, into.dtype.name
        require(fits, "into", told, f"must be float32 of shape {table.shape}")
    inputs = _alike((h, table, bias, labels, weights, jnp.float32(scale), into), axis)
    return _sums_and_gradients(_Static(options, axis, implementation), *inputs, skip)


def _checked(h, table, bias, labels, weights, options, axis, implementation) -> str | None:
    """The implementation that the dtype is covered by. Raises `ConfigError` for wrong shapes."""
    require(h.ndim == 2, "h", h.shape, "must be states [n, d]", "Reshape them.")
    call.require_floating("h", h)
    fits = table.ndim == 2 and table.shape[1] == h.shape[1]
    told = f"must be rows of the vocabulary, of shape (v, {h.shape[1]})"
    require(fits, "table", table.shape, told)
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


def _alike(inputs, axis: str | None):
    """The inputs, all varying over every mesh axis that one of them varies over, and `axis`.

    A custom VJP returns cotangents that vary as its inputs do. Made alike beforehand, each input's
    may vary freely, and the transpose of the broadcast done here sums it over the axes that the
    input did not vary over.
    """
    zero = varying_zero(inputs)
    if axis:
        zero = zero + lax.axis_index(axis) * 0
    return jax.tree.map(lambda a: a + lax.stop_gradient(zero).astype(a.dtype), inputs)


def chunk_size(n: int, v: int, itemsize: int) -> int:
    """Tokens of a chunk, which divide n evenly but for `MULTIPLE`."""
    chunks = max(-(-n * v * itemsize // SCRATCH), min(2, -(-n // FEW)), 1)
    even = -(-max(n, 1) // chunks)
    return even + -even % MULTIPLE


class _Problem(NamedTuple):
    """A loss's arguments, padded: h and the table to `WIDTH`, the table and the bias to `MULTIPLE`
    rows, tokens to whole chunks.

    count [1]: how many rows of the table stand for tokens; zero: float32 [] that varies as the
    arguments do, as a loop's carry must; chunk: how many tokens are one.
    """

    tokens: _Tokens
    h: jax.Array
    table: jax.Array
    bias: jax.Array | None
    count: jax.Array
    zero: jax.Array
    chunk: int

    def part(self, i: jax.Array, a: jax.Array) -> jax.Array:
        """The i-th chunk of what there is of tokens."""
        return lax.dynamic_slice_in_dim(a, i * self.chunk, self.chunk)

    def over_chunks(self, body: Callable, carry, skip: jax.Array | None):
        """body(i, carry), for each chunk or, where `skip`, for none."""
        n = self.tokens.labels.size // self.chunk
        return lax.fori_loop(0, n if skip is None else jnp.where(skip, 0, n), body, carry)


def _problem(static: _Static, h, table, bias, labels, weights) -> _Problem:
    (n, d), v, size = h.shape, table.shape[0], static.options.vocab_size
    zero = varying_zero((h, table, bias, labels, weights)).astype(jnp.float32)
    counted = (labels != IGNORE).astype(jnp.float32)
    counted = jnp.where((labels < IGNORE) | (labels >= size), jnp.nan, counted)
    weights = counted if weights is None else counted * weights.astype(jnp.float32)
    first = lax.axis_index(static.axis) * v if static.axis else 0
    count = jnp.clip(jnp.full((1,), size, jnp.int32) - first, 0, v)
    own = labels.astype(jnp.int32) - first
    labels = jnp.where((own >= 0) & (own < count), own, -1)
    chunk = chunk_size(n, v, h.dtype.itemsize)
    rows, wide = -n % chunk if n else chunk, -d % WIDTH
    pad = lambda a, *by: jnp.pad(a, [(0, b) for b in by])
    labels = jnp.pad(labels, (0, rows), constant_values=-1)
    tokens = _Tokens(labels, pad(weights, rows), pad(counted, rows))
    work = pad(table.astype(h.dtype), -v % MULTIPLE, wide)
    bias = None if bias is None else pad(bias.astype(jnp.float32), -v % MULTIPLE)
    return _Problem(tokens, pad(h, rows, wide), work, bias, count, zero, chunk)


class _Costs(NamedTuple):
    """Per token [c] float32, over all shards of the vocabulary: what it costs, -log p(label), the
    log-sum-exp of its logits, and the factor of -log p(label) in its cost."""

    cost: jax.Array
    nll: jax.Array
    lse: jax.Array
    factor: jax.Array | float


def _costs(static: _Static, s: reference.TileStatistics) -> _Costs:
    o = static.options
    over = (lambda f, a: f(a, static.axis)) if static.axis else (lambda f, a: a)
    top = over(lax.pmax, s.peaks.max(0))
    lse = top + jnp.log(over(lax.psum, jnp.sum(s.totals * jnp.exp(s.peaks - top[None, :]), 0)))
    nll = lse - over(lax.psum, s.picked)
    factor = jnp.exp(top - lse) if o.confidence_weighted else 1.0
    return _Costs(nll * factor + o.z_loss * jnp.square(lse), nll, lse, factor)


def _add(total: Sums, costs: _Costs, weights: jax.Array) -> Sums:
    new = jnp.sum(costs.cost * weights), jnp.sum(costs.nll * weights)
    return Sums(total.cost + new[0], total.nll + new[1])


def _sums(static: _Static, h, table, bias, labels, weights, skip=None) -> Sums:
    p = _problem(static, h, table, bias, labels, weights)

    statistics = _part(static.implementation, "statistics", static.options, False)

    def body(i, total):
        part = jax.tree.map(partial(p.part, i), p.tokens)
        s = statistics(p.part(i, p.h), p.table, p.bias, part.labels, p.count)
        return _add(total, _costs(static, s), part.weights)

    return p.over_chunks(body, Sums(p.zero, p.zero), skip)


def _sums_and_gradients(
    static: _Static, h, table, bias, labels, weights, scale, into=None, skip=None
) -> tuple[Sums, Gradients]:
    p, o = _problem(static, h, table, bias, labels, weights), static.options
    statistics = _part(static.implementation, "statistics", o, True)
    gradient = _part(static.implementation, "gradient", o)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def body(i, carry):
        total, d = carry
        part = jax.tree.map(partial(p.part, i), p.tokens)
        states = p.part(i, d.h)
        s = statistics(states, p.table, p.bias, part.labels, p.count)
        costs = _costs(static, s)
        fall = costs.factor * part.weights * (scale / o.temperature)
        rise = fall + 2 * o.z_loss * costs.lse * part.weights * (scale / o.temperature)
        # The label's probability is near 1 where training succeeds: what was kept of it is rounded.
        own = jnp.exp(s.picked - costs.lse) * rise - fall
        if o.softcap is not None:
            own = own * (1.0 - jnp.square(s.picked * (o.temperature / o.softcap)))
        g, d_bias = gradient(s.kept, s.peaks, costs.lse, rise, own, part.labels, p.bias)
        paste = lambda a, u: lax.dynamic_update_slice_in_dim(a, u, i * p.chunk, 0)
        d = Gradients(
            # A chunk's states are not read again: their gradient takes their place.
            paste(d.h, product("nv,vd->nd", g, p.table).astype(h.dtype)),
            d.table + product("nv,nd->vd", g, states),
            None if bias is None else d.bias + d_bias,
            paste(d.weights, costs.cost * part.counted),
        )
        return _add(total, costs, part.weights), d

    (n, width), v = h.shape, table.shape[0]
    begin = jnp.zeros(p.table.shape, jnp.float32) + p.zero
    if into is not None:
        begin = jnp.pad(into, [(0, a - b) for a, b in zip(begin.shape, into.shape, strict=True)])
    d_bias = None if bias is None else jnp.zeros(p.bias.shape, jnp.float32) + p.zero
    d = Gradients(p.h, begin, d_bias, jnp.zeros_like(p.tokens.weights) + p.zero)
    total, d = p.over_chunks(body, (Sums(p.zero, p.zero), d), skip)
    d_h = d.h if skip is None else jnp.where(skip, jnp.zeros((), h.dtype), d.h)
    d_bias = None if bias is None else d.bias[:v]
    return total, Gradients(d_h[:n, :width], d.table[:v, :width], d_bias, d.weights[:n])


@cache
def _part(implementation: str | None, name: str, *static) -> Callable:
    """`reference.<name>` with its static arguments, by one of its implementations."""

    def kernel(launch, *args):
        from eejax.kernels.linear_cross_entropy import triton

        return getattr(triton, name)(launch, *static, *args)

    plain = partial(getattr(reference, name), *static)
    return call.folded(call.op(kernel, plain, implementation), rows=())


def _whole(static: _Static, a: jax.Array) -> jax.Array:
    """Mark a value that every shard has as equal on all: a sum with one term tells JAX so."""
    return lax.psum(_once(static, a), static.axis) if static.axis else a


def _once(static: _Static, a: jax.Array) -> jax.Array:
    """Keep a value that all shards of the vocabulary have on the first one, 0 on the others."""
    return jnp.where(lax.axis_index(static.axis) == 0, a, 0.0) if static.axis else a


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(static: _Static, *inputs):
    return jax.tree.map(partial(_whole, static), _sums(static, *inputs))


def _forward(static: _Static, *inputs):
    total, d = _sums_and_gradients(static, *inputs, jnp.float32(1.0))
    like = jax.tree.map(lambda a: jnp.zeros((), a.dtype), inputs)
    return jax.tree.map(partial(_whole, static), total), (d, like)


def _backward(static: _Static, saved, cotangents):
    d, (h, table, bias, _, weights) = saved
    d = d._replace(weights=_once(static, d.weights))
    scaled = lambda a, to: (a.astype(jnp.float32) * cotangents[0]).astype(to.dtype)
    d = jax.tree.map(scaled, d, Gradients(h, table, bias, weights))
    return d.h, d.table, d.bias, None, d.weights


_differentiable.defvjp(_forward, _backward)
