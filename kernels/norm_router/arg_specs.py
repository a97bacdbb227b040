"""Arguments for tests of `norm_router`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from eejax.kernels.norm_router.api import norm_router
from eejax.kernels.norms import NormOptions
from eejax.kernels.specs import DTYPES, LAYER, ONE, RMS, Spec, normal

# Rows, widths of the model and the router, norm, whether it has a bias; and whether a product of a
# state and its scale exceeds float16.
SMALL = (
    (1, 64, 16, RMS, False),
    (5, 200, 48, LAYER, True),
    (37, 96, 100, ONE, False),
    (64, 512, 64, LAYER, False),
    (1030, 64, 16, RMS, True),
    (3, 200, 32, RMS, False, True),
    (20, 96, 16, LAYER, True, True),
)
LARGE = (
    (1, 4096, 128, RMS, False),
    (64, 8192, 512, LAYER, True),
    (5000, 768, 256, LAYER, True),
    (32768, 4096, 128, RMS, False),
    (32768, 4096, 128, LAYER, True),
    (32768, 8192, 512, ONE, False),
)


def draw(
    key, n: int, d: int, r: int, norm: NormOptions, bias: bool, dtype: str, outlier: bool = False
) -> tuple:
    """Draw states and the other arguments; states have a mean, so that the two norms differ."""
    make = partial(normal, key, dtype=dtype)
    x, scale = make(0, (n, d), mean=0.5), make(1, (d,), std=0.2, mean=1.0 - norm.plus_one)
    if outlier:  # like some columns of trained models, for every token
        x, scale = x.at[:, d // 3].set(4e4), scale.at[d // 3].set(5.0)
    return (
        x,
        scale,
        make(2, (d,), std=0.2) if bias else None,
        make(3, (d, r), std=d**-0.5),
        make(4, (r,), std=2 * r**-0.5),
        make(5, ()),
        jax.random.uniform(jax.random.fold_in(key, 6), (n,), jnp.float32),
    )


def _specs(cases: tuple, small: bool) -> tuple[Spec, ...]:
    return tuple(
        Spec(
            f"{dtype}-{n}x{d}x{r}-{norm.kind}{'+1' * norm.plus_one}{'-bias' * bias}"
            f"{'-outlier' * any(outlier)}",
            partial(norm_router, options=norm),
            partial(draw, n=n, d=d, r=r, norm=norm, bias=bias, dtype=dtype, outlier=any(outlier)),
            {"options": norm},
            small,
        )
        for dtype in DTYPES
        for n, d, r, norm, bias, *outlier in cases
    )


SPECS = _specs(SMALL, True) + _specs(LARGE, False)
