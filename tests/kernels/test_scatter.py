"""`scatter`: its kernel in Triton's interpreter, beside float64 and beside its reference."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from kernel_checks import small, wide

from eejax.common.errors import ConfigError
from eejax.kernels.norms import NormOptions
from eejax.kernels.scatter.api import scatter
from eejax.kernels.scatter.arg_specs import SPECS, draw
from eejax.kernels.specs import RMS

HALF = {"float32": 2.0**-20, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""A dtype's rounding, of float32's a few: the one rounding there is."""


def exact(options: NormOptions | None, into, x, place, scale, bias) -> np.ndarray:
    y, out = wide(x), wide(into)
    if options is not None:
        y = y - y.mean(1, keepdims=True) if options.kind == "layernorm" else y
        y = y / np.sqrt((y * y).mean(1, keepdims=True) + options.eps)
        y = y * (wide(scale) + options.plus_one) + (0 if bias is None else wide(bias))
    for row, at in zip(y, np.asarray(place), strict=True):
        if 0 <= at < len(out):
            out[at] = row
    return out


@pytest.mark.parametrize("which", ["reference", "interpreter"])
@small(SPECS)
def test_beside_float64(spec, which, interpreted):
    args = spec.args(4)
    got = jax.jit(partial(spec.run, implementation=which))(*args)
    want = exact(spec.options["options"], *args)
    assert got.dtype == args[0].dtype
    assert np.abs(wide(got) - want).max() <= HALF[got.dtype.name] * np.abs(want).max()
    placed = np.isin(np.arange(len(want)), np.asarray(args[2]))
    assert (wide(got)[~placed] == wide(args[0])[~placed]).all()


def test_from_one_dtype_to_another(interpreted):
    into, x, place, scale, _ = draw(jax.random.key(0), 9, 4, 64, RMS, False, "bfloat16")
    into = into.astype(jnp.float32)
    got = scatter(into, x, place, scale, options=RMS, implementation="interpreter")
    want = scatter(into, x, place, scale, options=RMS, implementation="reference")
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=2**-7)  # normed in bfloat16: one rounding apart


def test_what_was_there_is_not_written_over(interpreted):
    into, x, place, scale, _ = draw(jax.random.key(0), 9, 4, 64, RMS, False, "float32")
    before = np.array(into)
    scatter(into, x, place, scale, options=RMS, implementation="interpreter")
    assert (np.asarray(into) == before).all()


@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_are_the_references(bias, interpreted):
    into, x, place, scale, b = draw(jax.random.key(2), 7, 5, 32, RMS, bias, "float32")
    weight = jax.random.normal(jax.random.key(3), into.shape)

    def by_hand(into, x, scale, b):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + RMS.eps) * scale[None]
        y = y if b is None else y + b[None]
        hits = place[None, :] == jnp.arange(7)[:, None]
        out = jnp.where(hits.any(1)[:, None], hits.astype(jnp.float32) @ y, into)
        return jnp.sum(weight * out**2)

    def cost(into, x, scale, b):
        out = scatter(into, x, place, scale, b, options=RMS, implementation="interpreter")
        return jnp.sum(weight * out**2)

    numbers = (0, 1, 2, 3) if bias else (0, 1, 2)
    want, got = (
        jax.grad(by_hand, numbers)(into, x, scale, b),
        jax.grad(cost, numbers)(into, x, scale, b),
    )
    for a, w in zip(got, want, strict=True):
        assert np.abs(a - w).max() <= 1e-5 * np.abs(w).max()


def test_under_jit_vmap_and_scan(interpreted):
    into, x, place, scale, _ = draw(jax.random.key(5), 6, 4, 64, RMS, False, "float32")

    def run(into, x):
        return scatter(into, x, place, scale, options=RMS, implementation="interpreter")

    def plain(into, x):
        return scatter(into, x, place, scale, options=RMS, implementation="reference")

    both = jnp.stack([into, 2 * into]), jnp.stack([x, x + 1])
    want = jax.vmap(plain)(*both)
    np.testing.assert_allclose(jax.jit(jax.vmap(run))(*both), want, rtol=1e-5, atol=1e-6)
    end, _ = jax.lax.scan(lambda c, x: (run(c, x), None), into, both[1])
    np.testing.assert_allclose(end, plain(plain(into, x), x + 1), rtol=1e-5, atol=1e-6)


def test_in_a_shard_map(interpreted):
    into, x, place, scale, _ = draw(jax.random.key(6), 6, 4, 64, RMS, False, "float32")
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def run(into, x, scale):
        return jax.lax.fori_loop(
            0,
            2,
            lambda _, c: scatter(c, x, place, scale, options=RMS, implementation="interpreter"),
            into,
        )

    specs = (P("data"), P("data"), P())
    sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("data"))
    got = jax.jit(sharded)(jnp.concatenate([into, -into]), jnp.concatenate([x, x + 1]), scale)

    def one(into, x):
        return scatter(into, x, place, scale, options=RMS, implementation="reference")

    want = jnp.concatenate([one(into, x), one(-into, x + 1)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_named():
    into, x, place, scale, _ = draw(jax.random.key(0), 9, 4, 64, RMS, False, "float32")
    with pytest.raises(ConfigError, match=r"into = \(9, 63\): must be of shape \[m, 64\]"):
        scatter(into[:, 1:], x, place, scale, options=RMS)
    with pytest.raises(ConfigError, match=r"place = \(\(3,\), 'int32'\): must be integers"):
        scatter(into, x, place[1:], scale, options=RMS)
    with pytest.raises(ConfigError, match="scale = None: must be given with `options`"):
        scatter(into, x, place, options=RMS)
    with pytest.raises(ConfigError, match=r"scale = \(64,\): must be given with `options`"):
        scatter(into, x, place, scale)
    with pytest.raises(ConfigError, match=r"bias = \(65,\): must be of shape \(64,\)"):
        scatter(into, x, place, scale, jnp.zeros(65), options=RMS)


def test_no_rows_change_nothing(interpreted):
    into, x, place, _, _ = draw(jax.random.key(0), 9, 4, 64, None, False, "float32")
    got = scatter(into, x[:0], place[:0], implementation="interpreter")
    assert (got == into).all()


def test_integers_are_the_references_with_a_warning(interpreted):
    into, x = jnp.zeros((4, 8), jnp.int32), jnp.ones((1, 8), jnp.int32)
    with pytest.warns(
        UserWarning, match="no kernel covers rows of 8 int32 into int32; the reference"
    ):
        got = scatter(into, x, jnp.array([2]), implementation="interpreter")
    assert got.sum(1).tolist() == [0, 0, 8, 0]


def test_places_beyond_32_bits_are_outside_too(interpreted):
    with jax.enable_x64(True):
        for place in (2**32 + 2, 2**40, -(2**63)):
            for which in ("reference", "interpreter"):
                got = scatter(
                    jnp.zeros((4, 16), jnp.float32),
                    jnp.ones((1, 16), jnp.float32),
                    jnp.array([place], jnp.int64),
                    implementation=which,
                )
                assert not got.any()


def test_a_bias_needs_a_norm():
    with pytest.raises(ConfigError, match=r"bias = \(16,\): must be None without `options`"):
        scatter(jnp.zeros((4, 16)), jnp.ones((1, 16)), jnp.array([1]), None, jnp.ones(16))
