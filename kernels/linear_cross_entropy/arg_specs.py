"""Arguments for tests of `linear_cross_entropy`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from eejax.kernels.linear_cross_entropy.api import linear_cross_entropy
from eejax.kernels.linear_cross_entropy.chunks import IGNORE, Gradients, Sums
from eejax.kernels.linear_cross_entropy.reference import LossOptions
from eejax.kernels.specs import Spec, normal

PLAIN = {}
EVERYTHING = dict(softcap=5.0, temperature=0.7, z_loss=0.01, confidence_weighted=True)
TEMPERED = dict(temperature=1.6, z_loss=0.01)

# Tokens, width, rows of the table, of which these are padding, options, whether there is a bias.
SMALL = (
    (37, 72, 257, 40, EVERYTHING, True),
    (150, 200, 600, 3, TEMPERED, True),
    (1, 64, 17, 0, PLAIN, False),
    (20, 64, 300, 290, dict(softcap=5.0), False),
)
LARGE = (
    (8192, 4096, 128256, 0, PLAIN, False),
    (2048, 2880, 50257, 0, TEMPERED, True),
    (8192, 2304, 256000, 0, EVERYTHING, False),
    (300, 8192, 50304, 47, EVERYTHING, True),
)


def draw(key, n: int, d: int, v: int, padding: int, bias: bool, dtype: str) -> tuple:
    """Draw arguments such that logits have a standard deviation of 3.

    A fifth of the labels is ignored, but never the first.
    """
    labels = jax.random.randint(jax.random.fold_in(key, 0), (n,), 0, v - padding)
    ignored = jax.random.uniform(jax.random.fold_in(key, 1), (n,)) < 0.2
    weights = jax.random.uniform(jax.random.fold_in(key, 2), (n,), jnp.float32, 0.5, 1.5)
    make = partial(normal, key, dtype=dtype)
    return (
        make(3, (n, d)),
        make(4, (v, d), std=3 * d**-0.5),
        make(5, (v,)) if bias else None,
        jnp.where(ignored & (jnp.arange(n) > 0), IGNORE, labels),
        weights,
    )


def value_and_gradients(
    h, table, bias, labels, weights, *, options: LossOptions, implementation: str | None = None
) -> tuple[Sums, Gradients, Sums]:
    """Return the sums, their gradients in the arguments' dtypes, and the sums computed alone."""
    run = partial(
        linear_cross_entropy,
        *(h, table, bias, labels, weights),
        options=options,
        implementation=implementation,
    )
    sums, d = run(into=jnp.zeros_like(table, jnp.float32))
    of = Gradients(h, table, bias, weights)
    return sums, jax.tree.map(lambda g, a: g.astype(a.dtype), d, of), run()[0]


def _name(dtype, n, d, v, padding, options, bias) -> str:
    said = "".join(f"-{name}" for name in options)
    return f"{dtype}-{n}x{d}x{v}{f'-{padding}' * (padding > 0)}{said}{'-bias' * bias}"


def _specs(cases: tuple, dtype: str, small: bool) -> tuple[Spec, ...]:
    found = []
    for n, d, v, padding, given, bias in cases:
        options = LossOptions(v - padding, **given)
        found.append(
            Spec(
                _name(dtype, n, d, v, padding, given, bias),
                partial(value_and_gradients, options=options),
                partial(draw, n=n, d=d, v=v, padding=padding, bias=bias, dtype=dtype),
                {"options": options},
                small,
            )
        )
    return tuple(found)


# float16's kernels are those of bfloat16 except for the rounding; float32's large ones differ only
# in their masks.
SPECS = (
    *_specs(SMALL, "float32", True),
    *_specs(SMALL, "bfloat16", True),
    *_specs(SMALL[:2], "float16", True),
    *_specs(LARGE[1:3], "float32", False),
    *_specs(LARGE, "bfloat16", False),
    *_specs(LARGE[:2], "float16", False),
)
