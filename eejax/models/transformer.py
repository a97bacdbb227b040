"""The early-exit transformer: embedding, layers, and the states its exits read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from eejax.common.axes import LOCAL, Axes
from eejax.common.errors import require, require_one_of
from eejax.common.trees import Tree, slice_layers
from eejax.models import exits, layers
from eejax.models.config import ModelConfig
from eejax.models.params import for_compute

REMAT = ("none", "dots", "full")


def embed(
    params: Tree,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    axes: Axes = LOCAL,
) -> jax.Array:
    """tokens [b, t] at positions [b or 1, t] -> x [b, t, d] in the dtype of computation."""
    table = params["embed"]["tokens"]
    if axes.model:  # each shard looks up the rows it owns (Megatron's vocabulary parallelism)
        rows = table.shape[0]
        i = tokens - lax.axis_index(axes.model) * rows
        own = (i >= 0) & (i < rows)
        x = jnp.where(own[..., None], table[jnp.clip(i, 0, rows - 1)], jnp.zeros((), table.dtype))
        x = lax.psum(x, axes.model)
    else:
        x = table[tokens]
    x = x.astype(config.dtype)
    if config.embedding_scale != 1.0:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    if config.position == "learned":
        # In float32, as the gradient of a position is a sum over the batch.
        rows = params["embed"]["positions"][positions].astype(jnp.float32)
        x = (x.astype(jnp.float32) + rows).astype(x.dtype)
    if config.embedding_norm:
        x = layers.norm(params["embed"]["norm"], x, config)
    return x


def run_layers(
    stack: Tree,
    x: jax.Array,
    config: ModelConfig,
    context: layers.Context,
    start: int,
    stop: int,
    *,
    axes: Axes = LOCAL,
    remat: str = "none",
    layer_dropout: jax.Array | None = None,
) -> jax.Array:
    """x [b, t, d] through layers start:stop of the stacked leaves [l, ...], as one scan.

    `remat`: "none" keeps what autodiff wants, "dots" the products with weights only, "full"
    nothing but each layer's input. Attention's scores are recomputed under each. `layer_dropout`
    as in `exit_states`.
    """
    if start == stop:
        return x
    step, scanned = _layer_scan(stack, config, context, start, stop, axes, remat, layer_dropout)
    return lax.scan(lambda x, s: (step(x, s), None), x, scanned)[0]


def run_to_boundaries(
    stack: Tree,
    x: jax.Array,
    config: ModelConfig,
    context: layers.Context,
    boundaries: Sequence[int],
    *,
    axes: Axes = LOCAL,
    remat: str = "none",
    layer_dropout: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """x [b, t, d] after each of the given numbers of layers, in any order, by a single scan.

    A scan per segment would copy every segment's weights out of the stack and pad its gradients
    back into it. Here each layer writes its output into the slot of the next boundary, where the
    last layer before the boundary has the last word.
    """
    slots = sorted({n for n in boundaries if n > 0})
    at = {0: x}
    if len(slots) == 1:
        at[slots[0]] = run_layers(
            stack, x, config, context, 0, slots[0],
            axes=axes, remat=remat, layer_dropout=layer_dropout,
        )  # fmt: skip
    elif slots:
        step, scanned = _layer_scan(
            stack, config, context, 0, slots[-1], axes, remat, layer_dropout
        )
        slot = jnp.array([sum(n <= i for n in slots) for i in range(slots[-1])])

        def write(carry, s):
            x, written = carry
            x = step(x, s[0])
            return (x, lax.dynamic_update_index_in_dim(written, x, s[1], 0)), None

        start = x, lax.stop_gradient(jnp.stack([x] * len(slots)))  # all of it is overwritten
        written = lax.scan(write, start, (scanned, slot))[0][1]
        at |= {n: written[i] for i, n in enumerate(slots)}
    return tuple(at[n] for n in boundaries)


def _layer_scan(stack, config, context, start, stop, axes, remat, layer_dropout):
    """One layer as `step(x, inputs)`, and the inputs of layers start:stop to scan over."""
    body = partial(layers.layer, config=config, context=context, axes=axes)
    whole = (start, stop) == (0, config.n_layers)
    part = stack if whole else slice_layers(stack, start, stop)
    index = jnp.arange(start, stop)
    windows = config.sliding_window
    if isinstance(windows, tuple):  # layers differ: the window is an array in the scanned inputs
        everything = 2**30
        w = jnp.array([everything if v is None else v for v in windows[start:stop]], jnp.int32)
        scanned = (part, index, w, w < everything)
        step = lambda x, s: body(s[0], x, index=s[1], window=s[2], local=s[3])[0]
    else:
        scanned = (part, index)
        step = lambda x, s: body(s[0], x, index=s[1], window=windows, local=windows is not None)[0]
    if layer_dropout is None or context.dropout_keys is None:
        return rematerialised(step, remat), scanned

    def sometimes(x, s):
        keep = layers.keep_samples(context.dropout_keys, s[1], layer_dropout[s[1]])
        return jnp.where(keep[:, None, None], step(x, s), x)

    return rematerialised(sometimes, remat), scanned


def rematerialised(f, remat: str):
    """`f` under the activation policy `remat` ("none", "dots", "full")."""
    require_one_of("remat", remat, REMAT)
    if remat == "none":
        return f
    policies = jax.checkpoint_policies
    keep = policies.dots_with_no_batch_dims_saveable
    policy = keep if remat == "dots" else policies.nothing_saveable
    return jax.checkpoint(f, policy=policy, prevent_cse=False)


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
    """What the head of every exit reads: E + 1 arrays [b, t, d], the final exit last.

    tokens [b, t] int32; positions [b, t] (default 0..t-1); segment_ids [b, t] confine attention
    to equal ids; dropout_keys [b], one key per sample (None: no dropout). `which` selects exits
    by number, in order; layers above the deepest of them are not run. layer_dropout [l] float32:
    the probability of each layer to be left out, drawn for each sample from its dropout key (none
    is left out without keys).
    `tap` is put over the state [b, t, d] at each exit's boundary, where the exit reads it.
    """
    which = range(config.n_exits + 1) if which is None else which
    t = tokens.shape[1]
    require(
        t <= config.context_length or config.position in ("alibi", "none"),
        "tokens", f"length {t}", f"must fit the context length {config.context_length}",
    )  # fmt: skip
    # The embedding is cast after its look-up: the gradient of a table cast before would add up a
    # frequent token's contributions in bf16, where the sum stops growing.
    params = for_compute(params, config.dtype) | {"embed": params["embed"]}
    if positions is None:
        positions = jnp.arange(t)[None]
    context = layers.make_context(
        config, positions, segment_ids=segment_ids, dropout_keys=dropout_keys
    )
    x = embed(params, config, tokens, positions, axes)
    x = layers.dropout(x, config.dropout, dropout_keys, 0, 2)
    reached = run_to_boundaries(
        params["layers"], x, config, context, [config.stops[e] for e in which],
        axes=axes, remat=remat, layer_dropout=layer_dropout,
    )  # fmt: skip
    if tap is not None:
        reached = [tap(i, x) for i, x in enumerate(reached)]
    states = []
    for e, x in zip(which, reached, strict=True):
        read = lambda x, e=e: exits.state(params, config, e, x, context, axes=axes)[0]
        states.append(rematerialised(read, remat)(x))
    return tuple(states)
