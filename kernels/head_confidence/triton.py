"""Triton kernels of `head_confidence`.

A program has a block of rows and a span of the vocabulary, and reads its span of the table once, a
tile of logits at a time, which it reduces to five numbers for each row. There are about as many
programs as run at once, all with spans of the same size, so that none waits for another. A second
kernel merges the numbers of a row, always in the same order.

Tiles of logits and their steps through d are one loop instead of two, so that the loads of the next
tile are in flight while one is finished; this also takes half as many registers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from eejax.common.lengths import power_of_two
from eejax.kernels import call, norms
from eejax.kernels.head_confidence.reference import LOWEST, HeadConfidenceOptions, LogitStatistics
from eejax.kernels.softcap import tanh

PROGRAMS = 216
"""Two for each multiprocessor of an A100, so that all run at once there; an H100 has room for 264.
That is enough for full bandwidth, as loads stay in flight."""

MIN_SPAN = 16
"""Rows of the table: the minimum of a product."""

FUSED_ROWS = 16
"""Up to this many rows are normed as they are read, which saves a separate kernel. More are normed
beforehand: on an H100, tensor cores would wait for operands from registers.
"""

_LOWEST = tl.constexpr(LOWEST)
_NONE = tl.constexpr(2**31 - 1)
_NEVER = tl.constexpr(-float("inf"))


@triton.jit
def _read(x_ptr, row, at, N: tl.constexpr, D: tl.constexpr):
    """Load states [BN, BD] of rows and columns, 0 beyond them."""
    both = (row < N)[:, None] & (at < D)[None, :]
    return tl.load(x_ptr + row[:, None].to(tl.int64) * D + at[None, :], mask=both, other=0.0)


@triton.jit
def _moments(
    x_ptr,
    row,
    N: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    LAYER: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    """Return means [BN] of rows, 0 for RMSNorm, and one over their standard deviations [BN]."""
    i = tl.arange(0, BD)
    shift = tl.zeros((BN,), tl.float32)
    if LAYER:  # relative to the mean of the first tile, so that a large mean costs no precision
        shift = tl.sum(_read(x_ptr, row, i, N, D).to(tl.float32), 1) / min(BD, D)
    total, square = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for k in tl.range(0, D, BD, loop_unroll_factor=4):
        y = _read(x_ptr, row, k + i, N, D).to(tl.float32)
        if LAYER:
            y = tl.where((k + i < D)[None, :], y - shift[:, None], 0.0)
            total += tl.sum(y, 1)
        square += tl.sum(y * y, 1)
    off = total / D
    variance = tl.maximum(square / D - off * off, 0.0)
    return shift + off, tl.rsqrt(variance + EPS)


@triton.jit
def _normed(
    x,
    scale_ptr,
    bias_ptr,
    at,
    mean,
    inverse,
    D: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """Norm columns `at` [BD] of states, and round them as `norms.norm` does."""
    scale = tl.load(scale_ptr + at, mask=at < D, other=0.0).to(tl.float32)
    if PLUS_ONE:
        scale = scale + 1.0
    y = x.to(tl.float32)
    if LAYER:
        y = y - mean[:, None]
    y = y * inverse[:, None] * scale[None, :]
    if BIAS:
        y = y + tl.load(bias_ptr + at, mask=at < D, other=0.0).to(tl.float32)[None, :]
    return y.to(x.dtype)


@triton.jit
def _below(y, peak):
    """Compute `reference._below` without a maximum: on a GPU a maximum loses NaN."""
    z = y - tl.where(peak > _NEVER, peak, 0.0)
    return tl.where(z < _LOWEST, _LOWEST, z)


@triton.jit
def head_statistics_kernel(
    x_ptr,
    scale_ptr,
    bias_ptr,
    table_ptr,
    head_bias_ptr,
    allowed_ptr,
    peak_ptr,
    token_ptr,
    second_ptr,
    total_ptr,
    weighted_ptr,
    N: tl.constexpr,
    D: tl.constexpr,
    SPAN: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    HEAD_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    TILES: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Compute `LogitStatistics` of a block of rows and SPAN table rows, [programs, N] each."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    begin = tl.program_id(1) * SPAN
    end = tl.minimum(begin + SPAN, tl.load(allowed_ptr))
    mean, inverse = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    if NORM:
        mean, inverse = _moments(x_ptr, row, N, D, EPS, LAYER, BN, BD)
    peak = tl.full((BN,), _NEVER, tl.float32)
    second = tl.full((BN,), _NEVER, tl.float32)
    token = tl.zeros((BN,), tl.int32)
    total, weighted = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    i, product = tl.arange(0, BD), tl.zeros((BN, BV), tl.float32)
    for step in range(TILES * STEPS):
        at = step % STEPS * BD + i
        column = begin + step // STEPS * BV + tl.arange(0, BV)
        inside = column < end
        here = table_ptr + column[:, None].to(tl.int64) * D + at[None, :]
        table = tl.load(here, mask=inside[:, None] & (at < D)[None, :], other=0.0)
        x = _read(x_ptr, row, at, N, D)
        if NORM:
            x = _normed(x, scale_ptr, bias_ptr, at, mean, inverse, D, LAYER, BIAS, PLUS_ONE)
        product = tl.dot(x, tl.trans(table), product, input_precision=PRECISION)
        if step % STEPS == STEPS - 1:
            y = product
            product = tl.zeros((BN, BV), tl.float32)
            if HEAD_BIAS:
                y += tl.load(head_bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            if SOFTCAP > 0:
                y = SOFTCAP * tanh(y * (1.0 / SOFTCAP))
            if TEMPERATURE != 1.0:
                y = y * (1.0 / TEMPERATURE)
            y = tl.where(inside[None, :], y, _NEVER)
            own = tl.max(y, 1)
            index = tl.min(tl.where(y == own[:, None], column[None, :], _NONE), 1)
            other = tl.max(tl.where(column[None, :] == index[:, None], _NEVER, y), 1)
            before = peak
            second = tl.maximum(tl.maximum(second, other), tl.minimum(peak, own))
            token = tl.where(own > peak, index, token)
            peak = tl.maximum(peak, own)
            z = _below(before, peak)
            e = tl.exp(z)
            weighted = e * (weighted + z * total)
            total = e * total
            z = _below(y, peak[:, None])
            e = tl.exp(z)
            weighted += tl.sum(e * z, 1)
            total += tl.sum(e, 1)
    to = tl.program_id(1) * N + row
    tl.store(peak_ptr + to, peak, mask=row < N)
    tl.store(token_ptr + to, token, mask=row < N)
    tl.store(second_ptr + to, second, mask=row < N)
    tl.store(total_ptr + to, total, mask=row < N)
    tl.store(weighted_ptr + to, weighted, mask=row < N)


@triton.jit
def head_merge_kernel(
    peaks_ptr,
    tokens_ptr,
    seconds_ptr,
    totals_ptr,
    weighteds_ptr,
    peak_ptr,
    token_ptr,
    second_ptr,
    total_ptr,
    weighted_ptr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
):
    """Run `reference.merge` on [PARTS, N] for a block of rows."""
    row, part = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BP)
    at = part[:, None] * N + row[None, :]
    both = (part < PARTS)[:, None] & (row < N)[None, :]
    peaks = tl.load(peaks_ptr + at, mask=both, other=_NEVER)
    tokens = tl.load(tokens_ptr + at, mask=both, other=_NONE)
    seconds = tl.load(seconds_ptr + at, mask=both, other=_NEVER)
    totals = tl.load(totals_ptr + at, mask=both, other=0.0)
    weighteds = tl.load(weighteds_ptr + at, mask=both, other=0.0)
    peak = tl.max(peaks, 0)
    token = tl.min(tl.where(peaks == peak[None, :], tokens, _NONE), 0)
    second = tl.max(tl.where(tokens == token[None, :], seconds, peaks), 0)
    z = _below(peaks, peak[None, :])
    e = tl.exp(z)
    tl.store(peak_ptr + row, peak, mask=row < N)
    tl.store(token_ptr + row, token, mask=row < N)
    tl.store(second_ptr + row, second, mask=row < N)
    tl.store(total_ptr + row, tl.sum(e * totals, 0), mask=row < N)
    tl.store(weighted_ptr + row, tl.sum(e * (weighteds + z * totals), 0), mask=row < N)


def statistics(launch, options: HeadConfidenceOptions, x, scale, bias, table, head_bias, allowed):
    """Compute `reference.statistics` with kernels that `launch` runs."""
    (n, d), rows, norm = x.shape, table.shape[0], options.norm
    if norm is not None and n > FUSED_ROWS:
        x, norm = norms.norm(x, scale, bias, norm), None
    blocks = _blocks(n, d, rows, x.dtype.itemsize)
    own = blocks | dict(
        N=n,
        D=d,
        NORM=norm is not None,
        EPS=norm.eps if norm else 0.0,
        LAYER=bool(norm) and norm.kind == "layernorm",
        BIAS=bool(norm) and bias is not None,
        PLUS_ONE=bool(norm) and norm.plus_one,
        HEAD_BIAS=head_bias is not None,
        SOFTCAP=float(options.softcap or 0),
        TEMPERATURE=float(options.temperature),
        PRECISION=call.precision(x.dtype),
    )
    programs = call.cdiv(rows, blocks["SPAN"])
    given = [x if a is None else a for a in (scale, bias, table.astype(x.dtype), head_bias)]
    parts = launch(
        x,
        *given,
        allowed,
        kernel=head_statistics_kernel,
        grid=(call.cdiv(n, blocks["BN"]), programs),
        out=_results(programs, n),
        **own,
    )
    if programs == 1:
        return LogitStatistics(*(a[0] for a in parts))
    bn = min(4, power_of_two(n))
    merged = launch(
        *parts,
        kernel=head_merge_kernel,
        grid=(call.cdiv(n, bn),),
        out=_results(n),
        N=n,
        PARTS=programs,
        BN=bn,
        BP=power_of_two(programs),
    )
    return LogitStatistics(*merged)


def _blocks(n: int, d: int, rows: int, size: int) -> dict[str, int]:
    """Split n rows of width d and the table's rows into programs, and these into tiles of 16 KiB.

    Many rows of x share a read of a table's tile, and x is read once per tile: the more rows, the
    wider a tile is in the vocabulary and the narrower in d, as registers allow.
    """

    def least(a):
        return max(16, power_of_two(a))

    bn = min(64, least(n))
    blocks = call.cdiv(n, bn)
    # With one block all programs run at once; with many they should end at about the same time.
    programs = PROGRAMS if blocks == 1 else call.cdiv(4 * PROGRAMS, blocks)
    span = call.cdiv(call.cdiv(rows, programs), MIN_SPAN) * MIN_SPAN
    bv, width = (64, 256) if bn < 64 else (128 if size == 2 else 64, 128)
    bv, bd = min(bv, least(span)), min(width // size, least(d))
    return dict(BN=bn, BV=bv, BD=bd, SPAN=span, TILES=call.cdiv(span, bv), STEPS=call.cdiv(d, bd))


def _results(*shape: int) -> list[jax.ShapeDtypeStruct]:
    """Return shapes of `LogitStatistics`."""
    dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.float32)
    return [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes]
