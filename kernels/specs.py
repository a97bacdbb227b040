"""Arguments of ops in tests, compile checks and benchmarks: one list for each op."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eejax.kernels.norms import NormOptions

OPS = (
    "compact",
    "decode_attention",
    "head_confidence",
    "linear_cross_entropy",
    "norm_router",
    "scatter",
)
"""Names of the ops: each is a package `eejax.kernels.<name>`, with `SPECS` in its `arg_specs`."""

DTYPES = ("float32", "float16", "bfloat16")
RMS, ONE = NormOptions("rmsnorm", 1e-6), NormOptions("rmsnorm", 1e-6, plus_one=True)
LAYER = NormOptions("layernorm", 1e-5)


@dataclasses.dataclass(frozen=True)
class Spec:
    """An op with static options, and arguments to run it on.

    Attributes:
      run: (*args, implementation=None) -> the op's results.
      draw: key -> its arguments.
      options: options of `run`, for computing the same in another way.
      small: whether Triton's interpreter needs only seconds.
    """

    name: str
    run: Callable
    draw: Callable[[jax.Array], tuple]
    options: dict[str, Any]
    small: bool

    def args(self, seed: int = 0) -> tuple:
        """Return arguments drawn from a seed."""
        return jax.jit(self.draw)(jax.random.key(seed))  # one program, not one for each operation

    @property
    def shapes(self) -> tuple:
        """Return the arguments' shapes and dtypes."""
        return jax.eval_shape(self.draw, jax.random.key(0))


def normal(key: jax.Array, number: int, shape: tuple[int, ...], dtype: Any, std=1.0, mean=0.0):
    """Return the number-th array drawn from a key, rounded to a dtype."""
    key = jax.random.fold_in(key, number)
    return (jax.random.normal(key, shape) * std + mean).astype(jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class BenchCase:
    """Sizes that an op is timed with.

    Attributes:
      sizes: values of the spec's letters, for tables.
      moved: bytes that any implementation reads and writes.
      tiny: whether the case only tries the benchmark out.
      peer: another function of the same arguments to time beside the reference.
    """

    spec: Spec
    sizes: dict[str, Any]
    moved: int
    tiny: bool = False
    peer: Callable | None = None
