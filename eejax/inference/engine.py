"""The early-exit engine: requests join and leave its slots, and each exits by its own gate."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eejax.common.axes import DATA
from eejax.common.errors import require, require_count
from eejax.common.lengths import power_of_two
from eejax.common.trees import Tree
from eejax.inference import sharded
from eejax.inference.decoding import decode, default_plan
from eejax.inference.engine_step import PROMPT_SPAN
from eejax.inference.options import EngineOptions, engine_config, engine_options
from eejax.inference.schedule import INITIAL_TEXT_ACCEPTANCE, BatchPlan
from eejax.inference.segment_branches import SPAN
from eejax.inference.slot_engine import STEPS_PER_CALL, SlotEngineBase, check_slots
from eejax.inference.state import DecodeRecord, EngineState, RequestRows, blank
from eejax.inference.weights import Weights, colocate, prepare
from eejax.models.config import ModelConfig
from eejax.sharding.mesh import MeshConfig, check_batch, mesh_axes


def slot_cache_length(context: int, options: EngineOptions) -> int:
    """Return the positions of cache of a slot for `EngineOptions.resolved` options.

    There is room for whole spans and for all rows that wait.
    """
    return context + max(SPAN, options.cap, min(PROMPT_SPAN, options.prompt_rows))


@partial(jax.jit, static_argnames=("config", "options", "slots", "length", "context"))
def _start(weights, plan, *, config, options, slots, length, context) -> EngineState:
    own = dict(config=config, options=options, length=length, context=context)
    if (mesh := weights.mesh) is None:
        return blank(weights, plan, slots=slots, **own)
    run = partial(blank, slots=slots // mesh.shape[DATA], **own)
    given = (sharded.weights(config, options.num_segments, mesh), P())
    return sharded.shard(run, mesh, given, sharded.state(weights.axes))(weights, plan)


def _of_shards(change, mesh: Mesh | None, state: EngineState, slots, *rows) -> EngineState:
    """Run change(state, slots, *rows) on each shard, with the shard's own numbers of slots."""
    if mesh is None:
        return change(state, slots, *rows)
    axes = mesh_axes(mesh)

    def local(state, slots, *rows):
        return change(state, sharded.local_slots(slots, len(state.token), axes), *rows)

    specs = sharded.state(axes)
    return sharded.shard(local, mesh, (specs, *(P() for _ in (slots, *rows))), specs)(
        state, slots, *rows
    )


@partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def _insert(state: EngineState, slots, rows: PromptRows, *, mesh: Mesh | None) -> EngineState:
    return _of_shards(_insert_rows, mesh, state, slots, rows)


def _insert_rows(state: EngineState, slots, new: PromptRows) -> EngineState:
    def put(a, rows):
        return a.at[slots].set(rows, mode="drop")

    lengths, request = new.lengths, new.request
    left = request.limit - (lengths - request.start)
    return state.replace(
        cache=state.cache.replace(filled=put(state.cache.filled, 0)),
        reach=put(state.reach, state.cache.filled.shape[1] - 1),
        acceptance=put(state.acceptance, state.plan.acceptance),
        lookup_acceptance=jax.tree.map(
            lambda a: put(a, INITIAL_TEXT_ACCEPTANCE), state.lookup_acceptance
        ),
        position=put(state.position, lengths - 1),
        remaining=put(state.remaining, jnp.maximum(left, 0)),
        layers=put(state.layers, 0),
        since=put(state.since, state.clock),
        prompt=put(state.prompt, new.tokens),
        prompt_len=put(state.prompt_len, lengths),
        request=jax.tree.map(put, state.request, request),
    )


@partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def _free(state: EngineState, slots, *, mesh: Mesh | None) -> EngineState:
    return _of_shards(_empty_slots, mesh, state, slots)


def _empty_slots(state: EngineState, slots) -> EngineState:
    def none(a):
        return a.at[slots].set(0, mode="drop")

    return state.replace(
        cache=state.cache.replace(filled=none(state.cache.filled)),
        position=none(state.position),
        remaining=none(state.remaining),
        prompt_len=none(state.prompt_len),
    )


class PromptRows(NamedTuple):
    """Prompts to insert: padded tokens [m, context], their lengths [m], and the requests."""

    tokens: np.ndarray
    lengths: np.ndarray
    request: RequestRows


@dataclasses.dataclass(frozen=True)
class EarlyExitEngine(SlotEngineBase):
    """An `Engine` in which each request exits, waits and goes deeper by its own gate.

    It runs any of `options.ENGINES` but "pipelined", for which see
    `pipelined_slots.PipelinedSlotEngine`. One program is compiled for `generate` of up to
    `STEPS_PER_CALL` steps, one for up to twice as many, and so on. `prefill` runs nothing:
    `generate` runs prompts in chunks and emits their first tokens. A prompt may be longer than
    `request.start`: the tokens behind it were generated before, and the request continues as if it
    had never left its slot.

    `plan` has measured costs and waiting rules (`batch_costs.tune`). The state carries a copy,
    which `state.replace(plan=...)` changes while it runs.
    """

    weights: Weights
    config: ModelConfig
    options: EngineOptions
    slots: int
    context: int
    plan: BatchPlan

    resumes = True

    @classmethod
    def make(
        cls,
        params: Tree,
        config: ModelConfig,
        options: EngineOptions | str | None = None,
        *,
        slots: int,
        context: int | None = None,
        plan: BatchPlan | None = None,
        mesh: MeshConfig | Mesh | None = None,
    ) -> EarlyExitEngine:
        """Prepare an engine from training parameters.

        On a `mesh`, as in `Generator.make`, slots are split evenly over the data shards, each of
        which batches its own requests.

        Args:
          slots: requests at a time.
          context: most tokens of a request, by default the model's.

        Raises:
          ConfigError: for impossible slots, context, options, plan or mesh.
        """
        options = engine_options(options)
        config = engine_config(config, options)
        context = check_slots(config, slots, context)
        own = slots
        if mesh is None:
            weights = jax.device_put(prepare(params, config, options.num_segments))
        else:
            mesh = sharded.without_stages(mesh, options.engine)
            check_batch(slots, mesh, field="slots")
            own = slots // mesh.shape[DATA]
            weights = sharded.place(params, config, options.num_segments, mesh)
        options = options.resolved(config, own)
        segments, buckets = len(weights.segments), len(options.buckets)
        plan = default_plan(config, options, own) if plan is None else plan
        shape = np.shape(plan.packed) if isinstance(plan, BatchPlan) else None
        require(
            shape == (segments, buckets),
            "plan",
            plan,
            f"must be a BatchPlan of {segments} segments and {buckets} buckets",
            "batch_costs.tune makes one.",
        )
        return cls(weights, config, options, slots, context, plan)

    def with_slots(self, slots: int) -> EarlyExitEngine:
        """Return an engine of the same weights with so many slots, on one device.

        It has the row counts and the plan that are the default for them.
        """
        require_count("slots", slots)
        require(self.mesh is None, "mesh", self.mesh, "must be None")
        options = dataclasses.replace(self.options, buckets=()).resolved(self.config, slots)
        plan = default_plan(self.config, options, slots)
        return dataclasses.replace(self, options=options, slots=slots, plan=plan)

    @property
    def mesh(self) -> Mesh | None:
        return self.weights.mesh

    @property
    def _static(self) -> dict:
        return dict(config=self.config, options=self.options)

    @property
    def num_segments(self) -> int:
        return len(self.weights.segments)

    @property
    def cache_length(self) -> int:
        """Positions of cache of a slot (`slot_cache_length`)."""
        return slot_cache_length(self.context, self.options)

    def start(self) -> EngineState:
        sizes = dict(slots=self.slots, length=self.cache_length, context=self.context)
        state = _start(self.weights, self.plan, **sizes, **self._static)
        return colocate(state, self.weights) if self.mesh is None else state

    def _prefill(self, tokens, lengths, request) -> tuple[PromptRows, DecodeRecord]:
        m = len(tokens)
        none = np.zeros((m,), np.int32)
        zero = np.zeros((m,), np.float32)
        record = DecodeRecord(
            none - 1, zero, zero, none - 1, none, np.full_like(zero, np.inf), none, none
        )
        return PromptRows(tokens, lengths, request), record

    def _insert(self, state, rows, slots) -> EngineState:
        return _insert(state, slots, rows, mesh=self.mesh)

    def _decode(self, state, n) -> tuple[EngineState, DecodeRecord]:
        size = max(STEPS_PER_CALL, power_of_two(n))
        return decode(self.weights, state, np.int32(n), size=size, prompts=True, **self._static)

    def _free(self, state, slots) -> EngineState:
        return _free(state, slots, mesh=self.mesh)
