"""A model's fingerprint: whether exits and routers meet the parameters they were trained on."""

from __future__ import annotations

import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np

from eejax.common.errors import CheckpointError
from eejax.common.trees import Tree, path_name
from eejax.models.config import ModelConfig

VALUES = 64  # that are looked at of every leaf


def digest(config: ModelConfig, params: Tree, dtype: str = "float32") -> str:
    """Of some values of every leaf but those of exits, as bfloat16, which every way of storing
    them keeps. dtype: what they are rounded to before."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path_name(path)
        if not name.startswith("exits/"):
            # Padded tokens have no values, and whose table it is makes no other model.
            table = name in ("embed/tokens", "final/head", "shared_head", "final/head_bias")
            name = "final/head" if name == "shared_head" else name
            leaves[name] = leaf[: config.vocab_size] if table else leaf
    found = hashlib.sha256()
    for name, leaf in sorted(leaves.items()):
        number = np.unique(np.linspace(0, leaf.size - 1, VALUES).astype(np.int64))
        values = leaf[np.unravel_index(number, leaf.shape)]
        rounded = jnp.asarray(values).astype(dtype).astype(jnp.bfloat16)
        found.update(f"{name} {tuple(leaf.shape)}".encode())
        found.update(np.asarray(rounded.astype(jnp.float32)).tobytes())
    return found.hexdigest()[:32]


def same_model(where: str | os.PathLike, wanted: str, found: str, base: str) -> None:
    """Raises CheckpointError where the exits in `where` are of other parameters than the base's."""
    if wanted != found:
        raise CheckpointError(
            f"{where}: its exits and routers were trained on other parameters (digest {wanted}) "
            f"than those of {base} (digest {found}): give them the model they belong to, or "
            "calibrate this one."
        )
