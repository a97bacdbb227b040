"""Which layers and exits belong to which pipeline stage."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from eejax.common.errors import ConfigError, require, require_one_of
from eejax.models.config import ModelConfig

Placement = Literal["later", "earlier"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
EVEN, BALANCED = "even", "balanced"
INPUT, INSIDE, OUTPUT = "input", "inside", "output"


class ExitPlace(NamedTuple):
    """The place of exit `exit`.

    It is computed on what enters its stage, on what leaves the last stage, or INSIDE a stage, above
    `layers` layers of it.
    """

    exit: int
    stage: int
    at: str
    layers: int


@dataclasses.dataclass(frozen=True)
class Partition:
    """`layers[i]`: number of layers of stage i, all that are run, in order.

    `which`: the exits with a loss, all of them where it is empty; the layers end at the deepest.
    `placement` says where an exit between two stages is computed: at the beginning of the "later"
    (optimization 2 of EE-LLM's Table 1) or the end of the "earlier".
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
            require(ok, "pipeline.layers", self.layers, "must give every stage a layer or more")
        require(
            sum(self.layers) == self.depth,
            "pipeline.layers",
            self.layers,
            f"must add up to the {self.depth} layers that are run",
        )

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def depth(self) -> int:
        """Layers that are run."""
        return max(self.config.exit_boundaries[e] for e in self.which)

    @property
    def starts(self) -> tuple[int, ...]:
        """Number of each stage's first layer."""
        return tuple(itertools.accumulate((0, *self.layers[:-1])))

    @property
    def most(self) -> int:
        """Layers of the largest stage: the rows that every stage's stack has."""
        return max(self.layers)

    @property
    def even(self) -> bool:
        """All stages have equally many layers."""
        return min(self.layers) == self.most

    @functools.cached_property
    def places(self) -> tuple[ExitPlace, ...]:
        """Return the places of the exits `which`, in their order."""
        return tuple(self._place(e) for e in self.which)

    def _place(self, e: int) -> ExitPlace:
        boundary, last = self.config.exit_boundaries[e], self.stages - 1
        if boundary == self.depth:
            return ExitPlace(e, last, OUTPUT, self.layers[last])
        # The stage that the layer above the boundary is on.
        later = max(i for i, start in enumerate(self.starts) if start <= boundary)
        inside = boundary - self.starts[later]
        if inside:
            return ExitPlace(e, later, INSIDE, inside)
        if later and self.placement == "earlier":
            return ExitPlace(e, later - 1, INSIDE, self.layers[later - 1])
        return ExitPlace(e, later, INPUT, 0)

    def on(self, stage: int, *at: str) -> tuple[ExitPlace, ...]:
        """The exits of a stage, in order, or those of them that are `at` such a place."""
        return tuple(p for p in self.places if p.stage == stage and (not at or p.at in at))

    @property
    def input_exit_stages(self) -> tuple[int, ...]:
        """Stages with exits on what enters them."""
        return tuple(i for i in range(self.stages) if self.on(i, INPUT))


def partition(
    config: ModelConfig,
    stages: int,
    layers: str | Sequence[int] = EVEN,
    placement: str = "later",
    which: tuple[int, ...] | None = None,
) -> Partition:
    """The `Partition` of a model over `stages`.

    layers: "even", the first stages one more where they do not divide; "balanced", so that the
    stage with most work has as little as possible, exits included (`work`); or a number for each
    stage. Raises `ConfigError` where there are more stages than layers, or numbers do not fit.
    """
    which = tuple(range(config.n_exits + 1)) if which is None else which
    depth = max(config.exit_boundaries[e] for e in which)
    if stages > depth:
        raise ConfigError(
            f"mesh.pipe = {stages}: must be at most the {depth} layers that are run, as every "
            "stage needs one. Use fewer stages."
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
    return even if layers == EVEN else _balanced(even)


def work(p: Partition) -> tuple[float, ...]:
    """Multiplications of a token's forward pass on each stage: layers, exits' parts and heads.

    A stage's exit costs its head's v d, and what it has of an MLP or block.
    """
    c = p.config
    gates = 3 if c.mlp_gated else 2
    mlp = gates * c.d_model * c.d_ff
    layer = mlp + 2 * c.d_model * c.head_dim * (c.n_heads + c.n_kv_heads)
    layer += c.context_length * c.n_heads * c.head_dim  # causal: half of 2 t n h

    def exit_(e: int) -> float:
        head = c.padded_vocab * c.d_model
        early = c.exits[e] if e < c.n_exits else None
        return head + (mlp * early.mlp + layer * early.block if early else 0)

    return tuple(n * layer + sum(exit_(q.exit) for q in p.on(i)) for i, n in enumerate(p.layers))


def _balanced(even: Partition) -> Partition:
    """Move single layers from the stage with most work to another one while that helps."""
    best, layers = even, even.layers
    while True:
        loads = work(best)
        worst = max(range(len(loads)), key=loads.__getitem__)
        moved = []
        for i in range(len(layers)):
            if i != worst and best.layers[worst] > 1:
                changed = list(best.layers)
                changed[worst] -= 1
                changed[i] += 1
                moved.append(dataclasses.replace(best, layers=tuple(changed)))
        better = min(moved, key=lambda p: sorted(work(p), reverse=True), default=best)
        if sorted(work(better), reverse=True) >= sorted(loads, reverse=True):
            return best
        best = better
