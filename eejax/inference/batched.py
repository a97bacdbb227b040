"""Continuous batching in which every request exits by its own gate.

The model is cut into segments at its exits, and a *sweep* gives each segment its turn, from the
lowest: the slots whose newest token wants through it are gathered, with all rows of theirs that
wait below it (KV recomputation, as in `recompute`), and run as one flat batch of rows, padded to
the smallest of a few buckets. Who exits goes on with its next token in the next sweep; who does not
stands at the next segment. Few that want through a segment may be held back for others to come
(`packing`), while these go on. Keys and values stay where they are, by slot. Prompts are run in
chunks, one a sweep, beside the requests that decode.

Every request gets the tokens and exits that `posthoc` gives it alone.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from eejax.gates import router
from eejax.gates.confidence import Memory
from eejax.inference import state as s
from eejax.inference.batched_state import (
    BatchedState,
    BatchOptions,
    Pending,
    Work,
    at,
    stops,
)
from eejax.inference.packing import IN_PLACE, PACKED, Chosen, choose, prompts, wish
from eejax.inference.policy import Emission, Look, conclude, consider
from eejax.inference.shaping import shaped
from eejax.inference.state import Record, Weights
from eejax.kernels.compact.api import compact
from eejax.kernels.scatter.api import scatter
from eejax.models import transformer
from eejax.models.branches import run_branch
from eejax.models.cache import KVCache, run_packed, run_segment
from eejax.models.config import ModelConfig
from eejax.models.mixing import Packed

SPAN = 4  # rows of a slot that attention takes together
PROMPT_SPAN = 32  # of a prompt


def flatten(
    count: jax.Array,
    order: jax.Array,
    start: jax.Array,
    size: int,
    width: int,
    most: int | None = None,
) -> Packed:
    """count [slots] rows of slots in this order, from positions `start` [slots] onward, as `size`
    flat ones; `most` of a slot."""
    slots = start.shape[0]
    count = count[order]
    ends = jnp.cumsum(count)
    begins = ends - count
    row = jnp.arange(size, dtype=jnp.int32)
    i = jnp.minimum(jnp.sum(ends[None] <= row[:, None], -1, dtype=jnp.int32), slots - 1)
    real = row < ends[-1]
    slot = jnp.where(real, order[i], slots)
    behind = row - begins[i]
    position = jnp.where(real, start[order[i]] + behind, 0)
    begin, (spans, _) = compact(real & (behind % width == 0))
    first = jnp.where(row < spans, begin, 0)
    return Packed(slot, position, first, spans, width, most)


def _look(weights, config, state, e, slot, position, allowed, x, h, before) -> Pending:
    """Exit e's turn for rows of slots at positions [r]: x, h [r, d] of theirs, `before` [r, d] the
    states at the exit before. Changes what is pending of rows `allowed` [r] that are undecided."""
    pending, place = state.pending, position % state.pending.fed.shape[1]
    own = jax.tree.map(lambda a: a[slot, place], pending)
    allowed = allowed & (position >= state.position[slot])
    request = jax.tree.map(lambda a: a[slot], state.request)
    shaping, shape = request.shaping, None
    if e == 0:
        own = Pending.blank(len(slot), shaping=shaping is not None).replace(fed=own.fed)
    if shaping is not None:
        shape = lambda y: shaped(
            y, shaping, state.prompt[slot], request.start, position + 1, request.stops
        )
    head = s.reader(weights, config, e, h)
    allowed = allowed & (own.exit < 0)
    look = Look(
        e, x, head, allowed, position + 1, request.progress(position + 1),
        router.of_exit(weights.params, config, e), shaping, shape,
    )  # fmt: skip
    none = jnp.full(own.logprob.shape, jnp.inf)
    emission = Emission(own.token, own.logprob, own.confidence, own.exit, none, own.likely)
    if e == weights.last:
        emission = conclude(emission, look, request.sampling)
    else:
        drafts = None
        if e == 0 and pending.fed.shape[1] > 1:
            drafts = (request.policy.drafts > 0) & ~request.policy.paused
            if shaping is not None:
                drafts = drafts & ~shaping.changes
        memory = Memory(own.seen, own.streak, before)
        emission, memory = consider(
            emission, memory, look, request.policy, request.sampling, config, drafts=drafts
        )
        own = own.replace(seen=memory.token, streak=memory.streak)
    own = own.replace(
        token=emission.token, logprob=emission.logprob, confidence=emission.confidence,
        exit=emission.exit, likely=emission.likely,
    )  # fmt: skip
    slot = jnp.where(allowed, slot, len(state.token))
    return jax.tree.map(lambda a, b: a.at[slot, place].set(b, mode="drop"), pending, own)


def _in_place(weights, config, state, e, count, below, pending, above, kvs, block):
    """Run one row of every slot through segment e; a branch of a conditional."""
    start, slot = state.cache.filled[:, e], jnp.arange(state.token.shape[0])
    if e == 0:
        x = transformer.embed(
            weights.params, config, at(pending.fed, start)[:, None], start[:, None], weights.axes
        )
        before = jnp.zeros_like(x)
    else:
        before = x = _rows(below, slot, start)
    x, h, kvs, block = run_segment(
        weights.params, weights.segments[e], config, e, x, start, kvs, block, axes=weights.axes
    )
    above = _stored(above, jnp.where(count > 0, slot, len(slot)), start, x)
    pending = _look(
        weights, config, state.replace(pending=pending), e, slot, start, count > 0, x[:, 0],
        h[:, 0], before[:, 0],
    )  # fmt: skip
    return pending, above, kvs, block


def _packed(weights, config, state, e, size, chosen, below, pending, above, kvs, block):
    """Run the chosen rows through segment e, as `size` flat ones; a branch of a conditional."""
    most = min(size, state.waiting[0].shape[1] if state.waiting else 1)
    start = state.cache.filled[:, e]
    packed = flatten(chosen.count, chosen.order, start, size, SPAN, most)
    slot = jnp.minimum(packed.slot, len(state.token) - 1)
    if e == 0:
        token = pending.fed[slot, packed.position % pending.fed.shape[1]]
        x = transformer.embed(
            weights.params, config, token[:, None], packed.position[:, None], weights.axes
        )
        before = jnp.zeros_like(x)
    else:
        before = x = _rows(below, slot, packed.position)
    x, h, kvs, block = run_packed(
        weights.params, weights.segments[e], config, e, x, packed, kvs, block, axes=weights.axes
    )
    above = _stored(above, packed.slot, packed.position, x)
    pending = _look_flat(
        weights, config, state.replace(pending=pending), e, packed, None, x, h, before
    )
    return pending, above, kvs, block


def _look_flat(weights, config, state, e, packed, allowed, x, h, before) -> Pending:
    """`_look` of those flat rows that are pending. allowed [slots]: of whom, None: of all."""
    slots, m = state.pending.fed.shape
    size = len(packed.slot)
    slot = jnp.minimum(packed.slot, slots - 1)
    seen = (packed.slot < slots) & (packed.position >= state.position[slot])
    if allowed is not None:
        seen = seen & allowed[slot]
    order, counts = compact(seen)
    i = order[: min(size, slots * m)]
    real = jnp.arange(len(i)) < counts[0]
    return _look(
        weights, config, state, e, slot[i], packed.position[i], real, x[i, 0], h[i, 0], before[i, 0]
    )  # fmt: skip


def _rows(ring: jax.Array, slot: jax.Array, position: jax.Array) -> jax.Array:
    """[t, 1, d]: the states of slots [t] that wait at positions [t] in a ring [slots, cap, d]."""
    return ring[slot, position % ring.shape[1]][:, None]


def _stored(ring: jax.Array, slot: jax.Array, position: jax.Array, x: jax.Array) -> jax.Array:
    """The ring with states x [t, 1, d] of slots [t], left out where there is no such slot."""
    if not ring.shape[1]:
        return ring
    slots, cap, d = ring.shape
    return scatter(ring.reshape(-1, d), x[:, 0], slot * cap + position % cap).reshape(ring.shape)


def settle(state: BatchedState) -> BatchedState:
    """Emits what is decided, from the first pending row on while each reads what the one before it
    emits; where one does not, it and those behind it are forgotten."""
    decided = (
        state.live & (state.standing.ahead > 0) & (at(state.pending.exit, state.position) >= 0)
    )
    own = lambda s: (
        s.cache.filled, s.pending.accepted, s.token, s.position, s.remaining,
        None if s.request.shaping is None else s.prompt,
    )  # fmt: skip
    run = lambda _: own(_emitted(state))
    filled, accepted, token, position, remaining, prompt = lax.switch(
        jnp.any(decided).astype(jnp.int32), [lambda c: c, run], own(state)
    )
    return state.replace(
        cache=state.cache.replace(filled=filled), pending=state.pending.replace(accepted=accepted),
        token=token, position=position, remaining=remaining,
        prompt=state.prompt if prompt is None else prompt,
    )  # fmt: skip


def _emitted(state: BatchedState) -> BatchedState:
    """`settle` where somebody's first pending row is decided."""
    pending, position, m = state.pending, state.position, state.pending.fed.shape[1]
    filled, order = state.cache.filled, jnp.arange(m)[None]
    window = (position[:, None] + order) % m
    by_order = lambda a: jnp.take_along_axis(a, window, 1)
    token, exit_, fed = by_order(pending.token), by_order(pending.exit), by_order(pending.fed)
    there = position[:, None] + order < filled[:, :1]
    emits = there & (exit_ >= 0) & (order < state.remaining[:, None])
    ends = stops(state.request, token)
    if m > 1:
        right = (token[:, :-1] == fed[:, 1:]) & there[:, 1:]
        follows = jnp.pad(right & ~ends[:, :-1], [(0, 0), (1, 0)], constant_values=True)
        emits = jnp.cumprod((emits & follows).astype(jnp.int32), 1).astype(bool)
        accepted = jnp.pad(right, [(0, 0), (0, 1)]) & (by_order(pending.drafted) > 0)
        back = (jnp.arange(m)[None] - position[:, None]) % m
        put = lambda old, new: jnp.where(
            jnp.take_along_axis(emits, back, 1),
            jnp.take_along_axis(new.astype(jnp.int32), back, 1), old,
        )  # fmt: skip
        pending = pending.replace(accepted=put(pending.accepted, accepted))
    n = jnp.sum(emits.astype(jnp.int32), -1)
    prompt = state.prompt
    if state.request.shaping is not None:
        behind = jnp.where(emits, position[:, None] + 1 + order, prompt.shape[1])
        prompt = prompt.at[jnp.arange(len(n))[:, None], behind].set(token, mode="drop")
    last = jnp.take_along_axis(token, jnp.maximum(n - 1, 0)[:, None], 1)[:, 0]
    token = jnp.where(n > 0, last, state.token)
    position = position + n
    ended = jnp.any(ends & emits, -1)
    if m > 1:
        wrong = (n > 0) & (at(pending.fed, position) != token)
        filled = jnp.where(wrong[:, None], jnp.minimum(filled, position[:, None]), filled)
    return state.replace(
        cache=state.cache.replace(filled=filled), pending=pending, token=token, position=position,
        remaining=jnp.where(ended, 0, state.remaining - n), prompt=prompt,
    )  # fmt: skip


def sweep(
    weights: Weights, state: BatchedState, *, config: ModelConfig, options: BatchOptions
) -> tuple[BatchedState, Record]:
    """Every segment's turn, then a chunk of prompts. Records are [drafts + 1, slots]."""
    begun = state.position
    for e in range(weights.last + 1):
        state = _turn(weights, config, options, state, e)
    state = _prompts(weights, config, options, state)
    m = options.drafts + 1
    order = jnp.arange(m)[:, None]
    place = (begun[None] + order) % m
    taken = lambda a: jnp.take_along_axis(a.T, place, 0)
    likely = jax.tree.map(
        lambda a: jnp.take_along_axis(a.swapaxes(0, 1), place[..., None], 0), state.pending.likely
    )
    own = jax.tree.map(taken, state.pending.replace(likely=None))
    emits = order < (state.position - begun)[None]
    depth = jnp.array([*config.stops])[own.exit]
    record = Record(
        token=jnp.where(emits, own.token, -1),
        logprob=own.logprob,
        confidence=own.confidence,
        exit=jnp.where(emits, own.exit, -1),
        layers=jnp.where(emits, depth, 0).astype(jnp.int32),
        margin=jnp.full(emits.shape, jnp.inf),
        drafted=jnp.where(emits, own.drafted, 0),
        accepted=jnp.where(emits, own.accepted, 0),
        likely=likely,
    )
    work = state.work.replace(sweeps=state.work.sweeps + 1)
    return state.replace(clock=state.clock + 1, work=work), record


def _turn(weights, config, options, state, e) -> BatchedState:
    """Segment e's turn."""
    n, slots, cap = weights.last, state.token.shape[0], options.cap
    filled, begins = state.cache.filled, state.begins(cap)
    before = state.position, state.standing.stage
    if e == 0:
        # The row behind what was emitted reads that, one behind a pending row its draft.
        reads = jnp.where(
            filled[:, 0] > state.position, at(state.pending.token, filled[:, 0] - 1), state.token
        )
        fed = jnp.where(begins, reads, at(state.pending.fed, filled[:, 0]))
        pending, row, m = state.pending, jnp.arange(slots), state.pending.fed.shape[1]
        guess = begins & (filled[:, 0] > state.position) & (at(pending.exit, filled[:, 0] - 1) < 0)
        guess = jnp.where(guess, 1, at(pending.drafted, filled[:, 0] - 1))
        pending = pending.replace(
            drafted=pending.drafted.at[row, (filled[:, 0] - 1) % m].set(guess),
            fed=pending.fed.at[row, filled[:, 0] % m].set(fed),
        )
        state = state.replace(pending=pending)
    wished = wish(jnp, e, state.standing, cap, begins)
    waited = state.clock - state.since
    chosen = choose(jnp, state.plan, e, options.buckets, SPAN, wished, waited)
    no_ring = jnp.zeros((slots, 0, 0))
    below = state.waiting[e - 1] if e else no_ring
    top = no_ring if state.boundary is None else state.boundary
    above = state.waiting[e] if e < n else top
    # HELD, IN_PLACE, PACKED and so on, as `packing` numbers them.
    ways = [partial(_in_place, weights, config, state, e, chosen.count, below)]
    for size in options.buckets:
        ways.append(partial(_packed, weights, config, state, e, size, chosen, below))
    carry = state.pending, above, state.cache.segments[e], state.cache.blocks[e]
    pending, above, kvs, block = run_branch(chosen.way, ways, carry)
    swap = lambda tree, new: (*tree[:e], new, *tree[e + 1 :])
    state = settle(state.replace(
        cache=KVCache(
            swap(state.cache.segments, kvs), swap(state.cache.blocks, block),
            filled.at[:, e].add(chosen.count),
        ),
        waiting=swap(state.waiting, above) if e < n else state.waiting,
        boundary=state.boundary if e < n or state.boundary is None else above,
        pending=pending, work=_counted(state.work, e, chosen),
    ))  # fmt: skip
    moved = (state.position != before[0]) | (state.standing.stage != before[1])
    return state.replace(since=jnp.where(moved, state.clock, state.since))


def _counted(work: Work, e: int, chosen: Chosen) -> Work:
    ways = jnp.arange(IN_PLACE, IN_PLACE + work.runs.shape[1])
    spans = jnp.where(chosen.way >= PACKED, chosen.spans, 0)
    return work.replace(
        runs=work.runs.at[e].add((ways == chosen.way).astype(jnp.uint32)),
        spans=work.spans.at[e].add(spans.astype(jnp.uint32)),
    )


def _prompts(weights, config, options, state) -> BatchedState:
    """A chunk of prompts, if there are any."""
    run = partial(_chunk, weights, config, options, state)
    carry = state.pending, state.cache, state.boundary, state.work
    some = jnp.any(state.standing.prompting).astype(jnp.int32)
    pending, cache, boundary, work = lax.switch(some, [lambda c: c, run], carry)
    after = settle(state.replace(pending=pending, cache=cache, boundary=boundary, work=work))
    since = jnp.where(after.position != state.position, state.clock, state.since)
    return after.replace(since=since)


def _chunk(weights, config, options, state, carry):
    """A chunk of prompts through all segments, those that came first first; a branch."""
    pending, cache, boundary, work = carry
    start, prompting = cache.filled[:, 0], state.standing.prompting
    count, order = prompts(jnp, state.standing, state.since, options.chunk)
    packed = flatten(count, order, start, options.chunk, min(PROMPT_SPAN, options.chunk))
    token = state.prompt[jnp.minimum(packed.slot, len(start) - 1), packed.position]
    x = transformer.embed(
        weights.params, config, token[:, None], packed.position[:, None], weights.axes
    )
    done = prompting & (start + count == state.given)
    # What a request had been given before is decoded on: its next token may leave by any exit.
    early = state.request.policy.prefill_exit | (state.given > state.request.start)
    segments, blocks, before = [], [], jnp.zeros_like(x)
    for e, layers in enumerate(weights.segments):
        x, h, kvs, block = run_packed(
            weights.params, layers, config, e, x, packed, cache.segments[e], cache.blocks[e],
            axes=weights.axes,
        )  # fmt: skip
        segments.append(kvs)
        blocks.append(block)
        allowed = done if e == weights.last else done & early
        if e == 0:
            # Nothing is pending of a prompt; its last row may be seen by no early exit.
            pending = jax.tree.map(
                lambda a, b: jnp.where(prompting.reshape(-1, *[1] * (a.ndim - 1)), b, a), pending,
                Pending.blank(*pending.fed.shape, shaping=pending.likely is not None),
            )  # fmt: skip
        pending = _look_flat(
            weights, config, state.replace(pending=pending), e, packed, allowed, x, h, before
        )
        before = x
    cache = KVCache(tuple(segments), tuple(blocks), cache.filled + count[:, None])
    boundary = boundary if boundary is None else _stored(boundary, packed.slot, packed.position, x)
    work = work.replace(
        chunks=work.chunks + 1, chunk_spans=work.chunk_spans + packed.spans.astype(jnp.uint32)
    )
    return pending, cache, boundary, work
