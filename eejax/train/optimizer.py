"""AdamW with weight decay on matrices only, learning-rate schedules, clipping settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from eejax.common.fields import (
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    UnitFloat,
    check_fields,
)
from eejax.common.trees import Tree

RateSchedule = Literal["cosine", "linear", "constant", "inverse_sqrt"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019) with EE-LLM's settings, and its learning rate.

    The rate rises linearly over `warmup_steps` to the peak and then follows `schedule`.

    Attributes:
      learning_rate: the peak of the learning rate.
      final_fraction: share of the peak that "cosine" and "linear" reach at the last step.
      schedule: "cosine", "linear", "inverse_sqrt" (sqrt(warmup / step)) or "constant".
      warmup_steps: steps of the linear rise.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the denominator.
      weight_decay: weight decay of matrices.
      clip_norm: largest global norm of the gradients, which are scaled down to it (None: no limit).
    """

    learning_rate: PositiveFloat = 3e-4
    final_fraction: UnitFloat = 0.1
    schedule: RateSchedule = "cosine"
    warmup_steps: NonNegativeInt = 100
    b1: BelowOne = 0.9
    b2: BelowOne = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: PositiveFloat | None = 1.0

    def __post_init__(self):
        check_fields(self)


def learning_rate(config: OptimizerConfig, steps: int) -> Callable[[jax.Array], jax.Array]:
    """Return a function from the number of an update (from 0) to its rate, a float32 scalar.

    Update number warmup_steps - 1 is the first at the peak; the last one of a run of `steps` is at
    the final rate.
    """
    warmup, peak, end = config.warmup_steps, config.learning_rate, config.final_fraction
    rest = max(1, steps - warmup)
    after = {  # by updates after the first at the peak
        "cosine": optax.cosine_decay_schedule(peak, rest, end),
        "linear": optax.linear_schedule(peak, peak * end, rest),
        "constant": optax.constant_schedule(peak),
        "inverse_sqrt": lambda n: peak * jnp.sqrt(max(1, warmup) / (n + warmup)),
    }
    rate = optax.join_schedules(
        [optax.linear_schedule(0.0, peak, max(1, warmup)), after[config.schedule]], [warmup]
    )
    # optax counts updates from the one before the first.
    return lambda step: jnp.float32(rate(jnp.asarray(step).astype(jnp.float32) + 1.0))


def transformation(config: OptimizerConfig, decays: Tree) -> optax.GradientTransformation:
    """Return the transformation of gradients into the direction u of an update.

    Gradients are clipped first. The update is p - learning_rate * u. Unlike optax's own optimizers
    this neither negates nor scales by the rate: the training step does, with the rate that it
    reports. `decays` is True for the leaves that weight decay applies to.
    """
    inner = optax.chain(
        optax.scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(config.weight_decay, decays),
    )

    def update(updates, state, params=None):
        # optax raises a float to an integer array, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)
