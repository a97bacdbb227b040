"""Costs of a model's parts on the stages of a pipeline, in floating-point operations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from eejax.models import work
from eejax.models.config import ModelConfig
from eejax.pipeline.partition import (
    INPUT,
    INSIDE,
    OUTPUT,
    Partition,
    exit_work,
    layers_work,
)
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

    They are two for each multiplication (`models.work`), and twice as many backward. They stand in
    for measured times on devices that are equally fast at all parts.
    """
    tokens = rows * length

    def passes(multiplications: float) -> PassTime:
        forward = 2.0 * tokens * multiplications
        return PassTime(forward, 2 * forward)

    def exit(e: int) -> PassTime:
        return passes(exit_work(config, e, length))

    cut = [0, *itertools.accumulate(layers)]
    stages = [passes(layers_work(config, *span, length)) for span in itertools.pairwise(cut)]
    places = exit_places(config, layers, placement)

    def total(exits):
        return PassTime(*(sum(x) for x in zip(NO_WORK, *map(exit, exits), strict=True)))

    return StageCosts(
        tuple(stages),
        tuple(map(total, places.entry)),
        tuple(map(total, places.inner)),
        passes(work.head_weights(config, config.n_exits)).plus(total(places.final)),
    )
