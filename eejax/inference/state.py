"""What the engines share: prepared weights, the decoding state, and one step's record."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from eejax.common.errors import require, require_one_of
from eejax.common.trees import Tree
from eejax.models import exits, transformer
from eejax.models.cache import KVCache, unstack_segments
from eejax.models.config import ModelConfig
from eejax.models.params import for_compute

ENGINES = ("full", "posthoc", "recompute")


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Static choices of an engine; each combination compiles once.

    engine: "full" runs every layer and emits from the final exit; "posthoc" runs every layer and
        emits from the earliest exit whose gate fires (the oracle); "recompute" stops there, and
        later carries the waiting tokens along (KV recomputation).
    cap: most tokens of a request that may wait for deeper keys and values; when a token is
        the cap-th, it runs all layers (and is still emitted where its gate fired).
    buckets: row counts a deeper segment is compiled for, kept as a tuple; the cap itself is
        always one.
    """

    engine: str = "recompute"
    cap: int = 16
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16)

    def __post_init__(self):
        object.__setattr__(self, "buckets", tuple(self.buckets))  # hashable
        require_one_of("engine", self.engine, ENGINES)
        require(
            isinstance(self.cap, int) and self.cap >= 1,
            "cap",
            self.cap,
            "must be a positive integer",
        )
        require(
            bool(self.buckets) and all(isinstance(w, int) and w >= 1 for w in self.buckets),
            "buckets",
            self.buckets,
            "must be positive row counts",
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Row counts deeper segments are compiled for, ascending, the cap last."""
        return (*sorted({w for w in self.buckets if w < self.cap}), self.cap)


@struct.dataclass
class Weights:
    """Parameters laid out for decoding, in the dtype of computation.

    segments: per segment its layers' trees, unstacked; params: everything else.
    """

    segments: tuple[tuple[Tree, ...], ...]
    params: Tree


def engine_config(config: ModelConfig, options: EngineOptions) -> ModelConfig:
    """The model an engine decodes with: "full" has no exits."""
    return config.replace(exits=()) if options.engine == "full" else config


def prepare(params: Tree, config: ModelConfig) -> Weights:
    """Unstacks the layers by segment and casts once, so that no step copies or casts weights."""
    params = for_compute(params, config.dtype)
    segments = unstack_segments(params, config, config.n_exits + 1)
    return Weights(segments, {k: v for k, v in params.items() if k != "layers"})


@struct.dataclass
class DecodeState:
    """Everything a generation carries from step to step.

    cache: keys, values and `filled`.
    waiting: per boundary below the final one, [b, cap, d]: states of the positions that wait
        there, position p in slot p % cap. Empty where the engine never skips.
    token: [b] the last emitted token, which the next step reads; position: [b] its position.
    remaining: [b] tokens still to emit; 0 when done.
    """

    cache: KVCache
    waiting: tuple[jax.Array, ...]
    token: jax.Array
    position: jax.Array
    remaining: jax.Array

    @property
    def live(self) -> jax.Array:
        return self.remaining > 0


class Record(NamedTuple):
    """What one step did for each request; arrays [b].

    exit: number of the emitting exit, -1 where the request was done already.
    layers: layers executed in the step (all requests of a batch share a step).
    margin: the smallest distance to another outcome: of the top two logits at the emitting exit,
        and of confidence to threshold at every exit considered. Only "posthoc" measures it.
    """

    token: jax.Array
    logprob: jax.Array
    confidence: jax.Array
    exit: jax.Array
    layers: jax.Array
    margin: jax.Array


def step_logits(weights: Weights, config: ModelConfig, e: int, h: jax.Array) -> jax.Array:
    """float32 logits [b, v] of exit e from what its head reads, h [b, d]."""
    return exits.logits(exits.head(weights.params, config, e), h)


def embed_last(weights: Weights, config: ModelConfig, state: DecodeState) -> jax.Array:
    """[b, 1, d]: the last emitted tokens, embedded."""
    return transformer.embed(weights.params, config, state.token[:, None], state.position[:, None])


def advance(
    state: DecodeState,
    emission,
    stops: jax.Array,
    layers: jax.Array,
    margin: jax.Array | None = None,
) -> tuple[DecodeState, Record]:
    """Appends the emission to live requests; a stop token ends its request.

    stops: [b, n] token ids that end request b, padded with -1.
    """
    live = state.live
    stopped = jnp.any(emission.token[:, None] == stops, -1)
    remaining = jnp.where(live, jnp.where(stopped, 0, state.remaining - 1), 0)
    record = Record(
        token=jnp.where(live, emission.token, -1),
        logprob=emission.logprob,
        confidence=emission.confidence,
        exit=jnp.where(live, emission.exit, -1),
        layers=jnp.where(live, layers, 0).astype(jnp.int32),
        margin=jnp.full_like(emission.logprob, jnp.inf) if margin is None else margin,
    )
    state = state.replace(
        token=jnp.where(live, emission.token, state.token),
        position=state.position + live.astype(jnp.int32),
        remaining=remaining,
    )
    return state, record
