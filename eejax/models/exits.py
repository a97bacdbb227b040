"""Early exits: hidden state at a boundary -> (mlp) -> (block) -> (norm) -> (low rank) -> head.

The order is that of EE-LLM's code; the paper allows any (Appendix D.1). Exits are numbered 0..E-1
as configured; exit E is the final one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.axes import LOCAL, Axes
from eejax.common.trees import Tree
from eejax.kernels import call
from eejax.kernels.head_confidence.api import HeadStatistics, head_confidence
from eejax.kernels.head_confidence.reference import HeadConfidenceOptions
from eejax.models import fusion, layers, shards
from eejax.models.config import ModelConfig
from eejax.sharding.spread import gathered


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Static options of a head: logits = softcap(h @ table.T + bias) / temperature.

    Attributes:
      vocab_size: tokens that it knows, by the first rows of its table; other rows are masked.
    """

    vocab_size: int
    softcap: float | None = None
    temperature: float = 1.0


class Head(NamedTuple):
    """An output embedding.

    Attributes:
      table: [v, d], or its local rows under vocabulary parallelism. Below, d stands for the rank r
        where a low-rank head is folded (`with_small_heads`).
      bias: [v] or None. Either may be a `Spread`, which `losses.multi_exit.exits_loss` gathers.
      options: static options.
    """

    table: jax.Array
    bias: jax.Array | None
    options: HeadOptions


def head_name(config: ModelConfig, e: int) -> str:
    """Return where exit e gets its output embedding: "tied", "shared" or "own"."""
    return config.head if e == config.n_exits else config.exits[e].head


def exit_params(params: Tree, config: ModelConfig, e: int) -> Tree:
    """Return the parameters that belong to exit e alone."""
    return params["final"] if e == config.n_exits else params["exits"][config.exits[e].name]


def head(params: Tree, config: ModelConfig, e: int) -> Head:
    """Return the output embedding of exit e."""
    own = exit_params(params, config, e)
    if "head" in own:
        table = own["head"]
    else:
        tied = head_name(config, e) == "tied"
        table = params["embed"]["tokens"] if tied else params["shared_head"]
    early = None if e == config.n_exits else config.exits[e]
    temperature = early.temperature if early else config.temperature
    known = (early.vocabulary if early else 0) or config.vocab_size
    options = HeadOptions(known, config.logit_softcap, temperature)
    return Head(table, own.get("head_bias"), options)


def with_known_rows(params: Tree, config: ModelConfig) -> Tree:
    """Return the trees of a model's exits, where one of a smaller vocabulary has a head of its own
    with the rows that it knows, so that no product reads the others.

    A head is not sliced inside a program: XLA would copy the rows in each step. `params` holds the
    exits that are loaded, on one device.
    """
    trees = dict(params["exits"])
    for e, early in enumerate(config.exits):
        if early.vocabulary and early.name in trees:
            table, bias, _ = head(params, config, e)
            rows = {"head": table, "head_bias": bias}
            known = {k: a[: early.vocabulary] for k, a in rows.items() if a is not None}
            trees[early.name] = trees[early.name] | known
    return trees


def with_small_heads(params: Tree, config: ModelConfig) -> Tree:
    """Return the trees of a model's exits with heads that hold what decoding reads.

    They have the rows that the exit knows (`with_known_rows`). Of a low-rank head, `up` is
    multiplied into the table, [v, d] to [v, r], and the exit keeps only `down`.
    """
    trees = with_known_rows(params, config)
    for e, early in enumerate(config.exits):
        if early.head_rank and early.name in trees:
            table = head(params | {"exits": trees}, config, e).table
            down, up = (trees[early.name]["low_rank"][name] for name in ("down", "up"))
            narrow = jnp.einsum("vd,rd->vr", table, up, preferred_element_type=jnp.float32)
            small = {"head": narrow.astype(table.dtype), "low_rank": {"down": down}}
            trees[early.name] = trees[early.name] | small
    return trees


def logits(head: Head, h: jax.Array, axis: str | None = None) -> jax.Array:
    """Compute float32 logits [..., v] of hidden states [..., d]; padded vocabulary rows are masked.

    With a mesh `axis`, `head` has this shard's rows, and the result has the same.
    """
    rows = head.table.shape[0]

    def product(h):
        return jnp.einsum("...d,vd->...v", h, head.table, preferred_element_type=jnp.float32)

    y = layers.two_rows(product, h) if h.shape[:-1] == (1,) and call.for_gpu() else product(h)

    def lift(a):
        return a.reshape((1,) * (y.ndim - 1) + a.shape)

    y = _shaped(y, None if head.bias is None else lift(head.bias), head.options)
    if axis is None and rows == head.options.vocab_size:
        return y
    first = lax.axis_index(axis) * rows if axis else 0
    known = lift(first + jnp.arange(rows) < head.options.vocab_size)
    return jnp.where(known, y, layers.NEGATIVE)


def _shaped(y: jax.Array, bias: jax.Array | None, o: HeadOptions) -> jax.Array:
    """Add the rows' bias to products y with rows of the table, then apply soft cap and
    temperature."""
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    if o.softcap is not None:
        y = o.softcap * jnp.tanh(y / o.softcap)
    return y if o.temperature == 1.0 else y / o.temperature


def statistics(head: Head, h: jax.Array, axis: str | None = None) -> HeadStatistics:
    """Return statistics of the logits of states [n, d]; the kernel does not write the logits."""
    return _statistics(head, h, {}, None, axis)


def _statistics(head, h, norm: Tree, norm_options, axis) -> HeadStatistics:
    o = head.options
    options = HeadConfidenceOptions(o.vocab_size, norm_options, o.softcap, o.temperature)
    return head_confidence(
        h, norm.get("scale"), norm.get("bias"), head.table, head.bias, options=options, axis=axis
    )


def label_logits(head: Head, h: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the float32 logit [n] of each state [n, d] for its own label [n]."""
    y = jnp.einsum("nd,nd->n", h, head.table[labels], preferred_element_type=jnp.float32)
    y = _shaped(y, None if head.bias is None else head.bias[labels], head.options)
    return jnp.where(labels < head.options.vocab_size, y, layers.NEGATIVE)


def whole_logits(head: Head, h: jax.Array, axes: Axes = LOCAL) -> jax.Array:
    """Return the logits of the whole vocabulary on every shard, bitwise equal on all of them."""
    y = logits(head, h, axes.model)
    if not axes.model:
        return y
    rows = y.shape[-1]
    whole = jnp.zeros((*y.shape[:-1], rows * lax.axis_size(axes.model)), y.dtype)
    first = lax.axis_index(axes.model) * rows
    return lax.psum(lax.dynamic_update_slice_in_dim(whole, y, first, -1), axes.model)


def after_mlp(p: Tree, x: jax.Array, config: ModelConfig, axes: Axes = LOCAL) -> jax.Array:
    """Add the output of an exit's MLP, if its parameters p have one, to boundary state x [b, t,
    d]."""
    if "mlp" not in p:
        return x
    h = shards.gather_from_stream(layers.norm(p["mlp_norm"], x, config), axes)
    return x + layers.mlp(p["mlp"], h, config, axes)


def fuse(exits: Tree, config: ModelConfig, axes: Axes = LOCAL) -> Tree:
    """Fuse the MLPs and blocks of exits' trees, by name, for a GPU (`fusion.fuse`).

    XLA joins products of the same rows there and would copy their matrices at each step. On a CPU
    the trees are returned unchanged. On a mesh they are this shard's.
    """
    if not call.for_gpu():
        return exits

    def fused(p: Tree) -> Tree:
        p = dict(p)
        if "mlp" in p:
            p["mlp"] = fusion.fuse_mlp(p["mlp"])
        if "block" in p:
            block = p["block"]
            if "q" in block["attn"]:
                block = block | {"attn": shards.own_kv_head(block["attn"], config, axes)}
            p["block"] = fusion.fuse(block)
        return p

    return {name: fused(p) for name, p in exits.items()}


def state(
    params: Tree,
    config: ModelConfig,
    e: int,
    x: jax.Array,
    context: layers.LayerContext,
    *,
    axes: Axes = LOCAL,
) -> jax.Array:
    """Compute what exit e's head reads, [b, t, d], from boundary state x [b, t, d].

    With a sequence axis x is [b, t/shards, d]; the result is always [b, t, d].
    """
    x, _ = attend(params, config, e, x, context, axes=axes)
    return read(params, config, e, x, axes)


def attend(
    params: Tree,
    config: ModelConfig,
    e: int,
    x: jax.Array,
    context: layers.LayerContext,
    *,
    cache: tuple[jax.Array, jax.Array] | None = None,
    axes: Axes = LOCAL,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Run the part of exit e that every token of a text needs: its MLP and block.

    The block attends with the positions and mask of the pass. With a `cache` of its own it sees
    every earlier position that reached this boundary.

    Returns:
      The state [b, t, d] behind MLP and block, and the block's keys and values, None without a
      block.
    """
    p = exit_params(params, config, e)
    if "block" not in p:
        return x, None
    p = gathered({name: part for name, part in p.items() if name in ("mlp", "mlp_norm", "block")})
    return layers.layer(
        p["block"],
        after_mlp(p, x, config, axes),
        config,
        context,
        index=config.n_layers + e,
        window=config.exit_window(e),
        rope=config.exit_rope(e),
        cache=cache,
        axes=axes,
    )


def read(params: Tree, config: ModelConfig, e: int, x: jax.Array, axes: Axes = LOCAL) -> jax.Array:
    """Run the rest of exit e, which only a token whose logits are wanted needs.

    Args:
      x: [b, t, d], from `attend`.

    Returns:
      [b, t, d], what the head reads; [b, t, r] if it is folded (`with_small_heads`).
    """
    p, x = _unnormed(params, config, e, x, axes)
    return shards.gather_from_stream(_before_head(p, x, config), axes)


def _before_head(p: Tree, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Apply an exit's norm and low-rank projection, if its parameters p have them."""
    if "norm" in p:
        x = layers.norm(p["norm"], x, config)
    if "low_rank" in p:
        x = layers.project(x, p["low_rank"]["down"])
        x = layers.project(x, p["low_rank"]["up"]) if "up" in p["low_rank"] else x
    return x


def _unnormed(params, config, e, x, axes):
    """Return the parameters of exit e that `read` uses, and x before its norm."""
    p = exit_params(params, config, e)
    names = ("norm", "low_rank") if "block" in p else ("mlp", "mlp_norm", "norm", "low_rank")
    p = gathered({name: part for name, part in p.items() if name in names})
    return p, after_mlp(p, x, config, axes)


class Reader(NamedTuple):
    """The head of an exit on states [b, d], computed on demand.

    Attributes:
      logits: returns float32 [b, v] over the whole vocabulary on every shard.
      statistics: returns statistics of the logits by a kernel that does not write them; None where
        there is no kernel.
    """

    logits: Callable[[], jax.Array]
    statistics: Callable[[], HeadStatistics] | None


def reader(params: Tree, config: ModelConfig, e: int, h: jax.Array, axes: Axes = LOCAL) -> Reader:
    """Return the `Reader` of exit e for states h [b, d] from `attend`.

    The rest of the exit runs only when the caller asks for logits or statistics.
    """

    def logits():
        state = read(params, config, e, h[:, None], axes)[:, 0]
        y = whole_logits(head(params, config, e), state, axes)
        unknown = config.padded_vocab - y.shape[-1]  # rows that `with_small_heads` left out
        if unknown:
            y = jnp.pad(y, [(0, 0), (0, unknown)], constant_values=layers.NEGATIVE)
        return y

    def statistics():
        p, x = _unnormed(params, config, e, h[:, None], axes)
        norm = p.get("norm", {})
        if "low_rank" in p:  # the projection follows the norm, so the kernel cannot apply it
            x, norm = _before_head(p, x, config), {}
        return _statistics(
            head(params, config, e),
            shards.gather_from_stream(x, axes)[:, 0],
            norm,
            layers.norm_options(config) if norm else None,
            axes.model,
        )

    return Reader(logits, statistics if call.by_kernels() else None)
