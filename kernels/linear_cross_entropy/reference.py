"""The definition of `linear_cross_entropy` for a chunk of tokens, in two parts.

Between the parts the tokens' costs are known, over all shards of the vocabulary. The first part
keeps for the second the exponentials of the logits, each relative to the largest of its row within
a tile of columns. They need no normaliser, and are at most 1, so that they can be rounded.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eejax.common.errors import require, require_count

NEGATIVE = -1e30
"""Logit of a row of the table that stands for no token."""

FLOOR = NEGATIVE / 2
"""Minimum of a peak. Masked logits and -infinity are far below it, so that the exponentials of a
tile that has no others are 0, not 1 or NaN."""


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """Static options of a loss.

    Logits are softcap(h @ table.T + bias) / temperature. A token costs c * -log p(label) + z_loss *
    log(Z)^2, with Z the normaliser of the softmax.

    Attributes:
      vocab_size: number of tokens, the first rows of the whole table.
      softcap: soft cap of the logits, or None.
      temperature: divides the logits.
      z_loss: weight of log(Z)^2.
      confidence_weighted: whether c is the highest probability, held constant, instead of 1.
    """

    vocab_size: int
    softcap: float | None = None
    temperature: float = 1.0
    z_loss: float = 0.0
    confidence_weighted: bool = False

    def __post_init__(self):
        require_count("LossOptions.vocab_size", self.vocab_size)
        for name in ("softcap", "temperature", "z_loss"):  # Triton does not take numpy's floats
            if getattr(self, name) is not None:
                object.__setattr__(self, name, float(getattr(self, name)))
        for name, ok, allowed in (
            ("softcap", self.softcap is None or self.softcap > 0, "must be positive or None"),
            ("temperature", self.temperature > 0, "must be positive"),
            ("z_loss", self.z_loss >= 0, "must be at least 0"),
        ):
            require(ok, f"LossOptions.{name}", getattr(self, name), allowed)


class TileStatistics(NamedTuple):
    """Statistics of logits y [n, v] in t tiles of columns, the last of which may be narrower.

    Attributes:
      peaks: [t, n] float32, the largest logit of a row within a tile.
      totals: [t, n] float32, the sum of exp(y - peak).
      picked: [n] float32, the label's logit, 0 where another shard has the label.
      kept: [n, v] in h's dtype, or None: exp(y - peak) * d(temperature * y)/d(logit before the
        softcap).
    """

    peaks: jax.Array
    totals: jax.Array
    picked: jax.Array
    kept: jax.Array | None


def tile(options: LossOptions, dtype: Any) -> int:
    """Return the columns of a tile, as many as fit into a kernel's registers."""
    return 256 if jnp.dtype(dtype).itemsize == 2 and options.softcap is None else 128


def statistics(options: LossOptions, keep: bool, h, table, bias, labels, count) -> TileStatistics:
    """Return statistics of the logits of h [n, d] by a table [v, d] and bias [v] or None.

    The table has h's dtype. labels [n] int32: each token's row of the table, -1 if another shard
    has it; count [1] int32: number of rows of the table that stand for tokens.
    """
    y = jnp.einsum("nd,vd->nv", h, table, preferred_element_type=jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)[None, :]
    slope = 1.0
    if options.softcap is not None:
        tanh = jnp.tanh(y / options.softcap)
        y, slope = options.softcap * tanh, 1.0 - jnp.square(tanh)
    y = y / options.temperature
    n, v = y.shape
    y = jnp.where((jnp.arange(v, dtype=jnp.int32) < count[0])[None, :], y, NEGATIVE)
    size = tile(options, h.dtype)
    tiled = jnp.pad(y, ((0, 0), (0, -v % size)), constant_values=NEGATIVE).reshape(n, -1, size)
    peaks = jnp.maximum(tiled.max(-1), FLOOR)
    e = jnp.exp(tiled - peaks[:, :, None])
    picked = jnp.take_along_axis(y, jnp.clip(labels, 0)[:, None], 1)[:, 0]
    picked = jnp.where(labels >= 0, picked, 0.0)
    kept = (e.reshape(n, -1)[:, :v] * slope).astype(h.dtype) if keep else None
    return TileStatistics(peaks.T, e.sum(-1).T, picked, kept)


def gradient(options: LossOptions, kept, peaks, lse, rise, own, labels, bias):
    """Return g [n, v] in the dtype of `kept`, and the sum of its rows [v] float32, None without a
    bias.

    g = kept * exp(peak - lse) * rise, except `own` in the label's column: lse, rise and own [n] are
    float32; kept, peaks and labels as in `statistics`.
    """
    v = kept.shape[1]
    factor = jnp.exp(peaks - lse[None, :]) * rise[None, :]
    factor = jnp.repeat(factor.T, tile(options, kept.dtype), axis=1)[:, :v]
    g = kept.astype(jnp.float32) * factor
    g = jnp.where(jnp.arange(v, dtype=jnp.int32)[None, :] == labels[:, None], own[:, None], g)
    return g.astype(kept.dtype), None if bias is None else g.sum(0)
