"""Attention: scores, softmax and weighted values, of whole texts and with a KV cache."""

from __future__ import annotations

import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eejax.kernels import call
from eejax.kernels.decode_attention.api import covers, decode_attention
from eejax.kernels.decode_attention.reference import AttentionOptions
from eejax.models.branches import first_bucket
from eejax.models.config import ModelConfig

NEGATIVE = -1e30  # masks scores and logits; finite, so that fully masked rows stay finite

UNROLLED_WRITES = 8


def sanitize_kv(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [..., h] for a cache, in which rows may lie that nobody is to attend to: of a
    draft that was not right, of the slot's request before.

    A masked key counts nothing whatever it is, but 0 times a value that is not finite is NaN. So
    a row with such values keeps none and has NaN as keys instead: who attends to it gets NaN still.
    """
    bad = ~jnp.all(jnp.isfinite(v), -1, keepdims=True)
    return jnp.where(bad, jnp.asarray(jnp.nan, k.dtype), k), jnp.where(bad, 0, v)


def write(cache, k: jax.Array, v: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A cache's buffers of keys and values with rows k, v [b, t, k, h], as `write_rows`."""
    keys, values = cache
    k, v = sanitize_kv(k, v)
    return write_rows(keys, k, start), write_rows(values, v, start)


def write_rows(cache: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    """cache [b * k, s, h] with rows [b, t, k, h] written at positions start [b] onward.

    The caller leaves room for all rows: a start too close to the end would be clamped and
    overwrite earlier positions.
    """
    b, t, k, h = rows.shape
    rows = jnp.swapaxes(rows, 1, 2).astype(cache.dtype)  # [b, k, t, h]
    # On a CPU slice updates stay in place, and a scatter costs more. A GPU starts one for each.
    if b <= (1 if call.for_gpu() else UNROLLED_WRITES):
        for i in range(b):
            cache = lax.dynamic_update_slice(cache, rows[i], (i * k, start[i], 0))
        return cache
    grouped = cache.reshape(b, k, *cache.shape[1:])

    def write(c, r, i):
        return lax.dynamic_update_slice(c, r, (0, i, 0))

    return jax.vmap(write)(grouped, rows, start).reshape(cache.shape)


SHORTEST, LONGER = 256, 4  # positions attended to at least, and times more, in a long cache


def cache_lengths(length: int) -> list[int]:
    """The numbers of positions that attention to a cache of `length` is compiled for."""
    lengths = []
    while (n := SHORTEST * LONGER ** len(lengths)) < length / 2:
        lengths.append(n)
    return [*lengths, length]


def span_lengths(length: int) -> list[int]:
    """Return `cache_lengths` for the attention of one sequence: finer, as each has its own."""
    lengths = [SHORTEST // 2]
    while 2 * lengths[-1] < length:
        lengths.append(2 * lengths[-1])
    return [*(n for n in lengths if n < 0.9 * length), length]


def cached_attention(q, k, v, mask, distance, slopes, config: ModelConfig, reach: jax.Array):
    """`_attend` of rows with the first positions of a cache, of `cache_lengths` the fewest that are
    enough: what a step reads grows with what was written, and not with what there is room for."""
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
    """Values mixed by the softmax of scores: q [b, t, k, g, h] -> [b, t, k, g, h].

    k, v [b * k, s, h]; mask, distance [b or 1, t, s]; slopes [k, g]. These are products of
    three-dimensional buffers as the KV cache lies in memory: any other order of axes, or a
    reshape on the way, makes XLA's CPU backend copy the cache at every step of decoding (2 to 5
    times the time). The result is divided by the weights' sum, not the weights: it is smaller.
    """
    b, t, n_kv, g, h = q.shape
    rows = jnp.transpose(q, (0, 2, 3, 1, 4)).reshape(b * n_kv, g * t, h)
    scores = jnp.einsum("nrh,nsh->nrs", rows, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(b, n_kv, g, t, -1)
    scores = scores * jnp.float32(config.attention_scale or h**-0.5)
    if config.attention_softcap:
        scores = config.attention_softcap * jnp.tanh(scores / config.attention_softcap)
    if slopes is not None:
        assert distance is not None  # `layers.make_context` has it for ALiBi
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
    """Return the number of blocks in which the queries of t positions are taken."""
    return max(1, min(QUERY_BLOCKS, t // MIN_QUERY_BLOCK))


def causal_attention(q, k, v, mask, distance, slopes, config: ModelConfig) -> jax.Array:
    """`_attend` of rows with themselves, in blocks of queries with the keys up to each block's end.

    Blocks spare the products and exponentials of most masked scores, and each recomputes its
    scores in the backward pass, which therefore keeps nothing of size t * s from layer to layer.
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
    """Return whether cuDNN's attention takes a pass.

    It takes half precision without a soft cap or ALiBi, on GPUs from `call.OLDEST` on, heads of
    multiples of 8 up to 128 (256 from compute capability 9.0 on), and with a mask even numbers of
    positions. `EEJAX_KERNELS=reference` turns it off, as it does kernels.

    Args:
      q: [b, t, k, g, h] queries.
      slopes: [k, g] of ALiBi, or None.
      masked: whether a mask is given that the library does not know by itself.
      config: the model's.
    """
    capability = call.capability()
    if capability is None or capability < call.OLDEST or call.prefers_reference():
        return False
    if slopes is not None or config.attention_softcap:
        return False
    if q.dtype not in (jnp.bfloat16, jnp.float16) or masked and q.shape[1] % 2:
        return False
    return q.shape[-1] % 8 == 0 and q.shape[-1] <= (256 if capability >= 90 else 128)


def use_kernel(config: ModelConfig) -> bool:
    """Return whether one kernel attends to a KV cache and writes it (`kernel_attention`)."""
    return call.by_kernels() and covers(config.dtype, config.head_dim)


def library_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    window: int | None,
    config: ModelConfig,
) -> jax.Array:
    """Mix values by causal attention in cuDNN's fused kernels, which write no scores.

    Args:
      q: [b, t, k, g, h] queries.
      k: [b, t, k, h] keys.
      v: [b, t, k, h] values.
      mask: [b or 1, t, t] where attention is allowed besides; None: wherever it is causal.
      window: positions that a query sees, its own included; None: all before it.
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


class PackedRows(NamedTuple):
    """Rows [t] of several requests, one after the other, and their places in a cache of slots.

    Rows of a slot follow each other in position and are cut into spans of at most `width`, which
    attention takes one by one: it reads the keys and values of those slots alone that have rows, as
    they lie, and those of a span once.

    slot, position [t]: of each row; those beyond the last span belong to nobody. first [n]: of each
    span the first row, ascending; spans: how many there are. The cache has room for width - 1
    positions more than any row's.
    most: rows that a slot has at most, where there may be many spans: then XLA's own operations, on
    anything but a CPU, attend to all slots at once, as starting many small kernels would take
    longer than reading what nobody asked for. None where there are few spans, as of prompts. One
    kernel takes all spans either way (`kernel_attention`).
    """

    slot: jax.Array
    position: jax.Array
    first: jax.Array
    spans: jax.Array
    width: int
    most: int | None = None


KERNEL_SPAN = 64


def spans(start: jax.Array, t: int) -> PackedRows:
    """Lay out t rows of every sequence for `kernel_attention`.

    Args:
      start: [b] int32 position of each sequence's first row.
      t: rows of each.
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
        most=t,
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
    """Mix rows with a KV cache by one kernel, which writes their keys and values into it.

    Args:
      q: [b, t, k, g, h] queries of b t rows, in the order of `packed`.
      k: [b, t, k, h] keys.
      v: [b, t, k, h] values.
      cache: keys and values, [slots * k, s, h] each.
      slopes: [k, g] of ALiBi, or None.
      window: positions that a query sees; None: all before it.
      config: the model's.
      packed: where the rows lie.

    Returns:
      [b, t, k, g, h], and the cache.
    """

    def flat(a):
        return a.reshape(-1, *a.shape[2:])

    rows = packed.slot.shape[0]
    # The kernel starts programs for all spans that there are places for.
    most = rows // packed.width + cache[0].shape[0] // k.shape[2]
    first = packed.first[: min(len(packed.first), most)]
    first = jnp.where(jnp.arange(len(first)) < packed.spans, first, rows)
    options = AttentionOptions(
        width=packed.width,
        most=packed.most or rows,
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
    """Rows' values mixed, and the cache with their keys and values.

    q [t, 1, k, g, h]; k, v [t, 1, k, h]; mask, distance [t, 1, s]; the cache's [slots * k, s, h].
    What is written behind a slot's own rows lies where nobody attends before it is written again.
    """
    by_span = partial(_by_span, slopes=slopes, config=config, packed=packed)
    args = q, *sanitize_kv(k, v), mask, distance, *cache
    if packed.most is None:
        return by_span(*args)
    at_once = partial(_at_once, slopes=slopes, config=config, packed=packed)
    return lax.platform_dependent(*args, cpu=by_span, default=at_once)


def _at_once(
    q, k, v, mask, distance, keys, values, *, slopes, config: ModelConfig, packed: PackedRows
):
    """Attend with `packed.most` rows of every slot, whether they are there or not."""
    n_kv, most, t = k.shape[2], packed.most, q.shape[0]
    assert most is not None  # otherwise spans are taken one by one
    slots = keys.shape[0] // n_kv
    # Rows of a slot lie together: its first is the first of its first span.
    begin = jnp.full((slots,), t, jnp.int32).at[packed.slot].min(jnp.arange(t), mode="drop")
    start = packed.position[jnp.minimum(begin, t - 1)]
    start = jnp.where(begin < t, start, keys.shape[1] - most)  # of nobody: behind everything
    row = jnp.minimum(begin[:, None] + jnp.arange(most)[None], t - 1)  # [slots, most]
    near = None if distance is None else distance[row, 0]
    k, v = write_rows(keys, k[row, 0], start), write_rows(values, v[row, 0], start)
    flat_k, flat_v = k.astype(q.dtype), v.astype(q.dtype)
    reach = jnp.max(packed.position) + 1
    y = cached_attention(q[row, 0], flat_k, flat_v, mask[row, 0], near, slopes, config, reach)
    behind = packed.position - start[jnp.minimum(packed.slot, slots - 1)]
    y = y[jnp.minimum(packed.slot, slots - 1), jnp.clip(behind, 0, most - 1)]
    return y[:, None], (k, v)


def _by_span(q, k, v, mask, distance, *cache, slopes, config: ModelConfig, packed: PackedRows):
    """`packed_attention` of one span after the other."""
    width, n_kv, length = packed.width, k.shape[2], cache[0].shape[1]
    lengths = span_lengths(length)

    def rows(a):  # [t + width - 1, ...]: a span may begin with any row
        return jnp.pad(a[:, 0], [(0, width - 1)] + [(0, 0)] * (a.ndim - 2))

    own = [rows(a) for a in (q, k, v, mask)]
    far = None if distance is None else rows(distance)

    def span(i, carry):
        out, *buffers = carry
        first = packed.first[i]
        slot, start = packed.slot[first] * n_kv, packed.position[first]
        cut = partial(lax.dynamic_slice_in_dim, start_index=first, slice_size=width)
        q, k, v, mask = (cut(a) for a in own)
        distance = None if far is None else cut(far)
        buffers = [  # other slots' rows come along
            lax.dynamic_update_slice(c, jnp.swapaxes(a, 0, 1).astype(c.dtype), (slot, start, 0))
            for c, a in zip(buffers, (k, v), strict=True)
        ]

        def first_positions(n, q, mask, distance, *buffers):
            k, v = (
                lax.dynamic_slice(c, (slot, 0, 0), (n_kv, n, c.shape[2])).astype(q.dtype)
                for c in buffers
            )
            near = None if distance is None else distance[None, :, :n]
            return _attend(q[None], k, v, mask[None, :, :n], near, slopes, config)[0]

        branches = [partial(first_positions, n) for n in lengths]
        which = jnp.minimum(first_bucket(lengths, start + width), len(lengths) - 1)
        y = lax.switch(which, branches, q, mask, distance, *buffers)
        return lax.dynamic_update_slice_in_dim(out, y, first, 0), *buffers

    # Rows of nobody come out as they went in.
    out, *buffers = lax.fori_loop(0, packed.spans, span, (own[0], *cache))
    return out[: q.shape[0], None], tuple(buffers)
