"""Settings of pipeline parallelism."""

from __future__ import annotations

import dataclasses
import math

from eejax.common.errors import require, require_one_of
from eejax.pipeline.partition import BALANCED, EVEN, PLACEMENTS
from eejax.pipeline.schedule import EXIT_POLICIES, GENERATORS

FILLS = ("none", "part1", "part2", "both")


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """Settings of training over `mesh.pipe` stages; without effect with one stage.

    Attributes:
      schedule: "1f1b" or "gpipe".
      exits: when early exits at the beginning of a stage are computed (`schedule.one_f_one_b`).
        "mixed" takes no time and no memory in most models, "aligned" no time, "deferred" no memory.
        Exits that are distilled are always deferred.
      layers: layers of each stage: "even", "balanced" by work, exits included, or a number for each
        stage. With train.remat "none" every stage takes as long as the one with the most layers.
      placement: whether an exit between two stages is computed at the beginning of the "later" or
        the end of the "earlier" one.
      fill: computes some of a step's microbatches in the bubbles of the others, with a part of the
        exits ("part1"), of the backward pass ("part2"), or "both" (EE-LLM, Appendix C.2). The
        gradient stays unbiased. "mixed" exits are deferred if more microbatches fit that way.
      backward_cost: time of a layer's backward pass over that of its forward pass, from which the
        number of microbatches that fit is computed.
    """

    schedule: str = "1f1b"
    exits: str = "mixed"
    layers: str | tuple[int, ...] = EVEN
    placement: str = "later"
    fill: str = "none"
    backward_cost: float = 2.0

    def __post_init__(self):
        name = "PipelineConfig"
        require_one_of(f"{name}.schedule", self.schedule, tuple(GENERATORS))
        require_one_of(f"{name}.exits", self.exits, EXIT_POLICIES)
        require_one_of(f"{name}.placement", self.placement, PLACEMENTS)
        require_one_of(f"{name}.fill", self.fill, FILLS)
        if isinstance(self.layers, list):
            object.__setattr__(self, "layers", tuple(self.layers))
        if isinstance(self.layers, str):
            require_one_of(f"{name}.layers", self.layers, (EVEN, BALANCED))
        else:
            ok = all(isinstance(n, int) and n >= 1 for n in self.layers)
            require(
                ok,
                f"{name}.layers",
                self.layers,
                "must be numbers of layers, each at least 1, as (7, 7, 6, 4), 'even' or 'balanced'",
            )
        require(
            0 < self.backward_cost < math.inf,
            f"{name}.backward_cost",
            self.backward_cost,
            "must be positive and finite",
        )
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
