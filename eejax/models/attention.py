"""Attention: scores, softmax and weighted values, over whole texts and with a KV cache."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from eejax.common.indexing import gather, put_slice, take_slice
from eejax.kernels import call
from eejax.kernels.decode_attention.api import covers, decode_attention
from eejax.kernels.decode_attention.reference import AttentionOptions
from eejax.models.branches import first_bucket
from eejax.models.config import ModelConfig

NEGATIVE = -1e30  # masks scores and logits; finite, so that fully masked rows stay finite

UNROLLED_WRITES = 8


def sanitize_kv(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Replace keys and values that are not finite before they are written to a cache.

    A cache may hold rows that no query may see, of a rejected draft or of an earlier request in the
    slot. A masked key has weight 0, but 0 times a value that is not finite is NaN. A row with such
    values therefore stores zeros as values and NaN as keys: a query that attends to it still gets
    NaN.

    Args:
      k: [..., h] keys.
      v: [..., h] values.

    Returns:
      Keys and values of the same shapes.
    """
    bad = ~jnp.all(jnp.isfinite(v), -1, keepdims=True)
    return jnp.where(bad, jnp.asarray(jnp.nan, k.dtype), k), jnp.where(bad, 0, v)


def write(cache, k: jax.Array, v: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Write rows k, v [b, t, k, h] into a cache's keys and values, as `write_rows` does."""
    keys, values = cache
    k, v = sanitize_kv(k, v)
    return write_rows(keys, k, start), write_rows(values, v, start)


def write_rows(cache: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    """Write rows into a cache.

    The caller leaves room for all rows: a start too close to the end would be clamped, and the rows
    would overwrite earlier positions.

    Args:
      cache: [b * k, s, h].
      rows: [b, t, k, h].
      start: [b] position of each sequence's first row.

    Returns:
      The cache, [b * k, s, h].
    """
    b, t, k, h = rows.shape
    rows = jnp.swapaxes(rows, 1, 2).astype(cache.dtype)  # [b, k, t, h]
    # On a CPU slice updates stay in place and cost less than a scatter. A GPU starts a kernel for
    # each of them.
    if b <= (1 if call.for_gpu() else UNROLLED_WRITES):
        for i in range(b):
            cache = put_slice(cache, rows[i], (i * k, start[i], 0))
        return cache
    grouped = cache.reshape(b, k, *cache.shape[1:])

    def write(c, r, i):
        return put_slice(c, r, (0, i, 0))

    return jax.vmap(write)(grouped, rows, start).reshape(cache.shape)


# Attention is compiled for MIN_CACHE_LENGTH positions, and for multiples by powers of the growth. A
# conditional costs a batch more on a CPU than a cache that is a little too long: 256 beside 288
# positions took 1.3 times the time of 288 alone in 8 slots.
MIN_CACHE_LENGTH, CACHE_LENGTH_GROWTH = 256, 4


def cache_lengths(length: int) -> list[int]:
    """Return the numbers of positions that attention to a cache of `length` is compiled for."""
    lengths = []
    while (n := MIN_CACHE_LENGTH * CACHE_LENGTH_GROWTH ** len(lengths)) < length / 2:
        lengths.append(n)
    return [*lengths, length]


def span_lengths(length: int) -> list[int]:
    """Return the finer `cache_lengths` for attention of one sequence, which has its own length."""
    lengths = [MIN_CACHE_LENGTH // 2]
    while 2 * lengths[-1] < length:
        lengths.append(2 * lengths[-1])
    return [*(n for n in lengths if n < 0.9 * length), length]


def cached_attention(q, k, v, mask, distance, slopes, config: ModelConfig, reach: jax.Array):
    """Attend to the first positions of a cache, with `_attend`.

    It takes the shortest of `cache_lengths` that covers `reach`, so a step reads as much as was
    written, not as much as the cache has room for.
    """
    lengths = cache_lengths(k.shape[1])

    def first(n, q, k, v, mask, distance):
        near = None if distance is None else distance[..., :n]
        return _attend(q, k[:, :n], v[:, :n], mask[..., :n], near, slopes, config)

    branches = [partial(first, n) for n in lengths]
    if len(lengths) == 1:
        return branches[0](q, k, v, mask, distance)
    return lax.switch(first_bucket(lengths, reach), branches, q, k, v, mask, distance)


QUERY_BLOCKS, MIN_QUERY_BLOCK = 4, 64


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    distance: jax.Array | None,
    slopes: jax.Array | None,
    config: ModelConfig,
) -> jax.Array:
    """Mix values by the softmax of scores.

    The products are of three-dimensional buffers as the KV cache lies in memory: any other order of
    axes, or a reshape on the way, makes XLA's CPU backend copy the cache at every step of decoding
    (2 to 5 times the time). The result is divided by the sum of the weights; it is smaller than the
    weights.

    Args:
      q: [b, t, k, g, h] queries.
      k, v: [b * k, s, h] keys and values.
      mask: [b or 1, t, s] True where attention is allowed.
      distance: [b or 1, t, s] query minus key position, for ALiBi.
      slopes: [k, g] of ALiBi, or None.
      config: the model's.

    Returns:
      [b, t, k, g, h].
    """
    b, t, n_kv, g, h = q.shape
    rows = jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(b * n_kv, g * t, h)
    scores = jnp.einsum("nrh,nsh->nrs", rows, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(b, n_kv, g, t, -1)
    scores = scores * jnp.float32(config.attention_scale or h**-0.5)
    if config.attention_softcap:
        scores = config.attention_softcap * jnp.tanh(scores / config.attention_softcap)
    if slopes is not None:
        assert distance is not None  # `layers.make_context` computes it for ALiBi
        bias = slopes[None, :, :, None, None] * distance[:, None, None].astype(jnp.float32)
        scores = scores - bias
    scores = jnp.where(mask[:, None, None], scores, NEGATIVE)
    top = lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1).reshape(b * n_kv, g * t, 1)
    weights = weights.reshape(b * n_kv, g * t, -1).astype(q.dtype)
    y = jnp.einsum("nrs,nsh->nrh", weights, v, preferred_element_type=jnp.float32) / total
    return jnp.transpose(y.astype(q.dtype).reshape(b, n_kv, g, t, h), (0, 3, 1, 2, 4))


def query_blocks(t: int) -> int:
    """Return the number of blocks that the queries of t positions are cut into."""
    return max(1, min(QUERY_BLOCKS, t // MIN_QUERY_BLOCK))


def causal_attention(q, k, v, mask, distance, slopes, config: ModelConfig) -> jax.Array:
    """Attend from rows to themselves, in blocks of queries with the keys up to each block's end.

    The blocks skip the products and exponentials of most masked scores. Each block recomputes its
    scores in the backward pass, so nothing of size t * s is kept from layer to layer.
    """
    t = q.shape[1]
    n = query_blocks(t)
    cuts = [t * i // n for i in range(n + 1)]

    def block(start, stop, q, k, v, mask, distance):
        def part(a):
            return a[:, start:stop, :stop]

        near = None if distance is None else part(distance)
        return _attend(q[:, start:stop], k[:, :stop], v[:, :stop], part(mask), near, slopes, config)

    blocks = [
        jax.checkpoint(partial(block, *cut), prevent_cse=False)(q, k, v, mask, distance)
        for cut in itertools.pairwise(cuts)
    ]
    return blocks[0] if n == 1 else jnp.concatenate(blocks, 1)


def use_library(q: jax.Array, slopes: jax.Array | None, masked: bool, config: ModelConfig) -> bool:
    """Return whether cuDNN's attention can run a pass.

    It takes half precision without a soft cap or ALiBi, on GPUs from `call.MIN_CAPABILITY` on, with
    head dimensions that are multiples of 8 up to 128 (256 from compute capability 9.0 on), and with
    a mask only even numbers of positions. `EEJAX_KERNELS=reference` turns it off, as it does
    kernels.

    Args:
      q: [b, t, k, g, h] queries.
      slopes: [k, g] of ALiBi, or None.
      masked: whether there is a mask beside causality and windows, which the library knows.
      config: the model's.
    """
    capability = call.capability()
    if capability is None or capability < call.MIN_CAPABILITY or call.prefers_reference():
        return False
    if slopes is not None or config.attention_softcap:
        return False
    if q.dtype not in (jnp.bfloat16, jnp.float16) or masked and q.shape[1] % 2:
        return False
    return q.shape[-1] % 8 == 0 and q.shape[-1] <= (256 if capability >= 90 else 128)


def use_kernel(config: ModelConfig) -> bool:
    """Return whether one kernel both attends to a KV cache and writes it (`kernel_attention`)."""
    return call.by_kernels() and covers(config.dtype, config.head_dim)


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    window: int | None,
    config: ModelConfig,
) -> jax.Array:
    """Attend causally with cuDNN's fused kernels, which write no scores.

    Args:
      q: [b, t, k, g, h] queries.
      k: [b, t, k, h] keys.
      v: [b, t, k, h] values.
      mask: [b or 1, t, t] further restricts causal attention; None does not.
      window: positions that a query sees, its own included; None for all before it.
      config: the model's.

    Returns:
      [b, t, k, g, h].
    """
    b, t, n_kv, g, h = q.shape
    out = jax.nn.dot_product_attention(
        q.reshape(b, t, n_kv * g, h),
        k,
        v,
        mask=None if mask is None else mask[:, None],
        scale=config.attention_scale or h**-0.5,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return out.reshape(q.shape)


class PackedRows(struct.PyTreeNode):
    """Rows [t] of several requests, one after the other, and their places in a cache of slots.

    Rows of a slot have consecutive positions and are cut into spans of at most `width`. Attention
    takes one span at a time: it reads only the slots that have rows, in place, and reads a span's
    keys and values once.

    Attributes:
      slot: [t] of each row. Rows beyond the last span belong to no slot.
      position: [t] of each row. The cache has room for width - 1 positions beyond any of them.
      first: [n] first row of each span, ascending.
      spans: number of spans.
      width: maximum rows of a span.
      max_rows: maximum rows of a slot, where there may be many spans; None where there are few, as
        for prompts. With it XLA's own operations attend to all slots at once in programs for a GPU:
        starting many small kernels would take longer than reading slots without rows. One kernel
        takes all spans either way (`kernel_attention`).
    """

    slot: jax.Array
    position: jax.Array
    first: jax.Array
    spans: jax.Array
    width: int = struct.field(pytree_node=False)
    max_rows: int | None = struct.field(pytree_node=False, default=None)


KERNEL_SPAN = 64


def spans(start: jax.Array, t: int) -> PackedRows:
    """Lay out t rows of every sequence for `kernel_attention`.

    Args:
      start: [b] int32 position of each sequence's first row.
      t: rows of each sequence.
    """
    b, width = start.shape[0], min(t, KERNEL_SPAN)
    row = jnp.arange(t, dtype=jnp.int32)
    begin = jnp.arange(b, dtype=jnp.int32)[:, None] * t
    first = (begin + row[None, ::width]).reshape(-1)
    return PackedRows(
        slot=jnp.repeat(jnp.arange(b, dtype=jnp.int32), t),
        position=(start[:, None] + row[None]).reshape(-1),
        first=first,
        spans=jnp.int32(len(first)),
        width=width,
        max_rows=t,
    )


def kernel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    slopes: jax.Array | None,
    window: int | None,
    config: ModelConfig,
    packed: PackedRows,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Attend to a KV cache with one kernel, which also writes the rows' keys and values into it.

    Args:
      q: [b, t, k, g, h] queries of b t rows, in the order of `packed`.
      k: [b, t, k, h] keys.
      v: [b, t, k, h] values.
      cache: keys and values, [slots * k, s, h] each.
      slopes: [k, g] of ALiBi, or None.
      window: positions that a query sees; None for all before it.
      config: the model's.
      packed: places of the rows in the cache.

    Returns:
      [b, t, k, g, h], and the cache.
    """

    def flat(a):
        return a.reshape(-1, *a.shape[2:])

    rows = packed.slot.shape[0]
    # The kernel starts a program for every span that could be there.
    max_spans = rows // packed.width + cache[0].shape[0] // k.shape[2]
    first = packed.first[: min(len(packed.first), max_spans)]
    first = jnp.where(jnp.arange(len(first)) < packed.spans, first, rows)
    options = AttentionOptions(
        width=packed.width,
        max_rows=packed.max_rows or rows,
        window=window,
        softcap=config.attention_softcap,
        scale=config.attention_scale or q.shape[-1] ** -0.5,
    )
    keys, values = cache
    y, keys, values = decode_attention(
        flat(q),
        flat(k).astype(keys.dtype),
        flat(v).astype(values.dtype),
        keys,
        values,
        packed.slot,
        packed.position,
        first,
        options=options,
        slopes=slopes,
    )
    return y.reshape(q.shape), (keys, values)


def packed_attention(
    q, k, v, cache, mask, distance, slopes, config: ModelConfig, packed: PackedRows
):
    """Attend from packed rows to a cache of slots, and write their keys and values into it.

    Padding is written past a slot's rows; it is overwritten before any query reads it.

    Args:
      q: [t, 1, k, g, h] queries.
      k: [t, 1, k, h] keys.
      v: [t, 1, k, h] values.
      cache: keys and values, [slots * k, s, h] each.
      mask: [t, 1, s].
      distance: [t, 1, s].
      slopes: [k, g] of ALiBi, or None.
      config: the model's.
      packed: places of the rows in the cache.

    Returns:
      [t, 1, k, g, h], and the cache.
    """
    attend = _at_once if call.for_gpu() and packed.max_rows is not None else _by_span
    args = q, *sanitize_kv(k, v), mask, distance, *cache
    return attend(*args, slopes=slopes, config=config, packed=packed)


def _at_once(
    q, k, v, mask, distance, keys, values, *, slopes, config: ModelConfig, packed: PackedRows
):
    """Attend with `packed.max_rows` rows of every slot, of which some may be padding."""
    n_kv, max_rows, t = k.shape[2], packed.max_rows, q.shape[0]
    assert max_rows is not None  # otherwise `_by_span` is called
    slots = keys.shape[0] // n_kv
    # Rows of a slot lie together: the first of them begins its first span.
    begin = jnp.full((slots,), t, jnp.int32).at[packed.slot].min(jnp.arange(t), mode="drop")
    start = gather(packed.position, jnp.minimum(begin, t - 1))
    start = jnp.where(begin < t, start, keys.shape[1] - max_rows)  # slots without rows: at the end
    row = jnp.minimum(begin[:, None] + jnp.arange(max_rows)[None], t - 1)  # [slots, max_rows]
    near = None if distance is None else gather(distance[:, 0], row)
    k, v = (write_rows(a, gather(new[:, 0], row), start) for a, new in ((keys, k), (values, v)))
    flat_k, flat_v = k.astype(q.dtype), v.astype(q.dtype)
    reach = jnp.max(packed.position) + 1
    q, mask = (gather(a[:, 0], row) for a in (q, mask))
    y = cached_attention(q, flat_k, flat_v, mask, near, slopes, config, reach)
    slot = jnp.minimum(packed.slot, slots - 1)
    behind = packed.position - gather(start, slot)
    y = gather(y, slot, jnp.maximum(behind, 0))
    return y[:, None], (k, v)


def _by_span(q, k, v, mask, distance, *cache, slopes, config: ModelConfig, packed: PackedRows):
    """Run `packed_attention` on one span after the other."""
    width, n_kv, length = packed.width, k.shape[2], cache[0].shape[1]
    lengths = span_lengths(length)

    def rows(a):  # [t + width - 1, ...]: a span may begin with any row
        return jnp.pad(a[:, 0], [(0, width - 1)] + [(0, 0)] * (a.ndim - 2))

    own = [rows(a) for a in (q, k, v, mask)]
    far = None if distance is None else rows(distance)

    def span(i, carry):
        out, *buffers = carry
        first = gather(packed.first, i)
        slot, start = gather(packed.slot, first) * n_kv, gather(packed.position, first)

        def cut(a):
            return take_slice(a, (first,) + (0,) * (a.ndim - 1), (width, *a.shape[1:]))

        q, k, v, mask = (cut(a) for a in own)
        distance = None if far is None else cut(far)
        buffers = [  # may also write rows of the next slots, which their own spans write again
            put_slice(c, jnp.swapaxes(a, 0, 1).astype(c.dtype), (slot, start, 0))
            for c, a in zip(buffers, (k, v), strict=True)
        ]

        def first_positions(n, q, mask, distance, *buffers):
            size = n_kv, n, buffers[0].shape[2]
            k, v = (take_slice(c, (slot, 0, 0), size).astype(q.dtype) for c in buffers)
            near = None if distance is None else distance[None, :, :n]
            return _attend(q[None], k, v, mask[None, :, :n], near, slopes, config)[0]

        branches = [partial(first_positions, n) for n in lengths]
        which = jnp.minimum(first_bucket(lengths, start + width), len(lengths) - 1)
        y = lax.switch(which, branches, q, mask, distance, *buffers)
        return put_slice(out, y, (first,) + (0,) * (out.ndim - 1)), *buffers

    # Rows that belong to no span keep their query values, which nothing reads.
    out, *buffers = lax.fori_loop(0, packed.spans, span, (own[0], *cache))
    return out[: q.shape[0], None], tuple(buffers)
