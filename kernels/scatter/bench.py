"""Sizes at which `scatter` is timed: a decoding batch half of which left, and many rows."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from eejax.kernels.scatter.api import scatter
from eejax.kernels.scatter.arg_specs import draw
from eejax.kernels.specs import DTYPES, RMS, BenchCase, Spec


def case(m: int, n: int, d: int, dtype: str, tiny: bool = False) -> BenchCase:
    own = dict(m=m, n=n, d=d, norm=RMS, bias=False, dtype=dtype)
    spec = Spec(
        f"{dtype}-{n}x{d}-into-{m}",
        partial(scatter, options=RMS),
        partial(draw, **own),
        {"options": RMS},
        tiny,
    )
    # The benchmark writes into a copy, so m rows are read and written too.
    moved = (2 * m + 2 * n + 1) * d * jnp.dtype(dtype).itemsize
    return BenchCase(spec, dict(dtype=dtype, rows=n, into=m, d=d), moved, tiny)


CASES = (
    *(case(m, m // 2, d, t) for t in DTYPES for d in (1024, 4096) for m in (64, 32768)),
    case(4, 2, 64, "float32", tiny=True),
)
