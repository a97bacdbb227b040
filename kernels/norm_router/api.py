"""`norm_router`: whether tokens may leave at a boundary, from their states alone."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eejax.common.errors import require
from eejax.kernels import call
from eejax.kernels.norm_router import reference
from eejax.kernels.norms import NormOptions

DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)
MAX_WIDTH = 512


class Routed(NamedTuple):
    """Decisions of a router.

    Attributes:
      confidence: [n] float32 in [0, 1].
      leaves: [n] bool, whether it reaches the threshold.
    """

    confidence: jax.Array
    leaves: jax.Array


def norm_router(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    down: jax.Array,
    up: jax.Array,
    up_bias: jax.Array,
    threshold: jax.Array,
    *,
    options: NormOptions,
    implementation: str | None = None,
) -> Routed:
    """Compute confidences sigmoid(up . silu(norm(x) @ down) + up_bias), and which reach a
    threshold.

    This is TIDE's fused gate, with a bias. Products are in x's dtype and accumulated in float32.
    The confidence is differentiable in reverse mode in all arguments except the threshold. A batch
    of rows (`vmap`) becomes more rows. The kernel takes float32, float16 and bfloat16 and widths r
    up to 512; otherwise the reference runs, with a warning.

    Args:
      x: [n, d] states.
      scale: [d] of the norm.
      bias: [d] of the norm, or None.
      down: [d, r].
      up: [r].
      up_bias: [].
      threshold: [n] float32; 1 is never reached.
      options: the norm.
      implementation: one of `call.IMPLEMENTATIONS`.

    Raises:
      ConfigError: for shapes that do not fit together.
    """
    require(x.ndim == 2, "x", x.shape, "must be states [n, d]", "Reshape them.")
    call.require_floating("x", x)
    n, d = x.shape
    fits = down.ndim == 2 and down.shape[0] == d
    require(fits, "down", down.shape, f"must be of shape ({d}, r) beside x of shape {x.shape}")
    is_norm = isinstance(options, NormOptions)
    require(is_norm, "options", options, "must be `kernels.norms.NormOptions`")
    r = down.shape[-1]
    for name, a, shape in (
        ("scale", scale, (d,)),
        ("bias", bias, (d,)),
        ("down", down, (d, r)),
        ("up", up, (r,)),
        ("up_bias", up_bias, ()),
        ("threshold", threshold, (n,)),
    ):
        if a is not None:
            require(
                a.shape == shape,
                name,
                a.shape,
                f"must be of shape {shape} beside x of shape {x.shape}",
            )
    implementation = call.chosen(
        "norm_router",
        implementation,
        x.dtype in DTYPES and r <= MAX_WIDTH,
        f"{x.dtype} states and a width of {r}",
        empty=not x.size,
    )
    args = x, scale, bias, down, up, up_bias, threshold.astype(jnp.float32)
    return Routed(*_norm_router(options, implementation, *args))


@cache
def _run(options: NormOptions, implementation: str | None):
    """Return the op by one of its implementations, for rows x and threshold."""

    def kernel(launch, *args):
        from eejax.kernels.norm_router import triton

        return triton.norm_router(launch, options, *args)

    plain = partial(reference.norm_router, options)
    return call.folded(call.op(kernel, plain, implementation), rows=(0, 6))


def _routed(options, implementation, *args) -> tuple[jax.Array, jax.Array]:
    return _run(options, implementation)(*args)


_norm_router = jax.custom_vjp(_routed, nondiff_argnums=(0, 1))


def _forward(options, implementation, *args):
    return _norm_router(options, implementation, *args), args


def _backward(options, implementation, args, cotangents):
    *inputs, threshold = args

    def confidence(x, scale, bias, down, up, up_bias):
        return reference.norm_router(options, x, scale, bias, down, up, up_bias, threshold)[0]

    _, pull = jax.vjp(confidence, *inputs)
    return *pull(cotangents[0]), None


_norm_router.defvjp(_forward, _backward)
