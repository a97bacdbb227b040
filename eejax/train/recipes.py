"""Additions of training recipes to the step: layer dropout, averaged weights, a loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal, get_args

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Interval

from eejax.common.errors import require, require_one_of
from eejax.common.trees import Tree

Growth = Literal["constant", "exponential"]
GROWTHS: tuple[Growth, ...] = get_args(Growth)


def layer_dropout(
    rate: float, n_layers: int, *, growth: str = "constant", steps: int = 1
) -> Callable[[jax.Array], jax.Array]:
    """Return step -> [l] float32, the probability of leaving out each layer for a sample.

    It is rate * D(l) * S(t): D(l) = exp(l ln 2 / (L - 1)) - 1 grows from 0 at the first layer to 1
    at the last. S(t) is 1, or with growth "exponential" exp(t ln 2 / (T - 1)) - 1 over the T
    `steps` of the run, for training from scratch (LayerSkip, Elhoushi et al. 2024, section 4.1).
    """
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    require(number and 0 <= rate < 1, "layer_dropout", rate, "must be in [0, 1)")
    require_one_of("layer_dropout_growth", growth, GROWTHS)
    depth = np.expm1(np.arange(n_layers) * math.log(2) / max(1, n_layers - 1))
    by_depth = np.asarray(rate * depth, np.float32)

    def rates(step: jax.Array) -> jax.Array:
        if growth == "constant":
            return jnp.asarray(by_depth)
        done = jnp.asarray(step).astype(jnp.float32) / max(1, steps - 1)
        return jnp.expm1(jnp.clip(done, 0.0, 1.0) * math.log(2)) * by_depth

    return rates


def averaged(ema: Tree, params: Tree, decay: float, step: jax.Array) -> Tree:
    """Return the exponential moving average of the parameters after update number `step` (from 0).

    ema <- d ema + (1 - d) params with d = min(decay, (1 + step) / (10 + step)). A constant, long
    decay would keep the initial values for most of a run.
    """
    n = step.astype(jnp.float32)
    d = jnp.minimum(decay, (1.0 + n) / (10.0 + n))
    return optax.incremental_update(params, ema, 1.0 - d)


MIN_SCALE = 2.0**-14
MAX_SCALE = 2.0**24
InitialScale = Annotated[float, Interval(ge=MIN_SCALE, le=MAX_SCALE)]


class LossScale(flax.struct.PyTreeNode):
    """Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2).

    Attributes:
      value: float32, factor of the loss of every exit in the backward pass.
      clean: int32, steps in a row without an overflow.
    """

    value: jax.Array
    clean: jax.Array

    @classmethod
    def initial(cls, value: float) -> LossScale:
        return cls(jnp.asarray(value, jnp.float32), jnp.zeros((), jnp.int32))

    def after(self, finite: jax.Array, interval: int) -> LossScale:
        """Return half the value after an overflow, twice the value after `interval` clean steps."""
        clean = jnp.where(finite, self.clean + 1, 0)
        grow = clean >= interval
        factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
        value = jnp.clip(self.value * factor, MIN_SCALE, MAX_SCALE)
        return LossScale(value, jnp.where(grow, 0, clean))
