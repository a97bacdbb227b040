"""What schedulers drive: an engine of a fixed number of slots, which requests join and leave."""

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
from eejax.inference.policy import ExitPolicy
from eejax.inference.shaping import Shaping
from eejax.inference.state import (
    STOPS,
    DecodeState,
    EngineOptions,
    Record,
    Request,
    Weights,
    beside,
)
from eejax.models.branches import first_bucket
from eejax.models.cache import init_cache, varying
from eejax.models.config import ModelConfig
from eejax.sharding.mesh import MeshConfig, check_batch, mesh_axes

MIN_WIDTH = 16  # the shortest prompts are padded to this
CALL = 8  # steps between two looks of a scheduler, unless it is told otherwise


class Engine(Protocol):
    """A request's way: `prefill` -> `insert` into a slot -> `generate`, again and again -> `free`.

    slots: requests at a time. context: tokens of a request, prompt included. max_depth: segments
    of the model that are loaded. resumes: whether a prompt may hold tokens that were generated
    before, behind the `request.start` of its own. shapes: whether requests may bring a `Shaping`.
    A state is used once: what a method returns takes
    its place. Nothing here waits for the device, so what it computes raises nothing: a token
    whose log-probability is not finite came of logits that were not, and is none.
    """

    slots: int
    context: int
    max_depth: int
    resumes: bool
    shapes: bool

    def start(self) -> Any:
        """A state whose slots are all free."""

    def prefill(self, prompts: Sequence[Sequence[int]], request: Request) -> tuple[Any, Record]:
        """(rows to insert, the first token of each: a record with a row for every prompt first, and
        maybe others; exit -1 there, and where `generate` brings the first token too).

        Where prompt and limit do not fit the context together, the limit is lowered to what does.
        """

    def insert(self, state: Any, rows: Any, slots: Sequence[int]) -> Any:
        """The state with rows of `prefill` in slots, whatever was there before."""

    def generate(self, state: Any, n: int) -> tuple[Any, Record]:
        """n steps for all slots: records [n, slots], exit -1 where nothing was emitted.

        Those of an engine that emits up to m tokens in a step are [n m, slots].
        """

    def free(self, state: Any, slots: Sequence[int]) -> Any:
        """The state with these slots free."""


class Rows(NamedTuple):
    """What `prefill` made of `count` prompts; the state has rows of nobody behind theirs. context
    and options are the engine's."""

    state: Any
    count: int
    context: int
    options: EngineOptions


class Slots(abc.ABC):
    """What engines of a model share: the checks of what they are asked for, and few shapes of it.

    Prompts are padded to the context, and their number to a power of two; a number of slots to that
    of all. A subclass computes, as the protocol's methods of like names say.
    """

    config: ModelConfig
    options: EngineOptions
    slots: int
    context: int

    resumes = False  # whether prompts may hold tokens that were generated before
    shapes = False  # whether requests may bring a `Shaping`

    @abc.abstractmethod
    def _prefill(
        self, tokens: np.ndarray, given: np.ndarray, request: Request
    ) -> tuple[Any, Record]:
        """Of padded prompts [m, context] of `given` [m] tokens: (a state of m rows, the first
        record [m])."""

    @abc.abstractmethod
    def _insert(self, state: Any, rows: Any, slots: np.ndarray) -> Any:
        """The state with rows in slots [m]; those of a slot that there is not are left out."""

    @abc.abstractmethod
    def _decode(self, state: Any, n: int) -> tuple[Any, Record]:
        """As `generate`."""

    @abc.abstractmethod
    def _free(self, state: Any, slots: np.ndarray) -> Any:
        """The state with slots [m] free, those that there are."""

    def prefill(self, prompts: Sequence[Sequence[int]], request: Request) -> tuple[Rows, Record]:
        """Prompts of at most `context` - 1 tokens, and their `Request`, a row for each.

        Raises ConfigError for tokens that there are not, and for a request of other prompts.
        """
        state, record = self._prefill(*self._asked(prompts, request))
        return Rows(state, len(prompts), self.context, self.options), record

    def insert(self, state: Any, rows: Rows, slots: Sequence[int]) -> Any:
        return self._insert(state, rows.state, self._places(slots, rows))

    def generate(self, state: Any, n: int) -> tuple[Any, Record]:
        require_count("n", n)
        return self._decode(state, n)

    def free(self, state: Any, slots: Sequence[int]) -> Any:
        return self._free(state, self._numbered(slots, self.slots))

    def _asked(
        self, prompts: Sequence[Sequence[int]], request: Request
    ) -> tuple[np.ndarray, np.ndarray, Request]:
        """(padded prompts [m, context], tokens of each [m], what is asked for them as far as there
        is room, and for rows beyond them nothing).

        Raises as `prefill`.
        """
        generate.check_prompts(prompts, self.config, self.context)
        lengths, starts = [len(p) for p in prompts], np.asarray(request.start).tolist()
        fits = all(1 <= start <= n for start, n in zip(starts, lengths, strict=False))
        require(
            len(starts) == len(lengths) and fits if self.resumes else starts == lengths,
            "request.start", starts,
            f"must be the number of tokens of every prompt, {lengths}"
            + (", or fewer where some were generated before" if self.resumes else ""),
        )  # fmt: skip
        if not self.options.leaves_early:  # no exit of the model's is one of this engine's
            request = request.replace(policy=ExitPolicy.make(self.config, len(prompts)))
        exits = request.policy.thresholds.shape[1]
        require(
            exits == self.config.n_exits, "request.policy", f"thresholds of {exits} exits",
            f"must be made of this engine's config, which has {self.config.n_exits}",
        )  # fmt: skip
        n, width = len(prompts), request.stops.shape[1]
        require(width == STOPS, "request.stops", f"{width} a row", f"must be {STOPS} a row")
        request = request.replace(shaping=shaping_for(request.shaping, self, n))
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

    def _places(self, slots: Sequence[int], rows: Rows) -> np.ndarray:
        """The slots that rows go to, one that there is not for those of nobody."""
        n = rows.count
        for name in ("context", "options"):
            theirs, own = getattr(rows, name), getattr(self, name)
            require(theirs == own, f"rows.{name}", theirs, f"must be this engine's, {own}")
        numbered = self._numbered(slots, generate.power_of_two(n))
        require(
            len(slots) == n and len({*numbered[:n]}) == n, "slots", list(slots),
            f"must be {n} different ones: one for each of the rows",
        )  # fmt: skip
        return numbered

    def _numbered(self, slots: Sequence[int], n: int) -> np.ndarray:
        """[n or more] slots, those beyond them none that there is."""
        given = np.asarray(slots)
        whole = given.ndim == 1 and (given.dtype.kind in "iu" or not given.size)
        require(whole, "slots", slots, "must be a sequence of numbers of slots")
        there = bool(np.all((given >= 0) & (given < self.slots)))
        require(there, "slots", given.tolist(), f"must be in 0..{self.slots - 1}")
        none = [self.slots] * (n - len(given))
        return np.array([*given, *none], np.int32)


def shaping_for(shaping: Shaping | None, engine: Engine, rows: int) -> Shaping | None:
    """What requests of an engine bring. Raises ConfigError where it takes none."""
    require(
        shaping is None or engine.shapes, "shaping", type(shaping).__name__,
        f"must be None with {type(engine).__name__}", "BatchOptions(shaping=True) takes it.",
    )  # fmt: skip
    return Shaping.blank(rows) if shaping is None and engine.shapes else shaping


def check_slots(config: ModelConfig, slots: int, context: int | None) -> int:
    """The context of a request, by default the model's; raises ConfigError for what cannot be."""
    context = config.context_length if context is None else context
    require_count("slots", slots)
    require_count("context", context)
    require(
        2 <= context <= config.context_length, "context", context,
        f"must be in 2..{config.context_length}, the model's context_length",
    )  # fmt: skip
    return context


def at_width(run: Callable[[jax.Array], Any], tokens: jax.Array, start: jax.Array) -> Any:
    """`run` of padded prompts [n, context], cut to the smallest of a few widths that holds all of
    their `start` [n] tokens: chosen on the device."""
    context = tokens.shape[1]
    widths = [MIN_WIDTH << i for i in range(context.bit_length()) if MIN_WIDTH << i < context]
    widths.append(context)
    cut = lambda width: lambda tokens: run(tokens[:, :width])
    return lax.switch(
        first_bucket(widths, jnp.max(start)), [cut(width) for width in widths], tokens
    )


@dataclasses.dataclass(frozen=True)
class SlotEngine(Slots):
    """An `Engine` of one device, or of a mesh without stages, by any of `state.ENGINES` but
    "pipelined", which `pipelined_slots.PipelinedSlotEngine` has.

    One program is compiled for every n of `generate`, one of `prefill` and `insert` for every
    power of two of prompts, and one of `free`. Prompts run at the smallest of a few widths, chosen
    on the device.
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
        """From training parameters. Raises ConfigError for slots or a context there cannot be.

        On a `mesh`, which is as `Generator.make`'s, slots lie on data shards in equal parts; a
        prompt's pass is run by all of these alike.
        """
        options = s.without_stages(options)
        config = s.engine_config(config, options)
        context = check_slots(config, slots, context)
        if mesh is None:
            weights = s.prepare(params, config, options.max_depth)
            return cls(weights, config, options, slots, context)
        mesh = sharded.without_stages(mesh, options.engine)
        check_batch(slots, mesh, field="slots")
        weights = sharded.place(params, config, options.max_depth, mesh)
        return cls(weights, config, options, slots, context, mesh)

    @property
    def max_depth(self) -> int:
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
        return beside(state, self.weights) if self.mesh is None else state

    def _prefill(self, tokens, given, request) -> tuple[DecodeState, Record]:
        return _prefill(self.weights, tokens, request, **self._static)

    def _insert(self, state, rows, slots) -> DecodeState:
        return _insert(state, rows, slots, mesh=self.mesh)

    def _decode(self, state, n) -> tuple[DecodeState, Record]:
        return generate.decode(self.weights, state, n=n, **self._static)

    def _free(self, state, slots) -> DecodeState:
        return _free(state, slots, mesh=self.mesh)


@partial(jax.jit, static_argnames=("config", "options", "slots", "length", "mesh"))
def _start(weights, *, config, options, slots, length, mesh) -> DecodeState:
    def run(weights, n=slots):
        cache = init_cache(config, n, length, len(weights.segments), weights.axes)
        request = varying(Request.blank(config, n), weights.axes.data)
        return s.blank(weights, config, options, cache, request)

    if mesh is None:
        return run(weights)
    run = partial(run, n=slots // mesh.shape[DATA])
    specs = sharded.weights(config, options.max_depth, mesh)
    return sharded.shard(run, mesh, (specs,), sharded.state(weights.axes))(weights)


@partial(jax.jit, static_argnames=("config", "options", "mesh"))
def _prefill(weights, tokens, request, *, config, options, mesh):
    run = partial(_prompts, config=config, options=options)
    if mesh is not None:
        alike = sharded.alike(weights.axes)
        specs = (sharded.weights(config, options.max_depth, mesh), P(), P())
        local = lambda weights, *args: run(weights.replace(axes=alike), *args)
        return sharded.shard(local, mesh, specs, (sharded.state(alike), P()))(
            weights, tokens, request
        )
    return run(weights, tokens, request)


def _prompts(weights, tokens, request, *, config, options):
    length = tokens.shape[1]
    run = partial(posthoc.prefill, config=config, options=options, length=length)
    return at_width(lambda part: run(weights, part, request), tokens, request.start)


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
