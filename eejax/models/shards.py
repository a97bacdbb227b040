"""Communication between a layer's shards over the model axis.

One set of helpers for no axis, tensor parallelism (Shoeybi et al. 2019) and sequence parallelism
(Korthikanti et al. 2022).
"""

from __future__ import annotations

import jax
from jax import lax

from eejax.common.axes import Axes
from eejax.common.trees import Tree
from eejax.models.config import ModelConfig


def gather_from_stream(x: jax.Array, axes: Axes) -> jax.Array:
    """Return all positions [b, t, d] of a residual stream, for products with column-parallel
    weights."""
    return lax.all_gather(x, axes.sequence, axis=1, tiled=True) if axes.sequence else x


def reduce_to_stream(y: jax.Array, axes: Axes) -> jax.Array:
    """Sum the shards' row-parallel products [b, t, d], in the layout of the residual stream."""
    if axes.sequence:
        return lax.psum_scatter(y, axes.sequence, scatter_dimension=1, tiled=True)
    return lax.psum(y, axes.model) if axes.model else y


def own_positions(a: jax.Array, axes: Axes) -> jax.Array:
    """Return the part of a [b or 1, t, ...] that belongs to this shard of the residual stream."""
    if not axes.sequence:
        return a
    t = a.shape[1] // lax.axis_size(axes.sequence)
    return lax.dynamic_slice_in_dim(a, lax.axis_index(axes.sequence) * t, t, 1)


def own_kv_head(p: Tree, config: ModelConfig, axes: Axes) -> Tree:
    """Return attention's parameters with the one KV head that this shard's query heads read.

    It applies where there are more shards than KV heads: the parameters of keys and values are then
    whole on every shard (`sharding.rules`), and several shards compute the same head. A mean over
    shards is still the mean over heads (`qk_norm` full).
    """
    shards = lax.axis_size(axes.model) if axes.model else 1
    if shards <= config.n_kv_heads:
        return p
    head = lax.axis_index(axes.model) * config.n_kv_heads // shards
    h = config.head_dim

    def cut(a, dim):
        return lax.dynamic_slice_in_dim(a, head, 1, dim)

    own: dict[str, Tree] = {}
    own |= {name: cut(p[name].reshape(p[name].shape[0], -1, h), 1) for name in "kv"}  # [d, k, h]
    own |= {name: cut(p[name].reshape(-1, h), 0) for name in ("k_bias", "v_bias") if name in p}
    if config.qk_norm == "full":
        own["k_norm"] = {"scale": cut(p["k_norm"]["scale"], 0)}
    return p | own
