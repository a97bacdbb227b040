"""A model of which a prefix of segments is loaded, and which grows and shrinks while it serves."""

from __future__ import annotations

import dataclasses

import jax

from eejax.common.errors import require, require_count
from eejax.common.trees import Tree
from eejax.inference import state as s
from eejax.inference.batched_slots import BatchedEngine
from eejax.inference.batched_state import BatchOptions
from eejax.inference.deepening import deepen, more_weights
from eejax.inference.engine import CALL
from eejax.inference.packing import Plan
from eejax.inference.scheduler import Output, Scheduler, Stepped
from eejax.inference.state import Weights
from eejax.models.config import ModelConfig


class PartialModel(Stepped):
    """Requests through the first `depth` segments of a model, by its `scheduler`.

    The whole model stays in host memory; what is loaded is a prefix of it. `grow` returns at once:
    what is new is moved to the device while requests run, and used from the step on that finds it
    there, with keys and values filled in from the states kept behind the last segment. `shrink`
    frees segments at once; requests that run are run anew in what is left of the model.
    """

    def __init__(
        self, params: Tree, config: ModelConfig, options: BatchOptions | None = None, *,
        slots: int, depth: int, context: int | None = None, steps: int = CALL,
    ):  # fmt: skip
        """options: `max_depth` and `grows` are set here. Raises as `BatchedEngine.make`."""
        require_count("depth", depth)
        self.config = config
        self._host = jax.device_get(params)
        options = dataclasses.replace(options or BatchOptions(), max_depth=depth, grows=True)
        engine = BatchedEngine.make(self._host, config, options, slots=slots, context=context)
        engine = dataclasses.replace(engine, weights=jax.device_put(engine.weights))
        self.scheduler = Scheduler(engine, config, steps=steps)
        self._coming: Weights | None = None

    @property
    def engine(self) -> BatchedEngine:
        return self.scheduler.engine

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def depth(self) -> int:
        """Segments that requests go through."""
        return self.engine.max_depth

    @property
    def coming(self) -> int:
        """Segments that there will be once what was asked for is there."""
        return self.depth if self._coming is None else len(self._coming.segments)

    @property
    def bytes(self) -> int:
        """Of the weights that are loaded, or on their way."""
        weights = self.engine.weights if self._coming is None else self._coming
        return sum(a.nbytes for a in jax.tree.leaves(weights))

    def grow(self, depth: int) -> None:
        """Raises ConfigError for no more segments than there are, or are coming."""
        have, most = self.coming, self.config.n_exits + 1
        require(have < depth <= most, "depth", depth, f"must be in {have + 1}..{most}")
        self._coming = more_weights(self.engine, self._host, depth)

    def shrink(self, depth: int) -> None:
        """Raises ConfigError for no fewer segments than there are."""
        require(1 <= depth < self.depth, "depth", depth, f"must be in 1..{self.depth - 1}")
        self._coming = None
        old, options = self.engine, self.engine.options
        for number in self.scheduler.running:
            self.scheduler.preempt(number)
        weights = old.weights.replace(
            segments=old.weights.segments[:depth],
            params=s.outside(old.weights.params, self.config, depth),
        )
        less = dataclasses.replace(
            old, weights=weights, options=dataclasses.replace(options, max_depth=depth),
            plan=Plan.make(depth, old.slots, options.buckets),
        )  # fmt: skip
        self.scheduler.exchange(less, less.start())

    def step(self) -> list[Output]:
        """`Scheduler.step`, with what has come meanwhile."""
        if self._coming is not None and all(a.is_ready() for a in jax.tree.leaves(self._coming)):
            self.exchange()
        return self.scheduler.step()

    def exchange(self) -> None:
        """Goes on with what `grow` asked for, and waits for it where it is not there yet."""
        self.scheduler.exchange(*deepen(self.engine, self.scheduler.state, self._coming))
        self._coming = None
