"""The Triton kernels of `decode_attention`: flash decoding.

A program has a span's query rows (a block of them if there are many), a head of keys and values,
and a part of the positions that the span attends to, whose bounds it finds at run time. It goes
through its part a tile at a time and keeps the scores' maximum, the weights' sum and the weighted
values of each row. With several parts, a second kernel merges them in a fixed order.

Cached positions are read from the caches, those of this call from k and v. Rows are written to
positions that no program reads, so programs may run in any order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from eejax.common.lengths import power_of_two
from eejax.kernels import call
from eejax.kernels.decode_attention.reference import AttentionOptions
from eejax.kernels.softcap import tanh

PROGRAMS = 216
"""Two for each multiprocessor of an A100, as in `head_confidence`; fewer programs are split into
parts."""

LONG = 1024
"""Positions from which on a part pays for a merge: then twice as many programs take turns, so that
the others do not wait for a long slot."""

MIN_PART, MAX_PARTS = 64, 64
"""Minimum positions of a part if all slots are full, and maximum parts."""

MAX_ROWS = 64  # maximum query rows of a program
TILE, HOPPER_TILE = 2**13, 2**14
"""Bytes of a tile of keys, and of one of values; the larger size is for up to 16 query rows, from
an H100 on.

It took 15.4 us instead of 18.0 for 8 slots of 560 positions and 16 heads of 128, 8.3 instead of 8.9
for one slot, and 82.0 instead of 83.3 for 64 (bfloat16, one H200). On sm_80 it spills.
"""

MEMORY = 80 * 2**10  # bytes of queries and of tiles in flight

_NEVER = tl.constexpr(-float("inf"))
_LEAST = tl.constexpr(-1e30)
_NAN = tl.constexpr(float("nan"))
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(
    q,
    acc,
    top,
    total,
    keys_ptr,
    values_ptr,
    at,
    j,
    real,
    place,
    slope,
    H: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    GUARD: tl.constexpr,
    PRECISION: tl.constexpr,
    BH: tl.constexpr,
):
    """Add a tile of positions j [BN], where `real`, to the sums of query rows at positions `place`
    [BM].

    The keys and values of the tile are rows `at` [BN] in memory. GUARD: some query rows may not
    attend to some position, so values that are not finite go into the scores instead, which are
    masked.
    """
    i = tl.arange(0, BH)
    here, there = at[:, None] + i[None, :], real[:, None]
    if H != BH:
        there = there & (i < H)[None, :]
    k = tl.load(keys_ptr + here, mask=there, other=0.0)
    v = tl.load(values_ptr + here, mask=there, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
    if SOFTCAP > 0:
        scores = SOFTCAP * tanh(scores * (1.0 / SOFTCAP))
    if SLOPES:
        scores -= slope[:, None] * (place[:, None] - j[None, :]).to(tl.float32)
    if GUARD:
        bad = tl.sum(v.to(tl.float32) * 0.0, 1)  # NaN, or 0 where all are finite
        v = tl.where((bad == 0.0)[:, None], v, 0.0)
        scores += bad[None, :]
    seen = real[None, :]
    if CAUSAL:
        seen = seen & (j[None, :] <= place[:, None])
    if WINDOW > 0:
        seen = seen & (j[None, :] > place[:, None] - WINDOW)
    scores = tl.where(seen, scores * _LOG2E, _NEVER)
    above = tl.maximum(top, tl.max(scores, 1))
    weights, shrink = tl.exp2(scores - above[:, None]), tl.exp2(top - above)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, above, total


@triton.jit
def _clear(
    out_ptr,
    slot_ptr,
    begin,
    end,
    head,
    N_KV: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    SLOTS: tl.constexpr,
    EACH: tl.constexpr,
    BH: tl.constexpr,
):
    """Write zeros as y of the rows without a slot among begin, ..., end - 1, EACH at most."""
    n, i = tl.arange(0, 16), tl.arange(0, BH)
    for c in range(0, EACH, 16):
        row = begin + c + n
        slot = tl.load(slot_ptr + row, mask=row < end, other=0)
        nobody = (row < end) & ((slot < 0) | (slot >= SLOTS))
        if tl.max(nobody.to(tl.int32), 0) > 0:
            for query in range(0, G):
                to = ((row.to(tl.int64) * N_KV + head) * G + query) * H
                zeros = tl.zeros((16, BH), out_ptr.dtype.element_ty)
                both = nobody[:, None] & (i < H)[None, :]
                tl.store(out_ptr + to[:, None] + i[None, :], zeros, mask=both)


@triton.jit
def _write(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    place,
    count,
    N_KV: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    BH: tl.constexpr,
):
    """Write `count` rows of k and v to a slot's caches, from position `place` on.

    A row with values that are not finite writes NaN keys and no values.
    """
    n, i = tl.arange(0, 16), tl.arange(0, BH)
    for c in range(0, count, 16):
        row = c + n
        both = ((row < count) & (place + row < S))[:, None] & (i < H)[None, :]
        at = row[:, None] * (N_KV * H) + i[None, :]
        to = (place + row)[:, None] * H + i[None, :]
        k = tl.load(k_ptr + at, mask=both)
        v = tl.load(v_ptr + at, mask=both, other=0.0)
        finite = (tl.sum(v.to(tl.float32) * 0.0, 1) == 0.0)[:, None]
        k = tl.where(finite, k.to(tl.float32), _NAN).to(k.dtype)
        tl.store(keys_ptr + to, k, mask=both)
        tl.store(values_ptr + to, tl.where(finite, v, 0.0), mask=both)


@triton.jit
def decode_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    old_keys_ptr,
    old_values_ptr,
    slot_ptr,
    position_ptr,
    first_ptr,
    slopes_ptr,
    out_ptr,
    sums_ptr,
    keys_ptr,
    values_ptr,
    R: tl.constexpr,
    N_KV: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    S: tl.constexpr,
    SLOTS: tl.constexpr,
    SPANS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BO: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
    BW: tl.constexpr,
    BR: tl.constexpr,
):
    """Attend from a block of a span's rows to a part of the positions, for one head.

    out: y [R, N_KV, G, H], or acc [PARTS, R, N_KV, G, H] float32 beside sums [2, PARTS, R, N_KV, G]
    of maxima and totals. keys, values: the caches' memory, or copies.
    """
    if keys_ptr is None:
        keys_ptr = old_keys_ptr
    if values_ptr is None:
        values_ptr = old_values_ptr
    block, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PARTS == 1:  # otherwise the merge does it
        each: tl.constexpr = (R + SPANS * BLOCKS - 1) // (SPANS * BLOCKS)
        _clear(
            out_ptr,
            slot_ptr,
            block * each,
            tl.minimum(block * each + each, R),
            head,
            N_KV,
            G,
            H,
            SLOTS,
            each,
            BH,
        )

    # The span's rows: begin, ..., begin + count - 1, from position p on.
    begin = tl.load(first_ptr + block // BLOCKS)
    if (begin < 0) | (begin >= R):
        return
    others, w, back = tl.arange(0, BS), tl.arange(0, BW), tl.arange(0, BR)
    first = tl.load(first_ptr + others, mask=others < SPANS, other=R)
    after = tl.minimum(tl.min(tl.where(first > begin, first, R), 0), R)
    slot, p = tl.load(slot_ptr + begin), tl.load(position_ptr + begin)
    if (slot < 0) | (slot >= SLOTS):
        return
    row = begin + w
    of = tl.load(slot_ptr + row, mask=(w < WIDTH) & (row < after), other=-1)
    count = tl.sum((of == slot).to(tl.int32), 0)
    row = begin - 1 - back
    of = tl.load(slot_ptr + row, mask=row >= 0, other=-1)
    before = tl.sum((of == slot).to(tl.int32), 0)  # rows of the slot
    start = p - before
    cache = (slot.to(tl.int64) * N_KV + head) * (S * H)
    keys_ptr += cache
    values_ptr += cache

    if (part == PARTS - 1) & (block % BLOCKS == 0):  # the part with the least work
        own = (begin.to(tl.int64) * N_KV + head) * H
        _write(k_ptr + own, v_ptr + own, keys_ptr, values_ptr, p, count, N_KV, H, S, BH)

    # The block's query rows, and the part [low, high) of the positions that they attend to.
    m = block % BLOCKS * BM + tl.arange(0, BM)
    top_row = block % BLOCKS * BM // G
    if top_row >= count:
        return
    end = p + tl.minimum(count, (block % BLOCKS * BM + BM - 1) // G + 1)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(p + top_row - WINDOW + 1, 0)
    size = tl.cdiv(tl.cdiv(end - low, PARTS), BN) * BN
    low = low + part * size
    high = tl.minimum(low + size, end)
    real, place = m // G < count, p + m // G
    at, i = m // G * (N_KV * G * H) + m % G * H, tl.arange(0, BH)
    to = (begin.to(tl.int64) * N_KV + head) * (G * H) + at[:, None] + i[None, :]
    both = real[:, None] & (i < H)[None, :]
    q = tl.load(q_ptr + to, mask=both, other=0.0)
    slope = tl.zeros((BM,), tl.float32)
    if SLOPES:
        slope = tl.load(slopes_ptr + head * G + m % G)
    acc = tl.zeros((BM, BH), tl.float32)
    top, total = tl.full((BM,), _LEAST, tl.float32), tl.zeros((BM,), tl.float32)
    n = tl.arange(0, BN)
    old = tl.minimum(high, start)
    for c in tl.range(low, old, BN):
        acc, top, total = _tile(
            q,
            acc,
            top,
            total,
            keys_ptr,
            values_ptr,
            (c + n) * H,
            c + n,
            c + n < old,
            place,
            slope,
            H,
            SCALE,
            SOFTCAP,
            SLOPES,
            WINDOW,
            False,
            WINDOW > 0 and WIDTH > 1,
            PRECISION,
            BH,
        )
    o = tl.arange(0, BO)
    own = ((begin - before).to(tl.int64) * N_KV + head) * H
    # Two stages even if it runs once: with one, Triton 3.6 spills a register on sm_90.
    for c in tl.range(tl.maximum(low, start), high, BO, num_stages=2):
        acc, top, total = _tile(
            q,
            acc,
            top,
            total,
            k_ptr + own,
            v_ptr + own,
            (c + o - start) * (N_KV * H),
            c + o,
            c + o < high,
            place,
            slope,
            H,
            SCALE,
            SOFTCAP,
            SLOPES,
            WINDOW,
            True,
            True,
            PRECISION,
            BH,
        )
    if PARTS == 1:
        y = acc / tl.where(real, total, 1.0)[:, None]
        tl.store(out_ptr + to, y.to(out_ptr.dtype.element_ty), mask=both)
    else:
        rows: tl.constexpr = R * N_KV * G
        if low < high:
            tl.store(out_ptr + part.to(tl.int64) * (rows * H) + to, acc, mask=both)
        sums = (begin * N_KV + head) * G + m // G * (N_KV * G) + m % G + part * rows
        tl.store(sums_ptr + sums, top, mask=real)
        tl.store(sums_ptr + PARTS * rows + sums, total, mask=real)


@triton.jit
def decode_attention_merge_kernel(
    acc_ptr,
    sums_ptr,
    slot_ptr,
    y_ptr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    BP: tl.constexpr,
    BH: tl.constexpr,
):
    """Merge the parts of one query row of ROWS, with HEADS of them per row, into y.

    A row without a slot gets zeros.
    """
    row, part, i = tl.program_id(0), tl.arange(0, BP), tl.arange(0, BH)
    slot = tl.load(slot_ptr + row // HEADS)
    there = (part < PARTS) & (slot >= 0) & (slot < SLOTS)
    top = tl.load(sums_ptr + part * ROWS + row, mask=there, other=_NEVER)
    total = tl.load(sums_ptr + (PARTS + part) * ROWS + row, mask=there, other=0.0)
    there = there & (total != 0.0)  # an empty part wrote nothing else
    at = (part.to(tl.int64) * ROWS + row) * H
    acc = tl.load(
        acc_ptr + at[:, None] + i[None, :], mask=there[:, None] & (i < H)[None, :], other=0.0
    )
    most = tl.max(top, 0)
    share = tl.exp2(top - tl.where(most == _NEVER, 0.0, most))
    total = tl.where((slot >= 0) & (slot < SLOTS), tl.sum(total * share, 0), 1.0)
    y = tl.sum(acc * share[:, None], 0) / total
    tl.store(y_ptr + row.to(tl.int64) * H + i, y.to(y_ptr.dtype.element_ty), mask=i < H)


def decode_attention(
    launch, options: AttentionOptions, q, k, v, keys, values, slot, position, first, slopes
):
    """Run `reference.decode_attention` by kernels that `launch` starts."""
    (r, n_kv, g, h), s, spans = q.shape, keys.shape[1], first.shape[0]
    precision = call.precision(q.dtype)
    if precision == "ieee":  # without tensor cores a tile's products do not fit into registers
        precision = "tf32x3"
    exact = precision == "tf32x3"
    own = sizes(options, spans, n_kv, g, h, s, q.dtype.itemsize, exact)
    parts, slots = own["PARTS"], keys.shape[0] // n_kv

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    out = jax.ShapeDtypeStruct(q.shape, q.dtype) if parts == 1 else of(parts, *q.shape)
    sums = of(1) if parts == 1 else of(2, parts, r, n_kv, g)
    caches = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (keys, values)]
    out, sums, keys, values = launch(
        q,
        k,
        v,
        keys,
        values,
        slot,
        position,
        first,
        q if slopes is None else slopes,
        kernel=decode_attention_kernel,
        grid=(spans * own["BLOCKS"], n_kv, parts),
        out=[out, sums, *caches],
        aliases={3: 2, 4: 3},
        R=r,
        N_KV=n_kv,
        G=g,
        H=h,
        S=s,
        SLOTS=slots,
        SPANS=spans,
        WIDTH=options.width,
        SCALE=options.scale,
        SOFTCAP=options.softcap or 0.0,
        SLOPES=slopes is not None,
        WINDOW=options.window or 0,
        PRECISION=precision,
        BS=power_of_two(spans),
        BW=power_of_two(options.width),
        BR=power_of_two(min(r, options.max_rows)),
        **own,
    )
    if parts == 1:
        return out, keys, values
    (y,) = launch(
        out,
        sums,
        slot,
        kernel=decode_attention_merge_kernel,
        grid=(r * n_kv * g,),
        out=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        ROWS=r * n_kv * g,
        HEADS=n_kv * g,
        H=h,
        SLOTS=slots,
        PARTS=parts,
        BP=power_of_two(parts),
        BH=own["BH"],
        warps=4 if parts * h <= 2**13 else 8,
    )
    return y, keys, values


def sizes(
    options: AttentionOptions,
    spans: int,
    n_kv: int,
    g: int,
    h: int,
    s: int,
    size: int,
    exact: bool = False,
) -> dict[str, int]:
    """Return sizes of tiles, numbers of blocks and parts, and how the loop over s positions runs.

    `size` is the bytes of a number. `exact` says that float32 products are exact, of which
    registers hold fewer. Warps and rows are chosen such that no register spills on sm_80 and sm_90.
    """

    def least(a):
        return max(16, power_of_two(a))

    bh, rows = least(h), options.width * g
    bm = min(MAX_ROWS if size == 2 else 16 if exact else MAX_ROWS // 2, least(rows))
    hopper = (call.capability() or 0) >= 90
    tile = HOPPER_TILE if hopper and bm == 16 and size == 2 else TILE
    bn = min(max(16, tile // (bh * size)), 128 // size, least(s))
    blocks, bo = call.cdiv(rows, bm), min(16, bn)
    reach = s if options.window is None else min(s, options.window + options.width)
    programs = spans * blocks * n_kv
    parts = min(PROGRAMS // programs, call.cdiv(reach, MIN_PART))
    if reach > LONG * max(1, parts):
        parts = max(parts, min(2 * PROGRAMS // programs, call.cdiv(reach, LONG)))
    wide = bm * bh > 2**13 if size == 2 else exact or bh == 128 or (bm > 16 and bh != 256)
    stages = 1 + (MEMORY - bm * bh * size) // (2 * bn * bh * size)
    return dict(
        BLOCKS=blocks,
        PARTS=max(1, min(parts, MAX_PARTS)),
        BM=bm,
        BN=bn,
        BO=bo,
        BH=bh,
        stages=max(2, min(stages, 4)),
        warps=8 if wide else 4,
    )
