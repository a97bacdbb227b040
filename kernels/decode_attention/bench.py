"""Sizes at which `decode_attention` is timed: decoding steps with full caches, and a prompt."""

from __future__ import annotations

import jax.numpy as jnp

from eejax.kernels.decode_attention.arg_specs import spec
from eejax.kernels.specs import BenchCase


def case(
    counts: tuple[int, ...],
    s: int,
    n_kv: int,
    g: int,
    h: int,
    width: int,
    dtype: str,
    tiny: bool = False,
) -> BenchCase:
    own = spec(dtype, (counts, s, n_kv, g, h, width, 0, 0, {}), tiny, full=True)
    slots, rows = len(counts), sum(counts)
    sizes = dict(dtype=dtype, slots=slots, s=s, n_kv=n_kv, g=g, h=h, rows=rows)
    # Caches are read once, and before that read and written, as the benchmark copies them. Rows are
    # read and written: queries and results, keys and values.
    moved = 6 * slots * s * n_kv * h + 2 * rows * n_kv * g * h + 4 * rows * n_kv * h
    return BenchCase(own, sizes, moved * jnp.dtype(dtype).itemsize, tiny)


SHAPES = (16, 1, 128), (8, 4, 128), (3, 3, 64)
CASES = (
    *(
        case((1,) * slots, s, *shape, 1, "bfloat16")
        for shape in SHAPES
        for s in (640, 4096)
        for slots in (1, 8, 64)
    ),
    *(case((1,) * slots, 4096, *SHAPES[0], 1, "float32") for slots in (1, 8)),
    *(case((512,), 4096, *shape, 64, "bfloat16") for shape in SHAPES),
    case((2, 1), 90, 2, 2, 16, 2, "float32", tiny=True),
)
