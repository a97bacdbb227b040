"""Slots of requests on the stages of a mesh: an `engine.Engine` that decodes as `pipelined` does.

Requests are independent streams on every stage, so one that comes takes the rows of its slot in all
that a stage keeps: keys and values, its desk, the tokens in its inbox.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eejax.common.axes import DATA
from eejax.common.trees import Tree
from eejax.inference import pipelined, sharded
from eejax.inference import state as s
from eejax.inference.engine import Slots, at_width, check_slots
from eejax.inference.pipelined import Desk, PipelinedGenerator, PipelineState
from eejax.inference.stages import Stage, Stages, StageWeights
from eejax.inference.state import PIPELINED, EngineOptions, Record, Request
from eejax.models.cache import varying
from eejax.models.config import ModelConfig
from eejax.pipeline.partition import EVEN
from eejax.sharding.mesh import MeshConfig, check_batch


@dataclasses.dataclass(frozen=True)
class PipelinedSlotEngine(Slots):
    """An `engine.Engine` by "pipelined"; programs are compiled as `engine.SlotEngine`'s.

    A call of `generate` ends when every request has its n tokens. Those that stages still work on
    then stay where they are until the next one.
    """

    weights: StageWeights
    stages: Stages
    config: ModelConfig
    options: EngineOptions
    slots: int
    context: int

    @classmethod
    def make(
        cls,
        params: Tree,
        config: ModelConfig,
        mesh: MeshConfig | Mesh,
        options: EngineOptions | str = PIPELINED,
        *,
        slots: int,
        context: int | None = None,
        layers: str | Sequence[int] = EVEN,
    ) -> PipelinedSlotEngine:
        """As `PipelinedGenerator.make`. Slots lie on data shards in equal parts; a prompt's pass is
        run by all of these alike. Raises ConfigError for slots or a context there cannot be too."""
        context = check_slots(config, slots, context)
        made = PipelinedGenerator.make(params, config, mesh, options, layers=layers)
        check_batch(slots, made.stages.mesh, field="slots")
        return cls(made.weights, made.stages, made.config, made.options, slots, context)

    @property
    def max_depth(self) -> int:
        return self.stages.last + 1

    @property
    def _static(self) -> dict:
        return dict(stages=self.stages, cap=self.options.cap)

    def start(self) -> PipelineState:
        return _start(self.weights, slots=self.slots, length=self.context + 1, **self._static)

    def _prefill(self, tokens, given, request) -> tuple[PipelineState, Record]:
        return _prefill(self.weights, tokens, request, **self._static)

    def _insert(self, state, rows, slots) -> PipelineState:
        return _insert(state, rows, slots, stages=self.stages)

    def _decode(self, state, n) -> tuple[PipelineState, Record]:
        return pipelined.decode(self.weights, state, n=n, **self._static)

    def _free(self, state, slots) -> PipelineState:
        return _free(state, slots, stages=self.stages)


@partial(jax.jit, static_argnames=("stages", "cap", "slots", "length"))
def _start(weights, *, stages, cap, slots, length) -> PipelineState:
    def local(weights):
        stage, b = Stage(stages, weights), slots // stages.mesh.shape[DATA]
        request = varying(Request.blank(stages.config, b), DATA)
        return pipelined.leave(pipelined.blank(stage, stage.empty(b, length), cap, request))

    specs = pipelined.state_specs(stages)
    return sharded.shard(local, stages.mesh, (stages.specs,), specs)(weights)


@partial(jax.jit, static_argnames=("stages", "cap"))
def _prefill(weights, tokens, request, *, stages, cap) -> tuple[PipelineState, Record]:
    """Every data shard has all of the rows: those of the state are as many times the prompts."""
    n, context = tokens.shape

    def local(weights, tokens, request):
        def run(part):
            stage = Stage(stages, weights)  # of its own: it keeps what a branch computes
            own = varying((part, request), DATA)
            return pipelined.pass_prompts(stage, cap, context, *own)

        state, record = at_width(run, tokens, request.start)
        return pipelined.leave(state), record

    specs = (stages.specs, P(), P())
    state, record = sharded.shard(
        local, stages.mesh, specs, (pipelined.state_specs(stages), P(DATA))
    )(weights, tokens, request)
    return state, jax.tree.map(lambda a: a[:n], record)


@partial(jax.jit, static_argnames="stages", donate_argnums=0)
def _insert(state, rows, slots, *, stages) -> PipelineState:
    def local(state, rows, slots):
        state, rows = pipelined.enter(state), pipelined.enter(rows)
        n, b = len(rows.token), len(state.token)
        rows = rows.replace(cache=s.lengthened(rows.cache, state.cache), ticks=None)
        slots = sharded.own(slots, state, stages.axes)
        new = s.put(state.replace(ticks=None), rows, slots, n, b)
        return pipelined.leave(new.replace(ticks=state.ticks))

    specs = pipelined.state_specs(stages)
    return sharded.shard(local, stages.mesh, (specs, specs, P()), specs)(state, rows, slots)


@partial(jax.jit, static_argnames="stages", donate_argnums=0)
def _free(state, slots, *, stages) -> PipelineState:
    """What is under way of the requests in these slots is dropped, too."""

    def local(state, slots):
        state = pipelined.enter(state)
        slots = sharded.own(slots, state, stages.axes)
        none = lambda a: a.at[slots].set(0, mode="drop")
        desk = state.desk
        return pipelined.leave(
            state.replace(
                desk=Desk(none(desk.done), none(desk.part), none(desk.come), desk.inbox),
                kept=none(state.kept),
                position=none(state.position),
                remaining=none(state.remaining),
            )
        )

    specs = pipelined.state_specs(stages)
    return sharded.shard(local, stages.mesh, (specs, P()), specs)(state, slots)
