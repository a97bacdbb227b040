"""Ways to run rows of slots through a segment and its exit: in place, packed, or of one slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eejax.common.indexing import gather, ring_index
from eejax.common.trees import Tree, where_rows
from eejax.gates.confidence import Memory
from eejax.inference.logits_params import process_logits
from eejax.inference.policy import Emission
from eejax.inference.schedule import SegmentBatch
from eejax.inference.segment import SegmentRunner
from eejax.inference.state import EngineState, PendingRows, at_position
from eejax.kernels.compact.api import compact
from eejax.kernels.scatter.api import scatter
from eejax.models.attention import PackedRows
from eejax.models.cache import varying

SPAN = 4  # rows of a slot that attention takes together


def flatten(
    count: jax.Array,
    order: jax.Array,
    start: jax.Array,
    size: int,
    width: int,
    max_rows: int | None = None,
) -> PackedRows:
    """Flatten rows of slots into `size` packed ones.

    Args:
      count: [slots] int32, rows of each slot.
      order: [slots] int32, the order in which slots are packed.
      start: [slots] int32, position of each slot's first row.
      size: number of flat rows.
      width: rows of a span.
      max_rows: maximum `count`; None for no bound (`PackedRows`).
    """
    slots = start.shape[0]
    count = gather(count, order)
    ends = jnp.cumsum(count)
    offsets = ends - count
    row = jnp.arange(size, dtype=jnp.int32)
    i = jnp.minimum(jnp.sum(ends[None] <= row[:, None], -1, dtype=jnp.int32), slots - 1)
    real = row < ends[-1]
    own, behind = gather(order, i), row - gather(offsets, i)
    slot = jnp.where(real, own, slots)
    position = jnp.where(real, gather(start, own) + behind, 0)
    begin, (spans, _) = compact(real & (behind % width == 0))
    first = jnp.where(row < spans, begin, 0)
    return PackedRows(slot, position, first, spans, width, max_rows)


class ExitRows(NamedTuple):
    """Rows of slots at an exit.

    Attributes:
      slot: [r] int32, or None for one row of each slot.
      position: [r] int32.
      x, h: [r, d], states at the exit and behind its block.
      before: [r, d], states at the exit before.
    """

    slot: jax.Array | None
    position: jax.Array
    x: jax.Array
    h: jax.Array
    before: jax.Array

    def take_slots(self, tree: Tree) -> Tree:
        """Return [r, ...], the entries of the rows' slots in leaves [slots, ...]."""
        slot = self.slot
        return tree if slot is None else jax.tree.map(lambda a: gather(a, slot), tree)

    def take_places(self, tree: Tree) -> Tree:
        """Return [r, ...], the entries of the rows in leaves [slots, m, ...] by slot and place."""
        slot, position = self.slot, self.position

        def read(a):
            if slot is None:
                return at_position(a, position)
            return gather(a, slot, ring_index(position, a.shape[1]))

        return jax.tree.map(read, tree)


def run_gates(runner, state, e, rows: ExitRows, allowed, drafts=None, kept=None) -> PendingRows:
    """Run exit e for rows, and return the pending rows that follow.

    Only rows that are `allowed` [r] and undecided change. Those of slots `drafts` [slots] bool get
    a draft if no gate fires; those of slots `kept` [slots] bool have one from the text.
    """
    pending, request = state.pending, rows.take_slots(state.request)
    logits_params, process = request.logits_params, None
    if e == 0:
        none = PendingRows.blank(len(rows.x), logits_params=logits_params is not None)
        own = varying(none, runner.weights.axes.data)
        if kept is not None:
            own = where_rows(rows.take_slots(kept), rows.take_places(pending), own)
    else:
        own = rows.take_places(pending)
    if logits_params is not None:

        def shaped(y: jax.Array) -> jax.Array:
            return process_logits(
                y,
                logits_params,
                rows.take_slots(state.prompt),
                request.start,
                rows.position + 1,
                request.stop_token_ids,
            )

        process = shaped
    drafts = None if drafts is None else rows.take_slots(drafts)
    allowed = allowed & (rows.position >= rows.take_slots(state.position)) & (own.exit < 0)
    margin = jnp.full(own.logprob.shape, jnp.inf)
    emission = Emission(own.token, own.logprob, own.confidence, own.exit, margin, own.top_logprobs)
    look = runner.exit_input(
        e, rows.x, rows.h, allowed, rows.position + 1, request, process_logits=process
    )
    emission, memory = runner.decide(
        emission, Memory(own.top_token, own.streak, rows.before), look, drafts=drafts
    )
    # Only what changes: on a GPU each field that is written is a kernel of its own.
    new: dict[str, Any] = dict(
        token=emission.token,
        logprob=emission.logprob,
        confidence=emission.confidence,
        exit=emission.exit,
        top_logprobs=emission.top_logprobs,
    )
    if e < runner.last:  # later gates read them
        new |= dict(top_token=memory.token, streak=memory.streak)
    if e == 0 and pending.input_token.shape[1] > 1:  # those of the row that had this place before
        new |= dict(drafted=own.drafted, accepted=own.accepted)
    return _replace_rows(pending, new, rows, allowed)


def _replace_rows(
    pending: PendingRows, new: Mapping[str, Any], rows: ExitRows, allowed: jax.Array
) -> PendingRows:
    """Put the `new` fields [r] of rows, where they are `allowed` [r], in their places.

    Rows are compared with all places: on a GPU, a scatter for each field would be a kernel each.
    """
    slots, m = pending.input_token.shape
    place, i = ring_index(rows.position, m), None
    if rows.slot is None:
        found = allowed[:, None] & (place[:, None] == jnp.arange(m)[None])
    else:
        row = jnp.arange(len(place), dtype=jnp.int32)
        at = jnp.where(allowed, rows.slot * m + place, slots * m)
        here = at[None] == jnp.arange(slots * m, dtype=jnp.int32)[:, None]
        # At most one row belongs to a place.
        found, i = jnp.any(here, 1), jnp.sum(jnp.where(here, row[None], 0), 1)

    def put(old, new):
        new = new[:, None] if i is None else gather(new, i).reshape(old.shape)
        return jnp.where(found.reshape(slots, m, *[1] * (old.ndim - 2)), new, old)

    old = {name: getattr(pending, name) for name in new}
    return pending.replace(**jax.tree.map(put, old, dict(new)))


def run_gates_flat(
    runner, state, e, packed, allowed, states, drafts=None, kept=None
) -> PendingRows:
    """Run `run_gates` for flat rows that are pending, of slots `allowed` [slots] (None: all).

    states: x, h and before of `ExitRows`, each [t, 1, d].
    """
    slots, m = state.pending.input_token.shape
    size = len(packed.slot)
    slot = jnp.minimum(packed.slot, slots - 1)
    seen = (packed.slot < slots) & (packed.position >= gather(state.position, slot))
    if allowed is not None:
        seen = seen & gather(allowed, slot)
    order, counts = compact(seen)
    i = order[: min(size, slots * m)]
    rows = ExitRows(
        gather(slot, i), gather(packed.position, i), *(gather(a[:, 0], i) for a in states)
    )
    return run_gates(runner, state, e, rows, jnp.arange(len(i)) < counts[0], drafts, kept)


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
      drafts: [slots] bool, slots whose rows get a draft from this segment's exit; None for none.
      kept: [slots] bool, slots whose pending rows have a token already, a draft from the text; None
        for none. Only the first segment begins rows without one.
    """

    runner: SegmentRunner
    state: EngineState
    e: int
    below: jax.Array
    drafts: jax.Array | None
    kept: jax.Array | None = None

    def in_place(self, count, pending, above, kvs, block):
        """Run one row of every slot, of which those with a `count` [slots] above 0 are real."""
        state, e = self.state, self.e
        start, slot = state.cache.filled[:, e], jnp.arange(state.token.shape[0])
        if e == 0:
            x = self.runner.embed(at_position(pending.input_token, start)[:, None], start[:, None])
            before = jnp.zeros_like(x)
        else:
            before = x = read_ring(self.below, slot, start)
        x, h, kvs, block = self.runner.run(e, x, start, kvs, block)
        above = write_ring(above, jnp.where(count > 0, slot, len(slot)), start, x)
        rows = ExitRows(None, start, x[:, 0], h[:, 0], before[:, 0])
        state = state.replace(pending=pending)
        pending = run_gates(self.runner, state, e, rows, count > 0, self.drafts, self.kept)
        return pending, above, kvs, block

    def only_slot(self, size, count, pending, above, kvs, block):
        """Run `size` rows of the only slot, of which the first `count` [1] are real, unpacked."""
        rows, above, kvs, block = self.run_rows(size, count, pending, above, kvs, block)
        state, start = self.state, self.state.cache.filled[:, self.e]
        # Among these rows, pending ones come after those of emitted tokens.
        i = jnp.maximum(state.position - start, 0)
        i = i + jnp.arange(min(size, pending.input_token.shape[1]))
        real, i = i < count, jnp.minimum(i, size - 1)
        rows = jax.tree.map(lambda a: gather(a, i), rows)
        state = state.replace(pending=pending)
        pending = run_gates(self.runner, state, self.e, rows, real, self.drafts, self.kept)
        return pending, above, kvs, block

    def run_rows(self, size, count, pending, above, kvs, block):
        """Run `size` rows of the only slot without their exit: (`ExitRows`, above, kvs, block)."""
        state, e = self.state, self.e
        start, row = state.cache.filled[:, e], jnp.arange(size, dtype=jnp.int32)
        slot, position, m = jnp.zeros_like(row), start[0] + row, pending.input_token.shape[1]
        if e == 0:
            x = self.runner.embed(pending.input_token[:, ring_index(position, m)], position[None])
            before = jnp.zeros_like(x)
        else:
            before = x = jnp.swapaxes(read_ring(self.below, slot, position), 0, 1)
        x, h, kvs, block = self.runner.run(e, x, start, kvs, block)
        above = write_ring(above, jnp.where(row < count, 0, 1), position, x[0][:, None])
        return ExitRows(slot, position, x[0], h[0], before[0]), above, kvs, block

    def packed(self, size, batch: SegmentBatch, pending, above, kvs, block):
        """Run the rows of a batch as `size` flat ones."""
        state, e = self.state, self.e
        most = state.waiting[0].shape[1] if state.waiting else pending.input_token.shape[1]
        max_rows = min(size, most)
        width = min(SPAN, size)  # attention computes all rows of a span, real or not
        flat = flatten(batch.rows, batch.order, state.cache.filled[:, e], size, width, max_rows)
        slot = jnp.minimum(flat.slot, len(state.token) - 1)
        if e == 0:
            place = ring_index(flat.position, pending.input_token.shape[1])
            token = gather(pending.input_token, slot, place)
            x = self.runner.embed(token[:, None], flat.position[:, None])
            before = jnp.zeros_like(x)
        else:
            before = x = read_ring(self.below, slot, flat.position)
        x, h, kvs, block = self.runner.run_packed(e, x, flat, kvs, block)
        above = write_ring(above, flat.slot, flat.position, x)
        state = state.replace(pending=pending)
        states = x, h, before
        pending = run_gates_flat(self.runner, state, e, flat, None, states, self.drafts, self.kept)
        return pending, above, kvs, block


def read_ring(ring: jax.Array, slot: jax.Array, position: jax.Array) -> jax.Array:
    """Return [t, 1, d], states of slots [t] at positions [t] of a ring [slots, cap, d]."""
    return gather(ring, slot, ring_index(position, ring.shape[1]))[:, None]


def write_ring(ring: jax.Array, slot: jax.Array, position: jax.Array, x: jax.Array) -> jax.Array:
    """Write states x [t, 1, d] of slots [t] to the ring; drop rows whose slot does not exist."""
    if not ring.shape[1]:
        return ring
    slots, cap, d = ring.shape
    place = slot * cap + ring_index(position, cap)
    return scatter(ring.reshape(-1, d), x[:, 0], place).reshape(ring.shape)
