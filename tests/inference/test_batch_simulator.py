"""The simulator runs what the engine runs, and its costs are those that are there."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.inference import batch_costs
from eejax.inference.batch_simulator import (
    EngineSizes,
    RequestTrace,
    StepCosts,
    WorkCounts,
    best_plan,
    fit,
    simulate,
)
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.engine_step import PROMPT_SPAN
from eejax.inference.options import EngineOptions
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import SamplingParams, argmax
from eejax.inference.schedule import BatchPlan
from eejax.inference.segment_branches import SPAN
from eejax.inference.state import RequestRows
from eejax.models import exits, transformer
from eejax.sharding.mesh import MeshConfig

SLOTS, CONTEXT, BUCKETS = 4, 72, (3, 6, 12)
OPTIONS = EngineOptions(cap=6, drafts=3, chunk=16, buckets=BUCKETS)


@pytest.fixture(scope="module")
def engine(subset):
    p, config = subset((1, 3))
    return p, EarlyExitEngine.make(p, config, OPTIONS, slots=SLOTS, context=CONTEXT)


@pytest.fixture(scope="module")
def drafting(subset):
    """An engine of one slot whose drafts the final exit verifies."""
    p, config = subset((1, 3))
    options = EngineOptions("speculative", cap=4, drafts=3, chunk=16, buckets=(4,))
    return p, EarlyExitEngine.make(p, config, options, slots=1, context=CONTEXT)


@functools.partial(jax.jit, static_argnames="config")
def first_exit_says(p, config, ids):
    h = transformer.exit_states(p, config, ids, which=[0])[0]
    return argmax(exits.logits(exits.head(p, config, 0), h))[0]


def traces_of(p, config, prompts, texts, drafts):
    """Of texts [(tokens, exits)], what the first exit would draft seen in one pass."""
    found = []
    for prompt, (tokens, left), most in zip(prompts, texts, drafts, strict=True):
        ids = np.zeros((1, CONTEXT), np.int32)
        ids[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
        said = np.asarray(first_exit_says(p, config, ids))[len(prompt) - 1 :]
        right = said[: len(tokens)] == np.array(tokens)
        found.append(RequestTrace(len(prompt), tuple(left), tuple(right.tolist()), most))
    return found


@settings(max_examples=6)
@given(data=st.data())
def test_the_simulator_runs_what_the_engine_runs(engine, prompts, data):
    """To the number: every segment, bucket, span and chunk, and when each token comes."""
    p, batched = engine
    config, draw = batched.config, data.draw
    seconds = st.floats(0.1, 9)
    plan = BatchPlan.make(
        3,
        SLOTS,
        BUCKETS,
        draw(st.lists(st.integers(0, 5), min_size=3, max_size=3)),
        draw(st.integers(0, 5)),
        (
            [draw(seconds) for _ in range(3)],
            [sorted(draw(seconds) for _ in BUCKETS) for _ in range(3)],
            [draw(seconds) / 8 for _ in range(3)],
        ),
        draw(st.sampled_from([0.0, 0.137, 0.371])),
    )
    n = draw(st.integers(1, SLOTS))
    asked = prompts(draw(st.integers(0, 99)), [draw(st.integers(1, 40)) for _ in range(n)])
    thresholds = [[draw(st.sampled_from([0.1, 0.3, 0.5, 1.0]))] * 2 for _ in range(n)]
    drafts = [draw(st.integers(0, 4)) for _ in range(n)]
    policy = ExitPolicy.make(config, n, thresholds, drafts=drafts)
    request = RequestRows.make(
        config, [len(a) for a in asked], [30] * n, policy, SamplingParams.make(n)
    )
    check_simulated(p, batched, plan, asked, request, drafts, (1, 2, 2))


@settings(max_examples=4)
@given(
    seed=st.integers(0, 99),
    length=st.integers(1, 40),
    drafts=st.integers(0, 3),
    cost=st.sampled_from([0.0, 0.137, 0.371]),
)
@example(seed=3, length=20, drafts=3, cost=0.0)
def test_the_simulator_makes_all_drafts_of_a_single_slot_in_a_step(
    drafting, prompts, seed, length, drafts, cost
):
    p, engine = drafting
    plan = engine.plan.replace(draft_cost=np.float32(cost))
    asked, policy = prompts(seed, [length]), ExitPolicy.make(engine.config, 1, drafts=drafts)
    sampling = SamplingParams.make(1)
    request = RequestRows.make(engine.config, [length], [30], policy, sampling)
    found = check_simulated(p, engine, plan, asked, request, [drafts], (1, 4))
    ahead = np.array(found.counts.runs[0, 0])
    passes = found.counts.runs[1].sum()
    assert found.counts.steps <= passes + found.counts.chunks
    if cost == 0:
        assert (ahead > passes) == (drafts > 0)


def check_simulated(p, engine, plan, asked, request, drafts, depths):
    """Compare what an engine runs for requests, from a start to their ends, with a simulation."""
    n = len(asked)
    rows, _ = engine.prefill(asked, request)
    state = engine.insert(engine.start(), rows, range(n)).replace(plan=plan)
    tokens, left, came = ([[] for _ in asked] for _ in range(3))
    while np.asarray(state.live).any():
        state, record = engine.generate(state, 1)
        for i in range(n):
            there = np.asarray(record.exit)[:, i] >= 0
            tokens[i] += np.asarray(record.token)[there, i].tolist()
            left[i] += np.asarray(record.exit)[there, i].tolist()
            came[i] += [int(state.work.steps)] * int(there.sum())
    texts = [*zip(tokens, left, strict=True)]
    # Nothing is drafted behind a draft that would end a request: none here can be.
    work = jax.tree.map(np.asarray, state.work)
    none = (0.0,) * (1 + len(engine.options.buckets))
    costs = StepCosts(1.0, none, none, 0.0, 0.0, 0.0, depths)  # a second a step
    found = simulate(
        traces_of(p, engine.config, asked, texts, drafts),
        plan,
        costs,
        batch_costs.engine_sizes(engine),
    )
    np.testing.assert_array_equal(found.counts.runs, work.runs)
    np.testing.assert_array_equal(found.counts.spans, work.spans)
    assert (found.counts.chunks, found.counts.chunk_spans) == (work.chunks, work.chunk_spans)
    assert found.counts.steps == work.steps and found.seconds == work.steps
    assert found.emitted == came
    return found


def some_costs():
    return StepCosts(0.5, (6.0, 3.0, 4.0, 6.0), (0.7, 0.4, 0.7, 1.3), 0.3, 20.0, 2.0, (1, 2, 2))


def test_costs_are_found_again():
    """From what other costs, straight in the number of rows, would have taken."""
    rng = np.random.default_rng(0)

    def line(a, b):
        return tuple(a + b * n for n in BUCKETS)

    true = StepCosts(
        0.5, (6.0, *line(2.0, 0.4)), (0.1 + 4 * 0.1, *line(0.1, 0.1)), 0.3, 20.0, 2.0, (1, 2, 2)
    )
    samples = []
    for _ in range(80):
        counts = WorkCounts(
            rng.integers(0, 4, (3, 4)),
            rng.integers(0, 9, 3),
            int(rng.integers(0, 3)),
            int(rng.integers(0, 5)),
            int(rng.integers(1, 5)),
        )
        samples.append((counts, true.seconds(counts)))
    found = fit(samples, (1, 2, 2), SLOTS, BUCKETS)
    for name in ("step", "layer", "exit_check", "span", "chunk", "chunk_span"):
        np.testing.assert_allclose(getattr(found, name), getattr(true, name), rtol=1e-6)
    plan = found.plan(BUCKETS, SLOTS)
    np.testing.assert_allclose(plan.in_place, [6.5, 12.5, 12.5], rtol=1e-5)
    np.testing.assert_allclose(
        plan.packed[1],
        [2 * a + b for a, b in zip(true.layer[1:], true.exit_check[1:], strict=True)],
        rtol=1e-5,
    )
    np.testing.assert_allclose(plan.span, [0.3, 0.6, 0.6], rtol=1e-5)


def test_costs_of_the_engine_explain_other_runs_of_it(engine, prompts):
    """Of a clock that tells what known costs of the work would take."""
    _, batched = engine
    true, now = some_costs(), [0.0]

    def line(a):
        return np.polynomial.Polynomial.fit(BUCKETS, a[1:], 1)

    true = dataclasses.replace(
        true,
        layer=(6.0, *map(float, line(true.layer)(np.array(BUCKETS)))),
        exit_check=tuple(float(0.1 + 0.1 * n) for n in (SLOTS, *BUCKETS)),
    )
    before = [None]

    class Clocked(EarlyExitEngine):
        def generate(self, state, n):
            before[0] = jax.tree.map(np.array, state.work)
            state, record = super().generate(state, n)
            now[0] += true.seconds(batch_costs.work_between(state.work, before[0]))
            return state, record

    clocked = Clocked(**{f.name: getattr(batched, f.name) for f in dataclasses.fields(batched)})
    found = batch_costs.measure(
        clocked, prompts(3, [9, 20, 31]), calls=90, steps=3, clock=lambda: now[0]
    )
    samples = batch_costs.samples(
        clocked, prompts(5, [12, 8, 40]), calls=24, steps=3, seed=1, clock=lambda: now[0]
    )
    errors = [found.seconds(counts) / took - 1 for counts, took in samples]
    assert np.max(np.abs(errors)) < 1e-3
    assert found.depths == (1, 2, 2)


ENGINE = EngineSizes(
    slots=SLOTS, buckets=BUCKETS, cap=6, drafts=3, chunk=16, span=SPAN, prompt_span=PROMPT_SPAN
)


def drawn_traces(rng, n):
    lengths = rng.integers(5, 25, n)
    return [
        RequestTrace(
            int(rng.integers(1, 40)),
            tuple(rng.integers(0, 3, m).tolist()),
            tuple((rng.random(m) < 0.8).tolist()),
            int(rng.integers(0, 4)),
        )
        for m in lengths
    ]


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    fill=st.integers(0, 6),
    patience=st.integers(0, 5),
    slots=st.sampled_from([1, SLOTS]),
)
def test_everybody_gets_every_token_in_order(seed, fill, patience, slots):
    rng = np.random.default_rng(seed)
    traces = drawn_traces(rng, 9)
    costs = some_costs()
    plan = costs.plan(BUCKETS, slots, fill, patience)
    found = simulate(traces, plan, costs, dataclasses.replace(ENGINE, slots=slots), steps=3)
    assert [len(t) for t in found.emitted] == [len(t.exits) for t in traces]
    for times, arrived in zip(found.emitted, found.arrived, strict=True):
        assert all(a < b or a == b for a, b in zip(times, times[1:], strict=False))
        assert arrived < times[0] and times[-1] <= found.seconds
    assert found.seconds == pytest.approx(costs.seconds(found.counts))
    assert len(found.gaps) == found.tokens - len(traces)


def test_the_best_plan_is_the_best_of_those_that_keep_the_bound():
    rng = np.random.default_rng(1)
    traces, costs = drawn_traces(rng, 8), some_costs()
    free = best_plan(traces, costs, ENGINE)
    one = [dataclasses.replace(t, drafts=0) for t in traces]
    none = simulate(one, costs.plan(BUCKETS, SLOTS), costs, ENGINE)

    def rate(found):
        return found.seconds / found.tokens

    assert rate(free.simulated) < rate(none)

    def late(found):
        return np.quantile(found.gaps, 0.99)

    bound = float(late(free.simulated)) * 0.9
    held = best_plan(traces, costs, ENGINE, bound=bound)
    assert late(held.simulated) < late(free.simulated)
    assert rate(held.simulated) >= rate(free.simulated)
    again = [dataclasses.replace(t, drafts=free.drafts) for t in traces]
    assert simulate(again, free.plan, costs, ENGINE).seconds == free.simulated.seconds


def test_what_cannot_be_simulated():
    with pytest.raises(ConfigError, match="trace"):
        RequestTrace(3, (0, 1), (True,))
    with pytest.raises(ConfigError, match="costs"):
        StepCosts(-1.0, (1.0,), (1.0,), 0.0, 0.0, 0.0, (1,))
    with pytest.raises(ConfigError, match="trace"):
        RequestTrace(3, (-1,), (True,))
    with pytest.raises(ConfigError, match="samples"):
        fit([], (1, 2, 2), SLOTS, BUCKETS)
    costs, good = some_costs(), [RequestTrace(5, (2, 0, 1), (True,) * 3)]
    plan = costs.plan(BUCKETS, SLOTS)
    for change, field in (
        (dict(slots=0), "slots"),
        (dict(cap=0), "cap"),
        (dict(cap=99), "buckets"),
        (dict(chunk=0), "chunk"),
        (dict(drafts=-1), "drafts"),
        (dict(buckets=()), "buckets"),
        (dict(span=0.5), "span"),
    ):
        with pytest.raises(ConfigError, match=field):
            dataclasses.replace(ENGINE, **change)
    fewer = dataclasses.replace(ENGINE, buckets=BUCKETS[-1:])
    for change, field in (
        (dict(steps=0), "steps"),
        (dict(engine=fewer), "buckets"),
        (dict(traces=[RequestTrace(5, (7,), (True,))]), "traces"),
        (dict(plan=BatchPlan.make(1, SLOTS, BUCKETS)), "plan"),
    ):
        with pytest.raises(ConfigError, match=field):
            simulate(**dict(traces=good, plan=plan, costs=costs, engine=ENGINE) | change)
    for bad, bound, field in (([], None, "traces"), (good, float("nan"), "bound")):
        with pytest.raises(ConfigError, match=field):
            best_plan(bad, costs, ENGINE, bound=bound)
    one = [RequestTrace(5, (2,), (True,))]  # no two tokens to be apart
    assert best_plan(one, costs, ENGINE, bound=1.0).simulated.tokens == 1


def test_a_tuned_engine_adapts_its_drafts_as_before(subset, prompts):
    p, config = subset((1, 3))
    options = EngineOptions("speculative", cap=4, drafts=2, chunk=16, buckets=(4,))
    engine = EarlyExitEngine.make(p, config, options, slots=2, context=64)
    costs = StepCosts(0.5, (6.0, 3.0), (0.7, 0.4), 0.3, 20.0, 2.0, (1, 4))
    found = batch_costs.tune(engine, prompts(3, [8, 8]), new=8, costs=costs)
    assert float(found.engine.plan.draft_cost) == float(engine.plan.draft_cost) > 0


@pytest.mark.parametrize(
    "change, field",
    [
        (dict(prompts=[]), "prompts"),
        (dict(new=0), "new"),
        (dict(drafts=1), "drafts"),
        (dict(gate="nope"), "gate"),
        (dict(costs=None, prompts=[]), "prompts"),
    ],
)
def test_what_cannot_be_tuned(subset, change, field):
    """Told before anything is run."""
    p, config = subset((1, 3))
    engine = EarlyExitEngine.make(p, config, slots=2, context=64)
    with pytest.raises(ConfigError, match=field):
        batch_costs.tune(engine, **dict(prompts=[[1, 2]], costs=some_costs()) | change)
    with pytest.raises(ConfigError, match="calls"):
        batch_costs.samples(engine, [[1, 2]], calls=0)
    halves = EarlyExitEngine.make(p, config, slots=2, context=64, mesh=MeshConfig(data=2))
    for call in (
        lambda: batch_costs.tune(halves, [[1, 2]], costs=some_costs()),
        lambda: batch_costs.measure(halves, [[1, 2]]),
        lambda: batch_costs.engine_sizes(halves),
    ):
        with pytest.raises(ConfigError, match="mesh.data = 2: must be 1"):
            call()
