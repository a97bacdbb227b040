"""Scheduling of the early-exit engine: which slots run a segment in this step, and how.

The engine decides on the device and the simulator on the host. Both call these functions, with
`jax.numpy` or `numpy` as `xp`, so that they decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import struct

from eejax.common.errors import require, require_array
from eejax.common.indexing import gather

SKIP, IN_PLACE, PACKED = 0, 1, 2  # modes of a segment; PACKED + i packs rows into bucket i
INITIAL_EXIT_ACCEPTANCE, INITIAL_TEXT_ACCEPTANCE = 0.5, np.float32(0.6)
"""Assumed share of accepted drafts before any was made, of an exit whose `ExitConfig.acceptance` is
not known, and from the text. Short texts have few tokens to make up for wrong drafts."""
ACCEPTANCE_WEIGHT = np.float32(0.2)  # weight of one more draft in the running share
EXIT_RECOVERY, TEXT_RECOVERY = np.float32(0.002), np.float32(0.005)
"""Growth of that share towards 1 for a step without drafts, so that drafts are tried again. If they
are never accepted, one draft of an exit is wasted in some sixty tokens or more, and one from the
text, which costs less, in some twenty."""


class BatchPlan(struct.PyTreeNode):
    """Measured costs and waiting rules of each segment.

    The arrays are traced: a changed plan compiles nothing.

    Attributes:
      fill: [segments] int32, slots that must wait below a segment before it runs, while some slot
        can start a row in the first segment or has a prompt to run. 1 delays no slot.
      patience: [segments] int32, maximum steps that a slot may be delayed.
      in_place: [segments] float32, seconds to run one row of every slot.
      packed: [segments, buckets] float32, seconds to run that many rows of some slots, without
        their attention.
      span: [segments] float32, seconds of the attention of one span of packed rows.
      draft_cost: [] float32, time of a draft over that of a full step, by which each request's
        number of drafts adapts (`best_drafts`); 0 adapts none.
      verify_cost: [2] float32, what the pass that verifies drafts takes beyond a full step, over
        that step: for the first draft, and for each further one.
      acceptance: [] float32, share of an exit's drafts that a new request expects to be right.
    """

    fill: Any
    patience: Any
    in_place: Any
    packed: Any
    span: Any
    draft_cost: Any
    verify_cost: Any
    acceptance: Any

    @classmethod
    def make(
        cls,
        segments: int,
        slots: int,
        buckets: Sequence[int],
        fill: Sequence[int] | int = 1,
        patience: Sequence[int] | int = 0,
        seconds: tuple[Any, Any, Any] | None = None,
        draft_cost: float = 0.0,
        verify_cost: tuple[float, float] = (0.0, 0.0),
        acceptance: float = INITIAL_EXIT_ACCEPTANCE,
    ) -> BatchPlan:
        """Check and complete a plan.

        Args:
          segments: segments of the engine.
          slots: slots of the engine.
          buckets: row counts that packed segments are compiled for.
          fill: one number for all segments, or one for each.
          patience: one number for all segments, or one for each.
          seconds: (in_place, packed, span); by default in proportion to rows.
          draft_cost: see the attribute.
          verify_cost: see the attribute.
          acceptance: see the attribute.

        Raises:
          ConfigError: for a wrong shape, a negative fill or patience, or seconds or a draft's cost
            that are not finite and at least 0.
        """
        if seconds is None:
            rows = np.broadcast_to(np.asarray(buckets, np.float64), (segments, len(buckets)))
            seconds = np.full(segments, float(slots)), rows, np.zeros(segments)
        shapes = dict(in_place=(segments,), packed=(segments, len(buckets)), span=(segments,))
        three = isinstance(seconds, tuple | list) and len(seconds) == 3
        require(three, "plan.seconds", seconds, "must be (in_place, packed, span)")
        given = dict(zip(shapes, seconds, strict=True))
        for name, value in given.items():
            allowed = f"must be seconds, of shape {shapes[name]}"
            a = require_array(f"plan.{name}", value, allowed)
            ok = a.shape == shapes[name] and a.dtype.kind in "iuf"
            ok = ok and bool(np.all(np.isfinite(a) & (a >= 0)))
            require(ok, f"plan.{name}", value, allowed)
            given[name] = a.astype(np.float32)
        for name, value in (("fill", fill), ("patience", patience)):
            allowed = f"must be a whole number, or {segments}, one per segment"
            a = require_array(f"plan.{name}", value, allowed)
            ok = a.dtype.kind in "iu" and a.shape in ((), (segments,))
            ok = ok and bool(np.all((a >= 0) & (a <= np.iinfo(np.int32).max)))
            require(ok, f"plan.{name}", value, allowed)
            given[name] = np.array(np.broadcast_to(a, (segments,)), np.int32)
        real = isinstance(draft_cost, int | float) and 0 <= draft_cost < np.inf
        require(real, "plan.draft_cost", draft_cost, "must be a finite number of at least 0")
        return cls(
            **given,
            draft_cost=np.float32(draft_cost),
            verify_cost=np.asarray(verify_cost, np.float32),
            acceptance=np.float32(acceptance),
        )


class SlotProgress(NamedTuple):
    """Decoding progress of every slot.

    Attributes:
      filled: [slots, segments] int32, tokens whose keys and values each segment holds.
      position: [slots] int32, position of the row that decides the next token.
      remaining: [slots] int32, tokens still to emit; 0 when finished, and in a free slot.
      prompt_len: [slots] int32, tokens of the prompt.
    """

    filled: Any
    position: Any
    remaining: Any
    prompt_len: Any

    @property
    def live(self) -> Any:
        """Slots with a request that is not finished, [slots] bool."""
        return self.remaining > 0

    @property
    def in_prefill(self) -> Any:
        """Slots whose prompt has not run completely, [slots] bool."""
        return self.live & (self.filled[:, 0] < self.prompt_len)

    @property
    def num_pending(self) -> Any:
        """Number of pending rows, [slots]: the one that decides, and those that read drafts."""
        return self.filled[:, 0] - self.position

    @property
    def next_segment(self) -> Any:
        """The segment that the row at `position` runs through next, [slots]."""
        return (self.filled > self.position[:, None]).astype(np.int32).sum(-1)

    def at_cap(self, cap: int) -> Any:
        """Return [slots] bool, whether `cap` tokens wait, so that no other may start."""
        return self.filled[:, 0] - self.filled[:, -1] >= cap

    def must_run(self, e: int, cap: int) -> Any:
        """Return [slots] bool, whether rows that wait below segment e > 0 should run."""
        undecided = (self.num_pending > 0) & (self.next_segment == e)
        deepened = self.at_cap(cap) & (self.filled[:, e - 1] > self.filled[:, e])
        return self.live & ~self.in_prefill & (undecided | deepened)

    def can_start(self, cap: int, drafts: Any) -> Any:
        """Return [slots] bool, whether the first segment has a row to run.

        The row reads the token that was emitted last or, where at most `drafts` [slots] rows are
        pending, and fewer than `remaining`, a draft.
        """
        pending = self.num_pending
        may_draft = (pending <= drafts) & (pending < self.remaining)
        ready = self.live & ~self.in_prefill & ~self.at_cap(cap)
        return ready & ((pending <= 0) | may_draft)


def best_drafts(
    xp: Any, acceptance: Any, cost: Any, verify: Any, allowed: Any, max_drafts: int
) -> Any:
    """Return the numbers of drafts, [slots] int32, that promise the most tokens per time.

    If a share a of drafts is accepted, k drafts give 1 + a + .. + a^k tokens (Leviathan et al.
    2023, eq. 1) in the time of 1 + c k + v + w (k - 1) full steps. The number is 0 where none beats
    a full step.

    Args:
      acceptance: [slots] float32, share of drafts that are accepted.
      cost: [] float32, c.
      verify: [2] float32, (v, w). If c and v are 0, all allowed drafts are made.
      allowed: [slots] int32, maximum of each slot.
      max_drafts: maximum of any slot.
    """
    drafts = np.arange(max_drafts + 1, dtype=np.float32)[None]
    tokens = xp.cumsum(acceptance[:, None] ** drafts, -1)
    has_drafts = np.array([[0, *[1] * max_drafts]], np.float32)
    extra = verify[0] * has_drafts + verify[1] * np.maximum(drafts - 1, 0)
    gain = tokens / (np.float32(1) + cost * drafts + extra)
    number = drafts.astype(np.int32)
    gain = xp.where(number <= allowed[:, None], gain, np.float32(-1))
    # The smallest number with the largest gain, without a paired reduction.
    largest = xp.max(gain, -1, keepdims=True)
    best = xp.min(xp.where(gain >= largest, number, np.int32(max_drafts)), -1)
    return xp.where(cost + verify[0] > 0, best, allowed)


def update_acceptance(
    xp: Any, acceptance: Any, tried: Any, accepted: Any, recovery: np.float32 = EXIT_RECOVERY
) -> Any:
    """Return [slots] float32, the share of accepted drafts after tokens were emitted.

    Args:
      acceptance: [slots] float32, the share before.
      tried: [slots] int32, drafts up to the first wrong one.
      accepted: [slots] int32, number of them that were right.
      recovery: growth of the share where none was tried.

    Arrays may have further dimensions, for several kinds of drafts.
    """
    tried = tried.astype(np.float32)
    fresh = accepted.astype(np.float32) / xp.maximum(tried, np.float32(1))
    keep = (1 - ACCEPTANCE_WEIGHT) ** tried
    revived = acceptance + recovery * (1 - acceptance)
    return xp.where(tried > 0, keep * acceptance + (1 - keep) * fresh, revived)


class SegmentDemand(NamedTuple):
    """Slots that could run a segment in this step.

    Attributes:
      ready: [slots] bool, whether the slot has rows that should run.
      rows: [slots] int32, the number of those rows.
      can_join: [slots] bool, whether the slot's oldest row belongs to an emitted token and could
        run too.
      others_busy: [] bool, whether some slot can start a row in the first segment or has a prompt
        to run.
    """

    ready: Any
    rows: Any
    can_join: Any
    others_busy: Any


def segment_demand(xp: Any, e: int, at: SlotProgress, cap: int, can_start: Any) -> SegmentDemand:
    """Return the demand for segment e.

    can_start: [slots] bool, whether the slot has a row for the first segment
    (`SlotProgress.can_start`).
    """
    if e == 0:
        return SegmentDemand(
            can_start, xp.ones_like(at.position), xp.zeros_like(can_start), xp.zeros((), bool)
        )
    rows, started = at.filled[:, e - 1] - at.filled[:, e], at.live & ~at.in_prefill
    ready = at.must_run(e, cap)
    can_join = started & (rows > 0) & (at.filled[:, e] < at.position)
    return SegmentDemand(ready, rows, can_join, xp.any(can_start | at.in_prefill))


def is_delayed(xp: Any, plan: BatchPlan, e: int, demand: SegmentDemand, waited: Any) -> Any:
    """Return whether segment e waits for more slots, [] bool, by the plan's `fill` and `patience`.

    waited: [slots] int32, steps that each slot has waited.
    """
    few = xp.sum(demand.ready.astype(np.int32)) < plan.fill[e]
    longest = xp.max(xp.where(demand.ready, waited, -1))
    return demand.others_busy & few & (longest < plan.patience[e])


class SegmentBatch(NamedTuple):
    """The rows that a segment runs in this step.

    Attributes:
      mode: [] int32, SKIP, IN_PLACE, or PACKED + the number of the bucket.
      rows: [slots] int32, rows of each slot that run.
      order: [slots] int32, slots in the order in which their rows are packed.
      spans: [] int32, spans of packed rows.
    """

    mode: Any
    rows: Any
    order: Any
    spans: Any


def select_batch(
    xp: Any,
    plan: BatchPlan,
    e: int,
    buckets: Sequence[int],
    width: int,
    demand: SegmentDemand,
    waited: Any,
) -> SegmentBatch:
    """Choose the rows that segment e runs, and the mode.

    Slots are taken in the order of their arrival, until the largest bucket is full, unless all of
    them are delayed (`is_delayed`). The faster mode is chosen: their rows packed into the smallest
    bucket that holds them or, if each slot has one row, all slots in place, including those that
    can join.

    Args:
      buckets: row counts that packed segments are compiled for, ascending.
      width: rows of a span.
      demand: result of `segment_demand`.
      waited: [slots] int32, steps that each slot has waited.
    """
    ready, rows, most = demand.ready, demand.rows, buckets[-1]
    skipped = ~xp.any(ready) | is_delayed(xp, plan, e, demand, waited)
    # Slots that are not ready come last, however long they have waited.
    order, rank = stable_ranks(xp, xp.where(ready, -xp.minimum(waited, 1 << 29), 1 << 29))
    wanted = xp.where(ready, rows, 0)
    wanted_in_order = _pick(xp, wanted, order)
    total_wanted = xp.cumsum(wanted_in_order)
    taken = xp.where(total_wanted <= most, wanted_in_order, 0)
    spans = xp.sum(-(-taken // width))
    bucket = xp.sum((np.asarray(buckets) < xp.sum(taken)).astype(np.int32))
    costs = plan.packed[e] + plan.span[e] * spans.astype(np.float32)
    # In place also if the largest bucket does not hold all rows, and if the row is the only slot's.
    cheaper = (plan.in_place[e] <= _pick(xp, costs, bucket)) | (total_wanted[-1] > most)
    cheaper = cheaper | (len(ready) == 1)
    in_place = (xp.max(wanted) <= 1) & cheaper
    mode = xp.where(skipped, SKIP, xp.where(in_place, IN_PLACE, PACKED + bucket))
    taken = xp.where(in_place, (ready | demand.can_join).astype(np.int32), _pick(xp, taken, rank))
    return SegmentBatch(mode, xp.where(mode == SKIP, 0, taken), order, spans)


def select_prefill(xp: Any, at: SlotProgress, since: Any, chunk: int) -> tuple[Any, Any]:
    """Choose the prompt rows that run in this step, at most `chunk` of them.

    Slots are taken in the order of their arrival, each as far as there is room.

    Args:
      since: [slots] int32, the step in which each slot was filled.

    Returns:
      (rows [slots] of each slot, order [slots] in which their rows are packed).
    """
    todo = xp.where(at.in_prefill, at.prompt_len - at.filled[:, 0], 0)
    order, rank = stable_ranks(xp, xp.where(at.in_prefill, since, np.iinfo(np.int32).max))
    todo = _pick(xp, todo, order)
    excess = xp.maximum(xp.cumsum(todo) - chunk, 0)
    return _pick(xp, xp.maximum(todo - excess, 0), rank), order


def _pick(xp: Any, a: Any, index: Any) -> Any:
    """Return a[index], for indices from 0 to the end of a."""
    return a[index] if xp is np else gather(a, index)


def stable_ranks(xp: Any, keys: Any) -> tuple[Any, Any]:
    """Sort keys [n] stably: (indices [n] in sorted order, rank [n] of each key).

    It compares all pairs of keys: for as few keys as there are slots, XLA does this faster than two
    sorts.
    """
    i = xp.arange(len(keys), dtype=np.int32)
    before = (keys[None] < keys[:, None]) | ((keys[None] == keys[:, None]) & (i[None] < i[:, None]))
    rank = xp.sum(before.astype(np.int32), axis=1)
    return xp.argmax(rank[None] == i[:, None], axis=1), rank
