"""`norm_router`: its kernels in Triton's interpreter, beside float64 and beside its reference."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from kernel_checks import ROUNDING, small, wide

from eejax.common.errors import ConfigError
from eejax.kernels.norm_router.api import norm_router
from eejax.kernels.norm_router.arg_specs import SPECS, draw
from eejax.kernels.norms import NormOptions
from eejax.kernels.specs import RMS


def exact(options: NormOptions, x, scale, bias, down, up, up_bias, threshold):
    """Confidences [n] in float64."""
    x, scale, down, up, up_bias = map(wide, (x, scale, down, up, up_bias))
    if options.kind == "layernorm":
        x = x - x.mean(1, keepdims=True)
    x = x / np.sqrt((x * x).mean(1, keepdims=True) + options.eps) * (scale + options.plus_one)
    h = (x if bias is None else x + wide(bias)) @ down
    return 1 / (1 + np.exp(-(h / (1 + np.exp(-h)) @ up + up_bias)))


# The others have all that this has but its many tiles, each of which takes the interpreter long.
@small(SPECS, late="64x512x64")
def test_kernels_beside_float64(spec, interpreted):
    args = spec.args(1)
    got = jax.jit(partial(spec.run, implementation="interpreter"))(*args)
    want = exact(spec.options["options"], *args)
    # A confidence moves by a quarter of what its logit does, a sum of as many rounded terms.
    bound = 4 * ROUNDING[args[0].dtype.name]
    assert np.abs(np.asarray(got.confidence) - want).max() < bound
    threshold = np.asarray(args[-1])
    clear = np.abs(want - threshold) > bound
    assert clear.sum() > 0
    assert (np.asarray(got.leaves) == (want >= threshold))[clear].all()
    assert (np.asarray(got.leaves) == (np.asarray(got.confidence) >= threshold)).all()


@small(SPECS)
def test_the_reference_beside_float64(spec):
    args = spec.args(2)
    got = jax.jit(partial(spec.run, implementation="reference"))(*args)
    want = exact(spec.options["options"], *args)
    bound = 4 * ROUNDING[args[0].dtype.name]
    assert np.abs(np.asarray(got.confidence) - want).max() < bound


def arguments(n=6, d=96, r=32, dtype="float32", bias=True):
    return draw(jax.random.key(3), n=n, d=d, r=r, norm=RMS, bias=bias, dtype=dtype)


@pytest.mark.parametrize("kind", ["layernorm", pytest.param("rmsnorm", marks=pytest.mark.slow)])
def test_large_means_and_outliers_cost_no_precision(kind, interpreted):
    x, *rest = arguments(n=20, d=384)
    x = x + 300.0
    x = x.at[:, 7].set(5000.0)  # in the first tile, from whose mean the kernel takes differences
    x = x.at[3].set(0.0)  # variance 0
    options = NormOptions(kind, 1e-5)
    got = norm_router(x, *rest, options=options, implementation="interpreter")
    plain = norm_router(x, *rest, options=options, implementation="reference")
    want = exact(options, x, *rest)
    worst = np.abs(np.asarray(plain.confidence) - want).max()
    assert np.abs(np.asarray(got.confidence) - want).max() <= max(1e-5, 4 * worst)


def test_threshold_one_is_reached_by_none_and_zero_by_all(interpreted):
    x, scale, bias, down, up, up_bias, _ = arguments(n=4)
    for which in ("reference", "interpreter"):
        for threshold, want in ((0.0, True), (1.0, False)):
            got = norm_router(
                x,
                scale,
                bias,
                down,
                up,
                jnp.float32(200.0),
                jnp.full((4,), threshold),
                options=RMS,
                implementation=which,
            )
            assert np.asarray(got.confidence).tolist() == [1.0] * 4
            assert np.asarray(got.leaves).tolist() == [want] * 4


def test_no_rows(interpreted):
    x, *rest, threshold = arguments()
    for which in (None, "reference", "interpreter"):
        got = norm_router(x[:0], *rest, threshold[:0], options=RMS, implementation=which)
        assert [a.shape for a in got] == [(0,)] * 2


def test_nan_states_stay(interpreted):
    x, *rest = arguments()
    x = x.at[2, 5].set(jnp.nan)
    got = norm_router(x, *rest, options=RMS, implementation="interpreter")
    assert np.isnan(np.asarray(got.confidence)).tolist() == [False, False, True] + [False] * 3
    assert not got.leaves[2]


def test_gradients_are_the_references(interpreted):
    *inputs, threshold = arguments()
    weight = jnp.arange(1.0, 7.0)

    def cost(implementation, *inputs):
        got = norm_router(*inputs, threshold, options=RMS, implementation=implementation)
        return jnp.sum(weight * got.confidence**2)

    def by_hand(x, scale, bias, down, up, up_bias):
        x = x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + RMS.eps)
        h = jnp.dot(x * scale[None] + bias[None], down, precision="highest")
        p = jax.nn.sigmoid(jnp.sum(jax.nn.silu(h) * up[None], 1) + up_bias)
        return jnp.sum(weight * p**2)

    numbers = tuple(range(6))
    want = jax.grad(by_hand, numbers)(*inputs)
    for which in ("reference", "interpreter"):
        got = jax.grad(lambda *a, which=which: cost(which, *a), numbers)(*inputs)
        for a, b in zip(got, want, strict=True):
            assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_under_jit_vmap_and_scan(interpreted):
    x, *weights, threshold = arguments(n=12)

    def run(x, t, *w):
        return norm_router(x, *w, t, options=RMS, implementation="interpreter")

    want = run(x, threshold, *weights).confidence

    def fold(a):
        return a.reshape(3, 4, *a.shape[1:])

    def same(got):
        return np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)

    same(jax.jit(run)(x, threshold, *weights).confidence)
    rows = jax.vmap(lambda x, t: run(x, t, *weights))(fold(x), fold(threshold))
    same(rows.confidence.reshape(-1))
    twice = jax.vmap(jax.vmap(lambda x, t: run(x, t, *weights)))
    same(twice(fold(x)[:, :, None], fold(threshold)[:, :, None]).confidence.reshape(-1))
    _, scanned = jax.lax.scan(lambda c, xs: (c, run(*xs, *weights)), 0, (fold(x), fold(threshold)))
    same(scanned.confidence.reshape(-1))
    # Weights of their own for each: one by one.
    down = jnp.stack([weights[2], 2 * weights[2]])
    each = jax.vmap(lambda w: run(x, threshold, *weights[:2], w, *weights[3:]).confidence)(down)
    same(each[0])
    other = run(x, threshold, *weights[:2], down[1], *weights[3:]).confidence
    np.testing.assert_allclose(each[1], other, rtol=1e-6)


def test_in_a_shard_map(interpreted):
    x, *weights, threshold = arguments(n=8)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def run(x, threshold, *weights):
        got = norm_router(x, *weights, threshold, options=RMS, implementation="interpreter")

        # A conditional's branches have to vary over the same axes.
        def more(c):
            return c + x[:, 0] * 0

        return jax.lax.cond(jnp.any(got.leaves), lambda c: c, more, got.confidence)

    specs = (P("data"), P("data"), *[P()] * len(weights))
    sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("data"))
    want = norm_router(x, *weights, threshold, options=RMS, implementation="reference").confidence
    got = jax.jit(sharded)(x, threshold, *weights)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_named():
    x, scale, bias, down, up, up_bias, threshold = arguments()
    with pytest.raises(ConfigError, match=r"x = \(2, 6, 96\): must be states \[n, d\]"):
        norm_router(jnp.stack([x, x]), scale, bias, down, up, up_bias, threshold, options=RMS)
    with pytest.raises(ConfigError, match=r"up = \(31,\): must be of shape \(32,\)"):
        norm_router(x, scale, bias, down, up[:-1], up_bias, threshold, options=RMS)
    with pytest.raises(ConfigError, match="implementation = 'cuda': must be one of 'reference'"):
        norm_router(
            x, scale, bias, down, up, up_bias, threshold, options=RMS, implementation="cuda"
        )


def test_a_width_without_a_kernel_is_the_references_with_a_warning(interpreted):
    args = arguments(r=600)
    with pytest.warns(UserWarning, match="a width of 600; the reference runs instead"):
        got = norm_router(*args, options=RMS, implementation="interpreter")
    want = norm_router(*args, options=RMS, implementation="reference")
    assert (got.confidence == want.confidence).all()
    again = norm_router(*args, options=RMS, implementation="interpreter")  # warns once
    assert (again.confidence == want.confidence).all()
