"""`decode_attention`: attention of rows of several sequences to their KV caches."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp

from eejax.common.errors import require
from eejax.kernels import call
from eejax.kernels.decode_attention import reference
from eejax.kernels.decode_attention.reference import AttentionOptions

DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)
MAX_WIDTH = 256  # maximum head dimension; a row's sums are held in registers


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    first: jax.Array,
    *,
    options: AttentionOptions,
    slopes: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attend from rows of several slots to each slot's cached and new positions.

    A row at position p of its slot attends to the positions j <= p (and j > p - window). Those
    before the slot's first row of this call are read from the caches, the others from k and v.
    Scores are softcap(scale * q . k) - slope * (p - j) in float32, weights are rounded to q's dtype
    before they are multiplied with values, and sums are divided at the end. Cached positions that a
    row does not attend to have no effect on it, NaN included; a NaN key that it attends to makes it
    NaN. A row whose values are not all finite counts as one with NaN keys, and is written as such,
    with zeros as values.

    Args:
      q: [r, n_kv, g, h], queries; g of them share a head of keys and values.
      k: [r, n_kv, h], the rows' own keys.
      v: [r, n_kv, h], the rows' own values.
      keys: [slots * n_kv, s, h], the cache of keys.
      values: [slots * n_kv, s, h], the cache of values.
      slot: [r] integers, the slot of each row. A row outside 0..slots-1 belongs to no slot: nothing
        is written for it and its y is zeros. Rows of a slot are contiguous.
      position: [r] integers below s, consecutive among the rows of a slot.
      first: [n] integers, the first row of each span; r or more marks an unused entry. A span is
        at most `options.width` rows of one slot and ends where the next begins. Every row of a slot
        is in one span. The kernel starts programs for all n, so keep n small.
      options: static options.
      slopes: [n_kv, g] of ALiBi; None for no bias.
      implementation: one of `call.IMPLEMENTATIONS`.

    Returns:
      (y, keys, values): y [r, n_kv, g, h] in q's dtype, and the caches with the rows written at
      their positions, in the same memory if nothing else reads it.

    Raises:
      ConfigError: for shapes that do not fit together. The kernel covers float32, float16 and
        bfloat16, the same for rows and caches, and heads of up to `MAX_WIDTH`; otherwise the
        reference runs, with a warning. Neither has a rule for `vmap` or its own gradient.
    """
    require(q.ndim == 4, "q", q.shape, "must be queries [r, n_kv, g, h]", "Reshape them.")
    r, n_kv, g, h = q.shape
    require(
        isinstance(options, AttentionOptions),
        "options",
        options,
        "must be `kernels.decode_attention.reference.AttentionOptions`",
    )
    for name, a in dict(q=q, k=k, v=v, keys=keys, values=values).items():
        call.require_floating(name, a)
    for name, a in dict(k=k, v=v).items():
        fits = a.shape == (r, n_kv, h)
        require(fits, name, a.shape, f"must be of shape {(r, n_kv, h)} beside q of {q.shape}")
    fits = keys.ndim == 3 and keys.shape[2] == h and not (n_kv and keys.shape[0] % n_kv)
    require(fits, "keys", keys.shape, f"must be of shape [slots * {n_kv}, s, {h}]")
    for what, given, wanted in (
        ("shape", values.shape, keys.shape),
        ("dtype", values.dtype, keys.dtype),
    ):
        require(given == wanted, "values", given, f"must be of the keys' {what}, {wanted}")

    def integers(a, shape):
        return a.shape == shape and jnp.issubdtype(a.dtype, jnp.integer)

    for name, a in dict(slot=slot, position=position).items():
        given = (a.shape, a.dtype.name)
        require(integers(a, (r,)), name, given, f"must be integers of shape {(r,)}")
    given = (first.shape, first.dtype.name)
    require(integers(first, first.shape[:1]), "first", given, "must be integers [n]")
    if slopes is not None:
        require(slopes.shape == (n_kv, g), "slopes", slopes.shape, f"must be of shape {(n_kv, g)}")
        slopes = slopes.astype(jnp.float32)
    implementation = _chosen(
        {a.dtype for a in (q, k, v, keys)},
        h,
        implementation,
        empty=not (q.size and keys.size and first.size),
    )
    slot, position, first = map(_int32, (slot, position, first))
    return _run(options, implementation)(q, k, v, keys, values, slot, position, first, slopes)


def covers(dtype: jax.typing.DTypeLike, width: int) -> bool:
    """Return whether the kernel takes rows and caches of a dtype, and heads of a width.

    It warns once if a kernel would otherwise run.
    """
    return _chosen({jnp.dtype(dtype)}, width, None) is None


def _chosen(
    dtypes: set[jnp.dtype], width: int, implementation: str | None, empty: bool = False
) -> str | None:
    names = " and ".join(sorted(d.name for d in dtypes))
    covered = dtypes in [{jnp.dtype(t)} for t in DTYPES] and width <= MAX_WIDTH
    what = f"rows and caches of {names}, heads of {width}"
    return call.chosen("decode_attention", implementation, covered, what, empty)


def _int32(a: jax.Array) -> jax.Array:
    """Return integers as int32; those out of its range stay out of every valid range."""
    if a.dtype == jnp.int32:
        return a
    largest = jnp.iinfo(jnp.int32).max
    return jnp.clip(a, -1 if jnp.issubdtype(a.dtype, jnp.signedinteger) else 0, largest).astype(
        jnp.int32
    )


@cache
def _run(options: AttentionOptions, implementation: str | None):
    def kernel(launch, *args):
        from eejax.kernels.decode_attention import triton

        return triton.decode_attention(launch, options, *args)

    return call.op(kernel, partial(reference.decode_attention, options), implementation)
