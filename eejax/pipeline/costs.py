"""Costs of a model's parts on the stages of a pipeline, in floating-point operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax

from eejax.models import params
from eejax.models.config import ModelConfig
from eejax.models.positions import mean_visible
from eejax.pipeline.partition import INPUT, INSIDE, OUTPUT, Partition
from eejax.pipeline.simulate import NO_WORK, PassTime, StageCosts


class Places(NamedTuple):
    """Numbers of the exits (in `config.exits`) by place.

    Attributes:
      entry: [stages] of tuples, exits at the beginning of each stage.
      inner: [stages] of tuples, exits inside each stage.
      final: exits after the last layer, beside the final exit.
    """

    entry: tuple[tuple[int, ...], ...]
    inner: tuple[tuple[int, ...], ...]
    final: tuple[int, ...]


def exit_places(config: ModelConfig, layers: Sequence[int], placement: str = "later") -> Places:
    """Return the `Places` of a model whose stages have `layers` layers, as `Partition` says.

    Raises:
      ConfigError: if a stage has no layer or the numbers do not add up.
    """
    cut = Partition(config, tuple(layers), placement)

    def at(*found):
        return tuple(place.exit for place in found if place.exit < config.n_exits)

    def each(where):
        return tuple(at(*cut.on(i, where)) for i in range(cut.stages))

    return Places(each(INPUT), each(INSIDE), at(*cut.on(cut.stages - 1, OUTPUT)))


def model_costs(
    config: ModelConfig,
    layers: Sequence[int],
    rows: int,
    length: int,
    placement: str = "later",
) -> StageCosts:
    """Return the `StageCosts` of a microbatch of `rows` sequences, in floating-point operations.

    They are counted as by PaLM (Chowdhery et al. 2022, Appendix B): 2 for each weight that a token
    is multiplied with and 4 n h for each position that a query sees, twice as many backward; the
    look-up is free. They stand in for measured times on devices that are equally fast at all parts.
    """
    tokens = rows * length

    def matrices(tree):
        return sum(
            jax.tree.leaves(params.map_params(lambda a: math.prod(a.shape) if a.decay else 0, tree))
        )

    head = config.padded_vocab * config.d_model

    def work(weights: int, windows: Sequence[int | None]) -> PassTime:
        seen = sum(mean_visible(length, w) for w in windows)
        forward = tokens * (2.0 * weights + 4.0 * config.n_heads * config.head_dim * seen)
        return PassTime(forward, 2 * forward)

    def exit(e: int) -> PassTime:
        own = params.exit_(config, config.exits[e])
        own.pop("head", None)  # counted below: a tied or shared head is as much work as an own one
        return work(matrices(own) + head, [config.exit_window(e)] * config.exits[e].block)

    one, first, stages = matrices(params.layer(config)), 0, []
    for n in layers:
        stages.append(work(n * one, [config.window(i) for i in range(first, first + n)]))
        first += n
    places = exit_places(config, layers, placement)

    def total(exits):
        return PassTime(*(sum(x) for x in zip(NO_WORK, *map(exit, exits), strict=True)))

    return StageCosts(
        tuple(stages),
        tuple(map(total, places.entry)),
        tuple(map(total, places.inner)),
        work(head, ()).plus(total(places.final)),
    )
