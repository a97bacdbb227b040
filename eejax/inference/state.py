"""State of an engine: its requests, what each slot carries from step to step, and the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from eejax.common.errors import require, require_array
from eejax.common.indexing import gather_each, ring_index
from eejax.common.lengths import power_of_two
from eejax.inference.logits_params import LogitsParams, TopLogprobs
from eejax.inference.options import EngineOptions
from eejax.inference.policy import Emission, ExitInput, ExitPolicy
from eejax.inference.sampling import SamplingParams
from eejax.inference.schedule import (
    IN_PLACE,
    INITIAL_TEXT_ACCEPTANCE,
    PACKED,
    BatchPlan,
    SegmentBatch,
    SlotProgress,
    best_drafts,
)
from eejax.inference.weights import Weights
from eejax.models.cache import KVCache, init_cache, varying
from eejax.models.config import ModelConfig
from eejax.models.exits import Reader

EXIT_DRAFT = 1
TEXT_DRAFTS = (2, 3, 4)
"""Kinds of drafts (`PendingRows.drafted`): by an exit, or from the text, where so many of its last
tokens stood before. Longer matches are right more often."""

MAX_STOP_TOKENS = 8
"""Maximum stop tokens of a request in a slot. `Generator` takes more, with other programs."""


class RequestRows(struct.PyTreeNode):
    """Requests of an engine, one a row, as traced arrays: changing one compiles nothing.

    Attributes:
      policy: exit rules.
      sampling: sampling settings.
      stop_token_ids: [b, n] int32, token ids that end a request, padded with -1.
      start: [b] int32, tokens of the prompt.
      limit: [b] int32, maximum tokens to emit.
      logits_params: logits processing, for engines that take it (`EngineOptions.logits_params`).
    """

    policy: ExitPolicy
    sampling: SamplingParams
    stop_token_ids: jax.Array
    start: jax.Array
    limit: jax.Array
    logits_params: LogitsParams | None = None

    @classmethod
    def make(
        cls,
        config: ModelConfig,
        lengths: Sequence[int] | np.ndarray,
        limits: Sequence[int] | np.ndarray,
        policy: ExitPolicy,
        sampling: SamplingParams,
        stop_token_ids: Sequence[int] = (),
        logits_params: LogitsParams | None = None,
    ) -> RequestRows:
        """Check the settings of requests whose prompts have `lengths` tokens.

        Rows have `MAX_STOP_TOKENS` stop tokens, as slots need them, or a power of two for more.

        Args:
          limits: maximum tokens to emit, one per request.

        Raises:
          ConfigError: for lengths or limits that are not counts, or unknown stop tokens.
        """
        for name, value in (("lengths", lengths), ("limits", limits)):
            allowed = "must be a sequence of numbers of tokens"
            a = require_array(name, value, allowed)
            ok = a.ndim == 1 and a.dtype.kind in "iu" and bool(np.all(a >= 0))
            require(ok, name, value, allowed)
        require(
            len(limits) == len(lengths),
            "limits",
            limits,
            f"must be {len(lengths)}, one per prompt",
        )
        allowed = f"must be a sequence of token ids, each in 0..{config.vocab_size - 1}"
        ids = require_array("stop_token_ids", stop_token_ids, allowed)
        require(
            ids.ndim == 1
            and (not ids.size or ids.dtype.kind in "iu")
            and bool(np.all((ids >= 0) & (ids < config.vocab_size))),
            "stop_token_ids",
            stop_token_ids,
            allowed,
        )
        # A power of two, so that few counts of stop tokens are compiled for.
        width = max(MAX_STOP_TOKENS, power_of_two(ids.size))
        rows: Any = np.full((len(lengths), width), -1, np.int32)
        rows[:, : ids.size] = ids

        def as_rows(a) -> Any:  # a host array stands in for a device array
            return np.minimum(a, np.iinfo(np.int32).max).astype(np.int32)

        return cls(policy, sampling, rows, as_rows(lengths), as_rows(limits), logits_params)

    @classmethod
    def blank(cls, config: ModelConfig, rows: int) -> RequestRows:
        """Return the rows of free slots."""
        none = np.zeros((rows,), np.int32)
        return cls.make(
            config, none, none, ExitPolicy.make(config, rows), SamplingParams.make(rows)
        )

    def progress(self, position: jax.Array) -> jax.Array:
        """Return [b], the share of a request's tokens before the one at `position` [b]."""
        done = (position - self.start).astype(jnp.float32)
        return done / jnp.maximum(self.limit, 1).astype(jnp.float32)

    def exit_input(
        self,
        e: int,
        state: jax.Array,
        head: Reader,
        allowed: jax.Array,
        position: jax.Array,
        router: Callable[[jax.Array], jax.Array] | None,
        process_logits: Callable[[jax.Array], jax.Array] | None = None,
    ) -> ExitInput:
        """Return the input of exit e for these requests; arguments as the fields of `ExitInput`."""
        return ExitInput(
            e,
            state,
            head,
            allowed,
            position,
            self.progress(position),
            self.policy,
            self.sampling,
            router,
            self.logits_params,
            process_logits,
        )


class DecodeRecord(NamedTuple):
    """Outcome of a step for each request; [b], or [n, b] where it emits up to n tokens.

    Attributes:
      token, logprob, confidence: id, log-probability and confidence of the emitted token.
      exit: number of the emitting exit, -1 where no token was emitted.
      layers: layers that the device ran since the request's previous token, in steps that all
        requests of a batch share; see also `GenerationResult`. If a step emits several tokens, only
        the first has them, so that their sum counts each layer once.
      margin: smallest distance to another outcome: between the top two logits at the emitting exit,
        and from confidence to threshold at every exit considered. Only "posthoc" measures it.
      drafted: 1 for a token of which a draft was read before the token was decided.
      accepted: 1 where that draft was right. Both are 0 for engines that do not draft.
      top_logprobs: the most likely tokens, for requests that ask for them
        (`LogitsParams.top_logprobs`), where the engine supports it.
    """

    token: jax.Array | np.ndarray
    logprob: jax.Array | np.ndarray
    confidence: jax.Array | np.ndarray
    exit: jax.Array | np.ndarray
    layers: jax.Array | np.ndarray
    margin: jax.Array | np.ndarray
    drafted: jax.Array | np.ndarray
    accepted: jax.Array | np.ndarray
    top_logprobs: TopLogprobs | None = None


class WorkCounters(struct.PyTreeNode):
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

    def count_run(self, e: int, batch: SegmentBatch) -> WorkCounters:
        """Return the counters after segment e ran a batch, or skipped it."""
        segments, ways = self.runs.shape
        own = jnp.arange(segments) == e
        run = own[:, None] & (jnp.arange(IN_PLACE, IN_PLACE + ways) == batch.mode)[None]
        spans = jnp.where(own, jnp.where(batch.mode >= PACKED, batch.spans, 0), 0)
        return self.replace(
            runs=self.runs + run.astype(jnp.uint32), spans=self.spans + spans.astype(jnp.uint32)
        )


class PendingRows(struct.PyTreeNode):
    """The newest rows of every slot, [slots, m]; position p is kept at index p % m.

    Attributes:
      input_token: the token that the row reads.
      token, logprob, confidence: id, log-probability and confidence of the token that follows.
      exit: the exit that decided that token; -1 while none has, and then `token` is a draft.
      top_token, streak: what the gates of early exits remember about the row (`Memory`).
      drafted: where the next row started from a draft, who made it (`EXIT_DRAFT`, or one of
        `TEXT_DRAFTS`); else 0.
      accepted: 1 where that draft was right.
      top_logprobs: the most likely tokens, where requests may ask for them.
    """

    input_token: jax.Array
    token: jax.Array
    logprob: jax.Array
    confidence: jax.Array
    exit: jax.Array
    top_token: jax.Array
    streak: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    top_logprobs: TopLogprobs | None

    @classmethod
    def blank(cls, *shape: int, logits_params: bool) -> PendingRows:
        """Return rows [*shape] that no exit has run; their token is -1."""
        none, zero = jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.int32)
        number = jnp.zeros(shape, jnp.float32)
        top_logprobs = TopLogprobs.blank(*shape) if logits_params else None
        return cls(zero, none, number, number, none, none, zero, zero, zero, top_logprobs)


class EngineState(struct.PyTreeNode):
    """Everything that slots carry from step to step; arrays are [slots, ...].

    The row at `position` decides the next token. Rows from there on that the first segment has run
    are *pending*: the first is undecided, those behind it read drafts.

    Attributes:
      cache: keys, values and `filled`.
      waiting: for each boundary below the last one, [slots, cap, d]: states of the positions that
        wait there, position p at index p % cap. Empty for engines in which no token waits.
      boundary: [slots, length, d], states of all positions behind the last loaded segment, if
        segments may be added; else None.
      reach: [slots, length] int32, the last segment in which each position has keys and values. It
        has no positions unless `EngineOptions.propagate` is "mask": otherwise the segment is the
        same for all.
      pending: the pending rows.
      acceptance: recent share of accepted drafts of the exit.
      lookup_acceptance: [slots, kinds], the same of drafts from the text, for each of
        `TEXT_DRAFTS`; None without them.
      token: int32, the last emitted token, which the next row reads.
      position: int32, its position.
      remaining: int32, tokens still to emit; 0 when finished, and in a free slot.
      layers: int32, layers that steps have run since the last emitted token.
      since: the step in which the first pending row reached its segment.
      prompt: [slots, context], tokens that a request came with, followed by generated tokens if
        they are needed (`keeps_text`). It has no positions if neither is.
      prompt_len: number of those tokens, more than `request.start` if the request ran before.
      clock: [] steps since the start.
      work: counters of the work done.
      plan: costs and waiting rules of the schedule.
      request: the requests.
    """

    cache: KVCache
    waiting: tuple[jax.Array, ...]
    boundary: jax.Array | None
    reach: jax.Array
    pending: PendingRows
    acceptance: jax.Array
    lookup_acceptance: jax.Array | None
    token: jax.Array
    position: jax.Array
    remaining: jax.Array
    layers: jax.Array
    since: jax.Array
    prompt: jax.Array
    prompt_len: jax.Array
    clock: jax.Array
    work: WorkCounters
    plan: BatchPlan
    request: RequestRows

    @property
    def live(self) -> jax.Array:
        """Slots with a request that is not finished, [slots] bool."""
        return self.remaining > 0

    @property
    def decodes(self) -> jax.Array:
        """Slots with a request that is not finished and whose prompt has run, [slots] bool."""
        return self.live & ~self.progress.in_prefill

    @property
    def keeps_text(self) -> bool:
        """True if `prompt` also has the generated tokens, for `LogitsParams` or lookups."""
        return self.request.logits_params is not None or self.lookup_acceptance is not None

    @property
    def progress(self) -> SlotProgress:
        return SlotProgress(self.cache.filled, self.position, self.remaining, self.prompt_len)

    @property
    def max_drafts(self) -> jax.Array:
        """[slots] int32, maximum drafts of each request now; 0 where drafting is paused."""
        drafts, m = self.drafts_allowed, self.pending.input_token.shape[1]
        if m > 1:
            cost, verify = self.plan.draft_cost, self.verify_cost
            if self.lookup_acceptance is not None:  # its costs are those of the text's drafts too
                verify = jnp.where(cost > 0, verify, 0)
            drafts = best_drafts(jnp, self.acceptance, cost, verify, drafts, m - 1)
        return drafts

    @property
    def verify_cost(self) -> jax.Array:
        """[2] float32, `BatchPlan.verify_cost` as a share of what each request's step takes.

        Of several requests each takes its part of a step, of which a row more is a larger share.
        """
        cost = self.plan.verify_cost
        if self.lookup_acceptance is None or len(self.token) == 1:
            return cost
        n = jnp.sum(self.decodes.astype(jnp.float32))
        share = n * cost[1] / (1 + cost[0] + cost[1] * (n - 2))
        return jnp.where(n > 1, share, cost)

    @property
    def drafts_allowed(self) -> jax.Array:
        """[slots] int32, maximum drafts of each request by its exit rules."""
        policy, m = self.request.policy, self.pending.input_token.shape[1]
        if m == 1:
            return jnp.zeros_like(policy.drafts)
        drafts = jnp.where(policy.paused, 0, jnp.minimum(policy.drafts, m - 1))
        if self.request.logits_params is not None:  # penalties count only decided tokens
            drafts = jnp.where(self.request.logits_params.changes, 0, drafts)
        return drafts

    def can_start(self, cap: int, drafts: jax.Array) -> jax.Array:
        """Return [slots] bool, as `SlotProgress.can_start` with at most so many drafts [slots].

        No row starts from a draft that would end the request, or behind a row that got no draft
        and has the token -1 (`PendingRows.blank`).
        """
        if self.pending.input_token.shape[1] > 1:
            last = at_position(self.pending.token, self.cache.filled[:, 0] - 1)[:, None]
            ends = hits_stop_token(self.request, last)[:, 0] | (last[:, 0] < 0)
            drafts = jnp.where(ends, 0, drafts)
        return self.progress.can_start(cap, drafts)


def newest_row(a: jax.Array, row: jax.Array) -> jax.Array:
    """Return [b, d], the row of each request in a [b, w, d] that emits, `row` [b]."""
    return gather_each(a, row[:, None])[:, 0]


def at_position(a: jax.Array, position: jax.Array) -> jax.Array:
    """Return [slots], the entry of a [slots, m] that belongs to positions [slots]."""
    return gather_each(a, ring_index(position, a.shape[1])[:, None])[:, 0]


def hits_stop_token(request: RequestRows, tokens: jax.Array) -> jax.Array:
    """Return [slots, n] bool, whether tokens [slots, n] end their requests."""
    return jnp.any(tokens[..., None] == request.stop_token_ids[:, None], -1)


def blank(
    weights: Weights,
    plan: BatchPlan,
    *,
    config: ModelConfig,
    options: EngineOptions,
    slots: int,
    length: int,
    context: int,
) -> EngineState:
    """Return a state with all slots free and `length` positions of cache for each.

    `options` are `EngineOptions.resolved`. On a mesh the slots are those of a device.
    """
    n, counter = weights.last, jnp.zeros((), jnp.uint32)

    def own(a):
        return varying(a, weights.axes.data)

    zero = own(jnp.zeros((slots,), jnp.int32))

    def states(positions):
        return own(jnp.zeros((slots, positions, config.d_model), config.dtype))

    above = options.can_deepen and n < config.n_exits
    masks = options.engine == "propagate" and options.propagate == "mask"
    params = LogitsParams.blank(slots) if options.logits_params else None
    return EngineState(
        cache=init_cache(config, slots, length, n + 1, weights.axes),
        waiting=tuple(states(options.cap) for _ in range(n if options.waits else 0)),
        boundary=states(length) if above else None,
        reach=own(jnp.full((slots, length if masks else 0), n, jnp.int32)),
        pending=own(
            PendingRows.blank(
                slots,
                options.draft_rows + 1,
                logits_params=options.logits_params,
            )
        ),
        acceptance=own(jnp.broadcast_to(jnp.float32(plan.acceptance), (slots,))),
        lookup_acceptance=(
            own(jnp.full((slots, len(TEXT_DRAFTS)), INITIAL_TEXT_ACCEPTANCE))
            if options.lookup
            else None
        ),
        token=zero,
        position=zero,
        remaining=zero,
        layers=zero,
        since=zero,
        prompt=own(jnp.zeros((slots, context), jnp.int32)),
        prompt_len=zero,
        clock=jnp.int32(0),
        work=WorkCounters(
            jnp.zeros((n + 1, 1 + len(options.buckets)), jnp.uint32),
            jnp.zeros((n + 1,), jnp.uint32),
            counter,
            counter,
            counter,
        ),
        plan=plan,
        request=own(RequestRows.blank(config, slots).replace(logits_params=params)),
    )


def advance(
    state: Any, emission: Emission, layers: jax.Array, live: jax.Array
) -> tuple[Any, DecodeRecord]:
    """Append the emission to the `live` [b] requests of a state; a stop token ends its request."""
    none = jnp.zeros_like(state.token)
    stopped = hits_stop_token(state.request, emission.token[:, None])[:, 0]
    record = DecodeRecord(
        token=jnp.where(live, emission.token, -1),
        logprob=emission.logprob,
        confidence=emission.confidence,
        exit=jnp.where(live, emission.exit, -1),
        layers=jnp.where(live, layers, 0).astype(jnp.int32),
        margin=emission.margin,
        drafted=none,
        accepted=none,
    )
    left = jnp.where(stopped, 0, state.remaining - 1)
    state = state.replace(
        token=jnp.where(live, emission.token, state.token),
        position=state.position + live.astype(jnp.int32),
        remaining=jnp.where(live, left, state.remaining),
    )
    return state, record
