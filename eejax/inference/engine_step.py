"""A step of the early-exit engine, in which every request exits by its own gate.

The model is cut into segments at its exits. An *engine step* runs each segment once, from the
lowest: it gathers the slots whose oldest undecided row waits below the segment, or that have `cap`
waiting rows, with all their rows that wait there. It runs them as one flat batch of rows, padded to
the smallest of a few buckets, or in place where each slot has one. A request that exits continues
with its next token in the next step; one that does not stays at the next segment. A segment that
few slots wait for may be delayed until more do (`schedule`), while other requests go on. Keys and
values stay in place, by slot. Prompts run in chunks, one a step, beside the requests that decode.

Tokens that left early wait at their boundary, and the next token that goes deeper takes them along
(KV recomputation; Bae et al. 2023; EE-LLM, section 4, includes them in every pass). While a token
is undecided, the first exit may draft the tokens after it, and one pass of the layers above
verifies them, with the same keys, values and states (LayerSkip; Elhoushi et al. 2024, section 4.3).
A step makes one draft for each slot; a single slot may make all drafts of a pass
(`drafts_at_once`), and a text makes several at once where it repeats itself (`lookup`). A draft is
kept if it is the token that its emitting exit draws, greedy or sampled, so drafts change no text.
Keys and values of wrong drafts lie beyond `filled` and are overwritten before any token attends to
them.

Every request gets the tokens and exits that `posthoc` gives it alone.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eejax.common.indexing import gather, gather_each, ring_index
from eejax.common.trees import where_rows
from eejax.inference import lookup
from eejax.inference.carry import changed_from, replace_from
from eejax.inference.options import EngineOptions, drafts_at_once
from eejax.inference.schedule import (
    EXIT_RECOVERY,
    IN_PLACE,
    SKIP,
    TEXT_RECOVERY,
    SegmentBatch,
    is_delayed,
    segment_demand,
    select_batch,
    select_prefill,
    update_acceptance,
)
from eejax.inference.segment import SegmentRunner
from eejax.inference.segment_branches import (
    SPAN,
    SegmentBranches,
    flatten,
    run_gates_flat,
    write_ring,
)
from eejax.inference.state import (
    EXIT_DRAFT,
    TEXT_DRAFTS,
    DecodeRecord,
    EngineState,
    PendingRows,
    at_position,
    hits_stop_token,
)
from eejax.inference.weights import Weights
from eejax.models.branches import run_branch, run_where
from eejax.models.cache import KVCache
from eejax.models.config import ModelConfig

PROMPT_SPAN = 32  # rows of a prompt that attention takes together


def commit_tokens(state: EngineState) -> EngineState:
    """Emit decided tokens.

    Tokens are emitted from the first pending row on, as long as each row read the token that the
    row before it emits. A row that read another token is dropped, with the rows behind it. Slots
    whose first pending row is undecided stay as they are.
    """
    pending, position, m = state.pending, state.position, state.pending.input_token.shape[1]
    filled, order = state.cache.filled, jnp.arange(m)[None]
    window = ring_index(position[:, None] + order, m)

    def by_order(a):
        return gather_each(a, window)

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
        back = ring_index(jnp.arange(m)[None] - ring_index(position, m)[:, None], m)

        def put(old, new):
            return jnp.where(
                gather_each(emits, back),
                gather_each(new.astype(jnp.int32), back),
                old,
            )

        pending = pending.replace(accepted=put(pending.accepted, accepted))

        drafted, some = by_order(pending.drafted), jnp.any(emits, -1)[:, None]

        def shares(before, kinds, recovery):
            of_kind = emits[:, None] & (
                drafted[:, None] == np.array(kinds, np.int32)[None, :, None]
            )
            tried, right = (
                jnp.sum(which.astype(jnp.int32), -1)
                for which in (of_kind, of_kind & accepted[:, None])
            )
            after = update_acceptance(jnp, before, tried, right, recovery)
            return jnp.where(some, after, before)

        own = shares(state.acceptance[:, None], [EXIT_DRAFT], EXIT_RECOVERY)[:, 0]
        state = state.replace(acceptance=own)
        if (before := state.lookup_acceptance) is not None:
            state = state.replace(lookup_acceptance=shares(before, TEXT_DRAFTS, TEXT_RECOVERY))
    n = jnp.sum(emits.astype(jnp.int32), -1)
    prompt = state.prompt
    if state.keeps_text:
        behind = jnp.where(emits, position[:, None] + 1 + order, prompt.shape[1])
        prompt = prompt.at[jnp.arange(len(n))[:, None], behind].set(token, mode="drop")
    last = gather_each(token, jnp.maximum(n - 1, 0)[:, None])[:, 0]
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
    """Run every segment once, then a chunk of prompts.

    Records are [options.draft_rows + 1, slots].

    prompts: requests may bring prompts that have not run.
    """
    runner, begun, drafts = SegmentRunner(weights, config), state.position, state.max_drafts
    if options.lookup > options.max_drafts:  # there is room for more rows than the exit drafts
        drafts = jnp.minimum(drafts, options.max_drafts)
    state = _advance_segments(runner, options, state, drafts, prompts)
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
    place = ring_index(begun[:, None] + order.T, m)

    def taken(a):
        return jnp.swapaxes(gather_each(a, place), 0, 1)

    own = jax.tree.map(taken, state.pending)
    emits = order < (state.position - begun)[None]
    record = DecodeRecord(
        token=jnp.where(emits, own.token, -1),
        logprob=own.logprob,
        confidence=own.confidence,
        exit=jnp.where(emits, own.exit, -1),
        layers=jnp.where(emits & (order == 0), state.layers[None], 0),
        margin=jnp.full_like(own.logprob, jnp.inf),
        drafted=jnp.where(emits, jnp.minimum(own.drafted, 1), 0),
        accepted=jnp.where(emits, own.accepted, 0),
        top_logprobs=own.top_logprobs,
    )
    return state.replace(layers=jnp.where(emits[0], 0, state.layers)), record


def _advance_segments(runner, options, state, drafts, prompts) -> EngineState:
    """Run the first segment, and those above it if some slot waits for one (`run_where`).

    A step whose tokens all leave by the first exit schedules nothing above it, and neither does one
    that only drafts. On a GPU that saves more than the segments' own conditionals do: each takes
    some 40 us there, and each of the many small kernels of a schedule takes 2.
    """
    segments, at_once = range(1, runner.last + 1), drafts_at_once(options, len(state.token))
    if at_once:
        state = _draft(runner, options, state, drafts, prompts)
    else:
        state = _advance_segment(runner, options, state, 0, drafts, prompts)
    if not segments:
        return state

    def run(carry):
        above = replace_from(state, 1, carry)
        for e in segments:
            above = _advance_segment(runner, options, above, e, drafts, prompts)
        return changed_from(above, 1)

    waits = [state.progress.must_run(e, options.cap) for e in segments]
    some = jnp.any(jnp.stack(waits))
    # A segment that waits for drafts is delayed often.
    if state.pending.input_token.shape[1] > 1 and not at_once:
        can_start = state.can_start(options.cap, drafts)
        demand = segment_demand(jnp, 1, state.progress, options.cap, can_start)
        delayed = is_delayed(jnp, state.plan, 1, demand, state.clock - state.since)
        higher = jnp.any(jnp.stack(waits[1:])) if waits[1:] else False
        some = some & (higher | ~delayed)
    return replace_from(state, 1, run_where(some, run, changed_from(state, 1)))


def _draft(runner, options, state, drafts, prompts) -> EngineState:
    """Run the first segment until the only slot cannot start another row.

    A step for each draft would schedule the segments above, and write a record of no token: on a
    small model these many small operations take as long as a layer. Drafts from the text itself
    come first, all in one run of the segment.
    """
    if state.lookup_acceptance is not None:
        state = lookup.start_rows(runner, options, state, drafts)

    def can_start(carry):
        return replace_from(state, 0, carry).can_start(options.cap, drafts)[0]

    def run(carry):
        before = replace_from(state, 0, carry)
        return changed_from(_advance_segment(runner, options, before, 0, drafts, prompts), 0)

    return replace_from(state, 0, lax.while_loop(can_start, run, changed_from(state, 0)))


def _begin_rows(state: EngineState, can_start: jax.Array) -> PendingRows:
    """Return the pending rows with the input of each slot's next row, for the first segment.

    A row reads the last emitted token or, behind a pending row, that row's draft.
    """
    filled, pending = state.cache.filled[:, 0], state.pending
    behind = filled > state.position
    reads = jnp.where(behind, at_position(pending.token, filled - 1), state.token)
    input_token = jnp.where(can_start, reads, at_position(pending.input_token, filled))
    m = pending.input_token.shape[1]
    # XLA fuses comparisons, not a scatter.
    own = jnp.arange(m)[None] == ring_index(filled, m)[:, None]
    if m > 1:
        guess = can_start & behind & (at_position(pending.exit, filled - 1) < 0)
        before_own = jnp.arange(m)[None] == ring_index(filled - 1, m)[:, None]
        drafted = jnp.where(before_own & guess[:, None], EXIT_DRAFT, pending.drafted)
        pending = pending.replace(drafted=drafted)
    return pending.replace(input_token=jnp.where(own, input_token[:, None], pending.input_token))


def _slots_to_draft(options, state: EngineState, e: int, drafts: jax.Array) -> jax.Array | None:
    """Return [slots] bool, slots whose row in segment e gets a draft; None if no row does.

    drafts: [slots] int32, maximum drafts of each slot.
    """
    policy, logits_params = state.request.policy, state.request.logits_params
    if e > 0 or options.max_drafts == 0:
        return None
    if not options.leaves_early:
        # One pass decides all pending rows, so that no row reads the draft of the last of them.
        ahead = state.cache.filled[:, 0] - state.position
        return ahead < jnp.minimum(drafts, jnp.minimum(state.remaining, options.cap) - 1)
    wants = (policy.drafts > 0) & ~policy.paused
    return wants if logits_params is None else wants & ~logits_params.changes


def _run_batch(branches: SegmentBranches, options, demand, carry, prompts):
    """Select the rows that run a segment, and run them: (`SegmentBatch`, the changed carry)."""
    state, e, slots = branches.state, branches.e, branches.state.token.shape[0]
    # All unfinished requests run it in every step, or `_draft` calls this only while its slot can
    # start a row; and a conditional takes time.
    one_row = slots == 1 and state.pending.input_token.shape[1] == 1
    always = not prompts and not options.lookup and (branches.runner.last == 0 or one_row)
    if e == 0 and (always or drafts_at_once(options, slots)):
        ready = demand.ready.astype(jnp.int32)
        batch = SegmentBatch(jnp.int32(IN_PLACE), ready, None, jnp.int32(0))
        return batch, branches.in_place(ready, *carry)
    waited = state.clock - state.since
    batch = select_batch(jnp, state.plan, e, options.buckets, SPAN, demand, waited)
    # SKIP, IN_PLACE, PACKED and so on, as `schedule` numbers them.
    ways = [partial(branches.in_place, batch.rows)]
    # Without lookups the first segment runs one row of a slot, which needs no bucket beyond their
    # number.
    first = int(np.searchsorted(options.buckets, slots)) + 1 if slots > 1 else 0
    first = len(options.buckets) if options.lookup else first
    for size in options.buckets if e else options.buckets[:first]:
        if slots == 1:  # at most `cap` of its rows wait, and there is no room for more
            ways.append(partial(branches.only_slot, min(size, options.cap), batch.rows))
        else:
            ways.append(partial(branches.packed, size, batch))
    return batch, run_branch(batch.mode, ways, carry)


def _advance_segment(runner, options, state, e, drafts, prompts) -> EngineState:
    """Run segment e for the slots that the schedule selects, and commit what is decided.

    drafts: [slots] int32, maximum drafts of each slot. prompts: as in `engine_step`.
    """
    n, slots, cap = runner.last, state.token.shape[0], options.cap
    begin, end = runner.config.segments[e]
    filled, can_start = state.cache.filled, state.can_start(cap, drafts)
    before = state.position, state.progress.next_segment
    if e == 0:
        state = state.replace(pending=_begin_rows(state, can_start))
    demand, kept = segment_demand(jnp, e, state.progress, cap, can_start), None
    if e == 0 and options.lookup and not drafts_at_once(options, slots):
        found = lookup.find_drafts(options, state, can_start)
        state = state.replace(pending=lookup.begin_rows(state, found))
        demand, kept = demand._replace(rows=1 + found.number), found.number > 0
    no_ring = jnp.zeros((slots, 0, 0))
    below = state.waiting[e - 1] if e else no_ring
    top = no_ring if state.boundary is None else state.boundary
    above = state.waiting[e] if e < n else top
    wanted = _slots_to_draft(options, state, e, drafts)
    wanted = wanted if wanted is None or kept is None else wanted & ~kept
    branches = SegmentBranches(runner, state, e, below, wanted, kept)
    carry = state.pending, above, state.cache.segments[e], state.cache.blocks[e]
    batch, changed = _run_batch(branches, options, demand, carry, prompts)
    pending, above, kvs, block = changed

    def swap(tree, new):
        return (*tree[:e], new, *tree[e + 1 :])

    state = state.replace(
        cache=KVCache(
            swap(state.cache.segments, kvs),
            swap(state.cache.blocks, block),
            filled + jnp.where(jnp.arange(n + 1)[None] == e, batch.rows[:, None], 0),
        ),
        waiting=swap(state.waiting, above) if e < n else state.waiting,
        boundary=state.boundary if e < n or state.boundary is None else above,
        pending=pending,
        work=state.work.count_run(e, batch),
        layers=state.layers + jnp.where(batch.mode == SKIP, 0, end - begin),
    )
    if options.leaves_early or e == n:  # otherwise the last segment alone decides tokens
        state = commit_tokens(state)
    moved = (state.position != before[0]) | (state.progress.next_segment != before[1])
    return state.replace(since=jnp.where(moved, state.clock, state.since))


def _advance_prefill(runner, options, state) -> EngineState:
    """Run a chunk of prompts, if a slot has one."""
    whole = runner.config.exit_boundaries[runner.last]

    def run(carry):
        before = replace_from(state, 0, carry)
        after = commit_tokens(_prefill_chunk(runner, options, before))
        emitted = after.position != before.position
        after = after.replace(
            since=jnp.where(emitted, before.clock, before.since),
            layers=jnp.where(emitted, whole, after.layers),
        )
        return changed_from(after, 0)

    some = jnp.any(state.progress.in_prefill)
    return replace_from(state, 0, run_where(some, run, changed_from(state, 0)))


def _prefill_chunk(runner, options, state) -> EngineState:
    """Run a chunk of prompts through all segments."""
    pending, cache, boundary, work = state.pending, state.cache, state.boundary, state.work
    start, in_prefill = cache.filled[:, 0], state.progress.in_prefill
    count, order = select_prefill(jnp, state.progress, state.since, options.prompt_rows)
    width = min(PROMPT_SPAN, options.prompt_rows)
    packed = flatten(count, order, start, options.prompt_rows, width)
    token = gather(state.prompt, jnp.minimum(packed.slot, len(start) - 1), packed.position)
    x = runner.embed(token[:, None], packed.position[:, None])
    done = in_prefill & (start + count == state.prompt_len)
    # A request that ran before continues to decode: its next token may leave by any exit.
    early = state.request.policy.prefill_exit | (state.prompt_len > state.request.start)
    segments, blocks, before = [], [], jnp.zeros_like(x)
    for e in range(runner.last + 1):
        x, h, kvs, block = runner.run_packed(e, x, packed, cache.segments[e], cache.blocks[e])
        segments.append(kvs)
        blocks.append(block)
        allowed = done if e == runner.last else done & early
        if e == 0:
            # A prompt has no pending rows, and its last row may not reach an early exit.
            none = PendingRows.blank(
                *pending.input_token.shape, logits_params=pending.top_logprobs is not None
            )
            pending = where_rows(in_prefill, none, pending)
        own = state.replace(pending=pending)
        pending = run_gates_flat(runner, own, e, packed, allowed, (x, h, before))
        before = x
    cache = KVCache(tuple(segments), tuple(blocks), cache.filled + count[:, None])
    boundary = (
        boundary if boundary is None else write_ring(boundary, packed.slot, packed.position, x)
    )
    work = work.replace(
        chunks=work.chunks + 1, chunk_spans=work.chunk_spans + packed.spans.astype(jnp.uint32)
    )
    return state.replace(pending=pending, cache=cache, boundary=boundary, work=work)
