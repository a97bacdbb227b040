"""A `slot_engine.Engine` on the stages of a mesh that decodes as `pipelined` does.

Requests are independent streams on every stage. A request that joins takes its slot's rows of all
that a stage keeps: keys and values, its progress, and the tokens in its inbox.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eejax.common.axes import DATA
from eejax.common.lengths import padded_lengths
from eejax.common.trees import Tree
from eejax.inference import pipelined, sharded
from eejax.inference.options import PIPELINED, EngineOptions
from eejax.inference.pipelined import PipelinedGenerator, PipelineState, StageProgress
from eejax.inference.slot_engine import SlotEngineBase, check_slots
from eejax.inference.stages import DecodingStage, StagedModel, StageWeights
from eejax.inference.state import DecodeRecord, RequestRows
from eejax.models.branches import first_bucket
from eejax.models.cache import varying
from eejax.models.config import ModelConfig
from eejax.pipeline.partition import EVEN
from eejax.sharding.mesh import MeshConfig, check_batch


@dataclasses.dataclass(frozen=True)
class PipelinedSlotEngine(SlotEngineBase):
    """A `slot_engine.Engine` for "pipelined"; prompts run when they arrive.

    One program is compiled for every n of `generate`, one of `prefill` and `insert` for every power
    of two of prompts, and one of `free`. Prompts run at the smallest of a few widths, chosen on the
    device. A call of `generate` ends when every request has its n tokens. Tokens that stages still
    work on then stay in place until the next call.
    """

    weights: StageWeights
    stages: StagedModel
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
        """Prepare an engine as `PipelinedGenerator.make`.

        Slots are split evenly over the data shards; all shards run a prompt's pass alike. Raises
        ConfigError also for impossible slots or context.
        """
        context = check_slots(config, slots, context)
        made = PipelinedGenerator.make(params, config, mesh, options, layers=layers)
        check_batch(slots, made.stages.mesh, field="slots")
        return cls(made.weights, made.stages, made.config, made.options, slots, context)

    @property
    def num_segments(self) -> int:
        return self.stages.last + 1

    @property
    def _static(self) -> dict:
        return dict(stages=self.stages, cap=self.options.cap)

    def start(self) -> PipelineState:
        return _start(self.weights, slots=self.slots, length=self.context + 1, **self._static)

    def _prefill(self, tokens, lengths, request) -> tuple[PipelineState, DecodeRecord]:
        return _prefill(self.weights, tokens, request, **self._static)

    def _insert(self, state, rows, slots) -> PipelineState:
        return _insert(state, rows, slots, stages=self.stages)

    def _decode(self, state, n) -> tuple[PipelineState, DecodeRecord]:
        return pipelined.decode(self.weights, state, np.int32(n), size=n, **self._static)

    def _free(self, state, slots) -> PipelineState:
        return _free(state, slots, stages=self.stages)


def _run_at_width(run: Callable[[jax.Array], Any], tokens: jax.Array, start: jax.Array) -> Any:
    """Call `run` with padded prompts [n, context], cut to the smallest width that fits.

    start [n]: tokens of each prompt. The width is one of a few, chosen on the device.
    """
    context = tokens.shape[1]
    widths = padded_lengths(context)

    def cut(width):
        return lambda tokens: run(tokens[:, :width])

    return lax.switch(
        first_bucket(widths, jnp.max(start)), [cut(width) for width in widths], tokens
    )


@partial(jax.jit, static_argnames=("stages", "cap", "slots", "length"))
def _start(weights, *, stages, cap, slots, length) -> PipelineState:
    def local(weights):
        stage, b = DecodingStage(stages, weights), slots // stages.mesh.shape[DATA]
        request = varying(RequestRows.blank(stages.config, b), DATA)
        return pipelined.leave(pipelined.blank(stage, stage.empty(b, length), cap, request))

    specs = pipelined.state_specs(stages)
    return sharded.shard(local, stages.mesh, (stages.specs,), specs)(weights)


@partial(jax.jit, static_argnames=("stages", "cap"))
def _prefill(weights, tokens, request, *, stages, cap) -> tuple[PipelineState, DecodeRecord]:
    """Run prompts; every data shard has all rows, so a state has each row once per shard."""
    n, context = tokens.shape

    def local(weights, tokens, request):
        def run(part):
            stage = DecodingStage(stages, weights)  # one per branch, as it keeps computed values
            own = varying((part, request), DATA)
            return pipelined.pass_prompts(stage, cap, context, *own)

        state, record = _run_at_width(run, tokens, request.start)
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
        rows = rows.replace(cache=_pad_cache(rows.cache, state.cache), ticks=None)
        slots = sharded.local_slots(slots, len(state.token), stages.axes)
        new = _put(state.replace(ticks=None), rows, slots, n, b)
        return pipelined.leave(new.replace(ticks=state.ticks))

    specs = pipelined.state_specs(stages)
    return sharded.shard(local, stages.mesh, (specs, specs, P()), specs)(state, rows, slots)


@partial(jax.jit, static_argnames="stages", donate_argnums=0)
def _free(state, slots, *, stages) -> PipelineState:
    """Free slots, and drop the in-flight tokens of their requests."""

    def local(state, slots):
        state = pipelined.enter(state)
        slots = sharded.local_slots(slots, len(state.token), stages.axes)

        def none(a):
            return a.at[slots].set(0, mode="drop")

        progress = state.progress
        return pipelined.leave(
            state.replace(
                progress=StageProgress(
                    none(progress.done), none(progress.part), none(progress.come), progress.inbox
                ),
                kept=none(state.kept),
                position=none(state.position),
                remaining=none(state.remaining),
            )
        )

    specs = pipelined.state_specs(stages)
    return sharded.shard(local, stages.mesh, (specs, P()), specs)(state, slots)


def _put(tree: Tree, rows: Tree, slots: jax.Array, n: int, b: int) -> Tree:
    """Put a tree of n requests into the slots [n] of a tree of b slots.

    Leaves are [n m, ...] and [b m, ...], where m consecutive rows belong to one request.
    """

    def one(whole, part):
        per = part.shape[0] // n
        grouped = whole.reshape(b, per, *whole.shape[1:])
        new = part.reshape(n, per, *part.shape[1:])
        return grouped.at[slots].set(new, mode="drop").reshape(whole.shape)

    return jax.tree.map(one, tree, rows)


def _pad_cache(tree: Tree, like: Tree) -> Tree:
    """Pad leaves [r, s, ...] with zeros to as many positions s as those of `like`."""

    def one(part, whole):
        more = [(0, 0), (0, whole.shape[1] - part.shape[1])]
        return jnp.pad(part, more + [(0, 0)] * (part.ndim - 2))

    return jax.tree.map(one, tree, like)
