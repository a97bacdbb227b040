"""A model's fingerprint, which shows whether exits and routers match the parameters of their
training."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eejax.common.errors import CheckpointError
from eejax.common.trees import Tree, path_name
from eejax.models.config import ModelConfig

VALUES = 64  # values of every leaf that are digested
LeafReader = Callable[[str, tuple[np.ndarray, ...]], Any]


def digest(config: ModelConfig, params: Tree) -> str:
    """Return `digest_of` a tree of parameters.

    Loading as bfloat16 does not change it. Loading as float16 does, because it rounds differently:
    then use the values of the files.
    """
    found = jax.tree_util.tree_leaves_with_path(params)
    leaves = {path_name(path): leaf for path, leaf in found}
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    return digest_of(config, shapes, lambda name, at: leaves[name][at])


def digest_of(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], values: LeafReader
) -> str:
    """Digest some values of every leaf except those of exits, each rounded once, to bfloat16.

    Earlier rounding to float32 or bfloat16 changes no digest; rounding to float16 may.

    Args:
      config: the model's.
      shapes: shapes of the leaves by name.
      values: (name, index arrays) -> values of a leaf there, as they are stored.
    """
    leaves = {}
    for name, shape in shapes.items():
        if not name.startswith("exits/"):
            # Padded tokens have no values, and the name of a shared table is irrelevant.
            if name in ("embed/tokens", "final/head", "shared_head", "final/head_bias"):
                shape = (min(config.vocab_size, shape[0]), *shape[1:])
            leaves["final/head" if name == "shared_head" else name] = name, tuple(shape)
    found = hashlib.sha256()
    for called, (name, shape) in sorted(leaves.items()):
        if not math.prod(shape):  # a base with an exit below all layers may be read without layers
            continue
        number = np.unique(np.linspace(0, math.prod(shape) - 1, VALUES).astype(np.int64))
        rounded = jnp.asarray(values(name, np.unravel_index(number, shape))).astype(jnp.bfloat16)
        found.update(f"{called} {shape}".encode())
        found.update(np.asarray(rounded.astype(jnp.float32)).tobytes())
    return found.hexdigest()[:32]


def file_digest(path: str | os.PathLike) -> str:
    """Digest all bytes of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def same_model(where: str | os.PathLike, wanted: str, found: str, base: str) -> None:
    """Raise CheckpointError if the exits in `where` belong to other base parameters."""
    if wanted != found:
        raise CheckpointError(
            f"{where}: its exits and routers were trained on other parameters (digest {wanted}) "
            f"than those of {base} (digest {found}): give them the model they belong to, or "
            "calibrate this one."
        )
