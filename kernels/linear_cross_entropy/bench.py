"""Sizes at which `linear_cross_entropy` is timed, with gradients, beside whole logits."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from eejax.kernels.linear_cross_entropy.arg_specs import draw, value_and_gradients
from eejax.kernels.linear_cross_entropy.chunks import IGNORE
from eejax.kernels.linear_cross_entropy.reference import LossOptions
from eejax.kernels.specs import BenchCase, Spec


def gradients(*args, options: LossOptions, implementation: str | None = None):
    """Return the sums and their gradients, as a training step needs them."""
    return value_and_gradients(*args, options=options, implementation=implementation)[:2]


def whole_logits(h, table, bias, labels, weights):
    """Return the same by autodiff, with all logits [n, v] at once."""

    def cost(h, table, weights):
        y = jnp.einsum("nd,vd->nv", h, table, preferred_element_type=jnp.float32)
        picked = jnp.take_along_axis(y, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
        counted = labels != IGNORE
        return jnp.sum(jnp.where(counted, weights * (jax.nn.logsumexp(y, -1) - picked), 0.0))

    return jax.value_and_grad(cost, (0, 1, 2))(h, table, weights)


def case(n: int, d: int, v: int, dtype: str, tiny: bool = False) -> BenchCase:
    options = LossOptions(v)
    spec = Spec(
        f"{dtype}-{n}x{d}x{v}",
        partial(gradients, options=options),
        partial(draw, n=n, d=d, v=v, padding=0, bias=False, dtype=dtype),
        {"options": options},
        tiny,
    )
    size = jnp.dtype(dtype).itemsize
    moved = 2 * n * d * size + v * d * (size + 4)
    return BenchCase(spec, dict(dtype=dtype, rows=n, d=d, vocab=v), moved, tiny, whole_logits)


CASES = (
    *(
        case(8192, d, v, t)
        for t in ("bfloat16", "float16")
        for d in (1024, 4096)
        for v in (32768, 131072)
    ),
    *(case(4096, 1024, v, "float32") for v in (32768, 131072)),
    case(40, 64, 300, "float32", tiny=True),
)
