"""Drafts that a text makes itself: what came after the same tokens before.

Prompt lookup decoding (Saxena 2023): summaries, code and edits repeat parts of their prompt, and
small models repeat what they said. Such a draft costs one more row of the pass that verifies it,
and no layer of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from eejax.common.indexing import gather_each, ring_index
from eejax.inference.carry import changed_from, replace_from
from eejax.inference.options import EngineOptions
from eejax.inference.schedule import PACKED, SegmentBatch, best_drafts
from eejax.inference.segment import SegmentRunner
from eejax.inference.segment_branches import SPAN, SegmentBranches
from eejax.inference.state import TEXT_DRAFTS, EngineState, PendingRows, hits_stop_token
from eejax.models.branches import run_where
from eejax.models.cache import KVCache

SHORTEST, LONGEST = TEXT_DRAFTS[0], TEXT_DRAFTS[-1]
"""Tokens that must be the same, and tokens that are compared."""


def continuation(text: jax.Array, position: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Return the n tokens that followed the last ones where they stood before.

    The place with the most equal tokens is taken, of several the last. A place so near that fewer
    than n tokens followed begins a repetition, which goes on.

    Args:
      text: [slots, t] int32, tokens of each text.
      position: [slots] int32, position of the last token in its text.

    Returns:
      (tokens [slots, n], equal [slots] int32, the number of equal tokens there, 0 if it would be
      less than `SHORTEST`).
    """
    place = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
    end = position[:, None]
    same, equal = place < end, jnp.zeros(text.shape, jnp.int32)
    for back in range(LONGEST):
        own = gather_each(text, jnp.maximum(end - back, 0))
        before = jnp.pad(text, [(0, 0), (back, 0)], constant_values=-1)[:, : text.shape[1]]
        same = same & (before == own) & (end >= back)
        equal = equal + same.astype(jnp.int32)
    score = jnp.where(equal >= SHORTEST, equal * text.shape[1] + place, -1)
    best = jnp.argmax(score, -1).astype(jnp.int32)[:, None]
    period = jnp.maximum(end - best, 1)
    tokens = gather_each(text, best + 1 + jnp.arange(n, dtype=jnp.int32)[None] % period)
    return tokens, jnp.maximum(jnp.max(score, -1), 0) // text.shape[1]


class FoundDrafts(NamedTuple):
    """Drafts of every slot's text.

    Attributes:
      tokens: [slots, n] int32.
      number: [slots] int32, how many of them are to be verified.
      kind: [slots] int32, one of `TEXT_DRAFTS` where there are some.
    """

    tokens: jax.Array
    number: jax.Array
    kind: jax.Array


def find_drafts(options: EngineOptions, state: EngineState, can_start: jax.Array) -> FoundDrafts:
    """Find what followed each slot's last tokens where they stood before in its text.

    can_start: [slots] bool, slots that can start a row. Others, and those with pending rows, get no
    drafts.
    """
    most, filled = options.lookup, state.cache.filled
    assert state.lookup_acceptance is not None, "the engine drafts from texts"
    tokens, equal = continuation(state.prompt, state.position, most)
    kind = jnp.maximum(equal - SHORTEST, 0)
    acceptance = gather_each(state.lookup_acceptance, kind[:, None])[:, 0]
    allowed = jnp.where((equal > 0) & (state.drafts_allowed > 0), state.remaining - 1, 0)
    room = options.cap - 1 - (filled[:, 0] - filled[:, -1])
    allowed, verify = jnp.minimum(allowed, jnp.minimum(room, most)), state.verify_cost
    number = best_drafts(jnp, acceptance, jnp.float32(0), verify, allowed, most)
    ends = hits_stop_token(state.request, tokens)  # no row starts from such a draft
    number = jnp.minimum(number, jnp.where(jnp.any(ends, -1), jnp.argmax(ends, -1), most + 1))
    ready = can_start & (filled[:, 0] <= state.position)
    return FoundDrafts(tokens, jnp.where(ready, number, 0), equal)


def start_rows(
    runner: SegmentRunner,
    options: EngineOptions,
    state: EngineState,
    drafts: jax.Array,
) -> EngineState:
    """Run the only slot's next row through the first segment, with rows behind it that read what
    followed the same tokens before, if they stand in the text.

    Args:
      runner: runs the rows.
      options: options of an engine with one slot.
      state: the state before.
      drafts: [1] int32, maximum drafts of the exit.
    """
    size = options.lookup + 1
    found = find_drafts(options, state, state.can_start(options.cap, drafts))

    def run(carry):
        before, rows = replace_from(state, 0, carry), found.number + 1
        cache, pending = before.cache, begin_rows(before, found)
        branches = SegmentBranches(runner, before, 0, jnp.zeros((1, 0, 0)), None)
        _, above, kvs, block = branches.run_rows(
            size, rows, pending, before.waiting[0], cache.segments[0], cache.blocks[0]
        )
        first = jnp.arange(runner.last + 1)[None] == 0
        mode = jnp.int32(PACKED + options.buckets.index(size))
        batch = SegmentBatch(mode, rows, jnp.zeros_like(rows), -(-rows[0] // SPAN))
        begin, end = runner.config.segments[0]
        after = before.replace(
            cache=KVCache(
                (kvs, *cache.segments[1:]),
                (block, *cache.blocks[1:]),
                cache.filled + jnp.where(first, rows[:, None], 0),
            ),
            waiting=(above, *before.waiting[1:]),
            pending=pending,
            work=before.work.count_run(0, batch),
            layers=before.layers + (end - begin),
            since=jnp.broadcast_to(before.clock, before.since.shape),
        )
        return changed_from(after, 0)

    return replace_from(state, 0, run_where(found.number[0] > 0, run, changed_from(state, 0)))


def begin_rows(state: EngineState, found: FoundDrafts) -> PendingRows:
    """Return the pending rows with the next ones of slots that have drafts.

    These rows read the last token and the drafts.
    """
    (tokens, number, kind), pending, n = found, state.pending, found.tokens.shape[1]
    m = pending.input_token.shape[1]
    # By place of the ring: the order of its row.
    place = jnp.arange(m, dtype=jnp.int32)[None]
    order = ring_index(place - ring_index(state.cache.filled[:, :1], m), m)
    drafted = order < number[:, None]
    reads = jnp.concatenate([state.token[:, None], tokens], -1)
    draft = gather_each(tokens, jnp.minimum(order, n - 1))
    blank = PendingRows.blank(*order.shape, logits_params=pending.top_logprobs is not None)
    own = blank.replace(
        input_token=gather_each(reads, jnp.minimum(order, n)),
        token=jnp.where(drafted, draft, blank.token),
        drafted=jnp.where(drafted, kind[:, None], 0),
    )
    begun = (order <= number[:, None]) & (number > 0)[:, None]

    def put(old, new):
        return jnp.where(begun.reshape(*begun.shape, *[1] * (old.ndim - 2)), new, old)

    return jax.tree.map(put, pending, own)
