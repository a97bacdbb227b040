"""A model with a loaded prefix of its segments, which grows and shrinks while it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from eejax.common.errors import require, require_count
from eejax.common.trees import Tree, nbytes
from eejax.inference.decoding import default_plan
from eejax.inference.deepening import deepen, more_weights, on_host, select_slots
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.options import EngineOptions, given_options
from eejax.inference.request import RequestOutput
from eejax.inference.scheduler import Scheduler, StepLoop
from eejax.inference.slot_engine import STEPS_PER_CALL
from eejax.inference.weights import Weights, unlayered_params
from eejax.models.config import ModelConfig


class PartialModel(StepLoop):
    """A model whose first `depth` segments serve requests, with its `scheduler`.

    The whole model stays in host memory, a prefix of it on the device. `grow` returns at once: the
    new weights move to the device while requests run. The first step after they have arrived uses
    them, with keys and values filled in from the states kept behind the last segment. `shrink`
    frees segments at once; running requests start anew in the remaining ones.

    Every depth and number of slots has its default plan.

    If fewer segments leave room for more requests, `slots` gives the number at each depth; when the
    model grows, the requests that came last are preempted.

    If the device has less room than was counted, a change of depth raises JAX's error, a
    RuntimeError; `restart` goes back to the depth before it.
    """

    def __init__(
        self,
        params: Tree,
        config: ModelConfig,
        options: EngineOptions | None = None,
        *,
        slots: int | Sequence[int],
        depth: int,
        context: int | None = None,
        steps: int = STEPS_PER_CALL,
    ):
        """Load the first `depth` segments.

        Args:
          params: training parameters; those that `on_host` made load faster.
          slots: one number, or one for each depth, none larger than the one before.
          options: `num_segments` and `can_deepen` are set here.

        Raises:
          ConfigError: as `EarlyExitEngine.make`, and for another engine than "recompute".
        """
        options = given_options(options)
        require(
            options.engine == "recompute",
            "engine",
            options.engine,
            "must be 'recompute', whose segments can be loaded one by one",
        )
        require_count("depth", depth)
        self.config, n = config, config.n_exits + 1
        self.slots = (slots,) * n if isinstance(slots, int) else tuple(slots)
        falls = len(self.slots) == n and [*self.slots] == sorted(self.slots, reverse=True)
        require(falls, "slots", slots, f"must be one number, or {n} numbers that never rise")
        require_count("slots", self.slots[-1])
        require(depth <= n, "depth", depth, f"must be at most {n}, the segments of this model")
        self.host = on_host(params, config)
        # All depths have the same buckets, so that each has one program, however it was reached.
        options = options.resolved(config, self.slots[0])
        self._options = dataclasses.replace(options, can_deepen=True)
        options = dataclasses.replace(self._options, num_segments=depth)
        engine = EarlyExitEngine.make(
            self.host, config, options, slots=self.slots[depth - 1], context=context
        )
        self.scheduler = Scheduler(engine, steps=steps)
        self._coming: Weights | None = None

    @property
    def engine(self) -> EarlyExitEngine:
        return self.scheduler.engine

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def room(self) -> bool:
        """True if a slot is free for another request."""
        return self.scheduler.unfinished < self.engine.slots

    @property
    def depth(self) -> int:
        """Number of segments that requests run through."""
        return self.engine.num_segments

    @property
    def target_segments(self) -> int:
        """Number of segments once those that `grow` requested have arrived."""
        return self.depth if self._coming is None else len(self._coming.segments)

    @property
    def weights(self) -> Weights:
        """Weights that are loaded or on their way."""
        return self.engine.weights if self._coming is None else self._coming

    @property
    def weight_bytes(self) -> int:
        """Bytes of `weights`."""
        return nbytes(self.weights)

    @property
    def total_bytes(self) -> int:
        """Bytes of the weights and of the engine's state."""
        return self.weight_bytes + nbytes(self.scheduler.state)

    def grow(self, depth: int) -> None:
        """Start to load segments, up to `depth` in all.

        Requests that will lose their slot are preempted now, so that the weights find room. Raises
        ConfigError unless `depth` exceeds `target_segments` and exists.
        """
        have, most = self.target_segments, self.config.n_exits + 1
        require(have < depth <= most, "depth", depth, f"must be in {have + 1}..{most}")
        self.resize(self.slots[depth - 1])
        self._coming = more_weights(self.weights, self.host, self.config, depth)

    def cancel_growth(self) -> None:
        """Cancel `grow`.

        It waits until weights on their way have arrived, because they keep their room until then.
        Then the model has all slots of its depth again.
        """
        jax.block_until_ready(self._coming)
        self._coming = None
        self.resize(self.slots[self.depth - 1])

    def resize(self, slots: int) -> None:
        """Change the number of slots; with fewer, the requests that came last are preempted."""
        if slots == self.engine.slots:
            return
        rows = self.scheduler.retain_slots(slots)
        new = range(len(rows), slots)
        copied = [*rows, *(rows[0] for _ in new)]  # new slots copy any one, and are freed
        engine, state = select_slots(self.engine, self.scheduler.state, copied)
        if new:
            state = engine.free(state, new)
        self.scheduler.replace_engine(engine, state, [*rows, *(-1 for _ in new)])

    def shrink(self, depth: int) -> None:
        """Free the segments above `depth`, which must be below the current one (ConfigError)."""
        require(1 <= depth < self.depth, "depth", depth, f"must be in 1..{self.depth - 1}")
        self._restart_at(depth)

    def restart(self) -> None:
        """Go back to the depth before a failed change; running requests start anew."""
        self._restart_at(self.depth)

    def _restart_at(self, depth: int) -> None:
        """Start anew with the first `depth` of the loaded segments."""
        self._coming = None
        for id_ in self.scheduler.running:
            self.scheduler.preempt(id_)
        # Only the engine and its scheduler may hold references to what is to be freed.
        old, slots = self.engine, self.slots[depth - 1]
        options = dataclasses.replace(self._options, num_segments=depth)
        weights = old.weights.replace(
            segments=old.weights.segments[:depth],
            params=unlayered_params(old.weights.params, self.config, depth),
        )
        less = dataclasses.replace(
            old,
            weights=weights,
            options=options,
            slots=slots,
            plan=default_plan(self.config, options, slots),
        )
        del old, weights
        self.scheduler.replace_engine(less, None, [-1] * slots)

    def step(self) -> list[RequestOutput]:
        """Adopt segments that have arrived, then run `Scheduler.step`."""
        if self.growth_ready:
            self.adopt_growth()
        return self.scheduler.step()

    @property
    def growth_ready(self) -> bool:
        """True if the segments that `grow` requested have arrived and are not used yet."""
        coming = jax.tree.leaves(self._coming)
        return self._coming is not None and all(a.is_ready() for a in coming)

    def adopt_growth(self) -> None:
        """Use the segments that `grow` requested; wait for them if necessary."""
        coming = self._coming
        assert coming is not None, "`grow` was called before"
        # A failed transfer raises here, before the engine uses the weights.
        jax.block_until_ready(coming)
        engine, state = deepen(self.engine, self.scheduler.state, coming)
        jax.block_until_ready(state)
        self.scheduler.replace_engine(engine, state)
        self._coming = None
