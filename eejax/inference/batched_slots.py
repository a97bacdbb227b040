"""An `engine.Engine` that decodes as `batched` does."""

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
from eejax.common.errors import require
from eejax.common.trees import Tree
from eejax.inference import sharded
from eejax.inference import state as s
from eejax.inference.batched import PROMPT_SPAN, SPAN, engine_step
from eejax.inference.batched_state import BatchedState, BatchOptions, blank
from eejax.inference.engine import STEPS_PER_CALL, SlotEngineBase, check_slots
from eejax.inference.generate import loop, power_of_two
from eejax.inference.schedule import BatchPlan
from eejax.inference.state import DecodeRecord, RequestRows, Weights, colocate
from eejax.models.cache import KVCache
from eejax.models.config import ModelConfig
from eejax.sharding.mesh import MeshConfig, mesh_axes


def _specs(mesh: Mesh) -> BatchedState:
    """Return prefixes of a state's partition specs: heads are sharded, all else is replicated."""
    names = [f.name for f in dataclasses.fields(BatchedState)]
    pair = P(mesh_axes(mesh).model)
    return BatchedState(**dict.fromkeys(names, P()) | {"cache": KVCache(pair, pair, P())})


@partial(jax.jit, static_argnames=("config", "options", "slots", "length", "context", "mesh"))
def _start(weights, plan, *, config, options, slots, length, context, mesh) -> BatchedState:
    run = partial(
        blank, config=config, options=options, slots=slots, length=length, context=context
    )
    if mesh is not None:
        given = (sharded.weights(config, options.num_segments, mesh), P())
        run = sharded.shard(run, mesh, given, _specs(mesh))
    return run(weights, plan)


@partial(jax.jit, static_argnames=("config", "options", "size", "mesh"), donate_argnames="state")
def decode(
    weights: Weights,
    state: BatchedState,
    n: jax.Array,
    *,
    config: ModelConfig,
    options: BatchOptions,
    size: int,
    mesh: Mesh | None = None,
) -> tuple[BatchedState, DecodeRecord]:
    """Run up to `n` engine steps, at most `size`, in one compiled loop.

    The loop ends when all requests are finished. Records are [size (drafts + 1), slots].
    """
    run = partial(loop, partial(engine_step, config=config, options=options), size)
    if mesh is not None:
        given = (sharded.weights(config, options.num_segments, mesh), _specs(mesh), P())
        run = sharded.shard(run, mesh, given, (_specs(mesh), P()))
    return run(weights, state, n)


@partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def _insert(state: BatchedState, *rows, mesh: Mesh | None = None) -> BatchedState:
    if mesh is None:
        return _insert_rows(state, *rows)
    specs = _specs(mesh)
    return sharded.shard(_insert_rows, mesh, (specs, *(P() for _ in rows)), specs)(state, *rows)


def _insert_rows(state: BatchedState, tokens, given, request, slots) -> BatchedState:
    put = lambda a, rows: a.at[slots].set(rows, mode="drop")
    return state.replace(
        cache=state.cache.replace(filled=put(state.cache.filled, 0)),
        position=put(state.position, given - 1),
        remaining=put(state.remaining, jnp.maximum(request.limit - (given - request.start), 0)),
        since=put(state.since, state.clock),
        prompt=put(state.prompt, tokens),
        prompt_len=put(state.prompt_len, given),
        request=jax.tree.map(put, state.request, request),
    )


@partial(jax.jit, donate_argnums=0)
def _free(state: BatchedState, slots) -> BatchedState:
    none = lambda a: a.at[slots].set(0, mode="drop")
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
class BatchedEngine(SlotEngineBase):
    """An `engine.Engine` whose requests exit, wait and go deeper each by its own gate.

    One program is compiled for `generate` of up to `STEPS_PER_CALL` steps, one for up to twice as
    many, and so on. `prefill` runs nothing: `generate` runs prompts in chunks and emits their first
    tokens. A prompt may be longer than `request.start`: what follows was generated before, and the
    request continues as if it had never left its slot.

    `plan` has measured costs and waiting rules (`batch_costs.tune`). The state carries a copy,
    which `state.replace(plan=...)` changes while it runs.
    """

    weights: Weights
    config: ModelConfig
    options: BatchOptions
    slots: int
    context: int
    plan: BatchPlan
    mesh: Mesh | None = None

    resumes = True

    @classmethod
    def make(
        cls,
        params: Tree,
        config: ModelConfig,
        options: BatchOptions | None = None,
        *,
        slots: int,
        context: int | None = None,
        plan: BatchPlan | None = None,
        mesh: MeshConfig | Mesh | None = None,
    ) -> BatchedEngine:
        """Prepare an engine from training parameters; on a `mesh`, matrices are split over `model`.

        Raises ConfigError for slots, a context, options, a plan or a mesh that cannot be.
        """
        context = check_slots(config, slots, context)
        require(
            options is None or isinstance(options, BatchOptions),
            "options",
            options,
            "must be BatchOptions",
        )
        options = BatchOptions() if options is None else options
        options = options.resolve_buckets(slots).resolve_chunk(config)
        most, n = config.context_length, config.n_exits + 1
        require(
            options.num_segments is None or options.num_segments <= n,
            "num_segments",
            options.num_segments,
            f"must be at most {n}, the segments of this model",
        )
        for name in ("cap", "chunk", "drafts"):
            value = getattr(options, name)
            require(
                value <= most, name, value, f"must be at most {most}, the model's context_length"
            )
        if mesh is None:
            weights = s.prepare(params, config, options.num_segments)
        else:
            mesh = sharded.without_stages(mesh, "batched")
            require(
                mesh.shape[DATA] == 1,
                "mesh.data",
                mesh.shape[DATA],
                "must be 1 with the engine 'batched'",
                "Its requests share batches: run one engine for each copy of the model.",
            )
            weights = sharded.place(params, config, options.num_segments, mesh)
        segments, buckets = len(weights.segments), len(options.buckets)
        if plan is None:
            plan = BatchPlan.make(segments, slots, options.buckets)
        shape = np.shape(plan.packed) if isinstance(plan, BatchPlan) else None
        require(
            shape == (segments, buckets),
            "plan",
            plan,
            f"must be a BatchPlan of {segments} segments and {buckets} buckets",
            "See batch_costs.tune, which makes one.",
        )
        return cls(weights, config, options, slots, context, plan, mesh)

    @property
    def _static(self) -> dict:
        return dict(config=self.config, options=self.options, mesh=self.mesh)

    @property
    def takes_logits_params(self) -> bool:
        return self.options.logits_params

    @property
    def num_segments(self) -> int:
        return len(self.weights.segments)

    def start(self) -> BatchedState:
        # Rows are written in spans, and all that wait at once: what is behind them is nobody's.
        behind = max(SPAN, self.options.cap, min(PROMPT_SPAN, self.options.chunk))
        state = _start(
            self.weights,
            self.plan,
            slots=self.slots,
            length=self.context + behind,
            context=self.context,
            **self._static,
        )
        return colocate(state, self.weights) if self.mesh is None else state

    def _prefill(self, tokens, given, request) -> tuple[PromptRows, DecodeRecord]:
        m = len(tokens)
        none = np.zeros((m,), np.int32)
        zero = np.zeros((m,), np.float32)
        record = DecodeRecord(
            none - 1, zero, zero, none - 1, none, np.full_like(zero, np.inf), none, none
        )
        return PromptRows(tokens, given, request), record

    def _insert(self, state, rows, slots) -> BatchedState:
        return _insert(state, rows.tokens, rows.lengths, rows.request, slots, mesh=self.mesh)

    def _decode(self, state, n) -> tuple[BatchedState, DecodeRecord]:
        size = max(STEPS_PER_CALL, power_of_two(n))
        state, record = decode(self.weights, state, np.int32(n), size=size, **self._static)
        if size == n:
            return state, record
        return state, jax.tree.map(lambda a: a[: n * (self.options.drafts + 1)], record)

    def _free(self, state, slots) -> BatchedState:
        return _free(state, slots)
