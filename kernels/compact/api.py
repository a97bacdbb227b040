"""`compact`: a stable split of rows into those that are kept and the others."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp

from eejax.common.errors import require
from eejax.kernels import call
from eejax.kernels.compact import reference


class Compacted(NamedTuple):
    """A split of rows.

    Attributes:
      order: [n] int32 numbers of the rows, kept ones first, each part ascending.
      counts: [2] int32 numbers of kept rows and of the others.
    """

    order: jax.Array
    counts: jax.Array


def compact(keep: jax.Array, *, implementation: str | None = None) -> Compacted:
    """Split rows stably by `keep` [n] bool, for any n from 1.

    A batch (`vmap`) is split one by one. Raises `ConfigError` for anything but bools [n].
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
