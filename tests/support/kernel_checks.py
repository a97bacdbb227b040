"""What tests of kernels share."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

ROUNDING = {"float32": 2.0**-18, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of a sum of rounded terms of order 1: twice the dtype's own, 64 times that of float32's, where
sums of hundreds of terms round oftener than their terms do."""


def names(spec):
    return spec.name


def wide(a) -> np.ndarray:
    """float64 of what a dtype holds."""
    return np.asarray(a.astype(jnp.float32)).astype(np.float64)
