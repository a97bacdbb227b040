"""Who goes deeper now, and how: the decisions of `batched`, in numbers of numpy or of JAX.

The engine takes them on the device and the simulator beside it; both call these functions, with
`jax.numpy` or `numpy` as `xp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import struct

from eejax.common.errors import require, require_array

HELD, IN_PLACE, PACKED = 0, 1, 2  # ways to run a segment; from PACKED on, one for each bucket


@struct.dataclass
class Plan:
    """What decisions weigh, by segment: traced arrays, so that another plan compiles nothing.

    fill [e]: slots that have to wait below a segment for it to run, while others have work
        elsewhere; 1 holds nobody back.
    patience [e]: sweeps that a slot is held back at most.
    in_place [e]: seconds of one row of all slots; packed [e, buckets]: of so many rows of some of
        them, apart from their attention; span [e]: of one span's attention.
    """

    fill: Any
    patience: Any
    in_place: Any
    packed: Any
    span: Any

    @classmethod
    def make(
        cls,
        segments: int,
        slots: int,
        buckets: Sequence[int],
        fill: Sequence[int] | int = 1,
        patience: Sequence[int] | int = 0,
        seconds: tuple[Any, Any, Any] | None = None,
    ) -> Plan:
        """For an engine of so many segments, slots and row buckets. `seconds`: (in_place, packed,
        span), by default in proportion to rows. Raises ConfigError for another shape, a fill or
        patience below 0, or seconds that are none."""
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
            allowed = f"must be a whole number, or {segments}: one a segment"
            a = require_array(f"plan.{name}", value, allowed)
            ok = a.dtype.kind in "iu" and a.shape in ((), (segments,))
            ok = ok and bool(np.all((a >= 0) & (a <= np.iinfo(np.int32).max)))
            require(ok, f"plan.{name}", value, allowed)
            given[name] = np.array(np.broadcast_to(a, (segments,)), np.int32)
        return cls(**given)


class Standing(NamedTuple):
    """Where slots stand, arrays [slots]: `filled` [slots, e], rows each segment has seen; position,
    of the row that decides the token to emit next; remaining, tokens to emit; given, rows of the
    prompt."""

    filled: Any
    position: Any
    remaining: Any
    given: Any

    @property
    def live(self) -> Any:
        return self.remaining > 0

    @property
    def prompting(self) -> Any:
        return self.live & (self.filled[:, 0] < self.given)

    @property
    def ahead(self) -> Any:
        """Pending rows: the one that decides, and those behind it that read drafts."""
        return self.filled[:, 0] - self.position

    @property
    def stage(self) -> Any:
        """The segment that the row at `position` is to go through next."""
        return (self.filled > self.position[:, None]).astype(np.int32).sum(-1)

    def full(self, cap: int) -> Any:
        """Whether so many tokens wait that they go deeper before another begins."""
        return self.filled[:, 0] - self.filled[:, -1] >= cap

    def begins(self, cap: int, drafts: Any) -> Any:
        """Whether the first segment has a row to run: of a token that was emitted, or of a draft
        where fewer than `drafts` [slots] are pending."""
        ahead = self.ahead
        more = (ahead <= drafts) & (ahead < self.remaining)
        return self.live & ~self.prompting & ~self.full(cap) & ((ahead <= 0) | more)


class Wish(NamedTuple):
    """Who wants through a segment. goes, rows [slots]: whether, and with how many rows; riders
    [slots]: whose oldest row, of a token that was emitted, could go along; movers: whether others
    have work elsewhere."""

    goes: Any
    rows: Any
    riders: Any
    movers: Any


def wish(xp: Any, e: int, at: Standing, cap: int, begins: Any) -> Wish:
    """Segment e's, of slots of which `begins` [slots] have a row for the first."""
    if e == 0:
        return Wish(begins, xp.ones_like(at.position), xp.zeros_like(begins), xp.zeros((), bool))
    rows = at.filled[:, e - 1] - at.filled[:, e]
    started = at.live & ~at.prompting
    undecided = started & (at.ahead > 0) & (at.stage == e)
    goes = undecided | (started & at.full(cap) & (rows > 0))
    riders = started & (rows > 0) & (at.filled[:, e] < at.position)
    return Wish(goes, rows, riders, xp.any(begins | at.prompting))


class Chosen(NamedTuple):
    """A decision. way: HELD, IN_PLACE, or PACKED + the bucket's number; count [slots]: rows that go
    of each slot; order [slots]: slots, those that go first; spans: of packed rows."""

    way: Any
    count: Any
    order: Any
    spans: Any


def choose(
    xp: Any,
    plan: Plan,
    e: int,
    buckets: Sequence[int],
    width: int,
    wish: Wish,
    waited: Any,
) -> Chosen:
    """Segment e's turn. waited [slots]: sweeps that a slot has waited; width: of a span.

    Slots go in the order they came in, as far as the largest bucket reaches. All of them wait while
    they are few, others have work, and nobody's patience ends; otherwise they go the way that takes
    fewer seconds: their rows packed into the smallest bucket that takes them, or, where each has
    one, all slots in place, with riders.
    """
    goes, rows, _, movers = wish
    most = buckets[-1]
    n = xp.sum(goes.astype(np.int32))
    longest = xp.max(xp.where(goes, waited, -1))
    held = movers & (n < plan.fill[e]) & (longest < plan.patience[e])
    # Who does not go comes last, whatever it waited.
    order, rank = sort(xp, xp.where(goes, -xp.minimum(waited, 1 << 29), 1 << 29))
    upto = xp.cumsum(xp.where(goes, rows, 0)[order])
    count = xp.where(upto <= most, xp.where(goes, rows, 0)[order], 0)
    total = xp.sum(count)
    spans = xp.sum(-(-count // width))
    bucket = xp.sum((np.asarray(buckets) < total).astype(np.int32))
    costs = plan.packed[e] + plan.span[e] * spans.astype(np.float32)
    wanted = xp.where(goes, rows, 0)
    cheaper = (plan.in_place[e] <= costs[bucket]) | (upto[-1] > most)  # or some are left out
    in_place = (xp.max(wanted) <= 1) & cheaper
    way = xp.where((n == 0) | held, HELD, xp.where(in_place, IN_PLACE, PACKED + bucket))
    count = xp.where(in_place, (goes | wish.riders).astype(np.int32), count[rank])
    return Chosen(way, xp.where(way == HELD, 0, count), order, spans)


def prompts(xp: Any, at: Standing, since: Any, most: int) -> tuple[Any, Any]:
    """The next chunk of prompts, of at most so many rows: (count [slots], order [slots]).

    Those that came first go first, each as far as there is room.
    """
    left = xp.where(at.prompting, at.given - at.filled[:, 0], 0)
    order, rank = sort(xp, xp.where(at.prompting, since, np.iinfo(np.int32).max))
    over = xp.maximum(xp.cumsum(left[order]) - most, 0)
    return xp.maximum(left[order] - over, 0)[rank], order


def sort(xp: Any, keys: Any) -> tuple[Any, Any]:
    """(indices that sort keys [n] stably, the rank of each key). By comparing all with all, which
    for as few as there are slots takes XLA less time than two sorts."""
    i = xp.arange(len(keys), dtype=np.int32)
    before = (keys[None] < keys[:, None]) | ((keys[None] == keys[:, None]) & (i[None] < i[:, None]))
    rank = xp.sum(before.astype(np.int32), axis=1)
    return xp.argmax(rank[None] == i[:, None], axis=1), rank
