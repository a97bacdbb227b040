"""A partial model that grows: requests go on as if all of it had been there."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from eejax.common.errors import ConfigError
from eejax.inference.deepening import deepen, more_weights, on_host, select_slots
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.options import EngineOptions
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import SamplingParams
from eejax.inference.state import RequestRows
from eejax.inference.weights import prepare

CONTEXT, SLOTS = 96, 3
LENGTHS = (5, 40, 33)


def request(config, length, threshold, temperature, drafts):
    policy = ExitPolicy.make(config, 1, threshold, drafts=drafts)
    sampling = SamplingParams.make(1, temperature, seed=7 + length)
    return RequestRows.make(config, [length], [CONTEXT - length], policy, sampling)


def went(engine, state, calls):
    """(state, [(token, exit, log-probability)] of each slot) after so many calls."""
    found = [[] for _ in range(SLOTS)]
    for _ in range(calls):
        state, record = engine.generate(state, 4)
        for slot in range(SLOTS):
            columns = (np.asarray(a)[:, slot] for a in (record.token, record.exit, record.logprob))
            rows = zip(*columns, strict=True)
            found[slot] += [(int(t), int(e), float(p)) for t, e, p in rows if e >= 0]
    return state, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "depths, threshold, temperature, drafts",
    [
        ((2, 3), 0.4, 1.0, 2),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in (
                ((2, 4), 0.4, 1.0, 2),
                ((1, 4), 0.3, 0.0, 0),
                ((1, 2, 4), 0.4, 1.0, 2),
                ((2, 3, 4), 0.6, 0.0, 3),
                ((3, 4), 1.0, 1.0, 0),
            )
        ),
    ],
)
def test_requests_go_on_as_in_the_deeper_model(
    subset, prompts, depths, threshold, temperature, drafts
):
    """The oracle: the deeper engine, given all tokens so far, which it runs anew."""
    p, config = subset(tuple(range(1, depths[-1])))
    options = EngineOptions(cap=4, drafts=3, buckets=(8,), num_segments=depths[0], can_deepen=True)
    engine = EarlyExitEngine.make(p, config, options, slots=SLOTS, context=CONTEXT)
    texts = [prompts(i, [n])[0] for i, n in enumerate(LENGTHS)]
    asked = [request(config, n, threshold, temperature, drafts) for n in LENGTHS]
    state = engine.start()
    for slot, (text, own) in enumerate(zip(texts, asked, strict=True)):
        rows, _ = engine.prefill([text], own)
        state = engine.insert(state, rows, [slot])
    state, found = went(engine, state, 3)
    texts = [text + [t for t, *_ in got] for text, got in zip(texts, found, strict=True)]
    compared = 0
    for depth in depths[1:]:
        weights = more_weights(engine.weights, on_host(p, config), config, depth)
        assert weights.segments[: engine.num_segments] == engine.weights.segments  # the very arrays
        engine, state = deepen(engine, state, weights)
        assert engine.num_segments == depth and (state.boundary is None) == (depth == depths[-1])
        # A whole model's state keeps no more either way: with one value it is the same program.
        last = depth > config.n_exits
        whole = dataclasses.replace(options, num_segments=depth, can_deepen=last)
        fresh = EarlyExitEngine.make(p, config, whole, slots=SLOTS, context=CONTEXT)
        other = fresh.start()
        for slot, (text, own) in enumerate(zip(texts, asked, strict=True)):
            rows, _ = fresh.prefill([text], own)
            other = fresh.insert(other, rows, [slot])
        state, ours = went(engine, state, 3)
        _, theirs = went(fresh, other, 6)
        for a, b in zip(ours, theirs, strict=True):
            n = min(len(a), len(b))
            assert n == len(a) > 3
            assert [x[:2] for x in a] == [x[:2] for x in b[:n]]
            np.testing.assert_allclose([x[2] for x in a], [x[2] for x in b[:n]], atol=2e-4)
            compared += n
        texts = [text + [t for t, *_ in got] for text, got in zip(texts, ours, strict=True)]
    assert compared > 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_on_the_host_is_made_once(subset, dtype):
    """Nothing is cast, copied or computed with when a part of it is taken."""
    p, config = subset((1, 2, 3))
    config = config.replace(dtype=dtype)
    host = on_host(p, config)
    leaves = jax.tree.leaves(host)
    assert all(isinstance(a, np.ndarray) for a in leaves)

    def same(tree):
        return all(a is b for a, b in zip(jax.tree.leaves(tree), leaves, strict=True))

    assert same(on_host(host, config))
    taken, want = prepare(host, config, 3), prepare(p, config, 3)
    for a, b in zip(jax.tree.leaves(taken), jax.tree.leaves(want), strict=True):
        assert isinstance(a, np.ndarray) and any(np.shares_memory(a, one) for one in leaves)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, np.asarray(b))
    assert jax.tree.structure(taken) == jax.tree.structure(want)


def test_other_slots_have_the_plan_of_their_engine(subset):
    """That of "speculative" waits until no slot can make another draft."""
    p, config = subset((1, 3))
    options = EngineOptions("speculative", cap=4, drafts=2, chunk=8, buckets=(6,))
    two, one = (EarlyExitEngine.make(p, config, options, slots=n, context=CONTEXT) for n in (2, 1))
    other, state = select_slots(two, two.start(), [1])
    for plan in (other.plan, state.plan):
        jax.tree.map(np.testing.assert_array_equal, plan, one.plan)
    assert one.plan.fill.tolist() == [2, 2]


def test_what_cannot_grow_says_so(subset):
    p, config = subset((1, 2, 3))
    engine = EarlyExitEngine.make(
        p, config, EngineOptions(num_segments=2), slots=2, context=CONTEXT
    )

    def more(depth):
        return more_weights(engine.weights, on_host(p, config), config, depth)

    with pytest.raises(ConfigError, match="can_deepen = False: must be True"):
        deepen(engine, engine.start(), more(3))
    with pytest.raises(ConfigError, match=r"depth = 2: must be in 3..4"):
        more(2)
    whole = EarlyExitEngine.make(
        p, config, EngineOptions(can_deepen=True), slots=2, context=CONTEXT
    )
    assert whole.start().boundary is None
