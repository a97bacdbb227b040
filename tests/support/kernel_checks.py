"""What tests of kernels share."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

ROUNDING = {"float32": 2.0**-18, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of a sum of rounded terms of order 1: twice the dtype's own, 64 times that of float32's, where
sums of hundreds of terms round oftener than their terms do."""


def names(spec):
    return spec.name


def small(specs):
    """Parametrize a test by the small specs.

    Those of float16 are slow tests: bfloat16 rounds more, and only outliers leave float16's range.
    """
    slow = [s.name.startswith("float16") and "outlier" not in s.name for s in specs]
    chosen = [
        pytest.param(spec, marks=pytest.mark.slow if late else (), id=spec.name)
        for spec, late in zip(specs, slow, strict=True)
        if spec.small
    ]
    return pytest.mark.parametrize("spec", chosen)


def wide(a) -> np.ndarray:
    """float64 of what a dtype holds."""
    return np.asarray(a.astype(jnp.float32)).astype(np.float64)
