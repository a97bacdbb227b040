"""Simulated serving: times worked by hand, the real controller's decisions, and nothing lost."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.inference import batch_simulator
from eejax.inference.batch_simulator import Costs
from eejax.inference.batched import PROMPT_SPAN, SPAN
from eejax.inference.packing import Plan
from eejax.serving import policies, simulator
from eejax.serving.choices import Choice, Profile
from eejax.serving.controller import Controller, ControllerOptions
from eejax.serving.objectives import Objective
from eejax.serving.pace import Pace
from eejax.serving.policies import Scripted, choices_of, fixed
from eejax.serving.repository import Repository
from eejax.serving.simulated import Live, show_errors, validate
from eejax.serving.simulated_parts import Part, Prompt
from eejax.serving.simulator import Setting, simulate
from eejax.serving.traces import ModelTrace, Trace

THROUGHPUT = Objective.of("throughput")


def model(exits, prompts=2, thresholds=None, n=3, prefill_exit=True, wrong=()) -> ModelTrace:
    """Tokens that leave by `exits` [p, new] at 0.5; those of `wrong` (p, t) are not the final
    exit's before that."""
    exits = np.asarray(exits)
    sure = np.arange(n) >= exits[..., None]
    tokens = np.zeros((*exits.shape, n), np.int32)
    for p, t in wrong:
        tokens[p, t, :-1] = 1
    lengths = np.broadcast_to(prompts, len(exits)).astype(np.int32)
    limits = (0.5,) * (n - 1) if thresholds is None else thresholds
    return ModelTrace(
        tuple(range(1, n + 1)), limits, prefill_exit, lengths, tokens,
        np.where(sure, 0.9, 0.1).astype(np.float32),
    )  # fmt: skip


def trace(*models, kinds=None) -> Trace:
    named = dict(zip(("small", "large"), models, strict=False))
    return Trace(named, kinds or ("task",) * len(models[0]))


def profile(scale=1.0, n=3, **changes) -> Profile:
    own = dict(
        seconds=(scale,) * n, prefill=(scale,) * n, load=(scale * 10,) * n,
        rebuild=(scale * 0.5,) * n, bytes=(scale * 100,) * n, energy=(scale,) * n,
        sure=(1.0,) * n, unsure=(0.9,) * n,
    )  # fmt: skip
    return Profile(**(own | changes))


def pace(scale=1.0, n=3, slots=1) -> Pace:
    """A second a row and segment, a quarter of one a chunk."""
    rows = tuple(scale * (k + 1) for k in range(slots))
    return Pace(0.0, (rows,) * n, (scale * 0.25,) * n)


def run(t, make, *, scale=1.0, setting=None, profiles=None):
    names = [*t.models]
    scales = {name: scale * (i + 1) for i, name in enumerate(names)}
    n = t.models[names[0]].exits
    profiles = profiles or {name: profile(s, n) for name, s in scales.items()}
    paces = {name: pace(s, n) for name, s in scales.items()}
    return simulate(t, profiles, paces, make, setting or Setting(slots=1, steps=1))


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
    got = run(t, fixed("small", 3), setting=Setting(slots=2, steps=1, free=True))
    # A chunk: 0.75. Then the first one's second token beside the rest of the other's prompt.
    np.testing.assert_allclose(got.first, [0.75, 0.75 + 3.0 + 0.75])
    np.testing.assert_allclose(got.ended, [4.5, 7.5])
    # Of calls of four steps all is known at their end.
    got = run(t, fixed("small", 3), setting=Setting(slots=2, steps=4, free=True))
    np.testing.assert_allclose(got.first, [7.5, 7.5])


def test_arrivals_are_waited_for_and_the_cap_is_kept():
    t = trace(model([[0] * 6, [0] * 6]))
    got = run(t, fixed("small", 3), setting=Setting(slots=2, steps=1, arrivals=(100.0, 200.0)))
    np.testing.assert_allclose(got.first, [100.75, 200.75])
    np.testing.assert_allclose(got.ended - got.first, [5.0, 5.0])
    # Two that wait go through all before another begins: 1, then 1 + 2 + 2.
    got = run(t, fixed("small", 3), setting=Setting(slots=1, steps=1, cap=2, free=True))
    np.testing.assert_allclose(got.ended - got.first, [1 + 5 + 1 + 5 + 1] * 2)
    with pytest.raises(ConfigError, match="arrivals"):
        run(t, fixed("small", 3), setting=Setting(arrivals=(1.0,)))


def test_thresholds_of_one_switch_exits_off():
    t = trace(model([[0, 0, 0]]))
    on, off = (
        run(t, fixed("small", 3), setting=Setting(slots=1, steps=1, free=True, thresholds=v))
        for v in (None, {"small": 1.0})
    )
    assert on.exits["small"] == (3, 0, 0) and off.exits["small"] == (0, 0, 3)
    np.testing.assert_allclose(off.ended - off.first, 2 * (on.ended - on.first) * 1.5)
    partly = run(t, fixed("small", 1), setting=Setting(slots=1, steps=1, thresholds=1.0))
    assert partly.below_share == 1.0


def test_growing_takes_its_time_and_makes_up_for_what_is_missing():
    """A script that wants one segment, and then three from the second prompt on: they come beside
    the work, and keys and values of the text that is there are made up for."""
    make = lambda clock: Scripted([Choice("small", 1), Choice("small", 3)], clock=clock)
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
    wanted = [Choice("small", depth) for depth in (1, 3, 1)]
    got = run(trace(model([[0] * 4] * 3)), lambda clock: Scripted(wanted, clock=clock))
    assert [e.what for e in got.timeline] == ["load", "serve", "grow", "stay"]
    assert got.exits["small"] == (12, 0, 0) and got.timeline[-1].depth == 1
    assert got.ended[-1] < got.timeline[2].time + 20.0  # when it would have come


@pytest.mark.parametrize("budget", [650.0, float("inf")])
def test_models_that_do_not_fit_are_freed_and_texts_go_on_elsewhere(budget):
    """Small has 300 bytes and large 600, which comes while the first of two prompts is answered."""

    def make(clock):
        script = Scripted([Choice("small", 3), Choice("large", 3)], clock=clock)
        script.options = ControllerOptions(budget=budget)
        return script

    t = trace(model([[2] * 9] * 2), model([[2] * 9] * 2))
    quick = {"small": profile(1.0, load=(2.0,) * 3), "large": profile(2.0, load=(2.0,) * 3)}
    got = run(t, make, setting=Setting(slots=1, steps=1), profiles=quick)
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


def drawn(seed=0, p=60, new=12):
    """Tokens of small leave late and those of large early in the second half, and the other way
    round in the first."""
    rng = np.random.default_rng(seed)
    early, late = (0.8, 0.1, 0.1), (0.1, 0.1, 0.8)
    draw = lambda shares, k: rng.choice(3, (k, new), p=shares)
    half = p // 2
    one = np.concatenate([draw(early, half), draw(late, p - half)])
    two = np.concatenate([draw(late, half), draw(early, p - half)])
    return trace(model(one), model(two))


def options(**changes):
    own = dict(prompts=2, interval=10, window=20, breaches=10, tokens=12)
    return ControllerOptions(**(own | changes))


def cheap(scale):
    return profile(scale, load=(scale * 1e-2,) * 3, rebuild=(scale * 1e-4,) * 3)


PROFILES = {"small": cheap(1.0), "large": cheap(1.3)}


def test_decisions_are_those_of_a_controller_driven_by_hand():
    """One slot and steps of one: the simulator tells tokens as they come, and answers in turn. What
    is wanted is there at once."""
    t, objective = drawn(), THROUGHPUT
    make = policies.helios(PROFILES, objective, options())
    got = run(t, make, profiles=PROFILES, setting=Setting(slots=1, steps=1, free=True))
    repository = Repository()
    for name, p in PROFILES.items():
        repository.put(name, p.benchmark())
    hand = Controller(PROFILES, objective, repository, options(), clock=lambda: 0.0)
    for i in range(len(t)):
        hand.loaded(hand.wanted)
        hand.holds({hand.current.model: hand.current.depth}, 20)
        (name, depth), evaluated = hand.choose()
        assert name == got.models[i] or depth < 3
        serves, written = hand.current, 0
        while written < t.new:
            exits, below = t.models[name].leaves(None, depth)
            hand.tokens(name, [bool(below[i, written])])
            written += 1
            if hand.wanted != serves and hand.wanted.model == name:
                break  # grown, in the middle of the text: told in part below
        if hand.wanted != serves and not hand.evaluating:
            break  # what follows depends on when segments come
        if evaluated:
            told = hand.profiles[name].serving(hand.shares.get(name, (0.0, 0.0, 1.0)), depth)
            hand.answered(name, told, exits[i].tolist())
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
        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if name not in ("holds", "choose", "loaded", "tokens", "answered", "dropped"):
                return found

            def call(*args):
                said.append((self._clock(), name, copy.deepcopy(args)))
                return found(*args)

            return call

    made = lambda kind, clock: kind(
        PROFILES, THROUGHPUT, Repository(), options(breaches=6), clock=clock
    )
    setting = Setting(slots=slots, steps=steps)
    got = run(drawn(1), lambda clock: made(Noted, clock), profiles=PROFILES, setting=setting)
    again = made(Controller, lambda: now[0])
    for time, name, args in said:
        now[0] = time
        getattr(again, name)(*args)
    assert tuple(again.decisions) == got.decisions and len(got.decisions) > 5
    kinds = {d.kind for d in got.decisions}
    assert {"evaluate", "serve"} < kinds


def test_audits_tighten_where_accuracy_is_asked_for():
    t = trace(model([[0] * 10] * 150, wrong=itertools.product(range(150), range(0, 10, 2))))
    profiles = {"small": cheap(1.0)}
    kinds = {}
    for objective in (THROUGHPUT, Objective({"throughput": 1.0}, {"accuracy": 0.95})):
        make = policies.helios(profiles, objective, options(interval=10**6))
        got = run(t, make, profiles=profiles, setting=Setting(slots=2, steps=2, audits=0.5))
        kinds[bool(objective.limits)] = {d.kind for d in got.decisions}, got.agreement
    assert "tighten" not in kinds[False][0] and kinds[False][1] == 0.5
    assert "tighten" in kinds[True][0] and kinds[True][1] > 0.6


def test_hindsight_takes_what_is_best_for_each_stretch():
    early = drawn()
    # Tokens that leave before the last layer are wrong with a third of the prompts.
    t = trace(*(
        dataclasses.replace(m, tokens=np.where(
            (np.arange(60) % 3 == 0)[:, None, None] & (np.arange(3) < 2), 1, 0
        ) * np.ones((60, 12, 1), np.int32)) for m in early.models.values()
    ))  # fmt: skip
    paces = {"small": pace(1.0, slots=2), "large": pace(1.3, slots=2)}
    setting = Setting(slots=2, steps=2, free=True)
    find = lambda right: policies.hindsight(t, PROFILES, paces, 10, setting, right)
    make, chosen = find(0.0)
    assert chosen == [Choice("small", 1)] * 6  # nothing speaks against leaving early but agreement
    run = lambda make: simulate(t, PROFILES, paces, make, setting)
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


@settings(max_examples=25)
@given(
    st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 8),
    st.booleans(), st.sampled_from([300.0, float("inf")]),
)  # fmt: skip
def test_nobody_is_lost_and_time_goes_on(seed, slots, steps, clients, open_loop, budget):
    rng = np.random.default_rng(seed)
    p, new = int(rng.integers(1, 25)), int(rng.integers(1, 10))
    t = trace(*(model(rng.integers(0, 3, (p, new)), rng.integers(1, 90, p)) for _ in range(2)))
    profiles = {
        name: dataclasses.replace(v, bytes=(100, 100, 50), slots=(slots + 2, slots + 1, slots))
        for name, v in PROFILES.items()
    }
    arrivals = tuple(np.sort(rng.random(p) * 50).tolist()) if open_loop else None
    objective = THROUGHPUT if rng.random() < 0.5 else Objective.of("response_time")
    own = options(prompts=int(rng.integers(1, 4)), interval=int(rng.integers(1, 9)), budget=budget)
    got = run(
        t, policies.helios(profiles, objective, own), profiles=profiles,
        setting=Setting(slots=slots, steps=steps, clients=clients, arrivals=arrivals),
    )  # fmt: skip
    assert got.tokens.tolist() == [new] * p and all(got.models)
    assert (got.first >= got.arrived).all() and (got.ended >= got.first).all()
    assert (np.diff([e.time for e in got.timeline]) >= 0).all()
    assert (np.diff([d.time for d in got.decisions]) >= 0).all()
    assert sum(map(sum, got.exits.values())) == p * new
    assert (got.agree <= got.tokens).all() and (got.below <= got.tokens).all()
    assert 0 <= got.memory <= sum(v.size(3) for v in profiles.values())
    if budget == 300.0:
        assert got.memory <= budget


class Watched(simulator._Server):
    """Looks at what is loaded whenever that is about to change, and at every prompt that is given
    to a model or ends. made: the last one."""

    made: Watched

    def __init__(self, *args):
        super().__init__(*args)
        Watched.made = self
        self.peak, self.answers = 0.0, collections.Counter()
        self.ready: dict[str, float] = {}  # when models that are there came

    def bytes(self) -> float:
        """Of all weights and requests, with what is on its way: by hand."""
        there = {name: part.coming for name, part in self.parts.items()}
        if self._loading is not None:
            assert self._loading.choice.model not in there
            there[self._loading.choice.model] = self._loading.choice.depth
        table = self._profiles
        return sum(sum(table[m].bytes[:d]) + table[m].state[d - 1] for m, d in there.items())

    def look(self, more: float = 0.0) -> None:
        self.peak = max(self.peak, self.bytes() + more)

    def _arrange(self):
        self.look()
        super()._arrange()
        self.look()

    def _load(self, wanted):
        table = self._profiles[wanted.model]
        self.look(sum(table.bytes[: wanted.depth]) + table.state[wanted.depth - 1])
        return super()._load(wanted)

    def _arrived(self, loading):
        self.ready[loading.choice.model] = loading.ready
        super()._arrived(loading)
        self.look()

    def _grow(self, wanted):
        super()._grow(wanted)
        self.look()

    def _shrink(self, wanted):
        super()._shrink(wanted)
        self.look()

    def _freed(self, model, part):
        del self.ready[model]
        assert not part.every or all(job.part is not part for job in part.every)
        super()._freed(model, part)

    def _place(self, job, given):
        assert self.ready[given.choice.model] <= self.now
        super()._place(job, given)
        part = self.parts[job.model]
        # Whatever is on its way, the budget was counted with these slots.
        assert len(part.every) <= part.by_depth[part.coming - 1]

    def _ended(self, name, part, job):
        assert self.parts[name] is part and job.model == name
        self.answers[job.number] += 1
        super()._ended(name, part, job)


@st.composite
def fleets(draw):
    """(trace, profiles, paces, setting, budget of the controller as a share of what the largest
    model takes, its other options)."""
    names, n = ("a", "b", "c")[: draw(st.integers(2, 3))], draw(st.integers(2, 3))
    p, new = draw(st.integers(4, 40)), draw(st.integers(1, 10))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    # Prompts of a stretch leave early in some models, and late in others.
    spread = lambda: np.repeat(rng.integers(0, n, -(-p // 8)), 8)[:p, None]
    exits = lambda: np.where(rng.random((p, new)) < 0.7, spread(), rng.integers(0, n, (p, new)))
    traced = {name: model(exits(), rng.integers(1, 90, p), n=n) for name in names}
    profiles, paces = {}, {}
    for name in names:
        scale, slots = draw(st.floats(0.2, 5.0)), draw(st.integers(1, 4))
        by_depth = tuple(slots + n - d for d in range(1, n + 1))
        cost = draw(st.sampled_from([1e-3, 0.3, 10.0]))
        profiles[name] = profile(
            scale, n, load=(scale * cost,) * n, rebuild=(scale * 1e-3,) * n, slots=by_depth,
            bytes=tuple(rng.integers(50, 200, n)), sure=(0.9,) * n,
            state=tuple(10.0 * k * d for d, k in enumerate(by_depth, 1)),
        )  # fmt: skip
        paces[name] = pace(scale, n, slots=by_depth[0])
    arrivals = tuple(np.sort(rng.random(p) * p * 3).tolist()) if draw(st.booleans()) else None
    setting = Setting(
        steps=draw(st.integers(1, 4)), cap=draw(st.integers(1, 8)), arrivals=arrivals,
        clients=draw(st.integers(1, 8)), audits=draw(st.sampled_from([0.0, 0.5])),
    )  # fmt: skip
    window = draw(st.integers(2, 12))
    own = dict(
        prompts=draw(st.integers(1, 3)), interval=draw(st.integers(1, 8)), tokens=new,
        window=window, breaches=draw(st.integers(0, window // 2)), gain=draw(st.floats(0, 0.1)),
        candidates=draw(st.integers(1, 3)), greedy=draw(st.integers(0, 4)) > 0,
    )  # fmt: skip
    t = Trace(traced, ("task",) * p)
    return t, profiles, paces, setting, draw(st.floats(1.0, 2.0)), own


GOALS = (
    THROUGHPUT, Objective.of("response_time"), Objective.of("energy"),
    Objective.of("throughput", accuracy=0.95),
)  # fmt: skip


@settings(max_examples=100)
@given(fleet=fleets(), goal=st.sampled_from(GOALS), every=st.integers(0, 4))
def test_the_budget_holds_at_every_moment_and_everybody_is_answered_once(fleet, goal, every):
    """Models are loaded, grow, shrink and are freed with requests under way; every: prompts after
    which something else is wanted by chance, though what was wanted may not be there yet, in place
    of what the controller decides."""
    t, profiles, paces, setting, share, own = fleet
    budget = share * max(p.size(d) for p in profiles.values() for d in range(1, p.exits + 1))
    known = ControllerOptions(budget=budget, **own)

    def make(clock):
        if not every:
            return policies.helios(profiles, goal, known)(clock)
        script = policies.at_random(profiles, every, len(t), seed=len(t))(clock)
        script.options = known
        return script

    with mock.patch.object(simulator, "_Server", Watched):
        got = simulate(t, profiles, paces, make, setting)
    watched = Watched.made
    assert watched.answers == collections.Counter(range(len(t)))
    assert got.tokens.tolist() == [t.new] * len(t)
    assert sum(map(sum, got.exits.values())) == len(t) * t.new
    assert (got.first >= got.arrived).all() and (got.ended >= got.first).all()
    assert not watched._queue and not any(part.every for part in watched.parts.values())
    assert watched.peak <= budget  # sums of whole numbers, which are exact
    assert got.memory <= watched.peak * (1 + 1e-9)  # a mean over time, with rounding
    for what in sorted({e.what for e in got.timeline} & {"free", "grow", "shrink"}):
        event(what)
    event("a text goes on elsewhere" if any(j.moved for j in watched.jobs) else "all stay")


def test_paces():
    costs = Costs(0.1, (3.0, 1.0, 4.0), (0.0, 0.5, 1.0), 0.75, 6.0, 3.0, (1, 2))
    got = Pace.of(costs, (2, 8), 64)
    assert got.seconds(0, []) == 0.0 and got.seconds(0, [16]) == 10.0 + 4 * 0.75
    assert got.step == 0.1 and got.chunk == (2.0, 4.0) and got.most == 8
    assert got.rows[0] == (1.5, 1.5, *(5.0,) * 6) and got.rows[1][:3] == (2.5, 2.5, 9.0)
    # One span, then two; three rows are faster in place, unless two of them are of one text.
    assert [got.seconds(0, [1] * k) for k in (1, 2, 3)] == [2.25, 3.0, 3.0]
    assert got.seconds(0, [2, 1]) == 5.0 + 2 * 0.75 and got.seconds(0, [5]) == 5.0 + 2 * 0.75
    # Of a chunk's spans, 32 tokens each, two are of the first prompt.
    assert got.reading([33, 31], 1) == 2.0 + 3 * 1.0 and got.reading([64], 2) == 6.0 + 2 * 3.0
    with pytest.raises(ConfigError, match="pace"):
        Pace(0.0, ((1.0,),), (1.0, 2.0))


@given(data=st.data())
def test_steps_take_what_the_engines_own_decisions_do(data):
    """Texts of one batch, always packed: tokens come when `batch_simulator` has them come."""
    draw = data.draw
    n, slots, cap = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    buckets = (draw(st.integers(1, 4)), draw(st.integers(5, 9)))
    chunk, new = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    exits = draw(st.lists(
        st.lists(st.integers(0, n - 1), min_size=new, max_size=new), min_size=slots,
        max_size=slots))  # fmt: skip
    prompts = draw(st.lists(st.integers(1, 40), min_size=slots, max_size=slots))
    depths = tuple(draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)))
    costs = Costs(0.5, (1e6, 1.0, 1.75), (1e6, 0.25, 0.5), 0.125, 3.0, 0.0625, depths)
    plan = Plan.make(n, slots, buckets, seconds=(np.full(n, 1e9), np.zeros((n, 2)), np.zeros(n)))
    requests = [
        batch_simulator.Trace(p, tuple(e), (True,) * new)
        for p, e in zip(prompts, exits, strict=True)
    ]
    asked = batch_simulator.simulate(
        requests, plan, costs, slots=slots, buckets=buckets, cap=cap, drafts=0, chunk=chunk,
        span=SPAN, prompt_span=PROMPT_SPAN,
    )  # fmt: skip
    part = Part(
        model(exits, prompts, n=n), profile(n=n), Pace.of(costs, buckets, chunk),
        lambda depth, strict: (exits, np.zeros_like(exits).tolist()), depth=n,
        slots=(slots,) * n, steps=1, cap=cap,
    )  # fmt: skip
    jobs = [Prompt(number=i, order=(0, i), came=0.0, part=part) for i in range(slots)]
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
    costs = Costs(0.0, (1e6, 1.0), (0.0, 0.0), 0.0, 0.0, 0.0, (1, 1, 1))
    part = Part(
        model(exits, 1), profile(n=3), Pace.of(costs, (8,), 64),
        lambda depth, strict: (np.minimum(exits, depth - 1).tolist(), [[False] * 5]), depth=2,
        slots=(1,) * 3, steps=3, cap=8,
    )  # fmt: skip
    job = Prompt(number=0, order=(0, 0), came=0.0, part=part)
    part.waiting.append(job)
    part.join()
    assert part.call(0.0).end == 2.0 and job.left == [0, 2]  # a prompt, and two by the first exit
    part.grow(3, 2.0)
    assert part.grown() == (1 + 3) * 0.5 and job.left == [0, 2, 2]
    before = part.flops
    part.call(2.0)
    assert part.flops - before == 1 + 3 + 3 + 1  # the next token goes through all with both


def test_a_simulation_is_compared_with_what_was_measured():
    t = trace(model([[0, 0, 1]]))
    got = run(t, fixed("small", 2))
    off = validate(got, Live(got.throughput * 2, got.ttft["mean"] / 2))
    assert off == pytest.approx({"throughput": -0.5, "ttft": 1.0})
    line = show_errors({"whole": (got, Live(got.throughput, 41.0))})
    assert line.startswith("whole: tokens/s 0 simulated, 0 live (+0%)") and "(-50%)" in line
    with pytest.raises(ConfigError, match="ttft = 0"):
        Live(1.0, 0.0)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(slots=0), "slots"), (dict(steps=0), "steps"), (dict(clients=0), "clients"),
        (dict(arrivals=(2.0, 1.0)), "arrivals"), (dict(audits=2.0), "audits"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(change, message):
    with pytest.raises(ConfigError, match=message):
        Setting(**change)


def test_what_does_not_fit_the_trace_is_told():
    t = trace(model([[0, 1]]))
    with pytest.raises(ConfigError, match="profiles.*small"):
        simulate(t, {}, {}, fixed("small", 1))
    with pytest.raises(ConfigError, match=r"paces\['small'\] = 2: must be of 3 exits"):
        simulate(t, {"small": profile()}, {"small": pace(n=2)}, fixed("small", 1))
    with pytest.raises(ConfigError, match="choices"):
        Scripted([], clock=lambda: 0.0)
