"""Sampling of a token from logits: greedy, temperature, top-k, top-p and min-p, per request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from eejax.common.errors import require, require_array
from eejax.common.trees import varying_zero
from eejax.kernels import call
from eejax.models.layers import NEGATIVE


class SamplingParams(struct.PyTreeNode):
    """Sampling settings of each request, as traced arrays [b]: changing one compiles nothing.

    Attributes:
      temperature: divides the logits before a token is drawn; 0 takes the most likely token.
      top_k: number of most likely tokens to draw from; 0 draws from all.
      top_p: probability that the most likely tokens to draw from have together; 1 draws from all.
      min_p: least probability of a token to draw, as a share of the most likely token's; 0 is off.
      seed: seed of the draws, which depend on it and on the position alone.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array

    @classmethod
    def make(
        cls,
        batch: int,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
        seed: int | Sequence[int] = 0,
    ) -> SamplingParams:
        """Check settings and expand them to `batch` requests, each one number or one per request.

        One number as seed gives request i the seed seed + i. Raises ConfigError for a value out of
        range.
        """
        largest = np.iinfo(np.int32).max
        if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
            seed = [int(seed) + i for i in range(batch)]

        def field(name, value, dtype, ok, allowed) -> Any:  # a host array stands in for a device's
            a = require_array(name, value, allowed)
            number = a.dtype.kind in ("iu" if dtype is np.int32 else "iuf")
            fits = number and bool(np.all(np.abs(a) <= np.finfo(np.float32).max))  # False for NaN
            require(fits and bool(np.all(ok(a))), name, value, allowed)
            require(
                a.shape in ((), (batch,)),
                name,
                value,
                f"must be one number, or {batch}, one per request",
            )
            return np.array(np.broadcast_to(a.astype(dtype), (batch,)))

        f, i = np.float32, np.int32

        def small(a):
            return (a >= 0) & (a <= largest)

        return cls(
            field("temperature", temperature, f, lambda a: a >= 0, "must be at least 0"),
            field("top_k", top_k, i, small, "must be 0 (off) or an integer up to 2^31 - 1"),
            field("top_p", top_p, f, lambda a: (a > 0) & (a <= 1), "must be in (0, 1]"),
            field("min_p", min_p, f, lambda a: (a >= 0) & (a <= 1), "must be in [0, 1]"),
            field("seed", seed, i, small, "must be an integer from 0 to 2^31 - 1"),
        )


def restrict(logits: jax.Array, sampling: SamplingParams) -> jax.Array:
    """Return logits [b, v] after temperature, with tokens outside top-k, top-p and min-p masked.

    The filters are applied in that order, as is usual, each to the tokens that passed the one
    before. The most likely token always stays. Logits are relative to its logit, so that no
    temperature takes them out of float32's range.
    """
    t = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    v, real = logits.shape[-1], logits > NEGATIVE  # False for padding of the vocabulary
    y = (logits - jnp.max(logits, -1, keepdims=True)) / t[:, None]
    rank = jnp.where(real, _ordered(y), np.iinfo(np.int32).min)
    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, v), v)

    def count(rows):
        return jnp.sum(rows.astype(jnp.int32), -1)

    kth = _least(lambda r: count(rank[:, None] > r[:, :, None]) < k[:, None], rank)
    # Tokens tied for the k-th place all stay; together they count as the places that are left.
    above, tied = rank > kth[:, None], rank == kth[:, None]
    room = (k - count(above)) / jnp.maximum(count(tied), 1)
    ratio = jnp.exp(y)  # to the most likely token
    mass = jnp.where(above, ratio, jnp.where(tied, ratio * room[:, None], 0.0))
    mass = jnp.where(real, mass, 0.0)
    share = sampling.top_p * jnp.sum(mass, -1)

    def likelier(r):
        return jnp.sum(jnp.where(rank[:, None] > r[:, :, None], mass[:, None], 0.0), -1)

    nucleus = _least(lambda r: likelier(r) < share[:, None], rank)
    # A float32 sum may reach 1 before its last terms: top_p 1 is off by definition.
    within = (rank >= nucleus[:, None]) | (sampling.top_p[:, None] >= 1)
    kept = within & (rank >= kth[:, None]) & (ratio >= sampling.min_p[:, None])
    kept = kept | (rank == jnp.max(rank, -1, keepdims=True))
    return jnp.where(kept & real, y, NEGATIVE)


def _ordered(y: jax.Array) -> jax.Array:
    """Map float32 to int32 of the same order; -0 equals 0."""
    bits = lax.bitcast_convert_type(jnp.where(y == 0, 0.0, y), jnp.int32)
    return bits ^ ((bits >> 31) & np.iinfo(np.int32).max)


def _least(holds: Callable[[jax.Array], jax.Array], rank: jax.Array) -> jax.Array:
    """Find, for each row of `rank` [rows, v], the smallest int32 for which a predicate holds.

    It is found digit by digit. Nothing is sorted: a sort takes XLA ten times as long on a CPU, and
    on a GPU it may be a call into CUB, which no CUDA graph can hold, so that the host would run the
    whole decoding loop. On a GPU digits are wide, for few launches.

    Args:
      holds: function of numbers [rows, n] to booleans [rows, n], true from some number on.
    """
    gpu = call.for_gpu()
    width = 4 if gpu else 1
    digits = jnp.arange(1, 2**width, dtype=jnp.int32)[None]

    def add_digit(i, least):
        step = lax.shift_left(jnp.int32(1), jnp.int32(32 - width) - width * i)
        too_small = ~holds(least[:, None] + digits * step - 1)
        return least + jnp.sum(too_small.astype(jnp.int32), -1) * step

    start = jnp.full((len(rank),), np.iinfo(np.int32).min, jnp.int32) + varying_zero(rank)
    return lax.fori_loop(0, 32 // width, add_digit, start, unroll=gpu)


def argmax(logits: jax.Array) -> jax.Array:
    """Return the first most likely token [...] int32 of logits [..., v]; NaN gives v.

    The result is that of `jnp.argmax`, from two plain reductions: XLA's CPU backend does not
    vectorise the paired reduction of argmax, which is ten times slower at 50,000 tokens.
    """
    v = logits.shape[-1]
    peak = jnp.max(logits, -1, keepdims=True)
    index = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.min(jnp.where(logits == peak, index, v), -1)


def sample(logits: jax.Array, sampling: SamplingParams, position: jax.Array) -> jax.Array:
    """Sample a token [b] int32 from each row of float32 logits [b, v], at positions [b].

    The draw is keyed by (seed, position) alone, so it does not depend on the batch, the number of
    steps per call, or the engine. The vocabulary is restricted only where some request samples.
    """
    greedy = argmax(logits)

    samples = sampling.temperature > 0

    def draw():
        return _categorical(_keys(sampling, position), restrict(logits, sampling))

    return jnp.where(samples, lax.cond(jnp.any(samples), draw, lambda: greedy), greedy)


def _keys(sampling: SamplingParams, position: jax.Array) -> jax.Array:
    """Return keys [b] of (seed, position)."""

    def one(seed, position):
        return jax.random.fold_in(jax.random.key(seed), position)

    return jax.vmap(one)(sampling.seed, position)


def _categorical(keys: jax.Array, logits: jax.Array) -> jax.Array:
    """Draw a token [b] with each key from logits [b, v]."""
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
