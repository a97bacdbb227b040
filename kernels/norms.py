"""RMSNorm and LayerNorm: their options for kernels, and their definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.errors import require, require_one_of

KINDS = ("rmsnorm", "layernorm")


@dataclasses.dataclass(frozen=True)
class NormOptions:
    """Static options of a norm: y = (x - mean) / sqrt(variance + eps) * scale + bias.

    Attributes:
      kind: "layernorm", or "rmsnorm", which takes the mean to be 0.
      eps: see the formula.
      plus_one: whether 1 + scale replaces scale (Gemma).
    """

    kind: str = "rmsnorm"
    eps: float = 1e-6
    plus_one: bool = False

    def __post_init__(self):
        require_one_of("NormOptions.kind", self.kind, KINDS)
        object.__setattr__(self, "eps", float(self.eps))  # Triton does not take numpy's floats
        require(self.eps >= 0, "NormOptions.eps", self.eps, "must be at least 0")


def norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    options: NormOptions,
    mean: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Norm x over its last axis, or over the axes that `mean` averages over and keeps.

    It is computed in float32 and returned in x's dtype. scale and bias have the shape of x's last
    axes.
    """
    mean = mean or (lambda a: jnp.mean(a, -1, keepdims=True))
    y = x.astype(jnp.float32)
    if options.kind == "layernorm":
        y = y - mean(y)
    y = y * lax.rsqrt(mean(jnp.square(y)) + options.eps)

    def lift(a):
        return a.astype(jnp.float32).reshape((1,) * (y.ndim - a.ndim) + a.shape)

    y = y * (1.0 + lift(scale) if options.plus_one else lift(scale))
    if bias is not None:
        y = y + lift(bias)
    return y.astype(x.dtype)
