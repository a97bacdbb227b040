"""Exact GELU and its derivative, against the error function of the standard library."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eejax.models.layers import gelu

X = np.linspace(-8, 8, 129)  # eighths, which every dtype holds
CUMULATIVE = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in X])
DENSITY = np.exp(-0.5 * X * X) / math.sqrt(2 * math.pi)


# A few roundings of values up to 8 and of slopes up to 1.13.
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_values_and_slopes(dtype):
    x = jnp.asarray(X, dtype)
    eps = float(jnp.finfo(dtype).eps)
    got, slope = jax.jit(lambda x: (gelu(x), jax.vmap(jax.grad(gelu))(x)))(x)
    assert got.dtype == slope.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), X * CUMULATIVE, atol=10 * eps)
    np.testing.assert_allclose(
        np.asarray(slope, np.float64), CUMULATIVE + X * DENSITY, atol=4 * eps
    )


def test_the_slope_has_a_slope():
    got = jax.vmap(jax.grad(jax.grad(gelu)))(jnp.asarray(X, jnp.float32))
    want = (2 - X * X) * DENSITY
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=1e-6)  # 8 float32 roundings


def test_gradients_inside_a_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def total(x):
        return gelu(x).sum()

    run = jax.shard_map(jax.grad(total), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    x = jnp.asarray(X[:-1], jnp.float32)
    np.testing.assert_array_equal(jax.jit(run)(x), jax.jit(jax.grad(total))(x))
