"""RMSNorm and LayerNorm: what kernels have to know of a norm, and its definition."""

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
    """The static part of a norm: y = (x - mean) / sqrt(variance + eps) * scale + bias.

    kind: "rmsnorm" takes the mean to be 0; plus_one: 1 + scale in place of scale (Gemma).
    """

    kind: str = "rmsnorm"
    eps: float = 1e-6
    plus_one: bool = False

    def __post_init__(self):
        require_one_of("NormOptions.kind", self.kind, KINDS)
        object.__setattr__(self, "eps", float(self.eps))  # numpy's are nothing to Triton
        require(self.eps >= 0, "NormOptions.eps", self.eps, "must be at least 0")


def norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    options: NormOptions,
    mean: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """The norm of x over its last axis, or the axes that `mean` averages over and keeps; computed
    in float32, returned in x's dtype. scale and bias have the shape of x's last axes."""
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
