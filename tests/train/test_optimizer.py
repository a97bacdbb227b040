import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eejax.common.errors import ConfigError
from eejax.train.optimizer import OptimizerConfig, learning_rate

WARMUP, STEPS, PEAK, END = 5, 25, 2.0, 0.1


def formula(schedule, n):
    """The rate of update n = 1..STEPS in plain Python."""
    if n <= WARMUP:
        return PEAK * n / WARMUP
    done = (n - WARMUP) / (STEPS - WARMUP)
    return (
        PEAK
        * {
            "cosine": END + (1 - END) * (1 + math.cos(math.pi * done)) / 2,
            "linear": 1 + (END - 1) * done,
            "constant": 1.0,
            "inverse_sqrt": math.sqrt(WARMUP / n),
        }[schedule]
    )


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "inverse_sqrt"])
def test_rates_follow_their_formulas(schedule):
    config = OptimizerConfig(PEAK, END, schedule, WARMUP)
    rate = learning_rate(config, STEPS)
    got = [float(rate(jnp.int32(i))) for i in range(STEPS)]
    np.testing.assert_allclose(got, [formula(schedule, i + 1) for i in range(STEPS)], rtol=2e-6)
    if schedule in ("cosine", "linear"):
        np.testing.assert_allclose(got[-1], PEAK * END, rtol=1e-5)
        assert float(rate(STEPS + 100)) == pytest.approx(PEAK * END, rel=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "inverse_sqrt"])
def test_rates_of_a_long_run_are_right_to_a_rounding_of_the_peak(schedule):
    peak, warmup, steps = 3e-4, 2000, 100_000
    rate = learning_rate(OptimizerConfig(peak, END, schedule, warmup), steps)
    for n in (1, 2, 1999, 2000, 2001, 50_000, 99_999, 100_000):
        done = (n - warmup) / (steps - warmup)
        after = {
            "cosine": END + (1 - END) * (1 + math.cos(math.pi * done)) / 2,
            "linear": 1 + (END - 1) * done,
            "constant": 1.0,
            "inverse_sqrt": math.sqrt(warmup / n),
        }
        want = peak * (n / warmup if n <= warmup else after[schedule])
        assert float(rate(jnp.int32(n - 1))) == pytest.approx(want, rel=1e-6, abs=1.2e-7 * peak)


def test_a_rate_is_a_strong_float32_traced_or_not():
    for schedule in ("cosine", "linear", "constant", "inverse_sqrt"):
        rate = learning_rate(OptimizerConfig(PEAK, END, schedule, 0), STEPS)
        for got in (rate(3), jax.jit(rate)(jnp.int32(3))):
            assert got.dtype == jnp.float32 and got.shape == () and not got.weak_type


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "inverse_sqrt"])
def test_a_run_may_end_within_its_warm_up(schedule):
    rate = learning_rate(OptimizerConfig(PEAK, END, schedule, warmup_steps=10), 4)
    got = [float(rate(i)) for i in range(4)]
    np.testing.assert_allclose(got, [PEAK * (i + 1) / 10 for i in range(4)], rtol=2e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "inverse_sqrt"])
def test_without_warm_up_the_first_step_is_near_the_peak(schedule):
    rate = learning_rate(OptimizerConfig(PEAK, END, schedule, warmup_steps=0), 1000)
    assert float(rate(0)) == pytest.approx(PEAK, rel=2e-3)
    assert all(0 < float(rate(i)) <= PEAK * 1.000001 for i in range(0, 1200, 50))


@pytest.mark.parametrize(
    "field, value",
    [
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("b1", 1.0),
        ("b2", -0.1),
        ("eps", 0),
        ("final_fraction", 1.5),
        ("schedule", "step"),
        ("warmup_steps", -1),
        ("warmup_steps", 1.5),
        ("weight_decay", -1.0),
        ("clip_norm", 0.0),
    ],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"OptimizerConfig.{field}"):
        OptimizerConfig(**{field: value})
