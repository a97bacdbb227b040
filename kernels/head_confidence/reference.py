"""Reference of `head_confidence`: statistics of logits, and the confidence that follows from them.

The `LogitStatistics` of any part of the vocabulary (a tile, a program of a GPU, a shard of a mesh)
can be merged with those of the rest, in any order and to any depth.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eejax.common.errors import require, require_count
from eejax.kernels.norms import NormOptions, norm

LOWEST = -200.0
"""Lower bound on the distance of a logit to the peak: in float32, exp of -104 is 0. It replaces
-inf, which times 0 would be NaN."""


@dataclasses.dataclass(frozen=True)
class HeadConfidenceOptions:
    """Static options: logits = softcap * tanh((norm(x) @ table.T + bias) / softcap) / temperature.

    Attributes:
      vocab_size: number of leading rows of the whole table that are tokens; the rest is padding.
      norm: the norm, or None if states are already normed.
      softcap: soft cap, or None.
      temperature: divides the logits.
    """

    vocab_size: int
    norm: NormOptions | None = None
    softcap: float | None = None
    temperature: float = 1.0

    def __post_init__(self):
        require_count("HeadConfidenceOptions.vocab_size", self.vocab_size)
        for name, value in (("softcap", self.softcap), ("temperature", self.temperature)):
            require(
                value is None or value > 0,
                f"HeadConfidenceOptions.{name}",
                value,
                "must be above 0",
            )


class LogitStatistics(NamedTuple):
    """Statistics of logits y [n, v]; arrays [n], float32 but for the token.

    Attributes:
      peak: the largest logit.
      token: int32, the first token that has it; any token if no logit is above -inf.
      second: the largest of the others, equal to the peak if several share it.
      total: sum of exp(y - peak).
      weighted: sum of exp(y - peak) * (y - peak).
    """

    peak: jax.Array
    token: jax.Array
    second: jax.Array
    total: jax.Array
    weighted: jax.Array


def logits(options: HeadConfidenceOptions, x, scale, bias, table, head_bias) -> jax.Array:
    """Compute float32 logits [n, v] of states x [n, d]; products in x's dtype, accumulated in
    float32."""
    h = x if options.norm is None else norm(x, scale, bias, options.norm)
    y = jnp.einsum("nd,vd->nv", h, table.astype(x.dtype), preferred_element_type=jnp.float32)
    if head_bias is not None:
        y = y + head_bias.astype(jnp.float32)[None]
    if options.softcap is not None:
        y = options.softcap * jnp.tanh(y / options.softcap)
    return y if options.temperature == 1.0 else y / options.temperature


def statistics(
    options: HeadConfidenceOptions, x, scale, bias, table, head_bias, allowed
) -> LogitStatistics:
    """Return statistics of states x [n, d] and the first `allowed` [1] int32 table rows.

    The table is [v, d].
    """
    y = logits(options, x, scale, bias, table, head_bias)
    index = jax.lax.broadcasted_iota(jnp.int32, y.shape, 1)
    y = jnp.where(index < allowed[None], y, -jnp.inf)
    peak = jnp.max(y, -1)
    token = jnp.min(jnp.where(y == peak[:, None], index, y.shape[1]), -1)
    second = jnp.max(jnp.where(index == token[:, None], -jnp.inf, y), -1)
    z = _below(y, peak[:, None])
    e = jnp.exp(z)
    return LogitStatistics(peak, token, second, jnp.sum(e, -1), jnp.sum(e * z, -1))


def merge(parts: LogitStatistics) -> LogitStatistics:
    """Merge arrays [parts, n] of a vocabulary's parts into arrays [n] of the whole.

    Tokens are numbers in the whole vocabulary.
    """
    peak = jnp.max(parts.peak, 0)
    token = jnp.min(jnp.where(parts.peak == peak[None], parts.token, jnp.iinfo(jnp.int32).max), 0)
    second = jnp.max(jnp.where(parts.token == token[None], parts.second, parts.peak), 0)
    z = _below(parts.peak, peak[None])
    e = jnp.exp(z)
    weighted = jnp.sum(e * (parts.weighted + z * parts.total), 0)
    return LogitStatistics(peak, token, second, jnp.sum(e * parts.total, 0), weighted)


def head_statistics(s: LogitStatistics) -> tuple[jax.Array, ...]:
    """Return the parts of `api.HeadStatistics` [n], of a whole vocabulary."""
    total = jnp.where(s.total > 0, s.total, jnp.nan)  # 0 if no logit is above -inf
    token = jnp.where(s.total > 0, s.token, 0)
    log = jnp.log(total)
    return (
        token,
        1 / total,
        jnp.exp(s.second - s.peak) / total,
        s.peak + log,
        log - s.weighted / total,
    )


def _below(y: jax.Array, peak: jax.Array) -> jax.Array:
    """Return y - peak, at least `LOWEST`; a peak of -inf counts as 0."""
    z = y - jnp.where(peak > -jnp.inf, peak, 0.0)
    return jnp.where(z < LOWEST, LOWEST, z)
