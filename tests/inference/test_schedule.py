"""Decisions of a batch: who goes, in which order, and how."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.inference.options import EngineOptions
from eejax.inference.schedule import (
    IN_PLACE,
    PACKED,
    SKIP,
    BatchPlan,
    SegmentDemand,
    SlotProgress,
    best_drafts,
    segment_demand,
    select_batch,
    update_acceptance,
)
from eejax.models.config import ModelConfig

SLOTS, BUCKETS, WIDTH = 6, (2, 4, 9), 2


def listed(element):
    return st.lists(element, min_size=SLOTS, max_size=SLOTS).map(np.array)


@settings(max_examples=200)
@given(
    ready=listed(st.booleans()),
    rows=listed(st.integers(1, 9)),
    waited=listed(st.integers(0, 5)),
    can_join=listed(st.booleans()),
    others_busy=st.booleans(),
    fill=st.integers(0, 7),
    patience=st.integers(0, 5),
    seconds=st.lists(st.floats(0.1, 9), min_size=5, max_size=5),
)
def test_decisions(ready, rows, waited, can_join, others_busy, fill, patience, seconds):
    plan = BatchPlan.make(
        1, SLOTS, BUCKETS, fill, patience, ([seconds[0]], [sorted(seconds[1:4])], [seconds[4]])
    )
    demand = SegmentDemand(ready, rows, can_join & ~ready, np.bool_(others_busy))
    one = select_batch(np, plan, 0, BUCKETS, WIDTH, demand, waited)
    two = select_batch(
        jnp,
        plan,
        0,
        BUCKETS,
        WIDTH,
        SegmentDemand(*(jnp.asarray(a) for a in demand)),
        jnp.asarray(waited),
    )
    for a, b in zip(one, two, strict=True):  # the engine's and the simulator's
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    n = ready.sum()
    held = others_busy and n < fill and waited[ready].max(initial=-1) < patience
    if n == 0 or held:
        assert one.mode == SKIP and not one.rows.any()
        return
    assert one.mode != SKIP
    if one.mode == IN_PLACE:
        assert (rows[ready] == 1).all() and (one.rows == (ready | demand.can_join)).all()
        return
    # Packed: whole slots, those that waited longest, as many as the largest bucket takes.
    bucket = BUCKETS[one.mode - PACKED]
    assert ((one.rows == 0) | (one.rows == rows)).all() and not one.rows[~ready].any()
    total = one.rows.sum()
    assert 0 < total <= bucket and all(b >= bucket or b < total for b in BUCKETS)
    taken = one.rows > 0
    left = ready & ~taken
    if left.any():
        first = min(np.flatnonzero(left), key=lambda i: (-waited[i], i))
        ahead = [i for i in np.flatnonzero(taken) if (-waited[i], i) < (-waited[first], first)]
        assert len(ahead) == taken.sum()
        assert rows[list(ahead)].sum() + rows[first] > BUCKETS[-1]
    assert one.spans == sum(-(-c // WIDTH) for c in one.rows)


def test_the_cheaper_way_is_taken():
    ready = np.array([True, True, False, False, False, False])
    demand = SegmentDemand(ready, np.ones(SLOTS, int), np.zeros(SLOTS, bool), np.bool_(False))
    none = np.zeros(SLOTS, int)

    def plan(*seconds):
        return BatchPlan.make(1, SLOTS, BUCKETS, seconds=seconds)

    def way(*seconds):
        return select_batch(np, plan(*seconds), 0, BUCKETS, WIDTH, demand, none).mode

    assert way([3.0], [[1.0, 2.0, 3.0]], [0.5]) == PACKED  # 1 + 2 spans of 0.5
    assert way([1.9], [[1.0, 2.0, 3.0]], [0.5]) == IN_PLACE
    assert way([1.9], [[1.0, 2.0, 3.0]], [0.4]) == PACKED


def test_wishes():
    # Two segments, a cap of 3: fresh, undecided, full, with its prompt, over, free.
    at = SlotProgress(
        np.array([[7, 7], [8, 7], [9, 6], [3, 3], [5, 5], [0, 0]]),
        np.array([7, 7, 9, 8, 5, 0]),
        np.array([4, 4, 4, 4, 0, 0]),
        np.array([5, 5, 5, 9, 4, 0]),
    )
    begins = at.can_start(3, np.zeros(SLOTS, int))
    assert begins.tolist() == [True] + [False] * 5
    assert at.can_start(3, np.full(SLOTS, 2)).tolist() == [True, True] + [False] * 4
    first = segment_demand(np, 0, at, 3, begins)
    assert first.ready.tolist() == begins.tolist() and not first.others_busy
    second = segment_demand(np, 1, at, 3, begins)
    assert second.ready.tolist() == [False, True, True, False, False, False]
    assert second.rows.tolist()[1:3] == [1, 3] and second.others_busy
    # What waits and was emitted may ride along; what is undecided may not.
    waits = at._replace(filled=np.array([[7, 6], [8, 7], [9, 7], [3, 3], [5, 4], [0, 0]]))
    assert (
        segment_demand(np, 1, waits, 3, begins).can_join.tolist()
        == [True, False, True] + [False] * 3
    )


@pytest.mark.parametrize(
    "change, field",
    [
        (dict(fill=-1), "fill"),
        (dict(fill=[1]), "fill"),
        (dict(patience=0.5), "patience"),
        (dict(fill=2**40), "fill"),
        (dict(patience=2**31), "patience"),
        (dict(seconds="abc"), "seconds"),
        (dict(seconds=(1, 2)), "seconds"),
        (dict(seconds=([[1], [1, 2]], 1, 1)), "in_place"),
        (dict(seconds=([1.0], [[1.0] * 3], [1.0])), "in_place"),
        (dict(seconds=([1.0, 1], [[1.0] * 2] * 2, [1.0, 1])), "packed"),
        (dict(seconds=([1.0, 1], [[1.0] * 3] * 2, [1.0, np.nan])), "span"),
    ],
)
def test_plans_that_cannot_be(change, field):
    with pytest.raises(ConfigError, match=f"plan.{field}"):
        BatchPlan.make(2, SLOTS, BUCKETS, **change)


@pytest.mark.parametrize("slots", [2, 4, 16, 64])
def test_a_request_that_is_alone_goes_with_one_row(slots):
    config = ModelConfig(vocab_size=8, n_layers=1, d_model=8, n_heads=1, context_length=64)
    buckets = EngineOptions(drafts=4).resolved(config, slots).buckets
    plan = BatchPlan.make(1, slots, buckets)
    alone = np.arange(slots) == slots - 1
    none = np.zeros(slots, bool)
    demand = SegmentDemand(alone, np.ones(slots, int), none, np.zeros((), bool))
    chosen = select_batch(np, plan, 0, buckets, 4, demand, np.zeros(slots, int))
    assert buckets[0] == 1 and chosen.mode == PACKED
    assert chosen.rows.tolist() == alone.astype(int).tolist()
    assert 1 not in EngineOptions(drafts=4).resolved(config, 1).buckets  # one row runs in place


@settings(max_examples=60)
@given(
    share=st.lists(st.floats(0.01, 1), min_size=SLOTS, max_size=SLOTS),
    allowed=st.lists(st.integers(0, 6), min_size=SLOTS, max_size=SLOTS),
    cost=st.one_of(st.just(0.0), st.floats(0.01, 2)),
    verify=st.sampled_from([(0.0, 0.0), (0.3, 0.12), (0.02, 0.5)]),
)
def test_as_many_are_drafted_as_promise_the_most_tokens_for_their_time(
    share, allowed, cost, verify
):
    share, allowed = np.float32(share), np.int32(allowed)
    most = 6

    def rate(a: float, k: int) -> float:
        """Leviathan et al. 2023, eq. 1, over the time that k drafts and a full step take."""
        extra = verify[0] + verify[1] * (k - 1) if k else 0.0
        tokens = sum(float(a) ** i for i in range(k + 1))
        return tokens / (1 + float(np.float32(cost)) * k + extra)

    for xp in (np, jnp):
        costs = np.float32(cost), np.float32(verify)
        found = np.asarray(best_drafts(xp, xp.asarray(share), *costs, allowed, most))
        assert (found <= allowed).all()
        for a, limit, k in zip(share, allowed, found, strict=True):
            if cost + verify[0] == 0:
                assert k == limit
            else:
                assert rate(a, k) >= max(rate(a, n) for n in range(limit + 1)) * (1 - 1e-5)


@settings(max_examples=60)
@given(
    share=st.floats(0, 1),
    drafts=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4),
)
def test_the_share_of_accepted_drafts_follows_what_was_tried(share, drafts):
    tried = np.int32([max(pair) for pair in drafts])
    right = np.int32([min(pair) for pair in drafts])
    before = np.full(len(drafts), share, np.float32)
    found = update_acceptance(np, before, tried, right)
    same = update_acceptance(jnp, jnp.asarray(before), jnp.asarray(tried), jnp.asarray(right))
    np.testing.assert_allclose(found, same, atol=1e-6)
    for new, n, accepted in zip(found, tried, right, strict=True):
        # A mean over drafts in which each of the last n has the weight of its share of them.
        want = 0.8**n * share + (1 - 0.8**n) * accepted / n if n else share + 0.002 * (1 - share)
        assert abs(new - want) < 1e-6
