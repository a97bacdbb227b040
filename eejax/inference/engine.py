"""The engine that a scheduler drives: a fixed number of slots which requests join and leave."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eejax.common.axes import DATA
from eejax.common.errors import require, require_count
from eejax.common.trees import Tree
from eejax.inference import generate, posthoc, sharded
from eejax.inference import state as s
from eejax.inference.logits_params import LogitsParams
from eejax.inference.policy import ExitPolicy
from eejax.inference.state import (
    MAX_STOP_TOKENS,
    DecodeRecord,
    DecodeState,
    EngineOptions,
    RequestRows,
    Weights,
    colocate,
)
from eejax.models.branches import first_bucket
from eejax.models.cache import init_cache, varying
from eejax.models.config import ModelConfig
from eejax.sharding.mesh import MeshConfig, check_batch, mesh_axes

MIN_WIDTH = 16  # the shortest prompts are padded to this
STEPS_PER_CALL = 8  # steps between two looks of a scheduler, unless it is told otherwise


class Engine(Protocol):
    """Protocol of an engine: `prefill`, `insert` into a slot, `generate` repeatedly, then `free`.

    A state is used once: what a method returns takes its place. No method waits for the device, so
    an error in a computation raises nothing: a token whose log-probability is not finite came from
    logits that were not finite, and must be dropped.

    Attributes:
      slots: requests at a time.
      context: tokens of a request, prompt included.
      num_segments: segments of the model that are loaded.
      resumes: a prompt may contain tokens that were generated before, behind its `request.start`.
      takes_logits_params: requests may have `LogitsParams`.
    """

    slots: int
    context: int
    num_segments: int
    resumes: bool
    takes_logits_params: bool

    def start(self) -> Any:
        """Return a state whose slots are all free."""

    def prefill(
        self, prompts: Sequence[Sequence[int]], request: RequestRows
    ) -> tuple[Any, DecodeRecord]:
        """Run prompts.

        Where prompt and limit together exceed the context, the limit is lowered.

        Returns:
          (rows to insert, a record of the first token of each prompt). The record may have more
          rows behind those. Its exit is -1 there, and where `generate` brings the first token too.
        """

    def insert(self, state: Any, rows: Any, slots: Sequence[int]) -> Any:
        """Return the state with rows of `prefill` in slots; what the slots held is lost."""

    def generate(self, state: Any, n: int) -> tuple[Any, DecodeRecord]:
        """Run n steps of all slots: records [n, slots], exit -1 where nothing was emitted.

        Records of an engine that emits up to m tokens in a step are [n m, slots].
        """

    def free(self, state: Any, slots: Sequence[int]) -> Any:
        """Return the state with these slots free."""


class PrefilledRows(NamedTuple):
    """Rows that `prefill` computed of `count` prompts.

    The state may have padding rows behind theirs. context and options are those of the engine.
    """

    state: Any
    count: int
    context: int
    options: EngineOptions


class SlotEngineBase(abc.ABC):
    """Base of engines: checks arguments and pads them to few shapes.

    Prompts are padded to the context, their number to a power of two, and slots to free to the
    number of slots. A subclass implements the abstract methods.
    """

    config: ModelConfig
    options: EngineOptions
    slots: int
    context: int

    resumes = False  # whether prompts may hold tokens that were generated before
    takes_logits_params = False  # whether requests may bring a `LogitsParams`

    @abc.abstractmethod
    def _prefill(
        self, tokens: np.ndarray, given: np.ndarray, request: RequestRows
    ) -> tuple[Any, DecodeRecord]:
        """Run padded prompts [m, context] of `given` [m] tokens: (state, record [m])."""

    @abc.abstractmethod
    def _insert(self, state: Any, rows: Any, slots: np.ndarray) -> Any:
        """Return the state with rows in slots [m]; rows whose slot does not exist are dropped."""

    @abc.abstractmethod
    def _decode(self, state: Any, n: int) -> tuple[Any, DecodeRecord]:
        """Run n steps, as `generate`."""

    @abc.abstractmethod
    def _free(self, state: Any, slots: np.ndarray) -> Any:
        """Return the state with slots [m] free, as far as they exist."""

    def prefill(
        self, prompts: Sequence[Sequence[int]], request: RequestRows
    ) -> tuple[PrefilledRows, DecodeRecord]:
        """Run prompts of at most `context` - 1 tokens; `request` has a row for each.

        Raises ConfigError for unknown token ids, and for a request that does not match the prompts.
        """
        state, record = self._prefill(*self._pad_prompts(prompts, request))
        return PrefilledRows(state, len(prompts), self.context, self.options), record

    def insert(self, state: Any, rows: PrefilledRows, slots: Sequence[int]) -> Any:
        return self._insert(state, rows.state, self._check_slots(slots, rows))

    def generate(self, state: Any, n: int) -> tuple[Any, DecodeRecord]:
        require_count("n", n)
        return self._decode(state, n)

    def free(self, state: Any, slots: Sequence[int]) -> Any:
        return self._free(state, self._numbered(slots, self.slots))

    def _pad_prompts(
        self, prompts: Sequence[Sequence[int]], request: RequestRows
    ) -> tuple[np.ndarray, np.ndarray, RequestRows]:
        """Check and pad prompts: (prompts [m, context], tokens of each [m], request).

        The request's limits are lowered to what fits, and padding rows ask for nothing. Raises as
        `prefill`.
        """
        generate.check_prompts(prompts, self.config, self.context)
        lengths, starts = [len(p) for p in prompts], np.asarray(request.start).tolist()
        fits = all(1 <= start <= n for start, n in zip(starts, lengths, strict=False))
        require(
            len(starts) == len(lengths) and fits if self.resumes else starts == lengths,
            "request.start",
            starts,
            f"must be the number of tokens of every prompt, {lengths}"
            + (", or fewer where some were generated before" if self.resumes else ""),
        )
        if not self.options.leaves_early:  # no exit of the model's is one of this engine's
            request = request.replace(policy=ExitPolicy.make(self.config, len(prompts)))
        exits = request.policy.thresholds.shape[1]
        require(
            exits == self.config.n_exits,
            "request.policy",
            f"thresholds of {exits} exits",
            f"must be made of this engine's config, which has {self.config.n_exits}",
        )
        n, width = len(prompts), request.stop_token_ids.shape[1]
        require(
            width == MAX_STOP_TOKENS,
            "request.stop_token_ids",
            f"{width} a row",
            f"must be {MAX_STOP_TOKENS} a row",
        )
        request = request.replace(logits_params=logits_params_for(request.logits_params, self, n))
        rows = {len(a) for a in jax.tree.leaves(request)}
        require(rows == {n}, "request", f"{sorted(rows)} rows", f"must have {n}: one a prompt")
        which = np.minimum(np.arange(generate.power_of_two(n)), n - 1)  # the last one is repeated
        tokens = np.zeros((len(which), self.context), np.int32)
        for row, i in zip(tokens, which, strict=True):
            row[: lengths[i]] = prompts[i]
        request = jax.tree.map(lambda a: np.asarray(a)[which], request)
        limit = np.minimum(request.limit, self.context - request.start)
        limit = np.where(np.arange(len(which)) < n, limit, 0)
        return tokens, np.asarray(lengths, np.int32)[which], request.replace(limit=limit)

    def _check_slots(self, slots: Sequence[int], rows: PrefilledRows) -> np.ndarray:
        """Return the slot of each row; padding rows get one that does not exist."""
        n = rows.count
        for name in ("context", "options"):
            theirs, own = getattr(rows, name), getattr(self, name)
            require(theirs == own, f"rows.{name}", theirs, f"must be this engine's, {own}")
        numbered = self._numbered(slots, generate.power_of_two(n))
        require(
            len(slots) == n and len({*numbered[:n]}) == n,
            "slots",
            list(slots),
            f"must be {n} different ones: one for each of the rows",
        )
        return numbered

    def _numbered(self, slots: Sequence[int], n: int) -> np.ndarray:
        """Pad a list of slots to n or more with numbers that do not exist."""
        given = np.asarray(slots)
        whole = given.ndim == 1 and (given.dtype.kind in "iu" or not given.size)
        require(whole, "slots", slots, "must be a sequence of numbers of slots")
        there = bool(np.all((given >= 0) & (given < self.slots)))
        require(there, "slots", given.tolist(), f"must be in 0..{self.slots - 1}")
        none = [self.slots] * (n - len(given))
        return np.array([*given, *none], np.int32)


def logits_params_for(
    logits_params: LogitsParams | None, engine: Engine, rows: int
) -> LogitsParams | None:
    """Return an engine's logits_params for requests. Raises ConfigError where it takes none."""
    require(
        logits_params is None or engine.takes_logits_params,
        "logits_params",
        type(logits_params).__name__,
        f"must be None with {type(engine).__name__}",
        "BatchOptions(logits_params=True) takes it.",
    )
    return (
        LogitsParams.blank(rows)
        if logits_params is None and engine.takes_logits_params
        else logits_params
    )


def check_slots(config: ModelConfig, slots: int, context: int | None) -> int:
    """Return the context, by default the model's. Raises ConfigError if out of range."""
    context = config.context_length if context is None else context
    require_count("slots", slots)
    require_count("context", context)
    require(
        2 <= context <= config.context_length,
        "context",
        context,
        f"must be in 2..{config.context_length}, the model's context_length",
    )
    return context


def run_at_width(run: Callable[[jax.Array], Any], tokens: jax.Array, start: jax.Array) -> Any:
    """Call `run` with padded prompts [n, context], cut to the smallest width that fits.

    start [n]: tokens of each prompt. The width is one of a few, chosen on the device.
    """
    context = tokens.shape[1]
    widths = [MIN_WIDTH << i for i in range(context.bit_length()) if MIN_WIDTH << i < context]
    widths.append(context)
    cut = lambda width: lambda tokens: run(tokens[:, :width])
    return lax.switch(
        first_bucket(widths, jnp.max(start)), [cut(width) for width in widths], tokens
    )


@dataclasses.dataclass(frozen=True)
class SlotEngine(SlotEngineBase):
    """An `Engine` on one device, or on a mesh without stages.

    It runs any of `state.ENGINES` but "pipelined", for which see
    `pipelined_slots.PipelinedSlotEngine`. One program is compiled for every n of `generate`, one of
    `prefill` and `insert` for every power of two of prompts, and one of `free`. Prompts run at the
    smallest of a few widths, chosen on the device.
    """

    weights: Weights
    config: ModelConfig
    options: EngineOptions
    slots: int
    context: int
    mesh: Mesh | None = None

    @classmethod
    def make(
        cls,
        params: Tree,
        config: ModelConfig,
        options: EngineOptions | str = "recompute",
        *,
        slots: int,
        context: int | None = None,
        mesh: MeshConfig | Mesh | None = None,
    ) -> SlotEngine:
        """Prepare an engine from training parameters.

        On a `mesh`, as that of `Generator.make`, the slots are split evenly over the data shards;
        all shards run a prompt's pass alike. Raises ConfigError for impossible slots or context.
        """
        options = s.without_stages(options)
        config = s.engine_config(config, options)
        context = check_slots(config, slots, context)
        if mesh is None:
            weights = s.prepare(params, config, options.num_segments)
            return cls(weights, config, options, slots, context)
        mesh = sharded.without_stages(mesh, options.engine)
        check_batch(slots, mesh, field="slots")
        weights = sharded.place(params, config, options.num_segments, mesh)
        return cls(weights, config, options, slots, context, mesh)

    @property
    def num_segments(self) -> int:
        return len(self.weights.segments)

    @property
    def _static(self) -> dict:
        return dict(config=self.config, options=self.options, mesh=self.mesh)

    def start(self) -> DecodeState:
        state = _start(
            self.weights,
            slots=self.slots,
            length=self.context + self.options.most_rows,
            **self._static,
        )
        return colocate(state, self.weights) if self.mesh is None else state

    def _prefill(self, tokens, given, request) -> tuple[DecodeState, DecodeRecord]:
        return _prefill(self.weights, tokens, request, **self._static)

    def _insert(self, state, rows, slots) -> DecodeState:
        return _insert(state, rows, slots, mesh=self.mesh)

    def _decode(self, state, n) -> tuple[DecodeState, DecodeRecord]:
        return generate.decode(self.weights, state, n=n, **self._static)

    def _free(self, state, slots) -> DecodeState:
        return _free(state, slots, mesh=self.mesh)


@partial(jax.jit, static_argnames=("config", "options", "slots", "length", "mesh"))
def _start(weights, *, config, options, slots, length, mesh) -> DecodeState:
    def run(weights, n=slots):
        cache = init_cache(config, n, length, len(weights.segments), weights.axes)
        request = varying(RequestRows.blank(config, n), weights.axes.data)
        return s.blank(weights, config, options, cache, request)

    if mesh is None:
        return run(weights)
    run = partial(run, n=slots // mesh.shape[DATA])
    specs = sharded.weights(config, options.num_segments, mesh)
    return sharded.shard(run, mesh, (specs,), sharded.state(weights.axes))(weights)


@partial(jax.jit, static_argnames=("config", "options", "mesh"))
def _prefill(weights, tokens, request, *, config, options, mesh):
    run = partial(_prompts, config=config, options=options)
    if mesh is not None:
        alike = sharded.alike(weights.axes)
        specs = (sharded.weights(config, options.num_segments, mesh), P(), P())
        local = lambda weights, *args: run(weights.replace(axes=alike), *args)
        return sharded.shard(local, mesh, specs, (sharded.state(alike), P()))(
            weights, tokens, request
        )
    return run(weights, tokens, request)


def _prompts(weights, tokens, request, *, config, options):
    length = tokens.shape[1]
    run = partial(posthoc.prefill, config=config, options=options, length=length)
    return run_at_width(lambda part: run(weights, part, request), tokens, request.start)


@partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def _insert(state, rows, slots, *, mesh):
    if mesh is None:
        return s.place(state, rows, slots)
    axes = mesh_axes(mesh)
    whole, part = sharded.state(axes), sharded.state(sharded.alike(axes))
    put = lambda state, rows, slots: s.place(state, rows, sharded.own(slots, state, axes))
    return sharded.shard(put, mesh, (whole, part, P()), whole)(state, rows, slots)


@partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def _free(state, slots, *, mesh):
    if mesh is None:
        return s.free(state, slots)
    axes = mesh_axes(mesh)
    specs = sharded.state(axes)
    empty = lambda state, slots: s.free(state, sharded.own(slots, state, axes))
    return sharded.shard(empty, mesh, (specs, P()), specs)(state, slots)
