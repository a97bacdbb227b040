"""`head_confidence`: statistics of an exit head's logits, without writing the logits."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.errors import require
from eejax.kernels import call
from eejax.kernels.head_confidence import reference
from eejax.kernels.head_confidence.reference import HeadConfidenceOptions, LogitStatistics

DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)

MAX_ROWS = 2**24
"""Maximum rows of a table over all shards: shards exchange tokens as float32, which counts no
further."""


class HeadStatistics(NamedTuple):
    """Statistics of logits [n, v]; arrays [n], float32 but for the token.

    If a logit is NaN or +inf, or all are -inf, the token is 0 and the rest is NaN.

    Attributes:
      token: int32, the most likely token, the first among equals.
      top: probability of the token.
      second: probability of the second most likely token; equals `top` if several share it, 0 if
        there is only one token.
      lse: log-sum-exp of the logits.
      entropy: entropy in nats.
    """

    token: jax.Array
    top: jax.Array
    second: jax.Array
    lse: jax.Array
    entropy: jax.Array


def head_confidence(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    table: jax.Array,
    head_bias: jax.Array | None,
    *,
    options: HeadConfidenceOptions,
    axis: str | None = None,
    implementation: str | None = None,
) -> HeadStatistics:
    """Return the `HeadStatistics` of states x [n, d]; see `HeadConfidenceOptions` for the logits.

    Products are in x's dtype and accumulated in float32. It is differentiable in reverse mode in
    all arguments; the token has no gradient. A batch of rows (`vmap`) becomes more rows. The kernel
    takes float32, float16 and bfloat16; otherwise the reference runs, with a warning.

    Args:
      x: [n, d] states.
      scale: [d] of the norm; None without a norm.
      bias: [d] of the norm; None without a norm, or without a bias.
      table: [v, d], cast to x's dtype.
      head_bias: [v] or None.
      options: static options.
      axis: a mesh axis, inside a `shard_map`. table and head_bias are then this shard's rows of
        the vocabulary, split into equal parts, and every shard gets the results of the whole:
        shards exchange statistics, five numbers a row.
      implementation: one of `call.IMPLEMENTATIONS`.

    Raises:
      ConfigError: for shapes that do not fit together.
    """
    require(x.ndim == 2, "x", x.shape, "must be states [n, d]", "Reshape them.")
    call.require_floating("x", x)
    d = x.shape[1]
    fits = table.ndim == 2 and table.shape[1] == d
    require(fits, "table", table.shape, f"must be rows of the vocabulary, of shape (v, {d})")
    rows = table.shape[0]
    for name, a, shape in (
        ("scale", scale, (d,)),
        ("bias", bias, (d,)),
        ("table", table, (rows, d)),
        ("head_bias", head_bias, (rows,)),
    ):
        if a is not None:
            require(
                a.shape == shape,
                name,
                a.shape,
                f"must be of shape {shape} beside x of shape {x.shape} and table of shape "
                f"{table.shape}",
            )
    normed = options.norm is not None
    for name, a, fits in (
        ("scale", scale, (scale is not None) == normed),
        ("bias", bias, bias is None or normed),
    ):
        shape = None if a is None else a.shape
        require(fits, name, shape, f"does not go with HeadConfidenceOptions.norm = {options.norm}")
    whole = rows * (lax.axis_size(axis) if axis else 1)
    require(
        not axis or whole <= MAX_ROWS,
        "table",
        table.shape,
        f"must have at most {MAX_ROWS} rows together with the other shards' tables",
    )
    require(
        options.vocab_size <= whole,
        "HeadConfidenceOptions.vocab_size",
        options.vocab_size,
        f"must be at most {whole}, the rows of the whole table",
    )
    implementation = call.chosen(
        "head_confidence", implementation, x.dtype in DTYPES, f"{x.dtype} states", empty=not x.size
    )
    first = lax.axis_index(axis) * rows if axis else 0
    allowed = jnp.clip(options.vocab_size - first, 0, rows).astype(jnp.int32).reshape(1)
    args = x, scale, bias, table, head_bias, allowed
    s = LogitStatistics(*_statistics(options, implementation, *args))
    if axis:
        s = reference.merge(_gathered(s._replace(token=s.token + first), axis))
    return HeadStatistics(*reference.head_statistics(s))


def _gathered(s: LogitStatistics, axis: str) -> LogitStatistics:
    """Gather arrays [shards, n], equal on every shard, as a sum, which JAX knows to be equal."""
    size, own = lax.axis_size(axis), lax.axis_index(axis)
    mine = jnp.stack([a.astype(jnp.float32) for a in s])  # one message; see `MAX_ROWS`
    blank = jnp.zeros((size, *mine.shape), jnp.float32)
    whole = lax.psum(lax.dynamic_update_index_in_dim(blank, mine, own, 0), axis)
    parts = LogitStatistics(*jnp.moveaxis(whole, 1, 0))
    return parts._replace(token=parts.token.astype(jnp.int32))


@cache
def _run(options: HeadConfidenceOptions, implementation: str | None):
    """Return `LogitStatistics` by one of the implementations, for rows x."""

    def kernel(launch, *args):
        from eejax.kernels.head_confidence import triton

        return triton.statistics(launch, options, *args)

    plain = partial(reference.statistics, options)
    run = call.op(kernel, plain, implementation)
    return call.folded(lambda *args: tuple(run(*args)), rows=(0,))


def _statistics_by_run(options, implementation, *args) -> tuple[jax.Array, ...]:
    return _run(options, implementation)(*args)


_statistics = jax.custom_vjp(_statistics_by_run, nondiff_argnums=(0, 1))


def _forward(options, implementation, *args):
    return _statistics(options, implementation, *args), args


def _backward(options, implementation, args, cotangents):
    *inputs, allowed = args

    def without_token(s):
        return (s.peak, s.second, s.total, s.weighted)

    def run(x, scale, bias, table, head_bias):
        return without_token(
            reference.statistics(options, x, scale, bias, table, head_bias, allowed)
        )

    _, pull = jax.vjp(run, *inputs)
    return *pull(without_token(LogitStatistics(*cotangents))), None


_statistics.defvjp(_forward, _backward)
