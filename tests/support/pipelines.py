"""What tests of pipelines share: batches, parameters on stages, and the comparison of gradients."""

from __future__ import annotations

import jax
import numpy as np

from eejax.common.trees import path_name
from eejax.models.config import ModelConfig
from eejax.pipeline.layout import StageLayout
from eejax.sharding import rules

T = 8


def batch_of(config: ModelConfig, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size, (rows, T)).astype(np.int32)
    labels = rng.integers(-1, config.vocab_size, (rows, T)).astype(np.int32)  # some do not count
    return {"tokens": tokens, "labels": labels}


def placed(layout: StageLayout, tree, mesh, which: int = 0):
    specs = rules.specs(layout.declarations()[which], mesh)
    return jax.device_put(layout.to_stages(tree), rules.shardings(specs, mesh))


def compare(grads, want, tolerance: float = 1e-5) -> None:
    """Every gradient's largest error relative to its largest entry.

    That of a bias of keys may be 0 by symmetry, as the softmax does not see it: what is left is
    rounding, and is compared with the bias of queries.
    """
    grads, want = jax.device_get((grads, want))
    assert jax.tree.structure(grads) == jax.tree.structure(want)
    wanted = {path_name(p): g for p, g in jax.tree_util.tree_flatten_with_path(want)[0]}
    for path, got in jax.tree_util.tree_flatten_with_path(grads)[0]:
        name = path_name(path)
        scale = np.abs(wanted[name.replace("k_bias", "q_bias")]).max()
        assert np.abs(got - wanted[name]).max() <= tolerance * scale, name
