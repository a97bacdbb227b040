"""Weights as decoding multiplies with them: projections fused, MLPs padded, heads flat."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from eejax.common.trees import Tree
from eejax.kernels import call


def fuse(p: Tree) -> Tree:
    """A layer's tree, stacked or not, with q, k, v as one product, and gate and up as one, unless
    they are already. On a GPU the MLP is `padded` first.

    For decoding, where starting a product costs more than its small result is worth. The columns
    of "qkv" are q's, k's and v's, those of "gate_up" gate's and up's.
    """
    attn = p["attn"]
    attn = _joined(attn, ("q", "k", "v"), "qkv", 2) if "q" in attn else attn
    return p | {"attn": attn, "mlp": fuse_mlp(p["mlp"])}


def fuse_mlp(mlp: Tree) -> Tree:
    """The part of `fuse` that an MLP's tree takes."""
    mlp = padded(mlp)
    return _joined(mlp, ("gate", "up"), "gate_up", 1) if "gate" in mlp else mlp


WIDTH_MULTIPLE = 64


def padded(mlp: Tree) -> Tree:
    """Widen an MLP with zeros for a GPU, which changes no result.

    XLA's GPU backend pads what is no multiple of 64 at every step, by a copy of the matrix.

    Args:
      mlp: an MLP's tree, stacked or not: down [..., f, d], up and gate [..., d, f], biases.

    Returns:
      The tree with f a multiple of `WIDTH_MULTIPLE`; without a GPU, and where gate and up are one
      already, the tree as it was given.
    """
    more = -mlp["down"].shape[-2] % WIDTH_MULTIPLE
    if not more or "gate_up" in mlp or not call.for_gpu():
        return mlp

    def widen(name: str, a: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        own = np if isinstance(a, np.ndarray) else jnp
        columns = (*[(0, 0)] * (a.ndim - 1), (0, more))
        rows = (*[(0, 0)] * (a.ndim - 2), (0, more), (0, 0))
        if name == "down_bias":
            return a
        return own.pad(a, rows if name == "down" else columns)

    return {name: widen(name, a) for name, a in mlp.items()}


def flat_heads(p: Tree) -> Tree:
    """A layer's tree, stacked or not, with the heads of q, k, v [d, n h] and o [n h, d] as columns
    and rows of matrices: all that a layer does to these weights before it multiplies with them."""
    attn = dict(p["attn"])
    for name in ("q", "k", "v", "q_bias", "k_bias", "v_bias"):
        if name in attn:
            attn[name] = attn[name].reshape(*attn[name].shape[:-2], -1)
    o = attn["o"]
    attn["o"] = o.reshape(*o.shape[:-3], -1, o.shape[-1])
    return p | {"attn": attn}


def _joined(tree: Tree, names: tuple[str, ...], name: str, columns: int) -> Tree:
    """`tree` with the leaves `names` as one, and biases; their last so many dimensions are its
    columns. What lies on the host stays there."""
    rest = {k: v for k, v in tree.items() if k.removesuffix("_bias") not in names}
    for suffix in ("", "_bias"):
        if names[0] + suffix not in tree:
            continue
        parts = [tree[n + suffix] for n in names]
        own = np if all(isinstance(a, np.ndarray) for a in parts) else jnp
        flat = [a.reshape(*a.shape[: a.ndim - columns], -1) for a in parts]
        rest[name + suffix] = own.concatenate(flat, -1)
    return rest
