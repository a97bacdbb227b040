"""`compact`: rows that go on before those that leave, in the order they stand in."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eejax.common.errors import require
from eejax.kernels import call
from eejax.kernels.compact import reference


class Compacted(NamedTuple):
    """order [n] int32: the rows' numbers, those that are kept first, each part ascending;
    counts [2] int32: of rows kept and not."""

    order: jax.Array
    counts: jax.Array


def compact(keep: jax.Array, *, implementation: str | None = None) -> Compacted:
    """A stable split of rows by `keep` [n] bool, of any n from 1.

    A batch of them (`vmap`) is split one by one. Raises `ConfigError` for anything but bools [n].
    """
    flags = keep.ndim == 1 and keep.shape[0] > 0 and keep.dtype == jnp.bool_
    require(flags, "keep", (keep.shape, keep.dtype.name), "must be bools [n], n at least 1")
    implementation = call.chosen("compact", implementation, True, "")
    return Compacted(*_run(implementation)(keep))


@cache
def _run(implementation: str | None):
    def kernel(launch, keep):
        from eejax.kernels.compact import triton

        return triton.compact(launch, keep)

    return call.folded(call.op(kernel, reference.compact, implementation), rows=())
