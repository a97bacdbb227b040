"""A model of which a prefix of segments is loaded, and which grows and shrinks while it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from eejax.common.errors import require, require_count
from eejax.common.trees import Tree, nbytes
from eejax.inference import state as s
from eejax.inference.batched_slots import BatchedEngine
from eejax.inference.batched_state import BatchOptions
from eejax.inference.deepening import deepen, more_weights, of_slots, on_host
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

    Where fewer segments leave room for more requests, `slots` says how many there are at each
    depth; a model that grows puts back those that came last.

    Where there is less room on the device than was counted, what changes it raises JAX's error, a
    RuntimeError; `restart` goes on with what was there before.
    """

    def __init__(
        self, params: Tree, config: ModelConfig, options: BatchOptions | None = None, *,
        slots: int | Sequence[int], depth: int, context: int | None = None, steps: int = CALL,
    ):  # fmt: skip
        """params: may be as `on_host` made them, which takes a while for others; slots: one number,
        or one for each depth, none more than the one before; options: `max_depth` and `grows` are
        set here. Raises as `BatchedEngine.make`."""
        require_count("depth", depth)
        self.config, n = config, config.n_exits + 1
        self.slots = (slots,) * n if isinstance(slots, int) else tuple(slots)
        falls = len(self.slots) == n and [*self.slots] == sorted(self.slots, reverse=True)
        require(falls, "slots", slots, f"must be one number, or {n} of which none rises")
        require(depth <= n, "depth", depth, f"must be at most {n}, the segments of this model")
        self.host = on_host(params, config)
        # With the same buckets at every depth: each has one program then, however it came to be.
        options = (options or BatchOptions()).of_slots(self.slots[0]).of_model(config)
        self._options = dataclasses.replace(options, grows=True)
        options = dataclasses.replace(self._options, max_depth=depth)
        engine = BatchedEngine.make(
            self.host, config, options, slots=self.slots[depth - 1], context=context
        )
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
    def room(self) -> bool:
        """Whether a slot is left for another request."""
        return self.scheduler.unfinished < self.engine.slots

    @property
    def depth(self) -> int:
        """Segments that requests go through."""
        return self.engine.max_depth

    @property
    def coming(self) -> int:
        """Segments that there will be once what was asked for is there."""
        return self.depth if self._coming is None else len(self._coming.segments)

    @property
    def weights(self) -> Weights:
        """Those that are loaded, or on their way."""
        return self.engine.weights if self._coming is None else self._coming

    @property
    def bytes(self) -> int:
        """Of these weights."""
        return nbytes(self.weights)

    @property
    def held(self) -> int:
        """Bytes of the weights, and of what is kept for requests."""
        return self.bytes + nbytes(self.scheduler.state)

    def grow(self, depth: int) -> None:
        """Requests for which there is no room then are put back now, so that what comes finds it.
        Raises ConfigError for no more segments than there are, or are coming."""
        have, most = self.coming, self.config.n_exits + 1
        require(have < depth <= most, "depth", depth, f"must be in {have + 1}..{most}")
        self.resize(self.slots[depth - 1])
        self._coming = more_weights(self.weights, self.host, self.config, depth)

    def stay(self) -> None:
        """Calls off what `grow` asked for. What is under way has its room until it is there, and is
        waited for; there are all slots of this depth again then."""
        jax.block_until_ready(self._coming)
        self._coming = None
        self.resize(self.slots[self.depth - 1])

    def resize(self, slots: int) -> None:
        """So many slots: of fewer those that came last are put back, and more are free."""
        if slots == self.engine.slots:
            return
        rows = self.scheduler.keep(slots)
        new = range(len(rows), slots)
        copied = [*rows, *(rows[0] for _ in new)]  # whatever is in a slot that is freed
        engine, state = of_slots(self.engine, self.scheduler.state, copied)
        if new:
            state = engine.free(state, new)
        self.scheduler.exchange(engine, state, [*rows, *(-1 for _ in new)])

    def shrink(self, depth: int) -> None:
        """Raises ConfigError for no fewer segments than there are."""
        require(1 <= depth < self.depth, "depth", depth, f"must be in 1..{self.depth - 1}")
        self._begin_anew(depth)

    def restart(self) -> None:
        """Goes on as before a change that failed, in whatever state that left: requests that run
        are run anew."""
        self._begin_anew(self.depth)

    def _begin_anew(self, depth: int) -> None:
        """With the first segments of those there are."""
        self._coming = None
        for number in self.scheduler.running:
            self.scheduler.preempt(number)
        # Nothing but the engine and its scheduler may hold on to what is to be freed.
        old, slots = self.engine, self.slots[depth - 1]
        options = dataclasses.replace(self._options, max_depth=depth)
        weights = old.weights.replace(
            segments=old.weights.segments[:depth],
            params=s.outside(old.weights.params, self.config, depth),
        )
        less = dataclasses.replace(
            old, weights=weights, options=options, slots=slots,
            plan=Plan.make(depth, slots, options.buckets),
        )  # fmt: skip
        del old, weights
        self.scheduler.exchange(less, None, [-1] * slots)

    def step(self) -> list[Output]:
        """`Scheduler.step`, with what has come meanwhile."""
        if self.came:
            self.exchange()
        return self.scheduler.step()

    @property
    def came(self) -> bool:
        """Whether what `grow` asked for is there, and not used yet."""
        coming = jax.tree.leaves(self._coming)
        return self._coming is not None and all(a.is_ready() for a in coming)

    def exchange(self) -> None:
        """Goes on with what `grow` asked for, and waits for it where it is not there yet."""
        # What fails does so before anything leans on it.
        jax.block_until_ready(self._coming)
        engine, state = deepen(self.engine, self.scheduler.state, self._coming)
        jax.block_until_ready(state)
        self.scheduler.exchange(engine, state)
        self._coming = None
