"""Making of a schedule and its factors from the settings of pipeline parallelism."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from eejax.losses.objective import CROSS_ENTROPY, LossObjective
from eejax.pipeline.config import PipelineConfig
from eejax.pipeline.costs import model_costs
from eejax.pipeline.partition import INSIDE, Partition
from eejax.pipeline.schedule import GENERATORS, Schedule
from eejax.pipeline.schedule_fill import Filled, filled_to
from eejax.pipeline.simulate import PassTime, StageCosts


class Factors(NamedTuple):
    """Factors that keep the gradient of a schedule with inserted microbatches unbiased.

    Attributes:
      main: number of whole microbatches, which come first; sums over all count as that many.
      losses: [microbatches, stages] factors of the losses of a stage's exits.
      gradients: [stages] factors of a stage's summed gradients.
      reports: [stages] factors of the exits' cross entropies, for their mean.
    """

    main: int
    losses: np.ndarray
    gradients: np.ndarray
    reports: np.ndarray


class PipelinePlan(NamedTuple):
    """A schedule and its factors, which are None if no microbatch was inserted."""

    schedule: Schedule
    factors: Factors | None = None


def plan(
    config: PipelineConfig,
    partition: Partition,
    microbatches: int,
    *,
    length: int,
    remat: str,
    objective: LossObjective = CROSS_ENTROPY,
) -> PipelinePlan:
    """Return the `PipelinePlan` of a step of `microbatches` with sequences of `length` tokens.

    With `config.fill`, exits that are "mixed" are deferred if that makes the step shorter.
    """
    if objective.distillation:
        config = config.distilling()
    settings = {
        "exit_stages": partition.input_exit_stages,
        "exits": config.exits,
        "recompute": remat == "full",
    }
    if config.fill == "none":
        make = GENERATORS[config.schedule]
        return PipelinePlan(_checked(make(partition.stages, microbatches, **settings)))
    settings |= {part: None if config.fill in (part, "both") else 0 for part in ("part1", "part2")}
    settings["inner_stages"] = [i for i in range(partition.stages) if partition.on(i, INSIDE)]
    # Mixed exits and inserted microbatches use the same idle time, and neither takes memory.
    policies = ("mixed", "deferred") if config.exits == "mixed" else (config.exits,)
    times = costs(config, partition, length)
    found = [filled_to(times, microbatches, **settings | {"exits": e}) for e in policies]
    best = min(found, key=lambda one: one.time)
    return PipelinePlan(_checked(best.schedule), factors(best))


def _checked(schedule: Schedule) -> Schedule:
    """Return a schedule that passes `Schedule.check`."""
    schedule.check()
    return schedule


def factors(filled: Filled) -> Factors | None:
    """Return the `Factors` of a filled schedule, None if nothing was inserted."""
    if not filled.inserted:
        return None
    late = np.arange(filled.schedule.microbatches) >= filled.main + filled.part1
    losses = np.where(late[:, None], 1.0, filled.loss_factors[None])
    # Exits have a loss on the stages that a microbatch's backward pass reaches.
    came = filled.main / filled.loss_factors + filled.main / filled.gradient_factors - filled.main
    reports = filled.main / came
    one = np.float32
    return Factors(
        filled.main, losses.astype(one), filled.gradient_factors.astype(one), reports.astype(one)
    )


def costs(config: PipelineConfig, partition: Partition, length: int) -> StageCosts:
    """Return costs of one sequence in floating-point operations, with the set `backward_cost`."""
    found = model_costs(partition.config, partition.layers, 1, length, partition.placement)
    more = config.backward_cost / 2.0

    def back(work):
        return PassTime(work.forward, work.backward * more)

    def each(works):
        return tuple(map(back, works))

    return StageCosts(each(found.layers), each(found.entry), each(found.inner), back(found.final))
