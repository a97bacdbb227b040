"""Triton kernels of `compact`.

A block's rows go behind those of the blocks before it, kept ones from 0 on and others from the
number of kept rows on: one kernel counts, the next one adds the counts up and writes. Rows that fit
into one block need no count beforehand.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from eejax.common.lengths import power_of_two
from eejax.kernels import call

ALONE = 4096  # maximum rows that a single program splits
BLOCK = 1024  # rows of a program if there are several


@triton.jit
def compact_count_kernel(keep_ptr, kept_ptr, N: tl.constexpr, BN: tl.constexpr):
    """Count the kept rows of a block."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    keep = tl.load(keep_ptr + row, mask=row < N, other=0) != 0
    tl.store(kept_ptr + tl.program_id(0), tl.sum(keep.to(tl.int32), 0))


@triton.jit
def compact_kernel(
    keep_ptr,
    kept_ptr,
    order_ptr,
    counts_ptr,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
):
    """Write the places of a block's rows; kept [BLOCKS] are the counts if `compact_count_kernel`
    ran."""
    block, i = tl.program_id(0), tl.arange(0, BN)
    row = block * BN + i
    real = row < N
    keep = (tl.load(keep_ptr + row, mask=real, other=0) != 0).to(tl.int32)
    own = tl.cumsum(keep, 0)
    if BLOCKS == 1:
        before, total = 0, tl.sum(keep, 0)
    else:
        before = tl.sum(tl.zeros((BC,), tl.int32), 0)
        total = before
        for begin in range(0, BLOCKS, BC):
            at = begin + tl.arange(0, BC)
            kept = tl.load(kept_ptr + at, mask=at < BLOCKS, other=0)
            total += tl.sum(kept, 0)
            before += tl.sum(tl.where(at < block, kept, 0), 0)
    kept_before = before + own - keep
    place = tl.where(keep != 0, kept_before, total + row - kept_before)
    tl.store(order_ptr + place, row, mask=real)
    if block == 0:
        tl.store(counts_ptr, total)
        tl.store(counts_ptr + 1, N - total)


def compact(launch, keep):
    """Compute `reference.compact` with kernels that `launch` runs."""
    n = keep.shape[0]
    keep = keep.astype(jnp.int8)
    many = n > ALONE
    bn = BLOCK if many else max(16, power_of_two(n))
    blocks = call.cdiv(n, bn)
    kept = keep
    if many:
        (kept,) = launch(
            keep,
            kernel=compact_count_kernel,
            grid=(blocks,),
            N=n,
            BN=bn,
            out=[jax.ShapeDtypeStruct((blocks,), jnp.int32)],
        )
    return tuple(
        launch(
            keep,
            kept,
            kernel=compact_kernel,
            grid=(blocks,),
            N=n,
            BLOCKS=blocks,
            BN=bn,
            BC=1024,
            out=[jax.ShapeDtypeStruct(s, jnp.int32) for s in ((n,), (2,))],
        )
    )
