"""Conversion between tensors of another library and our parameter leaves, in both directions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from eejax.models.config import ModelConfig

TensorParts = tuple[np.ndarray, ...]
Shapes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A conversion between tensors and leaves.

    Attributes:
      theirs: names of tensors; {i} stands for the number of a layer.
      ours: paths of leaves, such as "attn/q" (within a layer) or "embed/tokens".
      read: (config, tensors, shapes of the leaves) -> leaves.
      write: (config, leaves) -> tensors; None if other rules write these leaves.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    read: Callable[[ModelConfig, TensorParts, Shapes], TensorParts]
    write: Callable[[ModelConfig, TensorParts], TensorParts] | None = None

    @property
    def layered(self) -> bool:
        return "{i}" in self.theirs[0]


def vector(theirs: str, ours: str) -> Rule:
    """Return a rule for the same numbers in the same order: norms and biases, whose heads we
    separate."""
    return Rule(
        (theirs,),
        (ours,),
        lambda config, a, shapes: (reshaped(theirs, a[0], shapes[0]),),
        lambda config, a: (a[0].reshape(-1),),
    )


def linear(theirs: str, ours: str) -> Rule:
    """Return a rule for their matrix [out, in] and ours [in, out], with heads separate."""
    return Rule(
        (theirs,),
        (ours,),
        lambda config, a, shapes: (reshaped(theirs, a[0], shapes[0], True),),
        lambda config, a: (_matrix(a[0], ours).T,),
    )


def conv1d(theirs: str, ours: str) -> Rule:
    """Return a rule for a matrix [in, out] (GPT-2's Conv1D)."""
    return Rule(
        (theirs,),
        (ours,),
        lambda config, a, shapes: (reshaped(theirs, a[0], shapes[0]),),
        lambda config, a: (_matrix(a[0], ours),),
    )


def vocabulary(theirs: str, ours: str) -> Rule:
    """Return a rule for [v, d] or [v]; ours may have padding rows, which are 0."""

    def read(config, a, shapes):
        rows = reshaped(theirs, a[0], (config.vocab_size, *shapes[0][1:]))
        return (np.pad(rows, [(0, shapes[0][0] - len(rows))] + [(0, 0)] * (rows.ndim - 1)),)

    return Rule((theirs,), (ours,), read, lambda config, a: (a[0][: config.vocab_size],))


def positions(theirs: str, ours: str, skipped: int) -> Rule:
    """Return a rule for [t, d] whose first rows belong to no position (OPT's two); they are
    written as 0."""

    def read(config, a, shapes):
        t, d = shapes[0]
        return (reshaped(theirs, a[0], (skipped + t, d))[skipped:],)

    def write(config, a):
        return (np.pad(a[0], ((skipped, 0), (0, 0))),)

    return Rule((theirs,), (ours,), read, write)


def fused(
    theirs: str,
    ours: Sequence[str],
    sizes: Callable[[ModelConfig], tuple[int, Sequence[int]]],
    transposed: bool = True,
) -> Rule:
    """Return a rule for several leaves in one tensor [out, in] ([in, out] if not `transposed`) or
    bias [out].

    sizes(config) returns the number of groups of rows, and the number of rows of each leaf in a
    group.
    """
    bias = theirs.endswith("bias")

    def read(config, a, shapes):
        groups, parts = sizes(config)
        inner = () if bias else (a[0].shape[-1 if transposed else 0],)
        rows = a[0] if bias or transposed else a[0].T
        rows = reshaped(theirs, rows, (groups, sum(parts), *inner))
        cut = np.split(rows, np.cumsum(parts)[:-1], axis=1)
        flat = (part.reshape(-1, *inner) for part in cut)
        return tuple(
            reshaped(theirs, p, shape, not bias) for p, shape in zip(flat, shapes, strict=True)
        )

    def write(config, a):
        groups, parts = sizes(config)
        rows = [
            x.reshape(-1) if bias else _matrix(x, name).T for x, name in zip(a, ours, strict=True)
        ]
        whole = np.concatenate(
            [r.reshape(groups, n, *r.shape[1:]) for r, n in zip(rows, parts, strict=True)], 1
        )
        whole = whole.reshape(-1, *rows[0].shape[1:])
        return (whole if bias or transposed else whole.T,)

    return Rule((theirs,), tuple(ours), read, write)


def one_after_another(config: ModelConfig) -> tuple[int, Sequence[int]]:
    """Return sizes for all of q, then all of k, then all of v."""
    h = config.head_dim
    return 1, (config.n_heads * h, config.n_kv_heads * h, config.n_kv_heads * h)


def by_group(config: ModelConfig) -> tuple[int, Sequence[int]]:
    """Return sizes for a key's queries, the key and its value, group by group.

    Falcon has this order, and GPT-NeoX with groups of one head.
    """
    h = config.head_dim
    return config.n_kv_heads, (config.n_heads // config.n_kv_heads * h, h, h)


def gate_and_up(config: ModelConfig) -> tuple[int, Sequence[int]]:
    return 1, (config.d_ff, config.d_ff)


def reshaped(name: str, a: np.ndarray, shape: tuple[int, ...], transposed: bool = False):
    """Return `a` in our shape, from [out, in] if `transposed`. Raises ValueError, naming the
    tensor."""
    if a.size != math.prod(shape):
        raise ValueError(f"{name} has shape {a.shape}, which does not make {shape}")
    return (a.T if transposed else a).reshape(shape)


def scaled(rule: Rule, factor: float) -> Rule:
    """Return a rule whose leaf is `factor` times the tensor, in float32, which is rounded once
    later.

    It is written unscaled, for a factor of 1.
    """
    if factor == 1:
        return rule

    def times(a):
        return a.astype(np.float32) * np.float32(factor)

    def read(config, a, shapes):
        return tuple(map(times, rule.read(config, a, shapes)))

    return dataclasses.replace(rule, read=read)


def _matrix(a: np.ndarray, name: str) -> np.ndarray:
    """Return a leaf with separate heads as [in, out]; o's heads are its first axes, others' the
    last."""
    end = a.shape[-1] if name.endswith(("/o", "/down")) else math.prod(a.shape[1:])
    return a.reshape(-1, end)
