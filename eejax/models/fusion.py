"""Weights in the form that decoding multiplies with: projections fused, MLPs padded, heads flat."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from eejax.common.trees import Tree
from eejax.kernels import call


def fuse(p: Tree) -> Tree:
    """Fuse a layer's q, k and v into one product, and gate and up into one, unless they are
    already.

    Decoding needs this because starting a product costs more than its small result is worth. The
    columns of "qkv" are q's, k's and v's, those of "gate_up" gate's and up's. On a GPU the MLP is
    `padded` first.

    Args:
      p: a layer's tree, stacked or not.
    """
    attn = p["attn"]
    attn = _joined(attn, ("q", "k", "v"), "qkv", 2) if "q" in attn else attn
    return p | {"attn": attn, "mlp": fuse_mlp(p["mlp"])}


def fuse_mlp(mlp: Tree) -> Tree:
    """Fuse gate and up of an MLP's tree, as `fuse` does."""
    mlp = padded(mlp)
    return _joined(mlp, ("gate", "up"), "gate_up", 1) if "gate" in mlp else mlp


WIDTH_MULTIPLE = 64


def padded(mlp: Tree) -> Tree:
    """Widen an MLP with zeros for a GPU, which changes no result.

    XLA's GPU backend pads widths that are not multiples of 64, by a copy of the matrix every step.

    Args:
      mlp: an MLP's tree, stacked or not: down [..., f, d], up and gate [..., d, f], biases.

    Returns:
      The tree with f a multiple of `WIDTH_MULTIPLE`; unchanged without a GPU, and where gate and up
      are fused already.
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
    """Reshape q, k, v to [d, n h] and o to [n h, d] in a layer's tree, stacked or not.

    A layer does nothing else to these weights before it multiplies with them.
    """
    attn = dict(p["attn"])
    for name in ("q", "k", "v", "q_bias", "k_bias", "v_bias"):
        if name in attn:
            attn[name] = attn[name].reshape(*attn[name].shape[:-2], -1)
    o = attn["o"]
    attn["o"] = o.reshape(*o.shape[:-3], -1, o.shape[-1])
    return p | {"attn": attn}


def _joined(tree: Tree, names: tuple[str, ...], name: str, columns: int) -> Tree:
    """Return `tree` with the leaves `names`, and their biases, joined into one leaf `name`.

    Their last `columns` dimensions are the columns of a matrix. Arrays on the host stay there.
    """
    rest = {k: v for k, v in tree.items() if k.removesuffix("_bias") not in names}
    for suffix in ("", "_bias"):
        if names[0] + suffix not in tree:
            continue
        parts = [tree[n + suffix] for n in names]
        own = np if all(isinstance(a, np.ndarray) for a in parts) else jnp
        flat = [a.reshape(*a.shape[: a.ndim - columns], -1) for a in parts]
        rest[name + suffix] = own.concatenate(flat, -1)
    return rest
