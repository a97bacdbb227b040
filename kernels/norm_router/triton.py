"""Triton kernels of `norm_router`.

There is one pass over d. It multiplies states times the norm's scale with `down`, and divides the
sums at the end by the variance, which is known only then. For LayerNorm states are taken relative
to the mean of their first tile, so that a large mean costs no precision. The rest of the mean is
subtracted at the end, times the scale's own product with `down`.

Float16 holds states, but not always their products with scales. These are taken relative to the
largest of them, by which the sums are multiplied at the end.

Few rows would keep few multiprocessors busy, so they are split along d, and a second kernel adds
up.
"""

# pyright: reportGeneralTypeIssues=false
# Triton types jitted functions as never returning.

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from eejax.common.lengths import power_of_two
from eejax.kernels import call
from eejax.kernels.norms import NormOptions

BLOCKS = 64  # fewer blocks of rows than this are split along d
MAX_CUTS = 32


@triton.jit
def _scales(scale_ptr, at, inside, PLUS_ONE: tl.constexpr):
    scale = tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        scale = tl.where(inside, scale + 1.0, 0.0)
    return scale


@triton.jit
def _sums(
    x_ptr,
    scale_ptr,
    bias_ptr,
    down_ptr,
    row,
    begin,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    SPAN: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
):
    """Sum over SPAN columns from `begin` of rows [BN].

    Returns products [BN, BR] of (x - shift) * scale, the sums [BN] of x - shift and of its square,
    and the products [BR] of scale and bias.
    """
    real = row < N
    here, i = row[:, None].to(tl.int64) * D, tl.arange(0, BD)
    wide = tl.arange(0, BR)
    shift = tl.zeros((BN,), tl.float32)
    if LAYER:
        first = tl.load(x_ptr + here + i[None, :], mask=real[:, None] & (i < D)[None, :], other=0.0)
        shift = tl.sum(first.to(tl.float32), 1) / min(BD, D)
    half: tl.constexpr = down_ptr.dtype.element_ty == tl.float16
    most = 1.0
    if half:
        largest = tl.zeros((BD,), tl.float32)
        for k in tl.range(0, SPAN, BD, num_stages=1):
            at = begin + k + i
            largest = tl.maximum(largest, tl.abs(_scales(scale_ptr, at, at < D, PLUS_ONE)))
        most = tl.maximum(tl.max(largest, 0), 1e-30) * (2.0 if LAYER else 1.0)  # x - shift: twice x
    shrink = 1.0 / most
    product = tl.zeros((BN, BR), tl.float32)
    total, square = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    of_scale, of_bias = tl.zeros((BR,), tl.float32), tl.zeros((BR,), tl.float32)
    for k in range(0, SPAN, BD):
        at = begin + k + i
        inside = at < D
        both = real[:, None] & inside[None, :]
        x = tl.load(x_ptr + here + at[None, :], mask=both, other=0.0)
        down = tl.load(
            down_ptr + at[:, None] * R + wide[None, :],
            mask=inside[:, None] & (wide < R)[None, :],
            other=0.0,
        )
        scale = _scales(scale_ptr, at, inside, PLUS_ONE)
        y = x.to(tl.float32)
        if LAYER:
            y = tl.where(both, y - shift[:, None], 0.0)
            total += tl.sum(y, 1)
            of_scale += tl.sum(down.to(tl.float32) * scale[:, None], 0)
        if BIAS:
            bias = tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
            of_bias += tl.sum(down.to(tl.float32) * bias[:, None], 0)
        square += tl.sum(y * y, 1)
        if half:
            scale = scale * shrink
        y = (y * scale[None, :]).to(down.dtype)
        product = tl.dot(y, down, product, input_precision=PRECISION)
    if half:
        product *= most
    return product, total, square, of_scale, of_bias


@triton.jit
def _decide(
    product,
    total,
    square,
    of_scale,
    of_bias,
    up_ptr,
    up_bias_ptr,
    threshold_ptr,
    confidence_ptr,
    leaves_ptr,
    row,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    EPS: tl.constexpr,
    BR: tl.constexpr,
):
    """Compute confidences of rows from the results of `_sums` over all columns."""
    wide, real = tl.arange(0, BR), row < N
    mean = total / D
    variance = tl.maximum(square / D - mean * mean, 0.0)
    h = product - mean[:, None] * of_scale[None, :]
    h = h * tl.rsqrt(variance + EPS)[:, None] + of_bias[None, :]
    up = tl.load(up_ptr + wide, mask=wide < R, other=0.0).to(tl.float32)
    logit = tl.sum(h * tl.sigmoid(h) * up[None, :], 1) + tl.load(up_bias_ptr).to(tl.float32)
    confidence = tl.sigmoid(logit)
    threshold = tl.load(threshold_ptr + row, mask=real, other=1.0)
    leaves = (confidence >= threshold) & (threshold < 1.0)
    tl.store(confidence_ptr + row, confidence, mask=real)
    tl.store(leaves_ptr + row, leaves.to(tl.int8), mask=real)


@triton.jit
def norm_router_kernel(
    x_ptr,
    scale_ptr,
    bias_ptr,
    down_ptr,
    up_ptr,
    up_bias_ptr,
    threshold_ptr,
    confidence_ptr,
    leaves_ptr,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    EPS: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
):
    """Compute confidences of a block of rows."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    product, total, square, of_scale, of_bias = _sums(
        x_ptr,
        scale_ptr,
        bias_ptr,
        down_ptr,
        row,
        0,
        N,
        D,
        R,
        D,
        LAYER,
        BIAS,
        PLUS_ONE,
        PRECISION,
        BN,
        BD,
        BR,
    )
    _decide(
        product,
        total,
        square,
        of_scale,
        of_bias,
        up_ptr,
        up_bias_ptr,
        threshold_ptr,
        confidence_ptr,
        leaves_ptr,
        row,
        N,
        D,
        R,
        EPS,
        BR,
    )


@triton.jit
def norm_router_sums_kernel(
    x_ptr,
    scale_ptr,
    bias_ptr,
    down_ptr,
    products_ptr,
    sums_ptr,
    constants_ptr,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    SPAN: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    PRECISION: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
):
    """Sum a block of rows over SPAN of their columns.

    Writes products [cuts, N, R], sums [cuts, 2, N] and constants [cuts, 2, R].
    """
    cut, wide = tl.program_id(1), tl.arange(0, BR)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    product, total, square, of_scale, of_bias = _sums(
        x_ptr,
        scale_ptr,
        bias_ptr,
        down_ptr,
        row,
        cut * SPAN,
        N,
        D,
        R,
        SPAN,
        LAYER,
        BIAS,
        PLUS_ONE,
        PRECISION,
        BN,
        BD,
        BR,
    )
    real, inside = row < N, wide < R
    tl.store(
        products_ptr + (cut * N + row[:, None]) * R + wide[None, :],
        product,
        mask=real[:, None] & inside[None, :],
    )
    tl.store(sums_ptr + cut * 2 * N + row, total, mask=real)
    tl.store(sums_ptr + cut * 2 * N + N + row, square, mask=real)
    inside = inside & (tl.program_id(0) == 0)
    tl.store(constants_ptr + cut * 2 * R + wide, of_scale, mask=inside)
    tl.store(constants_ptr + cut * 2 * R + R + wide, of_bias, mask=inside)


@triton.jit
def norm_router_end_kernel(
    products_ptr,
    sums_ptr,
    constants_ptr,
    up_ptr,
    up_bias_ptr,
    threshold_ptr,
    confidence_ptr,
    leaves_ptr,
    N: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    EPS: tl.constexpr,
    CUTS: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    """Add up the cuts of a block of rows, always in the same order, and compute confidences."""
    row, wide = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BR)
    real, inside = row < N, wide < R
    product = tl.zeros((BN, BR), tl.float32)
    total, square = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    of_scale, of_bias = tl.zeros((BR,), tl.float32), tl.zeros((BR,), tl.float32)
    for cut in range(CUTS):
        product += tl.load(
            products_ptr + (cut * N + row[:, None]) * R + wide[None, :],
            mask=real[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.load(sums_ptr + cut * 2 * N + row, mask=real, other=0.0)
        square += tl.load(sums_ptr + cut * 2 * N + N + row, mask=real, other=0.0)
        of_scale += tl.load(constants_ptr + cut * 2 * R + wide, mask=inside, other=0.0)
        of_bias += tl.load(constants_ptr + cut * 2 * R + R + wide, mask=inside, other=0.0)
    _decide(
        product,
        total,
        square,
        of_scale,
        of_bias,
        up_ptr,
        up_bias_ptr,
        threshold_ptr,
        confidence_ptr,
        leaves_ptr,
        row,
        N,
        D,
        R,
        EPS,
        BR,
    )


def norm_router(launch, options: NormOptions, x, scale, bias, down, up, up_bias, threshold):
    """Compute `reference.norm_router` with kernels that `launch` runs."""
    (n, d), r = x.shape, down.shape[1]
    down, up = down.astype(x.dtype), up.astype(x.dtype)
    # 16 KiB of a matrix at a time, so that three tiles fit the smallest chip.
    br = max(16, power_of_two(r))
    tile = 2**14 // (br * x.dtype.itemsize)
    bd = max(16, min(256 // x.dtype.itemsize, tile, power_of_two(d)))
    own = dict(
        N=n,
        D=d,
        R=r,
        BR=br,
        BD=bd,
        LAYER=options.kind == "layernorm",
        BIAS=bias is not None,
        PLUS_ONE=options.plus_one,
        PRECISION=call.precision(x.dtype),
    )
    bias = scale if bias is None else bias
    results = [jax.ShapeDtypeStruct((n,), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int8)]
    blocks = call.cdiv(n, 16)
    if blocks >= BLOCKS or d <= bd:
        own["BN"] = bn = _rows(blocks, own, x.dtype == jnp.float16)
        confidence, leaves = launch(
            x,
            scale,
            bias,
            down,
            up,
            up_bias,
            threshold,
            kernel=norm_router_kernel,
            grid=(call.cdiv(n, bn),),
            out=results,
            EPS=options.eps,
            warps=8 if bn > 16 and br > 128 else 4,
            **own,
        )
        return confidence, leaves.astype(bool)
    cuts = min(MAX_CUTS, call.cdiv(2 * BLOCKS, blocks), call.cdiv(d, bd))
    span = call.cdiv(call.cdiv(d, cuts), bd) * bd
    cuts = call.cdiv(d, span)
    shapes = [(cuts, n, r), (cuts, 2, n), (cuts, 2, r)]
    sums = launch(
        x,
        scale,
        bias,
        down,
        kernel=norm_router_sums_kernel,
        grid=(blocks, cuts),
        out=[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes],
        SPAN=span,
        BN=16,
        warps=8 if br > 256 else 4,
        **own,
    )
    bn = 1 if br >= 128 else 128 // br
    confidence, leaves = launch(
        *sums,
        up,
        up_bias,
        threshold,
        kernel=norm_router_end_kernel,
        grid=(call.cdiv(n, bn),),
        out=results,
        N=n,
        D=d,
        R=r,
        EPS=options.eps,
        CUTS=cuts,
        BN=bn,
        BR=br,
    )
    return confidence, leaves.astype(bool)


def _rows(blocks: int, own: dict, half: bool) -> int:
    """Return the rows of a program if there are enough for all multiprocessors.

    They are as many as fit into registers beside the matrix's tile.
    """
    if blocks < 4 * BLOCKS or half and own["LAYER"] and own["BR"] > 128:
        return 16
    return 32 if own["LAYER"] or own["BR"] > 256 else 64
