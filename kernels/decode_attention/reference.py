"""The definition of `decode_attention`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from eejax.common.errors import require, require_count

NEGATIVE = -1e30  # masks scores; finite, so that fully masked rows stay finite


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Static options of `decode_attention`.

    Attributes:
      width: maximum rows of a span.
      max_rows: maximum rows of one slot in a call.
      scale: factor of the scores q . k.
      window: positions that a row attends to, its own included; None for all up to its own.
      softcap: cap in cap * tanh(score / cap); None for no cap.
    """

    width: int
    max_rows: int
    scale: float
    window: int | None = None
    softcap: float | None = None

    def __post_init__(self):
        for name in ("width", "max_rows"):
            require_count(f"AttentionOptions.{name}", getattr(self, name))
        if self.window is not None:
            require_count("AttentionOptions.window", self.window)
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            if value is not None:
                require(value > 0, f"AttentionOptions.{name}", value, "must be above 0")
                object.__setattr__(self, name, float(value))  # Triton does not take numpy's floats


def decode_attention(
    options: AttentionOptions,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    first: jax.Array,
    slopes: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attend from rows to their slots, and write the rows to the caches; see
    `api.decode_attention`.

    The whole cache of each span's slot is gathered, so memory grows with the number of spans.
    """
    (r, n_kv, g, h), s = q.shape, keys.shape[1]
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    slots = keys.shape[0] // n_kv if n_kv else 0
    if not (q.size and keys.size and first.size):
        return jnp.zeros_like(q), keys, values
    slot = jnp.where((slot >= 0) & (slot < slots), slot, slots)

    def write(cache, rows):
        split = cache.reshape(slots, n_kv, s, h)
        split = split.at[slot, :, position].set(rows.astype(cache.dtype), mode="drop")
        return split.reshape(cache.shape)

    finite = jnp.all(jnp.isfinite(v), -1, keepdims=True)
    k, v = jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)
    keys, values = write(keys, k), write(values, v)
    row, real = span_rows(options, slot, first, slots)
    own = jnp.minimum(row, r - 1)
    of_span = slot[own[:, 0]]

    def gathered(cache):
        return cache.reshape(slots, n_kv, s, h)[jnp.minimum(of_span, slots - 1)]

    k, v = (gathered(cache).astype(q.dtype) for cache in (keys, values))  # [n, n_kv, s, h]
    # A value that is not finite reaches the rows that attend to it through their scores, because 0
    # times such a value would reach the other rows too.
    bad = ~jnp.all(jnp.isfinite(v), -1)
    v = jnp.where(bad[..., None], 0, v)
    p, j = position[own][:, :, None], jnp.arange(s, dtype=position.dtype)[None, None]
    seen = real[:, :, None] & (j <= p)
    if options.window is not None:
        seen = seen & (j > p - options.window)

    # Products of three-dimensional buffers, as in `models.attention`.
    def merged(a):
        return a.reshape(-1, *a.shape[2:])

    rows = jnp.transpose(q[own], (0, 2, 3, 1, 4)).reshape(-1, g * options.width, h)
    scores = jnp.einsum("nrh,nsh->nrs", rows, merged(k), preferred_element_type=wide)
    scores = scores.reshape(-1, n_kv, g, options.width, s)
    scores = scores * jnp.asarray(options.scale, wide)
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    if slopes is not None:
        distance = (p - j).astype(wide)[:, None, None]
        scores = scores - slopes.astype(wide)[None, :, :, None, None] * distance
    scores = jnp.where(bad[:, :, None, None], jnp.nan, scores)
    scores = jnp.where(seen[:, None, None], scores, NEGATIVE)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    weights = weights.astype(q.dtype).reshape(-1, g * options.width, s)
    y = jnp.einsum("nrs,nsh->nrh", weights, merged(v), preferred_element_type=wide)
    y = (y.reshape(*total.shape[:-1], h) / total).astype(q.dtype)
    y = jnp.transpose(y, (0, 3, 1, 2, 4))
    return jnp.zeros_like(q).at[jnp.where(real, row, r)].set(y, mode="drop"), keys, values


def span_rows(options: AttentionOptions, slot: jax.Array, first: jax.Array, slots: int):
    """Return the rows [n, width] of every span, and whether each is valid.

    A span ends before the next begins, and with its slot.
    """
    r = slot.shape[0]
    row = first[:, None] + jnp.arange(options.width, dtype=first.dtype)[None]
    after = jnp.min(jnp.where(first[None] > first[:, None], first[None], r), 1)
    begin = jnp.clip(first, 0, r - 1)
    of_span = slot[begin][:, None]
    there = ((first >= 0) & (first < r))[:, None] & (row < after[:, None])
    row = jnp.clip(row, 0, r)
    return row, there & (slot[jnp.minimum(row, r - 1)] == of_span) & (of_span < slots)
