"""The assignment of layers and exits to pipeline stages."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from eejax.common.errors import ConfigError, require, require_one_of
from eejax.models import work
from eejax.models.config import ModelConfig

ExitPlacement = Literal["later", "earlier"]
PLACEMENTS: tuple[ExitPlacement, ...] = get_args(ExitPlacement)
EVEN, BALANCED = "even", "balanced"
INPUT, INSIDE, OUTPUT = "input", "inside", "output"


class ExitPlace(NamedTuple):
    """The place of an exit.

    It is computed on the INPUT of its stage, on the OUTPUT of the last stage, or INSIDE a stage,
    above `layers` layers of it.
    """

    exit: int
    stage: int
    at: str
    layers: int


@dataclasses.dataclass(frozen=True)
class Partition:
    """Layers and exits of pipeline stages.

    Attributes:
      config: the model's.
      layers: number of layers of each stage, in order; together all layers that run.
      placement: where an exit between two stages is computed: at the beginning of the "later"
        (optimization 2 of EE-LLM's Table 1) or the end of the "earlier".
      which: numbers of the exits with a loss, all if empty; the layers end at the deepest of them.
    """

    config: ModelConfig
    layers: tuple[int, ...]
    placement: str = "later"
    which: tuple[int, ...] = ()

    def __post_init__(self):
        if not self.which:
            object.__setattr__(self, "which", tuple(range(self.config.n_exits + 1)))
        require_one_of("pipeline.placement", self.placement, PLACEMENTS)
        for n in self.layers:
            ok = isinstance(n, int) and not isinstance(n, bool) and n >= 1
            require(ok, "pipeline.layers", self.layers, "must give every stage at least one layer")
        require(
            sum(self.layers) == self.depth,
            "pipeline.layers",
            self.layers,
            f"must add up to the {self.depth} layers that run",
        )

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def depth(self) -> int:
        """Number of layers that run."""
        return max(self.config.exit_boundaries[e] for e in self.which)

    @property
    def starts(self) -> tuple[int, ...]:
        """Number of each stage's first layer."""
        return tuple(itertools.accumulate((0, *self.layers[:-1])))

    @property
    def max_layers(self) -> int:
        """Number of layers of the largest stage, which every stage's stack has as rows."""
        return max(self.layers)

    @property
    def even(self) -> bool:
        """True if all stages have equally many layers."""
        return min(self.layers) == self.max_layers

    @functools.cached_property
    def places(self) -> tuple[ExitPlace, ...]:
        """Return the places of the exits `which`, in their order."""
        return tuple(self._place(e) for e in self.which)

    def _place(self, e: int) -> ExitPlace:
        boundary, last = self.config.exit_boundaries[e], self.stages - 1
        if boundary == self.depth:
            return ExitPlace(e, last, OUTPUT, self.layers[last])
        # The stage of the layer above the boundary.
        later = max(i for i, start in enumerate(self.starts) if start <= boundary)
        inside = boundary - self.starts[later]
        if inside:
            return ExitPlace(e, later, INSIDE, inside)
        if later and self.placement == "earlier":
            return ExitPlace(e, later - 1, INSIDE, self.layers[later - 1])
        return ExitPlace(e, later, INPUT, 0)

    def on(self, stage: int, *at: str) -> tuple[ExitPlace, ...]:
        """Return the exits of a stage in order, or those of them at the places `at`."""
        return tuple(p for p in self.places if p.stage == stage and (not at or p.at in at))

    @property
    def input_exit_stages(self) -> tuple[int, ...]:
        """Stages with exits on their input."""
        return tuple(i for i in range(self.stages) if self.on(i, INPUT))


def partition(
    config: ModelConfig,
    stages: int,
    layers: str | Sequence[int] = EVEN,
    placement: str = "later",
    which: tuple[int, ...] | None = None,
    length: int | None = None,
) -> Partition:
    """Assign a model's layers and exits to `stages` stages.

    Args:
      config: the model's.
      stages: number of stages.
      layers: "even", with one more on the first stages if they do not divide; "balanced", so that
        the stage with the most work has as little as possible, exits included (`stage_work`); or a
        number for each stage.
      placement: see `Partition`.
      which: see `Partition`.
      length: tokens of a text, which attention's work depends on; by default the model's context.

    Raises:
      ConfigError: for more stages than layers, or numbers that do not fit.
    """
    which = tuple(range(config.n_exits + 1)) if which is None else which
    depth = max(config.exit_boundaries[e] for e in which)
    if stages > depth:
        raise ConfigError(
            f"mesh.pipe = {stages}: must be at most the {depth} layers that run, as every stage "
            "needs one. Use fewer stages."
        )
    if not isinstance(layers, str):
        require(
            len(layers) == stages,
            "pipeline.layers",
            tuple(layers),
            f"must have a number for each of {stages} stages",
        )
        return Partition(config, tuple(layers), placement, which)
    require_one_of("pipeline.layers", layers, (EVEN, BALANCED))
    least, more = divmod(depth, stages)
    even = Partition(config, tuple(least + (i < more) for i in range(stages)), placement, which)
    return even if layers == EVEN else _balanced(even, length or config.context_length)


def layers_work(config: ModelConfig, begin: int, end: int, length: int) -> float:
    """Return the multiplications of a token in layers begin..end-1, in texts of `length` tokens."""
    windows = [config.window(i) for i in range(begin, end)]
    seen = work.causal_attention(config, length, windows)
    return (end - begin) * work.layer_weights(config) + seen


def exit_work(config: ModelConfig, e: int, length: int) -> float:
    """Return those of exit e: its MLP, its block and its head. The final exit is last."""
    found: float = work.head_weights(config, e)
    if e < config.n_exits:
        windows = [config.exit_window(e)] * config.exits[e].block
        found += work.exit_weights(config, e) + work.causal_attention(config, length, windows)
    return found


def stage_work(p: Partition, length: int) -> tuple[float, ...]:
    """Return the multiplications of a token's forward pass on each stage, exits included."""
    spans = itertools.pairwise([0, *itertools.accumulate(p.layers)])
    return tuple(
        layers_work(p.config, *span, length)
        + sum(exit_work(p.config, q.exit, length) for q in p.on(i))
        for i, span in enumerate(spans)
    )


def _balanced(even: Partition, length: int) -> Partition:
    """Move single layers from the stage with the most work to another one while that helps."""
    best, layers = even, even.layers
    while True:
        loads = stage_work(best, length)
        worst = max(range(len(loads)), key=loads.__getitem__)
        moved = []
        for i in range(len(layers)):
            if i != worst and best.layers[worst] > 1:
                changed = list(best.layers)
                changed[worst] -= 1
                changed[i] += 1
                moved.append(dataclasses.replace(best, layers=tuple(changed)))
        better = min(moved, key=lambda p: sorted(stage_work(p, length), reverse=True), default=best)
        if sorted(stage_work(better, length), reverse=True) >= sorted(loads, reverse=True):
            return best
        best = better
