"""The early-exit transformer: embedding, layers, and the states its exits read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.axes import LOCAL, Axes
from eejax.common.errors import require, require_one_of
from eejax.common.trees import Tree, new_leaves, slice_layers
from eejax.models import exits, layers, shards
from eejax.models.config import NO_WINDOW, ModelConfig
from eejax.models.params import for_compute
from eejax.sharding.spread import gathered

Remat = Literal["none", "dots", "full"]
REMAT: tuple[Remat, ...] = get_args(Remat)


def embed(
    params: Tree,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    axes: Axes = LOCAL,
) -> jax.Array:
    """Embed tokens [b, t] at positions [b or 1, t] as x [b, t, d], in the dtype of computation.

    With a sequence axis x is [b, t/shards, d], this shard's positions.
    """
    p = gathered(params["embed"])
    table = p["tokens"]
    if axes.model:  # each shard looks up the rows it owns (Megatron's vocabulary parallelism)
        rows = table.shape[0]
        i = tokens - lax.axis_index(axes.model) * rows
        own = (i >= 0) & (i < rows)
        x = jnp.where(own[..., None], table[jnp.clip(i, 0, rows - 1)], jnp.zeros((), table.dtype))
        x = shards.reduce_to_stream(x, axes)
    else:
        x = table[tokens]
    x = x.astype(config.dtype)
    if config.embedding_scale != 1.0:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    if config.position == "learned":
        # In float32, because the gradient of a position is a sum over the batch.
        rows = p["positions"][shards.own_positions(positions, axes)]
        rows = rows.astype(jnp.float32)
        x = (x.astype(jnp.float32) + rows).astype(x.dtype)
    if config.embedding_norm:
        x = layers.norm(p["norm"], x, config)
    return x


def _layer_inputs(config: ModelConfig, index: jax.Array) -> dict[str, jax.Array]:
    """Return the properties in which layers differ, `window` and `rope`, of layers `index` [l]."""

    def each(values):
        return jnp.array(values, jnp.int32)[index]

    windows, inputs = config.sliding_window, {}
    if isinstance(windows, tuple):
        inputs["window"] = each([NO_WINDOW if w is None else w for w in windows])
    if isinstance(windows, tuple) or config.no_rope_layers:
        inputs["rope"] = each([config.rope(i) for i in range(config.n_layers)])
    return inputs


def run_layers(
    stack: Tree,
    x: jax.Array,
    config: ModelConfig,
    context: layers.LayerContext,
    index: jax.Array,
    *,
    slots: jax.Array | None = None,
    n_slots: int = 0,
    active: jax.Array | None = None,
    load: Callable[[Tree], Tree] = gathered,
    axes: Axes = LOCAL,
    remat: str = "none",
    layer_dropout: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Run x [b, t, d] through stacked layers [l, ...] as one scan.

    With a sequence axis x and the states are this shard's positions, as in `layers.layer`.
    Attention's scores are recomputed under every `remat`.

    Args:
      stack: parameters, [l, ...] each.
      x: [b, t, d].
      config: the model's.
      context: the pass's shared inputs.
      index: [l] numbers of the layers in the model, traced or not.
      slots: [l] slot that each layer writes its output into. Layers that share a slot overwrite
        each other, so a slot ends up with the state at the boundary above the last of them.
      n_slots: number of slots.
      active: [l] False where a layer only pads the stack and is passed by; with remat "none" it
        runs for nothing.
      load: makes a layer's parameters from one layer of the stack, where it is used.
      axes: mesh axes.
      remat: "none" keeps what autodiff wants, "dots" only the products with weights, "full" only
        each layer's input. `Spread` parameters are gathered again for the backward pass, except
        with "none", which keeps them whole.
      layer_dropout: as in `exit_states`.

    Returns:
      x, and the states [n_slots, b, t, d], None without slots.
    """
    inputs = {"layer": stack, "index": index, "active": active, "slot": slots}
    inputs |= _layer_inputs(config, index)

    def run(x, s):
        p, i = load(s["layer"]), s["index"]
        window, rope = s.get("window", config.sliding_window), s.get("rope", config.rope(0))
        return layers.layer(p, x, config, context, index=i, window=window, rope=rope, axes=axes)[0]

    layer, keys = run, context.dropout_keys
    if layer_dropout is not None and keys is not None:

        def maybe_left_out(x, s):
            keep = layers.keep_samples(keys, s["index"], layer_dropout[s["index"]])
            return jnp.where(keep[:, None, None], run(x, s), x)

        layer = maybe_left_out

    def unless_filling(x, s):
        # A branch keeps its own residuals, without a checkpoint around it also its weights.
        if remat == "none":
            return jnp.where(s["active"], layer(x, s), x)
        return lax.cond(s["active"], layer, lambda x, s: x, x, s)

    step = rematerialised(layer if active is None else unless_filling, remat)

    def body(carry, s):
        x, written = carry
        x = step(x, s)
        if written is not None:
            written = lax.dynamic_update_index_in_dim(written, x, s["slot"], 0)
        return (x, written), None

    written = None
    if slots is not None:
        written = lax.stop_gradient(jnp.stack([x] * n_slots))  # all of it is overwritten
    return lax.scan(body, (x, written), inputs)[0]


def run_to_boundaries(
    stack: Tree,
    x: jax.Array,
    config: ModelConfig,
    context: layers.LayerContext,
    boundaries: Sequence[int],
    *,
    axes: Axes = LOCAL,
    remat: str = "none",
    layer_dropout: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Return x [b, t, d] after each of `boundaries` numbers of layers, in any order, by one scan.

    A scan per segment would copy every segment's weights out of the stack and pad its gradients
    back into it. Here each layer writes its output into the slot of the next boundary, and the last
    layer before the boundary writes last.
    """
    ends = sorted({n for n in boundaries if n > 0})
    at = {0: x}
    if ends:
        part = stack if ends[-1] == config.n_layers else slice_layers(stack, 0, ends[-1])
        slots = None
        if len(ends) > 1:
            slots = jnp.array([sum(n <= i for n in ends) for i in range(ends[-1])])
        last, written = run_layers(
            part,
            x,
            config,
            context,
            jnp.arange(ends[-1]),
            slots=slots,
            n_slots=len(ends),
            axes=axes,
            remat=remat,
            layer_dropout=layer_dropout,
        )
        at |= {ends[0]: last} if written is None else {n: written[i] for i, n in enumerate(ends)}
    return tuple(at[n] for n in boundaries)


def rematerialised(f, remat: str):
    """Return `f` under the activation policy `remat` ("none", "dots", "full")."""
    require_one_of("remat", remat, REMAT)
    if remat == "none":
        return f
    policies = jax.checkpoint_policies
    keep = policies.dots_with_no_batch_dims_saveable
    policy = keep if remat == "dots" else policies.nothing_saveable
    return jax.checkpoint(f, policy=policy, prevent_cse=False)


def layer_residuals(
    p: Tree, x: jax.Array, config: ModelConfig, length: int, remat: str, axes: Axes = LOCAL
) -> list[jax.Array]:
    """Return the arrays that a layer keeps for its backward pass, under a policy of activations.

    Parameters and what all layers share are left out.

    Args:
      p: parameters of the layer.
      x: [b, t, d], its input.
      config: the model.
      length: tokens of a sequence, all shards together.
      remat: as in `rematerialised`.
      axes: mesh axes that the layer is sharded over.
    """
    context = layers.make_context(config, jnp.arange(length)[None])

    def run(p, x):
        return layers.layer(p, x, config, context, axes=axes)[0]

    return new_leaves(jax.vjp(rematerialised(run, remat), p, x)[1], (p, context))


def exit_states(
    params: Tree,
    config: ModelConfig,
    tokens: jax.Array,
    *,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    dropout_keys: jax.Array | None = None,
    axes: Axes = LOCAL,
    remat: str = "none",
    which: Sequence[int] | None = None,
    layer_dropout: jax.Array | None = None,
    tap: Callable[[int, jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Return what the head of every exit reads: E + 1 arrays [b, t, d], the final exit last.

    Args:
      tokens: [b, t] int32.
      positions: [b, t], by default 0..t-1.
      segment_ids: [b, t]; attention is confined to equal ids.
      dropout_keys: [b] one key per sample; None for no dropout.
      which: numbers of the exits to compute, in order; layers above the deepest are not run.
      layer_dropout: [l] float32, probability of skipping each layer, drawn for each sample from its
        dropout key; without keys no layer is skipped.
      tap: applied to the state that each exit reads at its boundary: [b, t, d], or with a sequence
        axis [b, t/shards, d].
    """
    which = range(config.n_exits + 1) if which is None else which
    t = tokens.shape[1]
    require(
        t <= config.context_length or config.position in ("alibi", "none"),
        "tokens",
        f"length {t}",
        f"must fit the context length {config.context_length}",
    )
    # The embedding is cast after its look-up. The gradient of a table cast before would add up a
    # frequent token's contributions in bf16, where the sum stops growing.
    params = for_compute(params, config.dtype) | {"embed": params["embed"]}
    if positions is None:
        positions = jnp.arange(t)[None]
    context = layers.make_context(
        config, positions, segment_ids=segment_ids, dropout_keys=dropout_keys
    )
    x = embed(params, config, tokens, positions, axes)
    x = layers.dropout(x, config.dropout, dropout_keys, 0, 2, axes)
    reached = run_to_boundaries(
        params["layers"],
        x,
        config,
        context,
        [config.exit_boundaries[e] for e in which],
        axes=axes,
        remat=remat,
        layer_dropout=layer_dropout,
    )
    if tap is not None:
        reached = [tap(i, x) for i, x in enumerate(reached)]
    states = []
    for e, x in zip(which, reached, strict=True):

        def read(x, e=e):
            return exits.state(params, config, e, x, context, axes=axes)

        states.append(rematerialised(read, remat)(x))
    return tuple(states)
