"""Sizes at which `head_confidence` is timed: a decoding batch, heads of GPT-2 and Llama 3."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp

from eejax.kernels.head_confidence.api import head_confidence
from eejax.kernels.head_confidence.arg_specs import RMS, draw
from eejax.kernels.head_confidence.reference import HeadConfidenceOptions
from eejax.kernels.specs import DTYPES, BenchCase, Spec


def case(n: int, d: int, v: int, dtype: str, tiny: bool = False) -> BenchCase:
    options = HeadConfidenceOptions(v, RMS)
    own = dict(n=n, d=d, rows=v, bias=False, head_bias=False, dtype=dtype, options=options)
    spec = Spec(
        f"{dtype}-{n}x{d}x{v}",
        partial(head_confidence, options=options),
        partial(draw, **own),
        {"options": options},
        tiny,
    )
    sizes = dict(dtype=dtype, rows=n, d=d, vocab=v)
    return BenchCase(spec, sizes, ((v + n) * d) * jnp.dtype(dtype).itemsize + 20 * n, tiny)


CASES = (
    *(
        case(n, d, v, dtype)
        for dtype in DTYPES
        for d, v in ((768, 50304), (4096, 128256))
        for n in (1, 8, 64)
    ),
    case(3, 64, 300, "float32", tiny=True),
)
