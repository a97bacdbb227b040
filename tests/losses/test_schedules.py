"""Exit-weight schedules against their formulas."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.losses.schedules import constant, cosine, linear, schedule

WEIGHTS = st.lists(st.floats(0, 10, width=32), min_size=2, max_size=2)


@settings(max_examples=30)
@given(WEIGHTS, WEIGHTS, st.integers(1, 1000), st.integers(0, 50), st.integers(0, 2000))
def test_ramps_follow_their_formulas(initial, final, steps, begin, step):
    x = min(max((step - begin) / steps, 0.0), 1.0)
    for make, shape in ((linear, x), (cosine, (1 - math.cos(math.pi * x)) / 2)):
        got = make(initial, final, steps, begin=begin)(step)
        want = np.array(initial) * (1 - shape) + np.array(final) * shape
        assert got.dtype == jnp.float32
        # float32: a few roundings of numbers up to 10, and of a cosine.
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_warm_up_and_cool_down_start_and_end_where_they_should(kind):
    for initial, final in (((0.0, 0.0), (0.25, 0.5)), ((0.25, 0.5), (0.0, 0.1))):
        f = schedule(kind, final, initial=initial, steps=100, begin=10)
        np.testing.assert_array_equal(f(0), np.float32(initial))
        np.testing.assert_array_equal(f(10), np.float32(initial))
        np.testing.assert_allclose(f(60), np.add(initial, final) / 2, atol=1e-6)
        np.testing.assert_allclose(f(110), final, atol=1e-6)
        np.testing.assert_allclose(f(10**6), final, atol=1e-6)


def test_one_compilation_serves_every_step():
    f = schedule("cosine", (1.0,), initial=(0.0,), steps=10)
    traces = []
    traced = jax.jit(lambda step: (traces.append(1), f(step))[1])
    for step in range(5):
        np.testing.assert_allclose(traced(jnp.int32(step)), f(step), atol=1e-6)
    assert len(traces) == 1


def test_a_model_without_early_exits_has_no_weights():
    assert constant(())(3).shape == (0,)
    assert linear((), (), 10)(3).shape == (0,)


@pytest.mark.parametrize(
    "make, field",
    [
        (lambda: schedule("step", (1.0,)), "kind"),
        (lambda: schedule("linear", (1.0,), steps=5), "initial"),
        (lambda: schedule("constant", (1.0,), initial=(0.5,)), "initial"),
        (lambda: linear((0.0,), (1.0, 1.0), 5), "initial"),
        (lambda: linear((0.0,), (1.0,), 0), "steps"),
        (lambda: linear((0.0,), (1.0,), 5, begin=-1), "begin"),
        (lambda: constant((-0.1,)), "weights"),
        (lambda: constant((float("nan"),)), "weights"),
        (lambda: cosine((0.0,), (float("inf"),), 5), "final"),
    ],
)
def test_bad_settings_are_named(make, field):
    with pytest.raises(ConfigError, match=f"^{field} = "):
        make()
