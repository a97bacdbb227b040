"""Slots that requests share as `batched` does: an `engine.Engine`."""

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
from eejax.inference.batched import PROMPT_SPAN, SPAN, sweep
from eejax.inference.batched_state import BatchedState, BatchOptions, blank
from eejax.inference.engine import CALL, Slots, check_slots
from eejax.inference.generate import loop, power_of_two
from eejax.inference.packing import Plan
from eejax.inference.state import Record, Request, Weights, beside
from eejax.models.cache import KVCache
from eejax.models.config import ModelConfig
from eejax.sharding.mesh import MeshConfig, mesh_axes


def _specs(mesh: Mesh) -> BatchedState:
    """Prefixes of a state's partition specs: heads are cut, and all else is the same everywhere."""
    names = [f.name for f in dataclasses.fields(BatchedState)]
    pair = P(mesh_axes(mesh).model)
    return BatchedState(**dict.fromkeys(names, P()) | {"cache": KVCache(pair, pair, P())})


@partial(jax.jit, static_argnames=("config", "options", "slots", "length", "context", "mesh"))
def _start(weights, plan, *, config, options, slots, length, context, mesh) -> BatchedState:
    run = partial(
        blank, config=config, options=options, slots=slots, length=length, context=context
    )
    if mesh is not None:
        given = (sharded.weights(config, options.max_depth, mesh), P())
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
) -> tuple[BatchedState, Record]:
    """Up to `n` sweeps, at most `size`, in one compiled loop: records [size (drafts + 1), slots].

    Ends when all requests are done.
    """
    run = partial(loop, partial(sweep, config=config, options=options), size)
    if mesh is not None:
        given = (sharded.weights(config, options.max_depth, mesh), _specs(mesh), P())
        run = sharded.shard(run, mesh, given, (_specs(mesh), P()))
    return run(weights, state, n)


@partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def _insert(state: BatchedState, *rows, mesh: Mesh | None = None) -> BatchedState:
    if mesh is None:
        return _join(state, *rows)
    specs = _specs(mesh)
    return sharded.shard(_join, mesh, (specs, *(P() for _ in rows)), specs)(state, *rows)


def _join(state: BatchedState, tokens, given, request, slots) -> BatchedState:
    put = lambda a, rows: a.at[slots].set(rows, mode="drop")
    return state.replace(
        cache=state.cache.replace(filled=put(state.cache.filled, 0)),
        position=put(state.position, given - 1),
        remaining=put(state.remaining, jnp.maximum(request.limit - (given - request.start), 0)),
        since=put(state.since, state.clock),
        prompt=put(state.prompt, tokens),
        given=put(state.given, given),
        request=jax.tree.map(put, state.request, request),
    )


@partial(jax.jit, donate_argnums=0)
def _free(state: BatchedState, slots) -> BatchedState:
    none = lambda a: a.at[slots].set(0, mode="drop")
    return state.replace(
        cache=state.cache.replace(filled=none(state.cache.filled)),
        position=none(state.position), remaining=none(state.remaining), given=none(state.given),
    )  # fmt: skip


class Joining(NamedTuple):
    """What `BatchedEngine.prefill` makes: padded prompts [m, context], their lengths, requests."""

    tokens: np.ndarray
    given: np.ndarray
    request: Request


@dataclasses.dataclass(frozen=True)
class BatchedEngine(Slots):
    """An `engine.Engine` whose requests exit, wait and go deeper each by its own gate.

    One program is compiled for `generate` of up to `CALL` sweeps, one for up to twice as many, and
    so on. `prefill` runs nothing: `generate` runs prompts, in chunks, and first tokens come of
    it. A prompt may be longer than `request.start`: what is behind that was generated before, and
    the request goes on from there as if it had never left its slot.

    `plan` says what was measured and how long to hold requests back (`batch_costs.tune`); the state
    carries a copy, which `state.replace(plan=...)` changes while it runs.
    """

    weights: Weights
    config: ModelConfig
    options: BatchOptions
    slots: int
    context: int
    plan: Plan
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
        plan: Plan | None = None,
        mesh: MeshConfig | Mesh | None = None,
    ) -> BatchedEngine:
        """From training parameters; on a `mesh` of model shards, matrices are cut over it.

        Raises ConfigError for slots, a context, options, a plan or a mesh there cannot be.
        """
        context = check_slots(config, slots, context)
        require(
            options is None or isinstance(options, BatchOptions), "options", options,
            "must be BatchOptions",
        )  # fmt: skip
        options = BatchOptions() if options is None else options
        options = options.of_slots(slots).of_model(config)
        most, n = config.context_length, config.n_exits + 1
        require(
            options.max_depth is None or options.max_depth <= n, "max_depth", options.max_depth,
            f"must be at most {n}, the segments of this model",
        )  # fmt: skip
        for name in ("cap", "chunk", "drafts"):
            value = getattr(options, name)
            require(
                value <= most, name, value, f"must be at most {most}, the model's context_length"
            )
        if mesh is None:
            weights = s.prepare(params, config, options.max_depth)
        else:
            mesh = sharded.without_stages(mesh, "batched")
            require(
                mesh.shape[DATA] == 1, "mesh.data", mesh.shape[DATA],
                "must be 1 with the engine 'batched'",
                "Its requests share batches: run one engine for each copy of the model.",
            )  # fmt: skip
            weights = sharded.place(params, config, options.max_depth, mesh)
        segments, buckets = len(weights.segments), len(options.buckets)
        if plan is None:
            plan = Plan.make(segments, slots, options.buckets)
        shape = np.shape(plan.packed) if isinstance(plan, Plan) else None
        require(
            shape == (segments, buckets), "plan", plan,
            f"must be a Plan of {segments} segments and {buckets} buckets",
            "See batch_costs.tune, which makes one.",
        )  # fmt: skip
        return cls(weights, config, options, slots, context, plan, mesh)

    @property
    def _static(self) -> dict:
        return dict(config=self.config, options=self.options, mesh=self.mesh)

    @property
    def shapes(self) -> bool:
        return self.options.shaping

    @property
    def max_depth(self) -> int:
        return len(self.weights.segments)

    def start(self) -> BatchedState:
        # Rows are written in spans, and all that wait at once: what is behind them is nobody's.
        behind = max(SPAN, self.options.cap, min(PROMPT_SPAN, self.options.chunk))
        state = _start(
            self.weights, self.plan, slots=self.slots, length=self.context + behind,
            context=self.context, **self._static,
        )  # fmt: skip
        return beside(state, self.weights) if self.mesh is None else state

    def _prefill(self, tokens, given, request) -> tuple[Joining, Record]:
        m = len(tokens)
        none = np.zeros((m,), np.int32)
        zero = np.zeros((m,), np.float32)
        record = Record(
            none - 1, zero, zero, none - 1, none, np.full_like(zero, np.inf), none, none
        )
        return Joining(tokens, given, request), record

    def _insert(self, state, rows, slots) -> BatchedState:
        return _insert(state, rows.tokens, rows.given, rows.request, slots, mesh=self.mesh)

    def _decode(self, state, n) -> tuple[BatchedState, Record]:
        size = max(CALL, power_of_two(n))
        state, record = decode(self.weights, state, np.int32(n), size=size, **self._static)
        if size == n:
            return state, record
        return state, jax.tree.map(lambda a: a[: n * (self.options.drafts + 1)], record)

    def _free(self, state, slots) -> BatchedState:
        return _free(state, slots)
