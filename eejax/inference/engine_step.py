"""A step of the early-exit engine, in which every request exits by its own gate.

The model is cut into segments at its exits. An *engine step* runs each segment once, from the
lowest: it gathers the slots whose newest token needs the segment, with all their rows that wait
below it, and runs them as one flat batch of rows, padded to the smallest of a few buckets. A
request that exits continues with its next token in the next step; one that does not stays at the
next segment. A segment with few waiting rows may be delayed until more arrive (`schedule`), while
other requests go on. Keys and values stay in place, by slot. Prompts run in chunks, one a step,
beside the requests that decode.

Tokens that left early wait at their boundary, and go deeper with the next one that does (KV
recomputation; Bae et al. 2023; EE-LLM, section 4, includes them in every pass). The first exit may
draft tokens past an undecided one, and one pass of the layers above verifies them, with the same
keys, values and states (LayerSkip; Elhoushi et al. 2024, section 4.3). A draft stands where it is
the token that its emitting exit draws, greedy or sampled, so drafts change no text. Keys and values
of wrong drafts lie beyond `filled` and are overwritten before any token attends to them.

Every request gets the tokens and exits that `posthoc` gives it alone.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eejax.gates.confidence import Memory
from eejax.inference.logits_params import process_logits
from eejax.inference.options import EngineOptions
from eejax.inference.policy import Emission
from eejax.inference.schedule import (
    IN_PLACE,
    PACKED,
    SKIP,
    SegmentBatch,
    segment_demand,
    select_batch,
    select_prefill,
    update_acceptance,
)
from eejax.inference.segment import SegmentRunner
from eejax.inference.state import (
    DecodeRecord,
    EngineState,
    PendingRows,
    WorkCounters,
    at_position,
    hits_stop_token,
)
from eejax.inference.weights import Weights
from eejax.kernels.compact.api import compact
from eejax.kernels.scatter.api import scatter
from eejax.models.attention import PackedRows
from eejax.models.branches import run_branch
from eejax.models.cache import KVCache, varying
from eejax.models.config import ModelConfig

SPAN = 4  # rows of a slot that attention takes together
PROMPT_SPAN = 32  # of a prompt


def flatten(
    count: jax.Array,
    order: jax.Array,
    start: jax.Array,
    size: int,
    width: int,
    most: int | None = None,
) -> PackedRows:
    """Flatten rows of slots into `size` packed ones.

    Args:
      count: [slots] int32, rows of each slot, at most `most`.
      order: [slots] int32, the order in which slots are packed.
      start: [slots] int32, position of each slot's first row.
      size: number of flat rows.
      width: rows of a span.
    """
    slots = start.shape[0]
    count = count[order]
    ends = jnp.cumsum(count)
    offsets = ends - count
    row = jnp.arange(size, dtype=jnp.int32)
    i = jnp.minimum(jnp.sum(ends[None] <= row[:, None], -1, dtype=jnp.int32), slots - 1)
    real = row < ends[-1]
    slot = jnp.where(real, order[i], slots)
    behind = row - offsets[i]
    position = jnp.where(real, start[order[i]] + behind, 0)
    begin, (spans, _) = compact(real & (behind % width == 0))
    first = jnp.where(row < spans, begin, 0)
    return PackedRows(slot, position, first, spans, width, most)


class ExitRows(NamedTuple):
    """Rows of slots at an exit.

    Attributes:
      slot, position: [r] int32.
      x, h: [r, d], states at the exit and behind its block.
      before: [r, d], states at the exit before.
    """

    slot: jax.Array
    position: jax.Array
    x: jax.Array
    h: jax.Array
    before: jax.Array


def _run_gates(runner, state, e, rows: ExitRows, allowed) -> PendingRows:
    """Run exit e for rows, and return the pending rows that follow.

    Only rows that are `allowed` [r] and undecided change.
    """
    pending, slot = state.pending, rows.slot
    place = rows.position % pending.input_token.shape[1]
    own = jax.tree.map(lambda a: a[slot, place], pending)
    request = jax.tree.map(lambda a: a[slot], state.request)
    logits_params, shaped = request.logits_params, None
    if e == 0:
        none = PendingRows.blank(len(slot), logits_params=logits_params is not None)
        own = varying(none, runner.weights.axes.data).replace(input_token=own.input_token)
    if logits_params is not None:
        shaped = lambda y: process_logits(
            y,
            logits_params,
            state.prompt[slot],
            request.start,
            rows.position + 1,
            request.stop_token_ids,
        )
    drafts = None
    if e == 0 < runner.last and pending.input_token.shape[1] > 1:
        drafts = (request.policy.drafts > 0) & ~request.policy.paused
        if logits_params is not None:
            drafts = drafts & ~logits_params.changes
    allowed = allowed & (rows.position >= state.position[slot]) & (own.exit < 0)
    none = jnp.full(own.logprob.shape, jnp.inf)
    emission = Emission(own.token, own.logprob, own.confidence, own.exit, none, own.top_logprobs)
    emission, memory = runner.decide(
        e,
        emission,
        Memory(own.seen, own.streak, rows.before),
        rows.x,
        rows.h,
        allowed,
        rows.position + 1,
        request,
        drafts=drafts,
        process_logits=shaped,
    )
    own = own.replace(
        seen=memory.token,
        streak=memory.streak,
        token=emission.token,
        logprob=emission.logprob,
        confidence=emission.confidence,
        exit=emission.exit,
        top_logprobs=emission.top_logprobs,
    )
    slot = jnp.where(allowed, slot, len(state.token))
    return jax.tree.map(lambda a, b: a.at[slot, place].set(b, mode="drop"), pending, own)


def _run_gates_flat(runner, state, e, packed, allowed, states) -> PendingRows:
    """Run `_run_gates` for flat rows that are pending, of slots `allowed` [slots] (None: all).

    states: x, h and before of `ExitRows`, each [t, 1, d].
    """
    slots, m = state.pending.input_token.shape
    size = len(packed.slot)
    slot = jnp.minimum(packed.slot, slots - 1)
    seen = (packed.slot < slots) & (packed.position >= state.position[slot])
    if allowed is not None:
        seen = seen & allowed[slot]
    order, counts = compact(seen)
    i = order[: min(size, slots * m)]
    rows = ExitRows(slot[i], packed.position[i], *(a[i, 0] for a in states))
    return _run_gates(runner, state, e, rows, jnp.arange(len(i)) < counts[0])


@dataclasses.dataclass(frozen=True)
class SegmentBranches:
    """Ways to run a segment, each a branch of a conditional.

    A branch takes and returns what a segment changes: the pending rows, the states that wait above,
    and the keys and values of the segment's layers and of its exit's block.

    Attributes:
      runner: runs the rows.
      state: the state before.
      e: number of the segment.
      below: [slots, cap, d], states that wait below; without positions below the first segment.
    """

    runner: SegmentRunner
    state: EngineState
    e: int
    below: jax.Array

    def in_place(self, count, pending, above, kvs, block):
        """Run one row of every slot, of which those with a `count` [slots] above 0 are real."""
        state, e = self.state, self.e
        start, slot = state.cache.filled[:, e], jnp.arange(state.token.shape[0])
        if e == 0:
            x = self.runner.embed(at_position(pending.input_token, start)[:, None], start[:, None])
            before = jnp.zeros_like(x)
        else:
            before = x = _read_ring(self.below, slot, start)
        x, h, kvs, block = self.runner.run(e, x, start, kvs, block)
        above = _write_ring(above, jnp.where(count > 0, slot, len(slot)), start, x)
        rows = ExitRows(slot, start, x[:, 0], h[:, 0], before[:, 0])
        state = state.replace(pending=pending)
        return _run_gates(self.runner, state, e, rows, count > 0), above, kvs, block

    def only_slot(self, size, count, pending, above, kvs, block):
        """Run `size` rows of the one slot that there is, of which the first `count` [1] are real.

        They need no packing.
        """
        state, e = self.state, self.e
        start, row = state.cache.filled[:, e], jnp.arange(size, dtype=jnp.int32)
        slot, position, m = jnp.zeros_like(row), start[0] + row, pending.input_token.shape[1]
        if e == 0:
            x = self.runner.embed(pending.input_token[:, position % m], position[None])
            before = jnp.zeros_like(x)
        else:
            before = x = jnp.swapaxes(_read_ring(self.below, slot, position), 0, 1)
        x, h, kvs, block = self.runner.run(e, x, start, kvs, block)
        above = _write_ring(above, jnp.where(row < count, 0, 1), position, x[0][:, None])
        # Of these rows, the pending ones lie behind those of emitted tokens.
        i = jnp.maximum(state.position - start, 0) + jnp.arange(min(size, m))
        real, i = i < count, jnp.minimum(i, size - 1)
        rows = ExitRows(slot[i], position[i], x[0, i], h[0, i], before[0, i])
        state = state.replace(pending=pending)
        return _run_gates(self.runner, state, e, rows, real), above, kvs, block

    def packed(self, size, batch: SegmentBatch, pending, above, kvs, block):
        """Run the rows of a batch as `size` flat ones."""
        state, e = self.state, self.e
        most = min(size, state.waiting[0].shape[1] if state.waiting else 1)
        flat = flatten(batch.rows, batch.order, state.cache.filled[:, e], size, SPAN, most)
        slot = jnp.minimum(flat.slot, len(state.token) - 1)
        if e == 0:
            token = pending.input_token[slot, flat.position % pending.input_token.shape[1]]
            x = self.runner.embed(token[:, None], flat.position[:, None])
            before = jnp.zeros_like(x)
        else:
            before = x = _read_ring(self.below, slot, flat.position)
        x, h, kvs, block = self.runner.run_packed(e, x, flat, kvs, block)
        above = _write_ring(above, flat.slot, flat.position, x)
        state = state.replace(pending=pending)
        pending = _run_gates_flat(self.runner, state, e, flat, None, (x, h, before))
        return pending, above, kvs, block


def _read_ring(ring: jax.Array, slot: jax.Array, position: jax.Array) -> jax.Array:
    """Return [t, 1, d], states of slots [t] at positions [t] of a ring [slots, cap, d]."""
    return ring[slot, position % ring.shape[1]][:, None]


def _write_ring(ring: jax.Array, slot: jax.Array, position: jax.Array, x: jax.Array) -> jax.Array:
    """Write states x [t, 1, d] of slots [t] to the ring; drop rows whose slot does not exist."""
    if not ring.shape[1]:
        return ring
    slots, cap, d = ring.shape
    return scatter(ring.reshape(-1, d), x[:, 0], slot * cap + position % cap).reshape(ring.shape)


def commit_tokens(state: EngineState) -> EngineState:
    """Emit decided tokens.

    Tokens are emitted from the first pending row on, while each row read what the one before it
    emits. Where a row read another token, it and the rows behind it are dropped.
    """
    decided = (
        state.live
        & (state.progress.num_pending > 0)
        & (at_position(state.pending.exit, state.position) >= 0)
    )
    drafts = state.pending.input_token.shape[1] > 1
    own = lambda s: (
        s.cache.filled,
        s.pending.accepted if drafts else None,
        s.acceptance if drafts else None,
        s.token,
        s.position,
        s.remaining,
        None if s.request.logits_params is None else s.prompt,
    )
    run = lambda _: own(_commit(state))
    filled, accepted, acceptance, token, position, remaining, prompt = lax.switch(
        jnp.any(decided).astype(jnp.int32), [lambda c: c, run], own(state)
    )
    if drafts:
        pending = state.pending.replace(accepted=accepted)
        state = state.replace(pending=pending, acceptance=acceptance)
    return state.replace(
        cache=state.cache.replace(filled=filled),
        token=token,
        position=position,
        remaining=remaining,
        prompt=state.prompt if prompt is None else prompt,
    )


def _commit(state: EngineState) -> EngineState:
    """Run `commit_tokens` where some slot's first pending row is decided."""
    pending, position, m = state.pending, state.position, state.pending.input_token.shape[1]
    filled, order = state.cache.filled, jnp.arange(m)[None]
    window = (position[:, None] + order) % m
    by_order = lambda a: jnp.take_along_axis(a, window, 1)
    token, exit_, input_token = (
        by_order(pending.token),
        by_order(pending.exit),
        by_order(pending.input_token),
    )
    there = position[:, None] + order < filled[:, :1]
    emits = there & (exit_ >= 0) & (order < state.remaining[:, None])
    ends = hits_stop_token(state.request, token)
    if m > 1:
        right = (token[:, :-1] == input_token[:, 1:]) & there[:, 1:]
        follows = jnp.pad(right & ~ends[:, :-1], [(0, 0), (1, 0)], constant_values=True)
        emits = jnp.cumprod((emits & follows).astype(jnp.int32), 1).astype(bool)
        accepted = jnp.pad(right, [(0, 0), (0, 1)]) & (by_order(pending.drafted) > 0)
        back = (jnp.arange(m)[None] - position[:, None]) % m
        put = lambda old, new: jnp.where(
            jnp.take_along_axis(emits, back, 1),
            jnp.take_along_axis(new.astype(jnp.int32), back, 1),
            old,
        )
        pending = pending.replace(accepted=put(pending.accepted, accepted))
    n = jnp.sum(emits.astype(jnp.int32), -1)
    if m > 1:
        count = lambda which: jnp.sum((which & emits).astype(jnp.int32), -1)
        tried, right = count(by_order(pending.drafted) > 0), count(accepted)
        share = update_acceptance(jnp, state.acceptance, tried, right)
        state = state.replace(acceptance=jnp.where(n > 0, share, state.acceptance))
    prompt = state.prompt
    if state.request.logits_params is not None:
        behind = jnp.where(emits, position[:, None] + 1 + order, prompt.shape[1])
        prompt = prompt.at[jnp.arange(len(n))[:, None], behind].set(token, mode="drop")
    last = jnp.take_along_axis(token, jnp.maximum(n - 1, 0)[:, None], 1)[:, 0]
    token = jnp.where(n > 0, last, state.token)
    position = position + n
    ended = jnp.any(ends & emits, -1)
    if m > 1:
        wrong = (n > 0) & (at_position(pending.input_token, position) != token)
        filled = jnp.where(wrong[:, None], jnp.minimum(filled, position[:, None]), filled)
    return state.replace(
        cache=state.cache.replace(filled=filled),
        pending=pending,
        token=token,
        position=position,
        remaining=jnp.where(ended, 0, state.remaining - n),
        prompt=prompt,
    )


def engine_step(
    weights: Weights,
    state: EngineState,
    *,
    config: ModelConfig,
    options: EngineOptions,
    prompts: bool,
) -> tuple[EngineState, DecodeRecord]:
    """Run every segment once, then a chunk of prompts. Records are [drafts + 1, slots].

    prompts: requests may bring prompts that have not run.
    """
    runner, begun = SegmentRunner(weights, config), state.position
    for e in range(runner.last + 1):
        state = _advance_segment(runner, options, state, e, prompts)
    if prompts:
        state = _advance_prefill(runner, options, state)
    return _take_record(state, begun)


def prefill_step(
    weights: Weights, state: EngineState, *, config: ModelConfig, options: EngineOptions
) -> tuple[EngineState, DecodeRecord]:
    """Run a chunk of prompts, if a slot has one. Records are those of `engine_step`."""
    begun = state.position
    return _take_record(_advance_prefill(SegmentRunner(weights, config), options, state), begun)


def _take_record(state: EngineState, begun: jax.Array) -> tuple[EngineState, DecodeRecord]:
    """Return the record of the tokens that were emitted since positions `begun` [slots]."""
    m = state.pending.input_token.shape[1]
    order = jnp.arange(m)[:, None]
    place = (begun[None] + order) % m
    taken = lambda a: jnp.take_along_axis(a.T, place, 0)
    top_logprobs = jax.tree.map(
        lambda a: jnp.take_along_axis(a.swapaxes(0, 1), place[..., None], 0),
        state.pending.top_logprobs,
    )
    own = jax.tree.map(taken, state.pending.replace(top_logprobs=None))
    emits = order < (state.position - begun)[None]
    record = DecodeRecord(
        token=jnp.where(emits, own.token, -1),
        logprob=own.logprob,
        confidence=own.confidence,
        exit=jnp.where(emits, own.exit, -1),
        layers=jnp.where(emits & (order == 0), state.layers[None], 0),
        margin=jnp.full_like(own.logprob, jnp.inf),
        drafted=jnp.where(emits, own.drafted, 0),
        accepted=jnp.where(emits, own.accepted, 0),
        top_logprobs=top_logprobs,
    )
    return state.replace(layers=jnp.where(emits[0], 0, state.layers)), record


def _advance_segment(runner, options, state, e, prompts) -> EngineState:
    """Run segment e for the slots that the schedule selects, and commit what is decided.

    prompts: as in `engine_step`.
    """
    n, slots, cap = runner.last, state.token.shape[0], options.cap
    begin, end = runner.config.segments[e]
    filled, can_start = state.cache.filled, state.can_start(cap)
    before = state.position, state.progress.next_segment
    if e == 0:
        # The row behind what was emitted reads that, one behind a pending row its draft.
        reads = jnp.where(
            filled[:, 0] > state.position,
            at_position(state.pending.token, filled[:, 0] - 1),
            state.token,
        )
        input_token = jnp.where(
            can_start, reads, at_position(state.pending.input_token, filled[:, 0])
        )
        pending, row, m = state.pending, jnp.arange(slots), state.pending.input_token.shape[1]
        guess = (
            can_start
            & (filled[:, 0] > state.position)
            & (at_position(pending.exit, filled[:, 0] - 1) < 0)
        )
        guess = jnp.where(guess, 1, at_position(pending.drafted, filled[:, 0] - 1))
        pending = pending.replace(
            drafted=pending.drafted.at[row, (filled[:, 0] - 1) % m].set(guess),
            input_token=pending.input_token.at[row, filled[:, 0] % m].set(input_token),
        )
        state = state.replace(pending=pending)
    demand = segment_demand(jnp, e, state.progress, cap, can_start)
    no_ring = jnp.zeros((slots, 0, 0))
    below = state.waiting[e - 1] if e else no_ring
    top = no_ring if state.boundary is None else state.boundary
    above = state.waiting[e] if e < n else top
    branches = SegmentBranches(runner, state, e, below)
    carry = state.pending, above, state.cache.segments[e], state.cache.blocks[e]
    if n == 0 and not prompts:  # whoever is not finished goes on, and a conditional takes time
        ready = demand.ready.astype(jnp.int32)
        batch = SegmentBatch(jnp.int32(IN_PLACE), ready, None, jnp.int32(0))
        pending, above, kvs, block = branches.in_place(ready, *carry)
    else:
        waited = state.clock - state.since
        batch = select_batch(jnp, state.plan, e, options.buckets, SPAN, demand, waited)
        # SKIP, IN_PLACE, PACKED and so on, as `schedule` numbers them.
        ways = [partial(branches.in_place, batch.rows)]
        # The first segment runs one row of a slot, which needs no bucket beyond their number.
        most = int(np.searchsorted(options.buckets, slots)) + 1 if slots > 1 else 0
        for size in options.buckets if e else options.buckets[:most]:
            if slots == 1:  # no more rows of it wait than the cap, and there is room for no more
                ways.append(partial(branches.only_slot, min(size, cap), batch.rows))
            else:
                ways.append(partial(branches.packed, size, batch))
        pending, above, kvs, block = run_branch(batch.mode, ways, carry)
    swap = lambda tree, new: (*tree[:e], new, *tree[e + 1 :])
    state = commit_tokens(
        state.replace(
            cache=KVCache(
                swap(state.cache.segments, kvs),
                swap(state.cache.blocks, block),
                filled.at[:, e].add(batch.rows),
            ),
            waiting=swap(state.waiting, above) if e < n else state.waiting,
            boundary=state.boundary if e < n or state.boundary is None else above,
            pending=pending,
            work=_count_work(state.work, e, batch),
            layers=state.layers + jnp.where(batch.mode == SKIP, 0, end - begin),
        )
    )
    moved = (state.position != before[0]) | (state.progress.next_segment != before[1])
    return state.replace(since=jnp.where(moved, state.clock, state.since))


def _count_work(work: WorkCounters, e: int, batch: SegmentBatch) -> WorkCounters:
    ways = jnp.arange(IN_PLACE, IN_PLACE + work.runs.shape[1])
    spans = jnp.where(batch.mode >= PACKED, batch.spans, 0)
    return work.replace(
        runs=work.runs.at[e].add((ways == batch.mode).astype(jnp.uint32)),
        spans=work.spans.at[e].add(spans.astype(jnp.uint32)),
    )


def _advance_prefill(runner, options, state) -> EngineState:
    """Run a chunk of prompts, if a slot has one."""
    run = partial(_prefill_chunk, runner, options, state)
    carry = state.pending, state.cache, state.boundary, state.work
    some = jnp.any(state.progress.in_prefill).astype(jnp.int32)
    pending, cache, boundary, work = lax.switch(some, [lambda c: c, run], carry)
    after = commit_tokens(state.replace(pending=pending, cache=cache, boundary=boundary, work=work))
    emitted = after.position != state.position
    whole = runner.config.exit_boundaries[runner.last]
    return after.replace(
        since=jnp.where(emitted, state.clock, state.since),
        layers=jnp.where(emitted, whole, after.layers),
    )


def _prefill_chunk(runner, options, state, carry):
    """Run a chunk of prompts through all segments; a branch of a conditional."""
    pending, cache, boundary, work = carry
    start, in_prefill = cache.filled[:, 0], state.progress.in_prefill
    count, order = select_prefill(jnp, state.progress, state.since, options.chunk)
    packed = flatten(count, order, start, options.chunk, min(PROMPT_SPAN, options.chunk))
    token = state.prompt[jnp.minimum(packed.slot, len(start) - 1), packed.position]
    x = runner.embed(token[:, None], packed.position[:, None])
    done = in_prefill & (start + count == state.prompt_len)
    # What a request had been given before is decoded on: its next token may leave by any exit.
    early = state.request.policy.prefill_exit | (state.prompt_len > state.request.start)
    segments, blocks, before = [], [], jnp.zeros_like(x)
    for e in range(runner.last + 1):
        x, h, kvs, block = runner.run_packed(e, x, packed, cache.segments[e], cache.blocks[e])
        segments.append(kvs)
        blocks.append(block)
        allowed = done if e == runner.last else done & early
        if e == 0:
            # Nothing is pending of a prompt; its last row may be seen by no early exit.
            none = PendingRows.blank(
                *pending.input_token.shape, logits_params=pending.top_logprobs is not None
            )
            pending = jax.tree.map(
                lambda a, b: jnp.where(in_prefill.reshape(-1, *[1] * (a.ndim - 1)), b, a),
                pending,
                none,
            )
        own = state.replace(pending=pending)
        pending = _run_gates_flat(runner, own, e, packed, allowed, (x, h, before))
        before = x
    cache = KVCache(tuple(segments), tuple(blocks), cache.filled + count[:, None])
    boundary = (
        boundary if boundary is None else _write_ring(boundary, packed.slot, packed.position, x)
    )
    work = work.replace(
        chunks=work.chunks + 1, chunk_spans=work.chunk_spans + packed.spans.astype(jnp.uint32)
    )
    return pending, cache, boundary, work
