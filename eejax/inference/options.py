"""Static options of an engine, and the model that an engine decodes with."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, get_args

import jax.numpy as jnp

from eejax.common.errors import require, require_count, require_one_of
from eejax.common.lengths import power_of_two
from eejax.common.trees import size
from eejax.kernels import call
from eejax.models import exits, params, work
from eejax.models.config import ModelConfig

PIPELINED = "pipelined"
ENGINES = ("full", "posthoc", "recompute", PIPELINED, "propagate", "speculative")
SETTINGS = ("recompute", "full", "speculative")  # settings of the engine that `engine_step` runs
Propagation = Literal["state", "mask"]
PROPAGATIONS: tuple[Propagation, ...] = get_args(Propagation)
DRAFTS = 4  # default maximum of drafts for "speculative"
USED_BY = {
    "drafts": ("recompute", "speculative"),
    "draft_exit": ("speculative",),
    "adapt": ("speculative",),
    "lookup": ("recompute", "speculative"),
    "propagate": ("propagate",),
    "logits_params": SETTINGS,
    "can_deepen": SETTINGS,
}
"""Settings that only some engines have, and those engines."""
CHUNKS = {"cpu": 64, "gpu": 512}
"""Default prompt tokens of a step. Every chunk reads the whole model: on a GPU only the products of
some hundreds of rows take as long as that."""

VERIFY_COSTS = {"cpu": (0.3, 0.12), "gpu": (0.02, 0.01), "cache": (0.02, 0.02)}
"""`BatchPlan.verify_cost` by device. On a CPU products of several rows take another form than those
of one: SmolLM2-135M in float32 on two cores takes 1.37, 1.50, 1.70, 1.78 and 2.11 of a step with 1,
2, 3, 4 and 7 drafts. Where a CPU's cache holds the weights, such rows are nearly free. For a GPU
the pair is an assumption: "speculative" was not measured there."""
CACHE_BYTES = 2**26  # of a CPU, roughly


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Static options of an engine; each combination compiles once.

    Attributes:
      engine: one of `ENGINES`, of which `SETTINGS` are settings of one engine.
        "recompute" stops at the exit whose gate fires; later tokens carry the waiting ones along
        (KV recomputation).
        "full" has no early exits: it runs every layer and emits from the final exit.
        "speculative" emits what "full" would, several tokens at a time: an exit drafts them, and
        one pass through the layers above verifies them (LayerSkip).
        "posthoc" runs every layer and emits from the earliest exit whose gate fires (the oracle).
        "propagate" stops at that exit and fills the deeper keys and values at once, from the state
        there (CALM). Its texts may differ.
        "pipelined" leaves the deeper layers to the next stages of a mesh
        (`pipelined.PipelinedGenerator`).
      cap: maximum tokens of a request that may wait for deeper keys and values. When that many
        wait, the request runs all layers before its next token; the last of them is still emitted
        at the exit whose gate fired.
      buckets: row counts of all requests together that packed segments are compiled for. The cap is
        added if all are smaller, because a request's waiting tokens go deeper together. If empty:
        powers of two up to all rows that may be pending (on a GPU from a quarter of the slots on),
        and one row, so that a lone request does not pay for free slots. With one slot, whose single
        row runs in place, all drafts with the row before them replace the one row.
      chunk: prompt tokens of a step, where prompts run beside requests that decode. None: as many
        as the device runs well together (`CHUNKS`), at most the model's context.
      drafts: maximum tokens of a request that an exit drafts past an undecided one; by default 4
        with "speculative", else none. No more than cap - 1 are made, and a request may have fewer
        (`ExitPolicy.drafts`).
      adapt: "speculative" drafts fewer tokens, or none, for a request whose drafts are rarely
        accepted.
      draft_exit: boundary of the exit that drafts for "speculative", which loads no other; by
        default the lowest.
      lookup: maximum tokens of a request that its text drafts itself (`inference.lookup`), where
        its last tokens stood before, and at most cap - 1. With "recompute" they are kept where the
        exits emit the same.
      propagate: what "propagate" leaves in the layers above a token's exit. "state": keys and
        values of the state at that exit. "mask": nothing, so later tokens do not attend to it
        there.
      num_segments: segments to load, from the bottom; the exit above the last of them emits every
        token that no exit below did. None loads all.
      logits_params: whether requests may have `LogitsParams`.
      can_deepen: whether segments may be added while requests run (`deepening.deepen`). The states
        behind the last segment are then kept for all positions.
    """

    engine: str = "recompute"
    cap: int = 16
    buckets: tuple[int, ...] = ()
    chunk: int | None = None
    drafts: int | None = None
    adapt: bool = True
    draft_exit: int | None = None
    lookup: int = 0
    propagate: Propagation = "state"
    num_segments: int | None = None
    logits_params: bool = False
    can_deepen: bool = False

    def __post_init__(self):
        listed = isinstance(self.buckets, tuple | list)
        require(listed, "buckets", self.buckets, "must be a sequence of row counts")
        for w in self.buckets:
            require_count("buckets", w)
        object.__setattr__(self, "buckets", tuple(sorted({*self.buckets})))  # hashable
        require_one_of("engine", self.engine, ENGINES)
        require_count("cap", self.cap)
        require_count("lookup", self.lookup, minimum=0)
        if self.chunk is not None:
            require_count("chunk", self.chunk)
        if self.drafts is not None:
            require_count("drafts", self.drafts, minimum=0)
        if self.num_segments is not None:
            require_count("num_segments", self.num_segments)
        require(
            self.lookup < self.cap,
            "lookup",
            self.lookup,
            f"must be below cap ({self.cap}), the rows that may wait for a pass",
        )
        require_one_of("propagate", self.propagate, PROPAGATIONS)
        if self.draft_exit is not None:
            require_count("draft_exit", self.draft_exit, minimum=0)
        for name in ("adapt", "logits_params", "can_deepen"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, value, "must be True or False")
        for name, engines in USED_BY.items():
            value = getattr(self, name)
            unset = value == getattr(type(self), name) or (name == "drafts" and value == 0)
            require(
                unset or self.engine in engines,
                name,
                value,
                f"must be left out with the engine {self.engine!r}",
                f"Engines with it: {', '.join(engines)}.",
            )
        require(
            self.num_segments is None or self.engine != "speculative",
            "num_segments",
            self.num_segments,
            "must be None with the engine 'speculative'",
            "The final exit verifies its drafts.",
        )

    @property
    def leaves_early(self) -> bool:
        """True if early exits emit tokens."""
        return self.engine not in ("full", "speculative")

    @property
    def prompt_rows(self) -> int:
        """Prompt tokens of a step, for options that `resolved` returned."""
        assert self.chunk is not None, "the options of an engine are resolved"
        return self.chunk

    @property
    def waits(self) -> bool:
        """True if tokens wait below deeper segments for their keys and values there."""
        return self.engine in ("recompute", "speculative")

    @property
    def max_drafts(self) -> int:
        """Maximum drafts of a request by an exit."""
        if self.drafts is not None:
            return self.drafts
        return DRAFTS if self.engine == "speculative" else 0

    @property
    def draft_rows(self) -> int:
        """Maximum drafts of a request, by an exit or from its text."""
        return max(self.max_drafts, self.lookup)

    def resolved(self, config: ModelConfig, slots: int) -> EngineOptions:
        """Return the options with open fields resolved for a model and a number of slots."""
        most = CHUNKS["gpu" if call.for_gpu() else "cpu"]
        chunk = min(most, config.context_length) if self.chunk is None else self.chunk
        own = dataclasses.replace(self, chunk=chunk, drafts=self.max_drafts)
        if drafts_at_once(own, slots):  # a pass decides all rows, so no more of them ever wait
            own = dataclasses.replace(own, cap=min(own.cap, own.draft_rows + 1))
        return dataclasses.replace(own, buckets=own._buckets_for(slots))

    def _buckets_for(self, slots: int) -> tuple[int, ...]:
        if self.buckets:
            own = {self.lookup + 1} if self.lookup else set()
            return tuple(sorted({*self.buckets, max(self.buckets[-1], self.cap), *own}))
        most = max(slots * min(max(self.draft_rows + 1, 2), self.cap), self.cap)
        # On a GPU few rows take hardly less time. On a CPU they do, and most slots may be free.
        least = max(slots // 4, 4) if slots > 1 and call.for_gpu() else 2
        powers = [1 << i for i in range((most - 1).bit_length() + 1) if 1 << i >= least]
        if slots > 1:
            return tuple(sorted({1, *(powers or [power_of_two(most)])}))
        # One row of the only slot runs in place, and no more than `most` wait.
        own = {min(self.max_drafts + 1, most), self.lookup + 1, max(most, 2)} - {1}
        return tuple(sorted({*own, *(size for size in powers if size < most)}))


def drafts_at_once(options: EngineOptions, slots: int) -> bool:
    """Return whether a step makes all drafts that a pass verifies, instead of one.

    It does for a single slot, which has no other to wait for, if no early exit emits tokens.
    """
    return slots == 1 and options.draft_rows > 0 and not options.leaves_early


def given_options(options: EngineOptions | str | None) -> EngineOptions:
    """Return options; a name stands for an engine's default options, None for "recompute".

    Raises ConfigError for another type.
    """
    options = EngineOptions() if options is None else options
    options = EngineOptions(engine=options) if isinstance(options, str) else options
    allowed = "must be EngineOptions, or the name of an engine"
    require(isinstance(options, EngineOptions), "options", options, allowed)
    return options


def engine_options(options: EngineOptions | str | None) -> EngineOptions:
    """Return the options of an engine without stages, as `given_options`.

    Raises ConfigError also for the engine "pipelined".
    """
    options = given_options(options)
    require(
        options.engine != PIPELINED,
        "engine",
        options.engine,
        "must decode without stages, and this engine decodes on the stages of a mesh",
        "Use inference.PipelinedGenerator.",
    )
    return options


def engine_config(config: ModelConfig, options: EngineOptions) -> ModelConfig:
    """Return the model that an engine decodes with.

    "full" has no exits, "speculative" only the one that drafts.

    Raises:
      ConfigError: for more segments than the model has, fewer than all of them with "full", a draft
        exit that does not exist, or a cap, chunk or number of drafts beyond the context.
    """
    if options.engine == "full":
        config = config.replace(exits=())
    if options.engine == "speculative":
        allowed = "must be at least 1 without lookup"
        fix = "Set lookup to draft from the text alone."
        require(options.draft_rows > 0, "drafts", options.drafts, allowed, fix)
        by_boundary = {e.boundary: e for e in config.exits}
        boundary = options.draft_exit
        if boundary is None:
            boundary = min(by_boundary, default=-1)
        require(
            boundary in by_boundary,
            "draft_exit",
            options.draft_exit,
            f"must be the boundary of one of this model's {len(by_boundary)} early exits, "
            f"{sorted(by_boundary)}",
            "" if by_boundary else "Tune an exit first, or decode with the engine 'full'.",
        )
        config = config.replace(exits=(by_boundary[boundary],))
    most = config.context_length
    both = ("cap", "drafts")
    used = dict(recompute=both, pipelined=("cap",), speculative=both)
    for name in (*used.get(options.engine, ()), "chunk"):
        rows = getattr(options, name)
        allowed = f"must be at most {most}, the model's context_length"
        require(rows is None or rows <= most, name, rows, allowed)
    n = config.n_exits + 1
    require(
        options.num_segments is None or options.num_segments <= n,
        "num_segments",
        options.num_segments,
        f"must be at most the {n} segments that the engine {options.engine!r} has of this model",
    )
    return config


@functools.cache
def draft_cost(config: ModelConfig, options: EngineOptions) -> float:
    """Return the time of a draft over that of a full step, from the weights that each reads.

    It counts the whole model's weights, so that a mesh drafts as many tokens as one device. The
    result is 0 if the number of drafts does not adapt.
    """
    if options.engine != "speculative" or not options.adapt:
        return 0.0
    declared = params.abstract(config)
    layer = size(params.layer(config))
    below = config.exit_boundaries[0] * layer + work.head_weights(config, 0, decoding=True)
    below += size(work.without_head(exits.exit_params(declared, config, 0)))
    return below / (config.n_layers * layer + work.head_weights(config, config.n_exits))


def verify_cost(config: ModelConfig, options: EngineOptions, slots: int) -> tuple[float, float]:
    """Return `BatchPlan.verify_cost` of an engine whose number of drafts adapts.

    With several slots it is (0, 0) without lookups: their products have several rows without
    drafts, too.
    """
    by_exit = drafts_at_once(options, slots) and draft_cost(config, options) > 0
    if not by_exit and not (options.lookup and options.adapt):
        return 0.0, 0.0
    cached = "cache" if _weight_bytes(config) <= CACHE_BYTES else "cpu"
    return VERIFY_COSTS["gpu" if call.for_gpu() else cached]


@functools.cache
def _weight_bytes(config: ModelConfig) -> int:
    return size(params.abstract(config)) * jnp.dtype(config.dtype).itemsize
