"""Triton kernels of `linear_cross_entropy`.

Each chunk of tokens takes one kernel that multiplies, a pass over what it kept, and two products
that XLA passes to cuBLAS: three products, as in plain autodiff, without its logits.

Per chunk of c tokens, with g [c, v] in h's dtype (2 bytes) in place of float32 logits:

    statistics    y = h @ table.T      2 c v d flops; exp(y - peak of the tile) kept: 2 c v bytes
    gradient      g, in place          4 c v bytes
    d_h           g @ table            2 c v d flops
    d_table      += g.T @ h            2 c v d flops; 8 v d bytes, read and written in float32

The alternative keeps nothing, recomputes the logits of a slice of the vocabulary once the whole
normaliser is known, and needs no float32 sums of the table's gradient, but 4 products.
With F flops and B bytes a second the fourth product takes 2 c v d / F a chunk and the sums
8 v d / B, so that keeping is faster from c = 4 F / B tokens on: 480 on an A100 (230 TFLOP/s of
312, 1.9 TB/s), 830 on an H100 (600 TFLOP/s of 990, 2.9 TB/s). `api.SCRATCH`, 512 MiB, holds 5300
tokens at v = 50k, 2048 at 128k, 1024 at 256k. In ms at n = 8192, three products plus the rest
against recomputing:

                           A100                                H100
    d 1024, v 50304        11 + 2 = 13, recomputing 15         4.2 + 1.2 = 5.4, recomputing 6.1
    d 4096, v 128256       112 + 12 = 124, recomputing 153     43 + 8 = 51, recomputing 60
    d 4096, v 256000       224 + 42 = 266, recomputing 305     86 + 27 = 113, recomputing 119

Kernels that form both gradients without writing g need 5 products. These times are calculated, for
a kernel as fast as cuBLAS.

Nothing is added up by atomics, so runs are bitwise equal: a row's tiles have separate places, which
`api` combines.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from eejax.common.lengths import power_of_two
from eejax.kernels import call
from eejax.kernels.linear_cross_entropy import reference
from eejax.kernels.linear_cross_entropy.reference import LossOptions, TileStatistics
from eejax.kernels.softcap import tanh

NEGATIVE, FLOOR = tl.constexpr(reference.NEGATIVE), tl.constexpr(reference.FLOOR)

ROWS = 128  # rows of a program
# With narrower states a program takes half of the rows: two programs fit a multiprocessor, of which
# one multiplies while the other takes exponentials and writes.
WIDE = 768
GROUP = 16  # blocks of rows that go through the vocabulary together, to read the table once
DEEP = 147_456  # bytes of shared memory of a large program's tiles of 64 columns of states
ELEMENTS = 8192  # elements of a program that only reads and writes


@triton.jit
def _product(
    h_ptr,
    table_ptr,
    y,
    row,
    column,
    N: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
):
    """Return y [BN, BV] + h [N, D] @ table [V, D].T, for rows from `row` and columns from `column`
    on.

    Beyond N and V, where the result is unused, the last row or column is repeated. D is a multiple
    of BD.
    """
    i, j, part = tl.arange(0, BN), tl.arange(0, BV), tl.arange(0, BD)[None, :]
    # Offsets within a block fit 32 bits, and half the registers of pointers.
    h_at = tl.minimum(i, N - 1 - row)[:, None] * D + part
    table_at = tl.minimum(j, V - 1 - column)[:, None] * D + part
    h_ptr += row.to(tl.int64) * D
    table_ptr += column.to(tl.int64) * D
    for k in range(0, D, BD):
        h, table = tl.load(h_ptr + k + h_at), tl.load(table_ptr + k + table_at)
        y = tl.dot(h, tl.trans(table), y, input_precision=PRECISION)
    return y


@triton.jit
def statistics_kernel(
    h_ptr,
    table_ptr,
    bias_ptr,
    labels_ptr,
    count_ptr,
    peaks_ptr,
    totals_ptr,
    picked_ptr,
    kept_ptr,
    N: tl.constexpr,
    D: tl.constexpr,
    V: tl.constexpr,
    CAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
):
    """Compute statistics of a block of rows and a tile of columns."""
    blocks: tl.constexpr = (N + BN - 1) // BN
    tiles: tl.constexpr = (V + BV - 1) // BV
    group, i = tl.program_id(0) // (GROUP * tiles), tl.program_id(0) % (GROUP * tiles)
    high = tl.minimum(blocks - group * GROUP, GROUP)
    tile = i // high
    block = group * GROUP + i % high
    row, column = block * BN + tl.arange(0, BN), tile * BV + tl.arange(0, BV)
    y = tl.zeros((BN, BV), tl.float32)
    if BIAS:  # first, while registers are free
        y += tl.load(bias_ptr + column, mask=column < V, other=0.0)[None, :]
    y = _product(h_ptr, table_ptr, y, block * BN, tile * BV, N, D, V, PRECISION, BN, BV, BD)
    real, inside = row < N, (column < tl.load(count_ptr))[None, :]
    if CAP is not None:
        y = CAP * tanh(y * (1.0 / CAP))
    if TEMPERATURE != 1.0:
        y *= 1.0 / TEMPERATURE
    y = tl.where(inside, y, NEGATIVE)
    label = tl.load(labels_ptr + row, mask=real, other=-1)
    here = (label >= tile * BV) & (label < tile * BV + BV)
    picked = tl.zeros((BN,), tl.float32)
    if tl.max(here.to(tl.int32), 0) > 0:  # few tiles have a label of their rows
        picked = tl.sum(tl.where(column[None, :] == label[:, None], y, 0.0), 1)
    # Every row is written once; the first tile writes rows whose label no tile has.
    tl.store(picked_ptr + row, picked, mask=real & (here | ((label < 0) & (tile == 0))))
    peak = tl.maximum(tl.max(y, 1), FLOOR)
    e = tl.exp(y - peak[:, None])
    tl.store(peaks_ptr + tile * N + row, peak, mask=real)
    tl.store(totals_ptr + tile * N + row, tl.sum(e, 1), mask=real)
    if KEEP:
        if CAP is not None:
            slope = tl.maximum(y * (TEMPERATURE / CAP), -1.0)  # masked logits are far below it
            e *= 1.0 - slope * slope
        tl.store(
            kept_ptr + row[:, None].to(tl.int64) * V + column[None, :],
            e.to(kept_ptr.dtype.element_ty),
            mask=real[:, None] & (column < V)[None, :],
        )


@triton.jit
def gradient_kernel(
    kept_ptr,
    peaks_ptr,
    lse_ptr,
    rise_ptr,
    own_ptr,
    labels_ptr,
    g_ptr,
    d_bias_ptr,
    N: tl.constexpr,
    V: tl.constexpr,
    BIAS: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
):
    """Compute the gradient of a block of rows and a tile of columns; g overwrites what was kept."""
    if g_ptr is None:
        g_ptr = kept_ptr
    tiles: tl.constexpr = (V + BV - 1) // BV
    tile, block = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row, column = block * BN + tl.arange(0, BN), tile * BV + tl.arange(0, BV)
    real, inside = row < N, column < V
    both = real[:, None] & inside[None, :]
    at = row[:, None].to(tl.int64) * V + column[None, :]
    peak = tl.load(peaks_ptr + tile * N + row, mask=real, other=0.0)
    lse = tl.load(lse_ptr + row, mask=real, other=0.0)
    factor = tl.exp(peak - lse) * tl.load(rise_ptr + row, mask=real, other=0.0)
    g = tl.load(kept_ptr + at, mask=both, other=0.0).to(tl.float32) * factor[:, None]
    label = tl.load(labels_ptr + row, mask=real, other=-1)
    own = tl.load(own_ptr + row, mask=real, other=0.0)
    g = tl.where(column[None, :] == label[:, None], own[:, None], g)
    tl.store(g_ptr + at, g.to(g_ptr.dtype.element_ty), mask=both)
    if BIAS:
        tl.store(d_bias_ptr + block.to(tl.int64) * V + column, tl.sum(g, 0), mask=inside)


def statistics(
    launch, options: LossOptions, keep: bool, h, table, bias, labels, count
) -> TileStatistics:
    """Compute `reference.statistics` with a kernel that `launch` runs."""
    (n, d), v = h.shape, table.shape[0]
    single = h.dtype == jnp.float32
    bv = reference.tile(options, h.dtype)
    bn = min(ROWS if d >= WIDE else ROWS // 2, max(16, power_of_two(n)))
    tiles = call.cdiv(v, bv)
    deep = bn == ROWS and call.shared_memory() >= DEEP
    shapes = (tiles, n), (tiles, n), (n,), (n, v) if keep else (1, 1)
    dtypes = jnp.float32, jnp.float32, jnp.float32, h.dtype
    peaks, totals, picked, kept = launch(
        h,
        table,
        table if bias is None else bias,
        labels,
        count,
        kernel=statistics_kernel,
        grid=(call.cdiv(n, bn) * tiles,),
        out=list(map(jax.ShapeDtypeStruct, shapes, dtypes)),
        N=n,
        D=d,
        V=v,
        CAP=options.softcap,
        TEMPERATURE=options.temperature,
        BIAS=bias is not None,
        KEEP=keep,
        PRECISION=call.precision(h.dtype),
        GROUP=GROUP,
        BN=bn,
        BV=bv,
        BD=16 if single else 64 if deep else 32,
        warps=4 if bn <= 32 else 8,
        stages=3 if single else 4,
    )
    return TileStatistics(peaks, totals, picked, kept if keep else None)


def gradient(launch, options: LossOptions, kept, peaks, lse, rise, own, labels, bias):
    """Compute `reference.gradient` with a kernel that `launch` runs."""
    n, v = kept.shape
    bv = reference.tile(options, kept.dtype)
    bn = ELEMENTS // bv
    blocks = call.cdiv(n, bn)
    sums = (1, 1) if bias is None else (blocks, v)
    g, d_bias = launch(
        kept,
        peaks,
        lse,
        rise,
        own,
        labels,
        kernel=gradient_kernel,
        grid=(call.cdiv(v, bv) * blocks,),
        aliases={0: 0},
        N=n,
        V=v,
        BIAS=bias is not None,
        out=[jax.ShapeDtypeStruct(kept.shape, kept.dtype), jax.ShapeDtypeStruct(sums, jnp.float32)],
        BN=bn,
        BV=bv,
        warps=8,
    )
    return g, None if bias is None else d_bias.sum(0)
