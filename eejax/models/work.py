"""Multiplications that a token needs in the parts of a model, from which costs are derived.

A multiplication stands for two floating-point operations, as the product is added to a sum. The
count is that of PaLM (Chowdhery et al. 2022, Appendix B): one for each weight that a token is
multiplied with, and 2 n h for each position that a query attends to, n heads of width h. Looking up
an embedding is free.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import jax

from eejax.common.trees import Tree
from eejax.models import params
from eejax.models.config import ModelConfig
from eejax.models.positions import mean_visible


def weights(declared: Tree) -> int:
    """Count the weights of declared parameters that a token is multiplied with: their matrices."""
    sizes = params.map_params(lambda p: math.prod(p.shape) if p.decay else 0, declared)
    return sum(jax.tree.leaves(sizes))


@functools.cache
def layer_weights(config: ModelConfig) -> int:
    """Count those of one layer."""
    return weights(params.layer(config))


@functools.cache
def exit_weights(config: ModelConfig, e: int) -> int:
    """Count those of exit e's own MLP and block, without its head and its router."""
    return weights(without_head(params.exit_(config, config.exits[e])))


def without_head(tree: Tree) -> Tree:
    """Return an exit's parameters without those of its head and its router."""
    return {k: v for k, v in tree.items() if k not in ("head", "low_rank", "router")}


def head_weights(config: ModelConfig, e: int, *, decoding: bool = False) -> int:
    """Count those of exit e's head: v d for the v tokens that it knows. The final exit is last.

    A head of rank r has 2 d r more to project a state and to bring it back. With `decoding` it is
    folded (`exits.with_small_heads`) and has d r and v r.
    """
    early, d = config.exits[e] if e < config.n_exits else None, config.d_model
    known, rank = (early.vocabulary, early.head_rank) if early else (0, 0)
    rows = known or config.padded_vocab
    return (d + rows) * rank if decoding and rank else rows * d + 2 * d * rank


def attention(config: ModelConfig, positions: float) -> float:
    """Return the multiplications of a layer's attention to that number of positions."""
    return 2.0 * config.n_heads * config.head_dim * positions


def causal_attention(config: ModelConfig, length: int, windows: Iterable[int | None]) -> float:
    """Return the mean multiplications of a query in texts of `length` tokens, over all layers.

    Args:
      config: the model's.
      length: tokens of a text.
      windows: the window of each layer, None for none.
    """
    return attention(config, sum(mean_visible(length, w) for w in windows))
