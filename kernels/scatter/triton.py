"""The Triton kernel of `scatter`: a row of x is read once, normed in registers, and written."""

from __future__ import annotations

import jax
import triton
import triton.language as tl

from eejax.common.lengths import power_of_two
from eejax.kernels.norms import NormOptions


@triton.jit
def scatter_kernel(
    into_ptr,
    x_ptr,
    place_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    M: tl.constexpr,
    D: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    LAYER: tl.constexpr,
    BIAS: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    BD: tl.constexpr,
):
    """Write a row. `out` is the memory of `into`, or a copy of it."""
    if out_ptr is None:
        out_ptr = into_ptr
    row, i = tl.program_id(0), tl.arange(0, BD)
    inside = i < D
    place = tl.load(place_ptr + row)
    y = tl.load(x_ptr + row.to(tl.int64) * D + i, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        y = tl.where(inside, y - tl.sum(y, 0) / D, 0.0)
    if NORM:
        scale = tl.load(scale_ptr + i, mask=inside, other=0.0).to(tl.float32)
        if PLUS_ONE:
            scale += 1.0
        y = y * tl.rsqrt(tl.sum(y * y, 0) / D + EPS) * scale
    if BIAS:
        y += tl.load(bias_ptr + i, mask=inside, other=0.0).to(tl.float32)
    if NORM:  # in x's dtype, like the norm's result
        y = y.to(x_ptr.dtype.element_ty)
    there = (place >= 0) & (place < M)
    tl.store(
        out_ptr + place.to(tl.int64) * D + i, y.to(out_ptr.dtype.element_ty), mask=inside & there
    )


def scatter(launch, options: NormOptions | None, into, x, place, scale, bias):
    """Compute `reference.scatter` with a kernel that `launch` runs."""
    (m, d), n = into.shape, x.shape[0]
    bd, norm = power_of_two(d), options or NormOptions()
    (out,) = launch(
        into,
        x,
        place,
        x if scale is None else scale,
        x if bias is None else bias,
        kernel=scatter_kernel,
        grid=(n,),
        out=[jax.ShapeDtypeStruct(into.shape, into.dtype)],
        aliases={0: 0},
        warps=max(1, min(16, bd // 512)),
        M=m,
        D=d,
        EPS=norm.eps,
        NORM=options is not None,
        LAYER=norm.kind == "layernorm",
        BIAS=bias is not None,
        PLUS_ONE=norm.plus_one,
        BD=bd,
    )
    return out
