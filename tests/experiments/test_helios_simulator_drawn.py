"""Simulated serving of drawn models and prompts: nobody is lost, and the budget holds."""

from __future__ import annotations

import collections
import dataclasses
from unittest import mock

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st
from simulations import PROFILES, THROUGHPUT, model, options, pace, profile, run, trace

from eejax.experiments.helios_simulation import policies, simulator
from eejax.experiments.helios_simulation.simulator import SimulationSetting, simulate
from eejax.experiments.helios_simulation.traces import PromptTrace
from eejax.helios.choices import ControllerOptions
from eejax.helios.objectives import ServiceObjective


@settings(max_examples=25)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([300.0, float("inf")]),
)
def test_nobody_is_lost_and_time_goes_on(seed, slots, steps, clients, open_loop, budget):
    rng = np.random.default_rng(seed)
    p, new = int(rng.integers(1, 25)), int(rng.integers(1, 10))
    t = trace(*(model(rng.integers(0, 3, (p, new)), rng.integers(1, 90, p)) for _ in range(2)))
    profiles = {
        name: dataclasses.replace(v, bytes=(100, 100, 50), slots=(slots + 2, slots + 1, slots))
        for name, v in PROFILES.items()
    }
    arrivals = tuple(np.sort(rng.random(p) * 50).tolist()) if open_loop else None
    objective = THROUGHPUT if rng.random() < 0.5 else ServiceObjective.of("response_time")
    own = options(prompts=int(rng.integers(1, 4)), interval=int(rng.integers(1, 9)), budget=budget)
    got = run(
        t,
        policies.helios(profiles, objective, own),
        profiles=profiles,
        setting=SimulationSetting(slots=slots, steps=steps, clients=clients, arrivals=arrivals),
    )
    assert got.tokens.tolist() == [new] * p and all(got.models)
    assert (got.first >= got.arrived).all() and (got.ended >= got.first).all()
    assert (np.diff([e.time for e in got.timeline]) >= 0).all()
    assert (np.diff([d.time for d in got.decisions]) >= 0).all()
    assert sum(map(sum, got.exits.values())) == p * new
    assert (got.agree <= got.tokens).all() and (got.below <= got.tokens).all()
    assert 0 <= got.memory <= sum(v.size(3) for v in profiles.values())
    if budget == 300.0:
        assert got.memory <= budget


class Watched(simulator.SimulatedServer):
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
        there = {name: part.target_segments for name, part in self.parts.items()}
        if self.dispatcher.loading is not None:
            assert self.dispatcher.loading.choice.model not in there
            there[self.dispatcher.loading.choice.model] = self.dispatcher.loading.choice.depth
        table = self._profiles
        return sum(sum(table[m].bytes[:d]) + table[m].state[d - 1] for m, d in there.items())

    def look(self, more: float = 0.0) -> None:
        self.peak = max(self.peak, self.bytes() + more)

    def _reconcile(self):
        self.look()
        super()._reconcile()
        self.look()

    def load(self, wanted):
        table = self._profiles[wanted.model]
        self.look(sum(table.bytes[: wanted.depth]) + table.state[wanted.depth - 1])
        return super().load(wanted)

    def add(self, loading):
        self.ready[loading.choice.model] = loading.ready
        super().add(loading)
        self.look()

    def grow(self, wanted):
        why = super().grow(wanted)
        self.look()
        return why

    def shrink(self, wanted):
        super().shrink(wanted)
        self.look()

    def free(self, model):
        del self.ready[model]
        part = self.parts[model]
        super().free(model)
        assert all(job.part is not part and not job.model for job in part.every)

    def start(self, job):
        assert self.ready[job.model] <= self.now
        super().start(job)
        part = self.parts[job.model]
        # Whatever is on its way, the budget was counted with these slots.
        assert len(part.every) <= part.by_depth[part.target_segments - 1]

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
    def spread():
        return np.repeat(rng.integers(0, n, -(-p // 8)), 8)[:p, None]

    def exits():
        return np.where(rng.random((p, new)) < 0.7, spread(), rng.integers(0, n, (p, new)))

    traced = {name: model(exits(), rng.integers(1, 90, p), n=n) for name in names}
    profiles, paces = {}, {}
    for name in names:
        scale, slots = draw(st.floats(0.2, 5.0)), draw(st.integers(1, 4))
        by_depth = tuple(slots + n - d for d in range(1, n + 1))
        cost = draw(st.sampled_from([1e-3, 0.3, 10.0]))
        profiles[name] = profile(
            scale,
            n,
            load=(scale * cost,) * n,
            rebuild=(scale * 1e-3,) * n,
            slots=by_depth,
            bytes=tuple(rng.integers(50, 200, n)),
            sure=(0.9,) * n,
            state=tuple(10.0 * k * d for d, k in enumerate(by_depth, 1)),
        )
        paces[name] = pace(scale, n, slots=by_depth[0])
    arrivals = tuple(np.sort(rng.random(p) * p * 3).tolist()) if draw(st.booleans()) else None
    setting = SimulationSetting(
        steps=draw(st.integers(1, 4)),
        cap=draw(st.integers(1, 8)),
        arrivals=arrivals,
        clients=draw(st.integers(1, 8)),
        audits=draw(st.sampled_from([0.0, 0.5])),
    )
    window = draw(st.integers(2, 12))
    own = dict(
        prompts=draw(st.integers(1, 3)),
        interval=draw(st.integers(1, 8)),
        tokens=new,
        window=window,
        breaches=draw(st.integers(0, window // 2)),
        gain=draw(st.floats(0, 0.1)),
        candidates=draw(st.integers(1, 3)),
        greedy=draw(st.integers(0, 4)) > 0,
    )
    t = PromptTrace(traced, ("task",) * p)
    return t, profiles, paces, setting, draw(st.floats(1.0, 2.0)), own


GOALS = (
    THROUGHPUT,
    ServiceObjective.of("response_time"),
    ServiceObjective.of("energy"),
    ServiceObjective.of("throughput", accuracy=0.95),
)


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

    with mock.patch.object(simulator, "SimulatedServer", Watched):
        got = simulate(t, profiles, paces, make, setting)
    watched = Watched.made
    assert watched.answers == collections.Counter(range(len(t)))
    assert got.tokens.tolist() == [t.new] * len(t)
    assert sum(map(sum, got.exits.values())) == len(t) * t.new
    assert (got.first >= got.arrived).all() and (got.ended >= got.first).all()
    assert not watched.dispatcher.queue and not any(part.every for part in watched.parts.values())
    assert watched.peak <= budget  # sums of whole numbers, which are exact
    assert got.memory <= watched.peak * (1 + 1e-9)  # a mean over time, with rounding
    for what in sorted({e.what for e in got.timeline} & {"free", "grow", "shrink"}):
        event(what)
    event("a text goes on elsewhere" if any(j.moved for j in watched.jobs) else "all stay")
