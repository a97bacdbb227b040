"""What tests of kernels share."""

from __future__ import annotations

import collections

import jax.numpy as jnp
import numpy as np
import pytest

ROUNDING = {"float32": 2.0**-18, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Of a sum of rounded terms of order 1: twice the dtype's own, 64 times that of float32's, where
sums of hundreds of terms round oftener than their terms do."""


def names(spec):
    return spec.name


def small(specs, late: str = "no spec"):
    """Parametrize a test by the small specs; those with `late` in their name are slow tests.

    In half precision most are slow tests. What differs there is the rounding, which the second of
    the cases shows with a bias and other options, and float16's range, which only outliers leave.
    """
    seen, chosen = collections.Counter(), []
    for spec in (s for s in specs if s.small):
        dtype = spec.name.split("-")[0]
        seen[dtype] += 1
        fast = {"float16": "outlier" in spec.name, "bfloat16": seen[dtype] == 2}.get(dtype, True)
        marks = () if fast and late not in spec.name else pytest.mark.slow
        chosen.append(pytest.param(spec, marks=marks, id=spec.name))
    return pytest.mark.parametrize("spec", chosen)


def wide(a) -> np.ndarray:
    """float64 of what a dtype holds."""
    return np.asarray(a.astype(jnp.float32)).astype(np.float64)
