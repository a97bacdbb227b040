"""Programs of the stage "helios", compiled for a card that need not exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from eejax.experiments import card_programs


def member_programs(
    member, counts: Sequence[int], context: int, capability: int
) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield a model's loops, the programs by which it grows, and those of audits.

    Args:
      member: a `FleetMember`, whose parameters are not used.
      counts: requests at each depth, as `PartialModel` takes them.
      context: maximum tokens of a request.
      capability: the card's compute capability, on which open options depend.
    """
    from eejax.helios.build import audited_lengths
    from eejax.kernels import call

    config, n = member.config, member.config.n_exits + 1
    # As in `PartialModel`, all depths use the buckets of the first depth's slots.
    with call.compute_capability(capability):
        options = member.options.resolved(config, counts[0])
    options = dataclasses.replace(options, can_deepen=True)

    def at(depth):
        return dataclasses.replace(options, num_segments=depth)

    for depth in range(1, n + 1):
        # A growing model already has the slots of its new depth.
        for slots in sorted({*counts[depth - 1 :]}, reverse=True):
            one = dict(config=config, slots=slots, cache=context, options=at(depth))
            yield f"to depth {depth}, {slots} slots", partial(card_programs.slots, **one)
        for deeper in range(depth + 1, n + 1):
            one = dict(config=config, slots=counts[deeper - 1], context=context)
            one |= dict(before=at(depth), after=at(deeper))
            yield f"from depth {depth} to {deeper}", partial(growth, **one)
    for length in audited_lengths(context):
        for part in ("embedded", "layer", "read"):
            build = partial(audit, config=config, part=part, length=length)
            yield f"audit of {length} tokens, {part}", build


def growth(card, config, slots: int, context: int, before, after):
    """Compile the program that fills in keys and values of more segments.

    Args:
      before: the engine's options, with `num_segments`, before it grows.
      after: its options after that.
    """
    import jax

    from eejax.experiments import aot
    from eejax.inference import deepening

    shapes = partial(card_programs.slot_shapes, card, config, slots, context)
    _, state, _ = shapes(before)
    weights, _, _ = shapes(after)
    args = weights, state.boundary, jax.ShapeDtypeStruct((slots,), np.int32)
    return aot.compiled(
        card,
        deepening._filled,
        *aot.shapes(card, args),
        have=before.num_segments,
        config=config,
        keep=after.num_segments <= config.n_exits,
    )


def audit(card, config, part: str, length: int):
    """Compile a part of the whole model's pass over a text: "embedded", "layer" or "read"."""
    import jax

    from eejax.experiments import aot
    from eejax.helios import verifier
    from eejax.inference.weights import prepare
    from eejax.kernels import call
    from eejax.models import params

    with call.compute_capability(card.capability):
        weights = jax.eval_shape(partial(prepare, config=config), params.shapes(config))
    outer = {k: v for k, v in weights.params.items() if k != "exits"}
    tokens = jax.ShapeDtypeStruct((1, length), np.int32)
    x = jax.eval_shape(partial(verifier._embedded, config=config), outer, tokens)
    run, args, static = {
        "embedded": (verifier._embedded, (outer, tokens), {}),
        "layer": (
            verifier._through,
            (weights.segments[0][0], x),
            dict(window=config.window(0), rope=config.rope(0)),
        ),
        "read": (verifier._read, (outer, x, tokens), {}),
    }[part]
    return aot.compiled(card, run, *aot.shapes(card, args), config=config, **static)


def scores(card, config, texts: Sequence[Sequence[int]], context: int):
    """Compile the pass in which the exits of a model are compared."""
    import jax

    from eejax.calibration import frontier
    from eejax.experiments import aot
    from eejax.helios.measurements import windows
    from eejax.inference.deepening import fused
    from eejax.kernels import call
    from eejax.models import params

    with call.compute_capability(card.capability):
        own = jax.eval_shape(partial(fused, config=config), params.shapes(config))
    own, batch = aot.shapes(card, (own, windows(texts, context)[0]))
    return aot.compiled(card, frontier._score, own, config=config, batch=batch)
