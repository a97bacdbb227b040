"""Simulated serving: times worked by hand, the real controller's decisions, and nothing lost."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulations import (
    PROFILES,
    THROUGHPUT,
    cheap,
    drawn,
    model,
    options,
    pace,
    profile,
    run,
    trace,
)

from eejax.common.errors import ConfigError
from eejax.experiments.helios_simulation import policies
from eejax.experiments.helios_simulation.pace import StepSeconds
from eejax.experiments.helios_simulation.policies import ScriptedPolicy, choices_of, fixed
from eejax.experiments.helios_simulation.result import MeasuredResult, show_errors, validate
from eejax.experiments.helios_simulation.simulator import SimulationSetting, simulate
from eejax.experiments.helios_simulation.slots import SimulatedModel, SimulatedRequest
from eejax.helios.choices import ControllerOptions, ModelDepth
from eejax.helios.controller import Controller
from eejax.helios.objectives import ServiceObjective
from eejax.helios.repository import Repository
from eejax.inference import batch_simulator
from eejax.inference.batch_simulator import StepCosts
from eejax.inference.engine_step import PROMPT_SPAN, SPAN
from eejax.inference.schedule import BatchPlan


def test_seconds_worked_by_hand():
    """Loading two of three segments takes 20, the prompt 0.5. The second token leaves by the first
    exit, 1; the third one goes through both and takes that along: 1 + 2. A step is looked at while
    the next one runs, so that a client is answered when a step is over and asks again."""
    t = trace(model([[0, 0, 1], [1, 1, 2]], wrong=[(1, 1), (1, 2)]))
    got = run(t, fixed("small", 2))
    np.testing.assert_allclose(got.arrived, [0.0, 24.5])
    np.testing.assert_allclose(got.first, [20.5, 25.0])
    np.testing.assert_allclose(got.ended, [24.5, 29.0])  # 0.5, 2 and 2: all the way twice
    assert got.seconds == pytest.approx(29.0) and got.throughput == pytest.approx(6 / 29)
    assert got.ttft["mean"] == pytest.approx((20.5 + 0.5) / 2)
    assert got.exits == {"small": (2, 4, 0)}
    assert got.below.tolist() == [0, 1] and got.below_share == pytest.approx(1 / 6)
    assert got.agree.tolist() == [3, 1] and got.agreement == pytest.approx(4 / 6)
    # Rows: 1, and 1 + 2; 2 and 2; by a proxy of one a segment and row.
    assert got.flops == pytest.approx(8 / 6)
    assert got.memory == pytest.approx(200.0)
    assert [(e.what, e.depth, e.time) for e in got.timeline] == [("load", 2, 0.0), ("serve", 2, 20)]
    assert got.telemetry.accuracy == got.agreement and got.telemetry.memory == got.memory


def test_slots_share_steps_and_prompts_their_chunks():
    """Two prompts of 40 tokens in chunks of 64: one is read in a step, the other in two."""
    t = trace(model([[2, 2], [2, 2]], prompts=40))
    got = run(t, fixed("small", 3), setting=SimulationSetting(slots=2, steps=1, free=True))
    # A chunk: 0.75. Then the first one's second token beside the rest of the other's prompt.
    np.testing.assert_allclose(got.first, [0.75, 0.75 + 3.0 + 0.75])
    np.testing.assert_allclose(got.ended, [4.5, 7.5])
    # Of calls of four steps all is known at their end.
    got = run(t, fixed("small", 3), setting=SimulationSetting(slots=2, steps=4, free=True))
    np.testing.assert_allclose(got.first, [7.5, 7.5])


def test_arrivals_are_waited_for_and_the_cap_is_kept():
    t = trace(model([[0] * 6, [0] * 6]))
    got = run(
        t, fixed("small", 3), setting=SimulationSetting(slots=2, steps=1, arrivals=(100.0, 200.0))
    )
    np.testing.assert_allclose(got.first, [100.75, 200.75])
    np.testing.assert_allclose(got.ended - got.first, [5.0, 5.0])
    # Two that wait go through all before another begins: 1, then 1 + 2 + 2.
    got = run(t, fixed("small", 3), setting=SimulationSetting(slots=1, steps=1, cap=2, free=True))
    np.testing.assert_allclose(got.ended - got.first, [1 + 5 + 1 + 5 + 1] * 2)
    with pytest.raises(ConfigError, match="arrivals"):
        run(t, fixed("small", 3), setting=SimulationSetting(arrivals=(1.0,)))


def test_thresholds_of_one_switch_exits_off():
    t = trace(model([[0, 0, 0]]))
    on, off = (
        run(
            t,
            fixed("small", 3),
            setting=SimulationSetting(slots=1, steps=1, free=True, thresholds=v),
        )
        for v in (None, {"small": 1.0})
    )
    assert on.exits["small"] == (3, 0, 0) and off.exits["small"] == (0, 0, 3)
    np.testing.assert_allclose(off.ended - off.first, 2 * (on.ended - on.first) * 1.5)
    partly = run(t, fixed("small", 1), setting=SimulationSetting(slots=1, steps=1, thresholds=1.0))
    assert partly.below_share == 1.0


def test_growing_takes_its_time_and_makes_up_for_what_is_missing():
    """A script that wants one segment, and then three from the second prompt on: they come beside
    the work, and keys and values of the text that is there are made up for."""

    def make(clock):
        return ScriptedPolicy([ModelDepth("small", 1), ModelDepth("small", 3)], clock=clock)

    t = trace(model([[0] * 30, [2] * 30]))
    got = run(t, make)
    what = {e.what: e for e in got.timeline}
    assert [e.what for e in got.timeline] == ["load", "serve", "grow", "grown", "serve"]
    assert what["grow"].seconds == 20.0 and what["grow"].time == 10.0
    # Seen at 30.25, the first look after 30; the step that is under way ends at 31.25.
    assert what["grown"].time == pytest.approx(31.25 + 24.0)
    # The first prompt's 2 tokens, and 21 of its text, for half a second a segment; the one that is
    # under way when it is seen was written before.
    assert what["grown"].seconds == pytest.approx((2 + 22) * 2 * 0.5)
    assert got.exits["small"] == (30, 0, 30)


def test_what_is_called_off_before_it_has_come_is_not_waited_for():
    wanted = [ModelDepth("small", depth) for depth in (1, 3, 1)]
    got = run(trace(model([[0] * 4] * 3)), lambda clock: ScriptedPolicy(wanted, clock=clock))
    assert [e.what for e in got.timeline] == ["load", "serve", "grow", "stay"]
    assert got.exits["small"] == (12, 0, 0) and got.timeline[-1].depth == 1
    assert got.ended[-1] < got.timeline[2].time + 20.0  # when it would have come


@pytest.mark.parametrize("budget", [650.0, float("inf")])
def test_models_that_do_not_fit_are_freed_and_texts_go_on_elsewhere(budget):
    """Small has 300 bytes and large 600, which comes while the first of two prompts is answered."""

    def make(clock):
        script = ScriptedPolicy([ModelDepth("small", 3), ModelDepth("large", 3)], clock=clock)
        script.options = ControllerOptions(budget=budget)
        return script

    t = trace(model([[2] * 9] * 2), model([[2] * 9] * 2))
    quick = {"small": profile(1.0, load=(2.0,) * 3), "large": profile(2.0, load=(2.0,) * 3)}
    got = run(t, make, setting=SimulationSetting(slots=1, steps=1), profiles=quick)
    happened = [(e.what, e.model) for e in got.timeline]
    if budget < 900:
        assert got.models == ("large", "large")
        assert happened[2:] == [("free", "small"), ("load", "large"), ("serve", "large")]
        assert sum(got.exits["small"]) == 0 and got.exits["large"] == (0, 0, 18)
    else:
        assert got.models == ("small", "large") and ("free", "small") not in happened
        load, serve = (e.time for e in got.timeline if e.model == "large")
        # Seen at the first look behind, when the prompt in small goes on.
        assert load == 6.0 and 12.0 <= serve < got.ended[0]
    assert got.tokens.tolist() == [9, 9]


def test_decisions_are_those_of_a_controller_driven_by_hand():
    """One slot and steps of one: the simulator tells tokens as they come, and answers in turn. What
    is wanted is there at once."""
    t, objective = drawn(1), THROUGHPUT
    make = policies.helios(PROFILES, objective, options())
    got = run(t, make, profiles=PROFILES, setting=SimulationSetting(slots=1, steps=1, free=True))
    repository = Repository()
    for name, p in PROFILES.items():
        repository.put(name, p.benchmark())
    hand = Controller(PROFILES, objective, repository, options(), clock=lambda: 0.0)
    for i in range(len(t)):
        hand.model_loaded(hand.wanted)
        hand.device_reported({hand.current.model: hand.current.depth}, 20)
        (name, depth), evaluated = hand.prompt_arrived()
        assert name == got.models[i] or depth < 3
        serves, written = hand.current, 0
        while written < t.new:
            exits, below = t.models[name].leaves(None, depth)
            hand.tokens_emitted(name, [bool(below[i, written])])
            written += 1
            if hand.wanted != serves and hand.wanted.model == name:
                break  # grown, in the middle of the text: told in part below
        if hand.wanted != serves and not hand.state.plan:
            break  # what follows depends on when segments come
        if evaluated:
            told = PROFILES[name].serving(hand.state.shares.get(name, (0.0, 0.0, 1.0)), depth)
            hand.prompt_answered(name, told, exits[i].tolist())
    kinds = [(d.kind, d.choice) for d in hand.decisions]
    assert len(kinds) > 3 and [(d.kind, d.choice) for d in got.decisions[: len(kinds)]] == kinds
    served = {d.choice.model for d in got.decisions if d.kind in ("serve", "switch")}
    assert served == {"small", "large"}
    # Grown, or switched, where the tokens of the model that serves were no more sure.
    assert any(d.kind in ("grow", "switch") for d in got.decisions)


@pytest.mark.parametrize("slots, steps", [(1, 1), (4, 4)])
def test_decisions_follow_from_what_the_controller_is_told(slots, steps):
    """What it was told, told again to another one at the same times, leads to the same."""
    said, now = [], [0.0]

    class Noted(Controller):
        def apply(self, event, *details):
            said.append((self._clock(), event, copy.deepcopy(details)))
            return super().apply(event, *details)

    def made(kind, clock):
        return kind(PROFILES, THROUGHPUT, Repository(), options(breaches=6), clock=clock)

    setting = SimulationSetting(slots=slots, steps=steps)
    got = run(drawn(1), lambda clock: made(Noted, clock), profiles=PROFILES, setting=setting)
    again = made(Controller, lambda: now[0])
    for time, event, details in said:
        now[0] = time
        again.apply(event, *details)
    assert tuple(again.decisions) == got.decisions and len(got.decisions) > 5
    kinds = {d.kind for d in got.decisions}
    assert {"evaluate", "serve"} < kinds


def test_audits_tighten_where_accuracy_is_asked_for():
    t = trace(model([[0] * 10] * 150, wrong=itertools.product(range(150), range(0, 10, 2))))
    profiles = {"small": cheap(1.0)}
    kinds = {}
    for objective in (THROUGHPUT, ServiceObjective({"throughput": 1.0}, {"accuracy": 0.95})):
        make = policies.helios(profiles, objective, options(interval=10**6))
        got = run(
            t, make, profiles=profiles, setting=SimulationSetting(slots=2, steps=2, audits=0.5)
        )
        kinds[bool(objective.limits)] = {d.kind for d in got.decisions}, got.agreement
    assert "tighten" not in kinds[False][0] and kinds[False][1] == 0.5
    assert "tighten" in kinds[True][0] and kinds[True][1] > 0.6


def test_audits_that_no_decision_reads_take_a_hundredth_of_the_time():
    t = trace(model([[0] * 20] * 400))
    profiles, found = {"small": cheap(1.0)}, {}
    paces = {"small": dataclasses.replace(pace(1.0, slots=2), chunk=(20.0,) * 3)}
    for limits in ({}, {"accuracy": 0.5}, {"perplexity": 2.0}):
        make = policies.helios(profiles, ServiceObjective({"throughput": 1.0}, limits), options())
        took = [
            simulate(
                t, profiles, paces, make, SimulationSetting(slots=2, steps=2, audits=share)
            ).seconds
            for share in (0.0, 1.0)
        ]
        found[",".join(limits)] = took[1] / took[0] - 1
    assert 0.002 < found[""] < 0.012, found
    assert 0.03 < found["accuracy"] < 0.06 and 0.03 < found["perplexity"] < 0.06, found


def test_hindsight_takes_what_is_best_for_each_stretch():
    early = drawn()
    # Tokens that leave before the last layer are wrong with a third of the prompts.
    t = trace(
        *(
            dataclasses.replace(
                m,
                tokens=np.where((np.arange(60) % 3 == 0)[:, None, None] & (np.arange(3) < 2), 1, 0)
                * np.ones((60, 12, 1), np.int32),
            )
            for m in early.models.values()
        )
    )
    paces = {"small": pace(1.0, slots=2), "large": pace(1.3, slots=2)}
    setting = SimulationSetting(slots=2, steps=2, free=True)

    def find(right):
        return policies.hindsight(t, PROFILES, paces, 10, setting, right)

    make, chosen = find(0.0)
    assert (
        chosen == [ModelDepth("small", 1)] * 6
    )  # nothing speaks against leaving early but agreement

    def run(make):
        return simulate(t, PROFILES, paces, make, setting)

    best = run(make)
    static = {c: run(fixed(*c)) for c in choices_of(PROFILES)}
    assert best.throughput > 0.99 * max(s.throughput for s in static.values())
    # As right as one that is the same throughout, and no slower but for where stretches meet.
    for one in static.values():
        make, chosen = find(one.agreement)
        got = run(make)
        assert got.agreement >= one.agreement and got.throughput > 0.9 * one.throughput
    assert {c.depth for c in find(1.0)[1]} == {3}  # as right as can be
    random = run(policies.at_random(PROFILES, 10, 60))
    assert random.throughput < best.throughput and len(set(random.models)) == 2


def test_paces():
    costs = StepCosts(0.1, (3.0, 1.0, 4.0), (0.0, 0.5, 1.0), 0.75, 6.0, 3.0, (1, 2))
    got = StepSeconds.of(costs, (2, 8), 64)
    assert got.seconds(0, [], 3) == 0.0 and got.seconds(0, [16], 3) == 10.0 + 4 * 0.75
    assert got.step == 0.1 and got.chunk == (2.0, 4.0) and got.max_rows == 8
    assert got.rows[0] == (1.5, 1.5, *(5.0,) * 6) and got.rows[1][:3] == (2.5, 2.5, 9.0)
    # One span, then two; three rows are faster in place, unless two of them are of one text.
    assert [got.seconds(0, [1] * k, 3) for k in (1, 2, 3)] == [2.25, 3.0, 3.0]
    assert got.seconds(0, [2, 1], 3) == 5.0 + 2 * 0.75 == got.seconds(0, [5], 3)
    assert got.seconds(0, [1], 1) == 3.0  # a row of the only slot never runs packed
    # Of a chunk's spans, 32 tokens each, two are of the first prompt.
    assert got.reading([33, 31], 1) == 2.0 + 3 * 1.0 and got.reading([64], 2) == 6.0 + 2 * 3.0
    with pytest.raises(ConfigError, match="pace"):
        StepSeconds(0.0, ((1.0,),), (1.0, 2.0))


@given(data=st.data())
def test_steps_take_what_the_engines_own_decisions_do(data):
    """Texts of one batch, always packed: tokens come when `batch_simulator` has them come."""
    draw = data.draw
    n, slots, cap = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    buckets = (draw(st.integers(1, 4)), draw(st.integers(5, 9)))
    chunk, new = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    exits = draw(
        st.lists(
            st.lists(st.integers(0, n - 1), min_size=new, max_size=new),
            min_size=slots,
            max_size=slots,
        )
    )
    prompts = draw(st.lists(st.integers(1, 40), min_size=slots, max_size=slots))
    depths = tuple(draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)))
    costs = StepCosts(0.5, (1e6, 1.0, 1.75), (1e6, 0.25, 0.5), 0.125, 3.0, 0.0625, depths)
    plan = BatchPlan.make(
        n, slots, buckets, seconds=(np.full(n, 1e9), np.zeros((n, 2)), np.zeros(n))
    )
    requests = [
        batch_simulator.RequestTrace(p, tuple(e), (True,) * new)
        for p, e in zip(prompts, exits, strict=True)
    ]
    asked = batch_simulator.simulate(
        requests,
        plan,
        costs,
        batch_simulator.EngineSizes(
            slots=slots,
            buckets=buckets,
            cap=cap,
            drafts=0,
            chunk=chunk,
            span=SPAN,
            prompt_span=PROMPT_SPAN,
        ),
    )
    part = SimulatedModel(
        model(exits, prompts, n=n),
        profile(n=n),
        StepSeconds.of(costs, buckets, chunk),
        lambda depth, strict: (exits, np.zeros_like(exits).tolist()),
        depth=n,
        slots=(slots,) * n,
        steps=1,
        cap=cap,
    )
    jobs = [SimulatedRequest(number=i, order=(0, i), came=0.0, part=part) for i in range(slots)]
    part.waiting.extend(jobs)
    part.join()
    came, end = [[] for _ in jobs], 0.0
    while any(job.done < new for job in jobs):
        call = part.call(end)
        end = call.end
        for job, written, _ in call.brought:
            came[job.number] += [end] * len(written)
    for got, want in zip(came, asked.emitted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_rows_that_wait_go_through_what_has_grown_behind_them_too():
    exits = [[0, 0, 0, 2, 0]]
    costs = StepCosts(0.0, (1.0, 1.0), (0.0, 0.0), 0.0, 0.0, 0.0, (1, 1, 1))
    part = SimulatedModel(
        model(exits, 1),
        profile(n=3),
        StepSeconds.of(costs, (8,), 64),
        lambda depth, strict: (np.minimum(exits, depth - 1).tolist(), [[False] * 5]),
        depth=2,
        slots=(1,) * 3,
        steps=3,
        cap=8,
    )
    job = SimulatedRequest(number=0, order=(0, 0), came=0.0, part=part)
    part.waiting.append(job)
    part.join()
    # A prompt, and two by the first exit.
    assert part.call(0.0).end == 2.0 and job.remaining == [0, 2]
    part.grow(3, 2.0)
    assert part.grown() == (1 + 3) * 0.5 and job.remaining == [0, 2, 2]
    before = part.flops
    part.call(2.0)
    assert part.flops - before == 1 + 3 + 3 + 1  # the next token goes through all with both


def test_a_simulation_is_compared_with_what_was_measured():
    t = trace(model([[0, 0, 1]]))
    got = run(t, fixed("small", 2))
    off = validate(got, MeasuredResult(got.throughput * 2, got.ttft["mean"] / 2))
    assert off == pytest.approx({"throughput": -0.5, "ttft": 1.0})
    line = show_errors({"whole": (got, MeasuredResult(got.throughput, 41.0))})
    assert line.startswith("whole: tokens/s 0 simulated, 0 live (+0%)") and "(-50%)" in line
    with pytest.raises(ConfigError, match="ttft = 0"):
        MeasuredResult(1.0, 0.0)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(slots=0), "slots"),
        (dict(steps=0), "steps"),
        (dict(clients=0), "clients"),
        (dict(arrivals=(2.0, 1.0)), "arrivals"),
        (dict(arrivals=(0.0, float("nan"))), "arrivals"),
        (dict(arrivals=(-1.0,)), "arrivals"),
        (dict(audits=2.0), "audits"),
    ],
)
def test_settings_that_cannot_be(change, message):
    with pytest.raises(ConfigError, match=message):
        SimulationSetting(**change)


def test_what_does_not_fit_the_trace_is_told():
    t = trace(model([[0, 1]]))
    with pytest.raises(ConfigError, match="profiles.*small"):
        simulate(t, {}, {}, fixed("small", 1))
    with pytest.raises(ConfigError, match=r"paces\['small'\] = 2: must be of 3 exits"):
        simulate(t, {"small": profile()}, {"small": pace(n=2)}, fixed("small", 1))
    with pytest.raises(ConfigError, match="choices"):
        ScriptedPolicy([], clock=lambda: 0.0)
