"""Sizes at which `compact` is timed."""

from __future__ import annotations

from functools import partial

from eejax.kernels.compact.api import compact
from eejax.kernels.compact.arg_specs import draw
from eejax.kernels.specs import BenchCase, Spec


def case(n: int, tiny: bool = False) -> BenchCase:
    spec = Spec(f"{n}", compact, partial(draw, n=n, share=0.5), {}, tiny)
    return BenchCase(spec, dict(rows=n), 5 * n + 8, tiny)


CASES = (*(case(n) for n in (64, 4096, 65536)), case(16, tiny=True))
