"""Settings of pipeline parallelism."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from eejax.common.errors import require
from eejax.common.fields import PositiveFloat, PositiveInt, check_fields
from eejax.pipeline.partition import EVEN, ExitPlacement
from eejax.pipeline.schedule import ExitTiming

Fill = Literal["none", "part1", "part2", "both"]
FILLS: tuple[Fill, ...] = get_args(Fill)


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """Settings of training over `mesh.pipe` stages; without effect with one stage.

    Attributes:
      schedule: "1f1b" or "gpipe".
      exits: when early exits at the beginning of a stage are computed (`schedule.one_f_one_b`).
        "mixed" takes no time and no memory in most models, "aligned" no time, "deferred" no memory.
        Exits that are distilled are always deferred, and "aligned" is refused for them.
      layers: layers of each stage: "even", "balanced" by work, exits included, or a number for each
        stage. With train.remat "none" every stage takes as long as the one with the most layers.
      placement: whether an exit between two stages is computed at the beginning of the "later" or
        the end of the "earlier" one.
      fill: computes some microbatches in the bubbles of the others. Those of "part1" visit only the
        first stages, those of "part2" go back through only the last ones, and "both" inserts both
        kinds (EE-LLM, Appendix C.2). The gradient stays unbiased. "mixed" exits are deferred if the
        simulated step is shorter that way.
      backward_cost: time of a layer's backward pass over that of its forward pass, from which the
        number of microbatches that fit is computed.
    """

    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    exits: ExitTiming = "mixed"
    layers: Literal["even", "balanced"] | tuple[PositiveInt, ...] = EVEN
    placement: ExitPlacement = "later"
    fill: Fill = "none"
    backward_cost: PositiveFloat = 2.0

    def __post_init__(self):
        check_fields(self)
        name = "PipelineConfig"
        require(
            self.fill == "none" or self.schedule == "1f1b",
            f"{name}.fill",
            self.fill,
            f"must be 'none' with schedule = {self.schedule!r}",
        )

    def distilling(self) -> PipelineConfig:
        """Return the settings for exits that learn from the final one, which are deferred.

        Such exits wait for the final exit's input, which comes down to them with the gradient.

        Raises:
          ConfigError: if the settings do not allow that.
        """
        why = "with loss.distillation: a stage gets the final exit's input only "
        require(
            self.exits != "aligned",
            "pipeline.exits",
            self.exits,
            f"must be 'deferred' or 'mixed' {why}when the gradient arrives",
        )
        require(
            self.fill in ("none", "part2"),
            "pipeline.fill",
            self.fill,
            f"must be 'none' or 'part2' {why}of microbatches that went through all stages",
        )
        return dataclasses.replace(self, exits="deferred")


PIPELINE = PipelineConfig()
