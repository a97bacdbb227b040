"""Every parameter declared once: shape, logical axes, initializer, decay.

`abstract(config)` is the single source from which initial values, shape structs, shardings,
memory counts, checkpoint restore and weight import all derive. Stacked layers carry a leading
"l" axis. Logical axes are the letters of `eejax.common.axes`.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eejax.common.trees import Tree, path_name
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.spread import is_spread

# Folded into the key of initial values. For dropout, a training step folds its number, an int32,
# into the key of the same seed. So no step can reach the key that a leaf is drawn with.
INIT = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Param:
    """The declaration of one leaf.

    Attributes:
      shape: of the leaf.
      axes: one logical axis for each dimension.
      std: standard deviation of normal initial values; None starts the leaf as the constant `fill`.
      fill: initial constant.
      decay: whether weight decay applies.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    std: float | None = None
    fill: float = 0.0
    decay: bool = False

    def stacked(self, n: int) -> Param:
        """Return the declaration of this leaf in n layers, stacked along a first axis."""
        return dataclasses.replace(self, shape=(n, *self.shape), axes=("l", *self.axes))


def _matrix(shape: tuple, axes: tuple, fan_in: int, scale: float = 1.0) -> Param:
    """Declare a decayed matrix with variance scale^2 / fan_in (0.022 at d = 2048, as Megatron's
    0.02)."""
    return Param(shape, axes, std=scale / math.sqrt(fan_in), decay=True)


def _norm(
    config: ModelConfig, shape: tuple | None = None, axes: tuple = ("d",), bias: bool = True
) -> Tree:
    shape = shape or (config.d_model,)
    tree = {"scale": Param(shape, axes, fill=0.0 if config.norm_plus_one else 1.0)}
    if config.norm == "layernorm" and config.norm_bias and bias:
        tree["bias"] = Param(shape, axes)
    return tree


def _attention(c: ModelConfig) -> Tree:
    d, n, k, h = c.d_model, c.n_heads, c.n_kv_heads, c.head_dim
    out_scale = 1 / math.sqrt(2 * c.n_layers)  # keeps the residual stream's variance (GPT-2)
    tree = {
        "q": _matrix((d, n, h), ("d", "n", "h"), d),
        "k": _matrix((d, k, h), ("d", "k", "h"), d),
        "v": _matrix((d, k, h), ("d", "k", "h"), d),
        "o": _matrix((n, h, d), ("n", "h", "d"), n * h, out_scale),
    }
    if c.qkv_bias:
        tree |= {"q_bias": Param((n, h), ("n", "h"))}
        tree |= {f"{x}_bias": Param((k, h), ("k", "h")) for x in "kv"}
    if c.o_bias:
        tree["o_bias"] = Param((d,), ("d",))
    if c.qk_norm == "head":
        tree |= {f"{x}_norm": _norm(c, (h,), ("h",), bias=False) for x in "qk"}
    elif c.qk_norm == "full":
        tree["q_norm"] = _norm(c, (n, h), ("n", "h"), bias=False)
        tree["k_norm"] = _norm(c, (k, h), ("k", "h"), bias=False)
    return tree


def _mlp(c: ModelConfig, f: int) -> Tree:
    d = c.d_model
    tree = {
        "up": _matrix((d, f), ("d", "f"), d),
        "down": _matrix((f, d), ("f", "d"), f, 1 / math.sqrt(2 * c.n_layers)),
    }
    if c.mlp_gated:
        tree["gate"] = _matrix((d, f), ("d", "f"), d)
    if c.mlp_bias:
        tree |= {"up_bias": Param((f,), ("f",)), "down_bias": Param((d,), ("d",))}
        if c.mlp_gated:
            tree["gate_bias"] = Param((f,), ("f",))
    return tree


def layer(config: ModelConfig) -> Tree:
    """Declare the parameters of one transformer layer, unstacked."""
    before = config.norm_placement in ("pre", "pre_post")
    after = config.norm_placement != "pre"
    tree = {"attn": _attention(config), "mlp": _mlp(config, config.d_ff)}
    if before:
        tree["attn_norm"] = _norm(config)
        if config.residual != "parallel_one_norm":
            tree["mlp_norm"] = _norm(config)
    if after:
        tree |= {"attn_out_norm": _norm(config), "mlp_out_norm": _norm(config)}
    return tree


def _vocab(config: ModelConfig, std: float) -> Param:
    return Param((config.padded_vocab, config.d_model), ("v", "d"), std=std, decay=True)


def _head(config: ModelConfig, head: str) -> Tree:
    tree = {}
    if head == "own":
        tree["head"] = _vocab(config, 1 / math.sqrt(config.d_model))
    if config.head_bias:
        tree["head_bias"] = Param((config.padded_vocab,), ("v",))
    return tree


def exit_(config: ModelConfig, e: ExitConfig) -> Tree:
    """Declare the parameters of one early exit."""
    tree = _head(config, e.head)
    if e.mlp:
        tree |= {"mlp": _mlp(config, e.mlp_width or config.d_ff), "mlp_norm": _norm(config)}
    if e.block:
        tree["block"] = layer(config)
    if e.norm:
        tree["norm"] = _norm(config)
    if e.head_rank:
        tree["low_rank"] = _low_rank(config, e.head_rank)
    if e.router:
        tree["router"] = router(config, e.router)
    return tree


def _low_rank(config: ModelConfig, rank: int) -> Tree:
    d = config.d_model
    return {
        "down": _matrix((d, rank), ("d", "r"), d),
        "up": _matrix((rank, d), ("r", "d"), rank),
    }


def router(config: ModelConfig, width: int) -> Tree:
    """Declare a router network (`gates.router`), which only calibration trains."""
    d = config.d_model
    return {
        "norm": _norm(config),
        "down": Param((d, width), ("d", "r"), std=1 / math.sqrt(d)),
        "up": Param((width,), ("r",), std=1 / math.sqrt(width)),
        "up_bias": Param((), ()),
    }


def abstract(config: ModelConfig) -> Tree:
    """Declare every parameter of a model, as a nested dict of `Param`."""
    # A tied matrix is a head too: 1/sqrt(d) would make initial logits of order sqrt(d).
    embed = {"tokens": _vocab(config, 0.02)}
    if config.position == "learned":
        embed["positions"] = Param((config.context_length, config.d_model), ("t", "d"), std=0.02)
    if config.embedding_norm:
        embed["norm"] = _norm(config)
    final = _head(config, config.head)
    if config.final_norm:
        final["norm"] = _norm(config)
    tree = {
        "embed": embed,
        "layers": map_params(lambda p: p.stacked(config.n_layers), layer(config)),
        "final": final,
        "exits": {e.name: exit_(config, e) for e in config.exits},
    }
    if "shared" in (config.head, *(e.head for e in config.exits)):
        tree["shared_head"] = _vocab(config, 1 / math.sqrt(config.d_model))
    return tree


def map_params(f: Callable[[Param], Any], tree: Tree) -> Tree:
    """Apply `f` to every `Param` of a declaration."""
    return jax.tree.map(f, tree, is_leaf=lambda x: isinstance(x, Param))


def init(config: ModelConfig, key: jax.Array) -> Tree:
    """Draw initial float32 parameters.

    A leaf's values depend only on `key` and its own name, so adding an exit changes no other
    parameter.
    """
    key = jax.random.fold_in(key, INIT)

    def one(path, p: Param):
        if p.std is None:
            return jnp.full(p.shape, p.fill, jnp.float32)
        tag = zlib.crc32(path_name(path).encode())
        return p.std * jax.random.normal(jax.random.fold_in(key, tag), p.shape, jnp.float32)

    return jax.tree_util.tree_map_with_path(
        one, abstract(config), is_leaf=lambda x: isinstance(x, Param)
    )


def for_compute(params: Tree, dtype: Any) -> Tree:
    """Cast parameters, or any part of their tree, for a computation in `dtype`.

    Matrices become `dtype`. Norm scales and biases stay float32, where they cost nothing: in bf16 a
    scale of 1.003 would be 1, and a bias's gradient, a sum over all tokens, would be accumulated or
    rounded. A `Spread` leaf is cast when it is gathered. A leaf that has `dtype` already is not
    copied, as numpy would.
    """
    names, dtype = {"scale", "bias"}, jnp.dtype(dtype)

    def small(path):
        return path_name(path).rsplit("/", 1)[-1].rsplit("_", 1)[-1] in names

    def one(path, a):
        return a if small(path) or a.dtype == dtype else a.astype(dtype)

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_spread)


def shapes(config: ModelConfig) -> Tree:
    """Return the parameters as float32 `jax.ShapeDtypeStruct`s."""
    return map_params(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), abstract(config))


def decays(config: ModelConfig) -> Tree:
    """Return which leaves weight decay applies to: matrices and embeddings, not norms, biases or
    positions."""
    return map_params(lambda p: p.decay, abstract(config))


def count(config: ModelConfig) -> int:
    """Return the number of parameters."""
    return sum(math.prod(a.shape) for a in jax.tree.leaves(shapes(config)))
