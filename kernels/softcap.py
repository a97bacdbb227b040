"""Soft caps of logits in kernels."""

from __future__ import annotations

import triton
import triton.language as tl

SMALL = tl.constexpr(0.15)


@triton.jit
def tanh(a):
    """Return tanh, by its series for small numbers, where 1 minus nearly 1 would lose digits."""
    e = tl.exp(tl.abs(a) * -2.0)
    large = (1.0 - e) / (1.0 + e)
    square = a * a
    small = a * (1.0 - square * (1.0 / 3 - square * (2.0 / 15 - square * (17.0 / 315))))
    return tl.where(tl.abs(a) < SMALL, small, tl.where(a < 0, -large, large))
