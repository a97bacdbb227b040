"""Arguments for tests of `compact`."""

from __future__ import annotations

from functools import partial

import jax

from eejax.kernels.compact.api import compact
from eejax.kernels.specs import Spec

# Number of rows, and the share that is kept.
SMALL = (
    (1, 0.5),
    (2, 0.0),
    (7, 1.0),
    (64, 0.3),
    (1000, 0.5),
    (4096, 0.9),
    (4097, 0.5),
    (9000, 0.0),
)
LARGE = ((32768, 0.3), (3_000_000, 0.5))


def draw(key, n: int, share: float) -> tuple:
    return (jax.random.bernoulli(key, share, (n,)),)


def _specs(cases: tuple, small: bool) -> tuple[Spec, ...]:
    return tuple(
        Spec(f"{n}-{share}", compact, partial(draw, n=n, share=share), {}, small)
        for n, share in cases
    )


SPECS = _specs(SMALL, True) + _specs(LARGE, False)
