"""Arguments for tests of `scatter`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from eejax.kernels.norms import NormOptions
from eejax.kernels.scatter.api import scatter
from eejax.kernels.specs import DTYPES, LAYER, ONE, RMS, Spec, normal

# Rows of `into`, rows of x, width, norm, whether it has a bias.
SMALL = (
    (1, 1, 64, RMS, False),
    (7, 5, 200, LAYER, True),
    (64, 40, 96, ONE, False),
    (30, 30, 128, None, False),
    (9, 4, 1000, LAYER, False),
)
LARGE = (
    (4096, 4096, 4096, RMS, False),
    (64, 8, 8192, LAYER, True),
    (512, 300, 768, None, False),
    (64, 64, 5120, ONE, False),
    (4, 2, 16384, LAYER, True),
)


def draw(key, m: int, n: int, d: int, norm: NormOptions | None, bias: bool, dtype: str) -> tuple:
    """Draw arguments with different places, of which some lie outside."""
    make = partial(normal, key, dtype=dtype)
    place = jax.random.permutation(jax.random.fold_in(key, 9), max(m, n) + 3)[:n] - 1
    return (
        make(0, (m, d)),
        make(1, (n, d), mean=0.5),
        place.astype(jnp.int32),
        make(2, (d,), std=0.2, mean=1.0) if norm else None,
        make(3, (d,), std=0.2) if bias else None,
    )


def _specs(cases: tuple, small: bool) -> tuple[Spec, ...]:
    return tuple(
        Spec(
            f"{dtype}-{n}x{d}-into-{m}-{norm.kind if norm else 'as-they-are'}"
            f"{'+1' * bool(norm and norm.plus_one)}{'-bias' * bias}",
            partial(scatter, options=norm),
            partial(draw, m=m, n=n, d=d, norm=norm, bias=bias, dtype=dtype),
            {"options": norm},
            small,
        )
        for dtype in DTYPES
        for m, n, d, norm, bias in cases
    )


SPECS = _specs(SMALL, True) + _specs(LARGE, False)
