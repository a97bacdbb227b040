"""State and static options of the engine `batched`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from eejax.common.errors import require, require_count
from eejax.inference.logits_params import LogitsParams, TopLogprobs
from eejax.inference.schedule import BatchPlan, SlotProgress
from eejax.inference.state import RequestRows, Weights
from eejax.kernels import call
from eejax.models.cache import KVCache, init_cache
from eejax.models.config import ModelConfig

CHUNKS = {"cpu": 64, "gpu": 512}
"""Prompt tokens of a step by default. Every chunk reads the whole model: a GPU needs some hundreds
of rows for their products to take as long."""


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Static options of the engine `batched`; each combination compiles once.

    Attributes:
      cap: most tokens of a request that may wait for deeper keys and values. With that many the
        request runs all layers before its next token.
      buckets: row counts that packed segments are compiled for, ascending; the largest is at least
        the cap. Empty: powers of two up to all rows that may be pending, on a GPU from a quarter of
        the slots on; and one row, so that a lone request does not pay for free slots. With one
        slot, of which one row runs in place: all drafts with the row before them instead.
      chunk: prompt tokens per step. None: as many as the device runs well together (`CHUNKS`), at
        most the model's context.
      drafts: most tokens of a request that are drafted past an undecided one. How many a request
        drafts is its `ExitPolicy.drafts`.
      num_segments: segments to load, from the bottom; None loads all.
      logits_params: requests may have `LogitsParams`.
      can_deepen: segments may be added while requests run (`deepening.deepen`). The states behind
        the last segment are then kept for all positions.
    """

    cap: int = 16
    buckets: tuple[int, ...] = ()
    chunk: int | None = None
    drafts: int = 4
    num_segments: int | None = None
    logits_params: bool = False
    can_deepen: bool = False

    def __post_init__(self):
        listed = isinstance(self.buckets, tuple | list)
        require(listed, "buckets", self.buckets, "must be a sequence of row counts")
        for w in self.buckets:
            require_count("buckets", w)
        object.__setattr__(self, "buckets", tuple(sorted({*self.buckets})))
        require_count("cap", self.cap)
        if self.chunk is not None:
            require_count("chunk", self.chunk)
        require_count("drafts", self.drafts, least=0)
        if self.num_segments is not None:
            require_count("num_segments", self.num_segments)
        for name in ("logits_params", "can_deepen"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, value, "must be True or False")
        require(
            not self.buckets or self.buckets[-1] >= self.cap,
            "buckets",
            self.buckets,
            f"must reach the cap, {self.cap}, at least",
            "A request's waiting tokens go deeper together.",
        )

    @property
    def leaves_early(self) -> bool:
        return True

    def resolve_chunk(self, config: ModelConfig) -> BatchOptions:
        """Choose the chunk where none is given."""
        if self.chunk is not None:
            return self
        most = CHUNKS["gpu" if call.for_gpu() else "cpu"]
        return dataclasses.replace(self, chunk=min(most, config.context_length))

    def resolve_buckets(self, slots: int) -> BatchOptions:
        """Choose the buckets for a number of slots where none are given."""
        if self.buckets:
            return self
        most = max(slots * min(max(self.drafts + 1, 2), self.cap), self.cap)
        # Few rows take hardly less time on a GPU. On a CPU they do, and most slots may be free.
        least = max(slots // 4, 4) if slots > 1 and call.for_gpu() else 2
        powers = [1 << i for i in range((most - 1).bit_length() + 1) if 1 << i >= least]
        # One row of the only slot runs in place.
        own = {1} if slots > 1 else {min(self.drafts + 1, most)} - {1}
        buckets = (*own, *(powers or [1 << (most - 1).bit_length()]))
        return dataclasses.replace(self, buckets=buckets)


@struct.dataclass
class WorkCounters:
    """Work since the start, in uint32 counters that wrap around at 2^32.

    Attributes:
      runs: [segments, 1 + buckets], runs of each segment in place and with each bucket.
      spans: [segments], spans of packed rows.
      chunks: [], chunks of prompts.
      chunk_spans: [], spans of prompt rows.
      steps: [], engine steps.
    """

    runs: jax.Array
    spans: jax.Array
    chunks: jax.Array
    chunk_spans: jax.Array
    steps: jax.Array


@struct.dataclass
class PendingRows:
    """The newest rows of every slot, [slots, m]; position p is kept at index p % m.

    Attributes:
      input_token: the token that the row reads.
      token, logprob, confidence: of the token that follows.
      exit: the exit that decided that token; -1 while none has, and then `token` is a draft.
      seen, streak: what gates remember of the row (`Memory`).
      drafted: 1 where the next row started from the draft.
      accepted: 1 where that draft was right.
      top_logprobs: the most likely tokens, where requests may ask for them.
    """

    input_token: jax.Array
    token: jax.Array
    logprob: jax.Array
    confidence: jax.Array
    exit: jax.Array
    seen: jax.Array
    streak: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    top_logprobs: TopLogprobs | None

    @classmethod
    def blank(cls, *shape: int, logits_params: bool) -> PendingRows:
        none, zero = jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.int32)
        number, top_logprobs = (
            jnp.zeros(shape, jnp.float32),
            TopLogprobs.blank(*shape) if logits_params else None,
        )
        return cls(zero, none, number, number, none, none, zero, zero, zero, top_logprobs)


@struct.dataclass
class BatchedState:
    """Everything that slots carry from step to step; arrays are [slots, ...].

    The fields cache, waiting, token, position, remaining and request are those of
    `state.DecodeState`. The row at `position` decides the next token. Rows from there on that the
    first segment has run are *pending*: the first is undecided, those behind it read drafts.

    Attributes:
      boundary: [slots, length, d], states behind the last loaded segment of all positions, where
        segments may be added; else None.
      since: the step in which the first pending row came to its segment.
      prompt: [slots, context], tokens that a request came with. Where requests may have
        `LogitsParams`, generated tokens follow.
      prompt_len: number of those tokens. More than `request.start` where the request ran before:
        what follows is decoded.
      clock: [] steps since the start.
      plan: costs and waiting rules of the schedule.
    """

    cache: KVCache
    boundary: jax.Array | None
    waiting: tuple[jax.Array, ...]
    pending: PendingRows
    token: jax.Array
    position: jax.Array
    remaining: jax.Array
    since: jax.Array
    prompt: jax.Array
    prompt_len: jax.Array
    clock: jax.Array
    work: WorkCounters
    plan: BatchPlan
    request: RequestRows

    @property
    def live(self) -> jax.Array:
        return self.remaining > 0

    @property
    def progress(self) -> SlotProgress:
        return SlotProgress(self.cache.filled, self.position, self.remaining, self.prompt_len)

    def can_start(self, cap: int) -> jax.Array:
        """Return [slots] bool, as `SlotProgress.can_start`.

        No row starts from a draft that would end the request, or where drafting was paused.
        """
        policy, m = self.request.policy, self.pending.input_token.shape[1]
        most = jnp.where(policy.paused, 0, jnp.minimum(policy.drafts, m - 1))
        if self.request.logits_params is not None:  # penalties are of tokens that are decided
            most = jnp.where(self.request.logits_params.changes, 0, most)
        last = at_position(self.pending.token, self.cache.filled[:, 0] - 1)[:, None]
        most = jnp.where(hits_stop_token(self.request, last)[:, 0] | (last[:, 0] < 0), 0, most)
        return self.progress.can_start(cap, most)


def at_position(a: jax.Array, position: jax.Array) -> jax.Array:
    """Return [slots], the entry of a [slots, m] that belongs to positions [slots]."""
    return jnp.take_along_axis(a, (position % a.shape[1])[:, None], 1)[:, 0]


def hits_stop_token(request: RequestRows, tokens: jax.Array) -> jax.Array:
    """Return [slots, n] bool: tokens [slots, n] end their requests."""
    return jnp.any(tokens[..., None] == request.stop_token_ids[:, None], -1)


def blank(
    weights: Weights,
    plan: BatchPlan,
    *,
    config: ModelConfig,
    options: BatchOptions,
    slots: int,
    length: int,
    context: int,
) -> BatchedState:
    """Return a state with all slots free and `length` positions of cache for each."""
    n = weights.last
    zero, none = jnp.zeros((slots,), jnp.int32), jnp.zeros((), jnp.uint32)
    ring = lambda: jnp.zeros((slots, options.cap, config.d_model), config.dtype)
    above = options.can_deepen and n < config.n_exits
    return BatchedState(
        cache=init_cache(config, slots, length, n + 1, weights.axes),
        boundary=jnp.zeros((slots, length, config.d_model), config.dtype) if above else None,
        waiting=tuple(ring() for _ in range(n)),
        pending=PendingRows.blank(slots, options.drafts + 1, logits_params=options.logits_params),
        token=zero,
        position=zero,
        remaining=zero,
        since=zero,
        prompt=jnp.zeros((slots, context), jnp.int32),
        prompt_len=zero,
        clock=jnp.int32(0),
        work=WorkCounters(
            jnp.zeros((n + 1, 1 + len(options.buckets)), jnp.uint32),
            jnp.zeros((n + 1,), jnp.uint32),
            none,
            none,
            none,
        ),
        plan=plan,
        request=RequestRows.blank(config, slots).replace(
            logits_params=LogitsParams.blank(slots) if options.logits_params else None
        ),
    )
