"""Sizes at which `norm_router` is timed: rows of a decoding batch, and of many prompts."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from eejax.kernels.norm_router.api import norm_router
from eejax.kernels.norm_router.arg_specs import LAYER, RMS, draw
from eejax.kernels.specs import DTYPES, BenchCase, Spec

ROWS, WIDTHS, BOTTLENECK = (1, 8, 64, 32768), (1024, 4096, 8192), 128


def case(n: int, d: int, r: int, norm, dtype: str, tiny: bool = False) -> BenchCase:
    own = dict(n=n, d=d, r=r, norm=norm, bias=norm.kind == "layernorm", dtype=dtype)
    size = jnp.dtype(dtype).itemsize
    spec = Spec(
        f"{dtype}-{n}x{d}x{r}-{norm.kind}",
        partial(norm_router, options=norm),
        partial(draw, **own),
        {"options": norm},
        tiny,
    )
    sizes = dict(dtype=dtype, rows=n, d=d, bottleneck=r, norm=norm.kind)
    return BenchCase(spec, sizes, (n * d + d * r) * size + n * 9, tiny)


CASES = (
    *(case(n, d, BOTTLENECK, RMS, dtype) for dtype in DTYPES for d in WIDTHS for n in ROWS),
    *(case(n, 4096, BOTTLENECK, LAYER, "bfloat16") for n in ROWS),
    *(case(n, 64, 16, RMS, "float32", tiny=True) for n in (4, 1024)),
)
