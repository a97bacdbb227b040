"""`scatter`: rows that left are written back to their places, normed on the way."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp

from eejax.common.errors import require
from eejax.kernels import call
from eejax.kernels.norms import NormOptions
from eejax.kernels.scatter import reference

DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)
MAX_WIDTH = 2**14  # maximum columns; a whole row is held in registers


def scatter(
    into: jax.Array,
    x: jax.Array,
    place: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    options: NormOptions | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Write the norm of rows x into rows of `into` (TIDE's exit projection).

    The result has the dtype of `into`, whose memory it reuses if nothing else reads it. It is
    differentiable in reverse mode in into, x, scale and bias. `vmap` takes batches one by one. The
    kernel takes float32, float16 and bfloat16 and up to `MAX_WIDTH` columns; otherwise the
    reference runs, with a warning.

    Args:
      into: [m, d].
      x: [n, d].
      place: [n] int32, different rows of `into`; rows outside 0..m-1 are dropped.
      scale: [d] of the norm.
      bias: [d] of the norm, or None.
      options: the norm; None writes x itself.
      implementation: one of `call.IMPLEMENTATIONS`.

    Raises:
      ConfigError: for shapes that do not fit together.
    """
    n, d = x.shape if x.ndim == 2 else (0, 0)
    require(x.ndim == 2, "x", x.shape, "must be rows [n, d]", "Reshape them.")
    require(
        into.ndim == 2 and into.shape[1] == d,
        "into",
        into.shape,
        f"must be of shape [m, {d}] beside x of shape {x.shape}",
    )
    whole = place.shape == (n,) and jnp.issubdtype(place.dtype, jnp.integer)
    require(whole, "place", (place.shape, place.dtype.name), f"must be integers of shape {(n,)}")
    normed, shape = options is not None, lambda a: None if a is None else a.shape
    require(
        normed == (scale is not None),
        "scale",
        shape(scale),
        "must be given with `options`, and only with them",
    )
    require(normed or bias is None, "bias", shape(bias), "must be None without `options`")
    if normed:
        call.require_floating("x", x)
    for name, value in (("scale", scale), ("bias", bias)):
        if value is not None:
            require(value.shape == (d,), name, value.shape, f"must be of shape {(d,)}")
    covered = {x.dtype, into.dtype} <= set(map(jnp.dtype, DTYPES)) and d <= MAX_WIDTH
    implementation = call.chosen(
        "scatter",
        implementation,
        covered,
        f"rows of {d} {x.dtype} into {into.dtype}",
        empty=not x.size,
    )
    if not x.size:
        return into
    m = into.shape[0]
    place = jnp.where((place >= 0) & (place < m), place, m).astype(jnp.int32)  # before it wraps
    return _scatter(options, implementation, into, x, place, scale, bias)


@cache
def _run(options: NormOptions | None, implementation: str | None):
    def kernel(launch, *args):
        from eejax.kernels.scatter import triton

        return triton.scatter(launch, options, *args)

    plain = partial(reference.scatter, options)
    return call.folded(call.op(kernel, plain, implementation), rows=())


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scatter(options, implementation, *args):
    return _run(options, implementation)(*args)


def _forward(options, implementation, *args):
    return _scatter(options, implementation, *args), args


def _backward(options, implementation, args, cotangent):
    into, x, place, scale, bias = args

    def plain(into, x, scale, bias):
        return reference.scatter(options, into, x, place, scale, bias)

    _, pull = jax.vjp(plain, into, x, scale, bias)
    d_into, d_x, d_scale, d_bias = pull(cotangent)
    return d_into, d_x, None, d_scale, d_bias


_scatter.defvjp(_forward, _backward)
