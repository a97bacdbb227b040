"""Weights of the early exits' losses over training (EE-LLM, Appendix C.1).

A schedule maps a step, traced or not, to the weights [e] of the early exits. The final exit is
excluded: its weight is always 1. With `initial` below `final` a schedule is the paper's warm-up
(the backbone learns first, the exits later). With `initial` above `final` it is the paper's
cool-down (deep supervision first, then only the final exit).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from eejax.common.errors import require, require_given, require_one_of

WeightSchedule = Callable[[jax.Array | int], jax.Array]

Kind = Literal["constant", "linear", "cosine"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Curriculum = Literal["none", "rotating", "gradual"]
CURRICULA: tuple[Curriculum, ...] = get_args(Curriculum)


def constant(weights: Sequence[float]) -> WeightSchedule:
    """Return a schedule with the same weights [e] at every step."""
    fixed = _weights("weights", weights)
    return lambda step: jnp.asarray(fixed)


def linear(
    initial: Sequence[float], final: Sequence[float], steps: int, *, begin: int = 0
) -> WeightSchedule:
    """Return a schedule that is linear from `initial` to `final` over `steps` from `begin`."""
    return _ramp(initial, final, steps, begin, lambda x: x)


def cosine(
    initial: Sequence[float], final: Sequence[float], steps: int, *, begin: int = 0
) -> WeightSchedule:
    """Return a schedule along half a cosine from `initial` to `final`, as `linear`."""
    return _ramp(initial, final, steps, begin, lambda x: 0.5 - 0.5 * jnp.cos(jnp.pi * x))


def schedule(
    kind: str,
    final: Sequence[float],
    *,
    initial: Sequence[float] | None = None,
    steps: int = 1,
    begin: int = 0,
) -> WeightSchedule:
    """Return the schedule of a configuration: "constant" (`final` alone), "linear" or "cosine".

    Raises:
      ConfigError: for an unknown kind, weights that are negative or not finite, different numbers
        of initial and final weights, or fewer than 1 step.
    """
    require_one_of("kind", kind, KINDS)
    if kind == "constant":
        require(initial is None, "initial", initial, "has no meaning in a constant schedule")
        return constant(final)
    initial = require_given("initial", initial, f"a {kind} schedule needs initial weights")
    return {"linear": linear, "cosine": cosine}[kind](initial, final, steps, begin=begin)


def curriculum(kind: str, n: int, *, steps: int = 1, rotation: int | None = None) -> WeightSchedule:
    """Return which of n early exits have a loss at a step, as [n] float32 of 0 and 1.

    The curricula are those of LayerSkip (Elhoushi et al. 2024, section 4.1). "none": all exits have
    one. "rotating": every `rotation`-th exit (default n: one at a time), the next one at the next
    step. "gradual": no exit at first, then one more every steps / (2 (n + 1)) steps, the deepest
    first, so that all have a loss in the second half of the run. The final exit, which is not among
    the n, always has one.

    Raises:
      ConfigError: for an unknown kind, or a rotation that is not in 1..n.
    """
    require_one_of("curriculum", kind, CURRICULA)
    numbers = np.arange(n)
    if kind == "none":
        return lambda step: jnp.ones(n, jnp.float32)
    if kind == "gradual":
        every = steps / (2 * (n + 1))

        def reached(step):
            on = jnp.asarray(step).astype(jnp.float32) // every
            return (on.astype(jnp.int32) > n - 1 - numbers).astype(jnp.float32)

        return reached
    period = n if rotation is None else rotation
    ok = isinstance(period, int) and 1 <= period <= max(1, n)
    require(ok, "rotation", rotation, f"must be in 1..{n}, the number of early exits")
    return lambda step: ((numbers - jnp.asarray(step)) % max(1, period) == 0).astype(jnp.float32)


def _ramp(initial, final, steps: int, begin: int, shape: Callable) -> WeightSchedule:
    a, b = _weights("initial", initial), _weights("final", final)
    require(
        a.shape == b.shape,
        "initial",
        tuple(initial),
        f"must have as many weights as final ({b.size})",
    )
    require(steps >= 1, "steps", steps, "must be at least 1")
    require(begin >= 0, "begin", begin, "must be at least 0")

    def weights(step):
        done = (jnp.asarray(step).astype(jnp.float32) - begin) / steps
        x = shape(jnp.clip(done, 0.0, 1.0))
        return a * (1.0 - x) + b * x

    return weights


def _weights(field: str, values: Sequence[float]) -> np.ndarray:
    for value in values:
        require(0 <= value < 1e30, field, tuple(values), "must be finite weights of at least 0")
    return np.asarray(values, np.float32).reshape(-1)
