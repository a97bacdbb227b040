"""Decisions of a batch: who goes, in which order, and how."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.inference.batched_state import BatchOptions
from eejax.inference.packing import HELD, IN_PLACE, PACKED, Plan, Standing, Wish, choose, wish

SLOTS, BUCKETS, WIDTH = 6, (2, 4, 9), 2


def listed(element):
    return st.lists(element, min_size=SLOTS, max_size=SLOTS).map(np.array)


@settings(max_examples=200)
@given(
    goes=listed(st.booleans()), rows=listed(st.integers(1, 9)), waited=listed(st.integers(0, 5)),
    riders=listed(st.booleans()), movers=st.booleans(), fill=st.integers(0, 7),
    patience=st.integers(0, 5), seconds=st.lists(st.floats(0.1, 9), min_size=5, max_size=5),
)  # fmt: skip
def test_decisions(goes, rows, waited, riders, movers, fill, patience, seconds):
    plan = Plan.make(
        1, SLOTS, BUCKETS, fill, patience, ([seconds[0]], [sorted(seconds[1:4])], [seconds[4]])
    )
    wished = Wish(goes, rows, riders & ~goes, np.bool_(movers))
    one = choose(np, plan, 0, BUCKETS, WIDTH, wished, waited)
    two = choose(
        jnp, plan, 0, BUCKETS, WIDTH, Wish(*(jnp.asarray(a) for a in wished)), jnp.asarray(waited)
    )
    for a, b in zip(one, two, strict=True):  # the engine's and the simulator's
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    n = goes.sum()
    held = movers and n < fill and waited[goes].max(initial=-1) < patience
    if n == 0 or held:
        assert one.way == HELD and not one.count.any()
        return
    assert one.way != HELD
    if one.way == IN_PLACE:
        assert (rows[goes] == 1).all() and (one.count == (goes | wished.riders)).all()
        return
    # Packed: whole slots, those that waited longest, as many as the largest bucket takes.
    bucket = BUCKETS[one.way - PACKED]
    assert ((one.count == 0) | (one.count == rows)).all() and not one.count[~goes].any()
    total = one.count.sum()
    assert 0 < total <= bucket and all(b >= bucket or b < total for b in BUCKETS)
    taken = one.count > 0
    left = goes & ~taken
    if left.any():
        first = min(np.flatnonzero(left), key=lambda i: (-waited[i], i))
        ahead = [i for i in np.flatnonzero(taken) if (-waited[i], i) < (-waited[first], first)]
        assert len(ahead) == taken.sum()
        assert rows[list(ahead)].sum() + rows[first] > BUCKETS[-1]
    assert one.spans == sum(-(-c // WIDTH) for c in one.count)


def test_the_cheaper_way_is_taken():
    goes = np.array([True, True, False, False, False, False])
    wished = Wish(goes, np.ones(SLOTS, int), np.zeros(SLOTS, bool), np.bool_(False))
    none = np.zeros(SLOTS, int)
    plan = lambda *seconds: Plan.make(1, SLOTS, BUCKETS, seconds=seconds)
    way = lambda *seconds: choose(np, plan(*seconds), 0, BUCKETS, WIDTH, wished, none).way
    assert way([3.0], [[1.0, 2.0, 3.0]], [0.5]) == PACKED  # 1 + 2 spans of 0.5
    assert way([1.9], [[1.0, 2.0, 3.0]], [0.5]) == IN_PLACE
    assert way([1.9], [[1.0, 2.0, 3.0]], [0.4]) == PACKED


def test_wishes():
    # Two segments, a cap of 3: fresh, undecided, full, with its prompt, over, free.
    at = Standing(
        np.array([[7, 7], [8, 7], [9, 6], [3, 3], [5, 5], [0, 0]]),
        np.array([7, 7, 9, 8, 5, 0]), np.array([4, 4, 4, 4, 0, 0]), np.array([5, 5, 5, 9, 4, 0]),
    )  # fmt: skip
    begins = at.begins(3, np.zeros(SLOTS, int))
    assert begins.tolist() == [True] + [False] * 5
    assert at.begins(3, np.full(SLOTS, 2)).tolist() == [True, True] + [False] * 4
    first = wish(np, 0, at, 3, begins)
    assert first.goes.tolist() == begins.tolist() and not first.movers
    second = wish(np, 1, at, 3, begins)
    assert second.goes.tolist() == [False, True, True, False, False, False]
    assert second.rows.tolist()[1:3] == [1, 3] and second.movers
    # What waits and was emitted may ride along; what is undecided may not.
    waits = at._replace(filled=np.array([[7, 6], [8, 7], [9, 7], [3, 3], [5, 4], [0, 0]]))
    assert wish(np, 1, waits, 3, begins).riders.tolist() == [True, False, True] + [False] * 3


@pytest.mark.parametrize("change, field", [
    (dict(fill=-1), "fill"), (dict(fill=[1]), "fill"), (dict(patience=0.5), "patience"),
    (dict(fill=2**40), "fill"), (dict(patience=2**31), "patience"),
    (dict(seconds="abc"), "seconds"), (dict(seconds=(1, 2)), "seconds"),
    (dict(seconds=([[1], [1, 2]], 1, 1)), "in_place"),
    (dict(seconds=([1.0], [[1.0] * 3], [1.0])), "in_place"),
    (dict(seconds=([1.0, 1], [[1.0] * 2] * 2, [1.0, 1])), "packed"),
    (dict(seconds=([1.0, 1], [[1.0] * 3] * 2, [1.0, np.nan])), "span"),
])  # fmt: skip
def test_plans_that_cannot_be(change, field):
    with pytest.raises(ConfigError, match=f"plan.{field}"):
        Plan.make(2, SLOTS, BUCKETS, **change)


@pytest.mark.parametrize("slots", [2, 4, 16, 64])
def test_a_request_that_is_alone_goes_with_one_row(slots):
    buckets = BatchOptions().of_slots(slots).buckets
    plan = Plan.make(1, slots, buckets)
    alone = np.arange(slots) == slots - 1
    none = np.zeros(slots, bool)
    wished = Wish(alone, np.ones(slots, int), none, np.zeros((), bool))
    chosen = choose(np, plan, 0, buckets, 4, wished, np.zeros(slots, int))
    assert buckets[0] == 1 and chosen.way == PACKED
    assert chosen.count.tolist() == alone.astype(int).tolist()
    assert 1 not in BatchOptions().of_slots(1).buckets  # which is run in place
