"""Evaluations of candidates: when the controller makes them again, and what they tell."""

from __future__ import annotations

import itertools
import math

import pytest
from controlled import THROUGHPUT, World, profile, set_state

from eejax.common.errors import ConfigError
from eejax.helios import prospects
from eejax.helios.choices import ControllerOptions, ModelDepth
from eejax.helios.objectives import ServiceObjective


def test_reassessment_every_interval_and_no_change_for_little():
    shares = {"a": (0.1, 0.7, 0.1, 0.1), "b": (0.1, 0.1, 0.1, 0.7)}
    world = World({"a": profile(1.0), "b": profile(0.9)}, shares, interval=20)
    for _ in range(200):
        world.prompt()
    assert {c.model for c in world.served[10:] if c.depth < 4} == {"a"}
    # The one that serves is evaluated as it is, for 5 of every 26 prompts; the other one whole, but
    # not before that pays.
    begins = [
        d.time for d in world.controller.decisions if d[1:3] == ("evaluate", ModelDepth("a", 2))
    ]
    assert len(begins) >= 6
    assert {b - a for a, b in itertools.pairwise(begins)} <= {26.0, 31.0}
    assert any(d[1:3] == ("evaluate", ModelDepth("b", 4)) for d in world.controller.decisions[2:])


def test_who_could_not_be_better_is_not_evaluated_again():
    """By throughput 'b' could not win at its first exit; what is limited may still need it."""
    shares = {"a": (0.7, 0.1, 0.1, 0.1), "b": (0.7, 0.1, 0.1, 0.1)}
    for goal, again in (
        (THROUGHPUT, False),
        (ServiceObjective.of("throughput", accuracy=0.999), True),
    ):
        world = World({"a": profile(1.0), "b": profile(1.2)}, shares, goal, interval=10)
        for _ in range(600):
            world.prompt(100)
        evaluated = [d.choice.model for d in world.controller.decisions if d.kind == "evaluate"]
        assert evaluated[:2] == ["a", "b"] and ("b" in evaluated[2:]) is again
        # Nor is 'a' where it has one segment alone, and could not have fewer.
        assert ("a" in evaluated[2:]) is again


# A token takes 3.4 segments of 'a', and the gain is 5 %; after k assessments 'b' is hoped to take
# 1 + 3 * 0.9**k, or 1 where most tokens leave by the first exit, which they do from the seventh on.
@pytest.mark.parametrize("greedy, want", [(True, [4, 7, 7, 7]), (False, [4, 10, 18, 27])])
def test_who_lost_by_more_is_evaluated_more_rarely(greedy, want):
    """And who could not win, were all its tokens to leave by the first exit, never."""
    gaps, load = [], (1e-4,) * 4
    for scale in (1.0, 1.5, 2.2, 2.7, 3.6):
        world = World(
            {"a": profile(load=load), "b": profile(scale, load=load)},
            {"a": (0.1, 0.1, 0.1, 0.7), "b": (0.0, 0.0, 0.0, 1.0)},
            interval=20,
            greedy=greedy,
        )
        for _ in range(1600):
            world.prompt()
        decisions = world.controller.decisions
        assert world.controller.state.serving == "a"
        served = [i for i, d in enumerate(decisions) if d.kind != "evaluate"]
        rounds = [decisions[a:b] for a, b in itertools.pairwise([-1, *served])]
        asked = [i for i, r in enumerate(rounds) if any(d.choice.model == "b" for d in r)]
        gaps.append({b - a for a, b in itertools.pairwise(asked)})
        assert len(rounds) > 26
    assert gaps == [*({gap} for gap in want), set()]


PRIOR = dict(shares=(0.55, 0.25, 0.1, 0.1))


def test_it_begins_with_what_profiles_tell_of_exits():
    """Nobody is evaluated whole who could not win; the one that serves shows how it does as it is,
    and what leaves below its threshold is taken to go deeper."""
    profiles = {"a": profile(**PRIOR), "b": profile(1.5, **PRIOR)}
    world = World(profiles, dict.fromkeys(profiles, (0.7, 0.1, 0.1, 0.1)))
    world.prompt()
    assert world.kinds == ["serve", "evaluate"] and world.served == [ModelDepth("a", 1)]
    for _ in range(60):
        world.prompt()
    assert {*world.served} == {ModelDepth("a", 1)}
    (row,) = world.repository.history("a", 5)
    assert row.depth == 1 and row.prompts == 5
    found = world.controller.state.shares["a"]
    # Three of ten are below, as of 25, 10 and 10 before.
    assert found == pytest.approx((0.7, 0.3 * 5 / 9, 0.3 * 2 / 9, 0.3 * 2 / 9), abs=0.02)
    # Another one that could be faster, did some more of its tokens leave early, is looked at.
    profiles = {"a": profile(**PRIOR), "b": profile(0.9, shares=(0.1, 0.1, 0.1, 0.7))}
    world = World(profiles, {"a": (0.55, 0.25, 0.1, 0.1), "b": (0.9, 0.1, 0.0, 0.0)})
    for _ in range(800):
        world.prompt()
    assert world.served[0] == ModelDepth("a", 1) and world.served[-1] == ModelDepth("b", 1)


@pytest.mark.parametrize("above", [0.0, 0.3, 1.0])
def test_tokens_below_the_threshold_of_a_part_go_deeper(above):
    c = World({"m": profile(**PRIOR)}, {"m": (1.0, 0.0, 0.0, 0.0)}).controller
    shares = (0.2, 0.8, 0.0, 0.0)
    found = c.state.expected.spread("m", 2, above, shares)
    assert sum(found) == pytest.approx(1.0) and min(found) >= 0
    assert found[0] == 0.2 and sum(found[2:]) == pytest.approx(min(above, 0.8))
    assert found[2] == pytest.approx(found[3])  # as they were before


def test_an_evaluation_that_costs_much_waits_until_it_pays():
    """The longer the last one is ago the more it may cost."""
    found = []
    for load in (1e-4, 1.0, 10.0):
        profiles = {"a": profile(load=(load,) * 4), "b": profile(2.0, load=(load,) * 4)}
        world = World(profiles, {"a": (0.1, 0.1, 0.1, 0.7), "b": (0.0, 0.0, 0.0, 1.0)}, interval=20)
        c = world.controller
        while c.state.serving is None:
            world.prompt()
        whole = ModelDepth("a", 4)
        set_state(c, serving="a", wanted=whole, current=whole, plan=())
        c.device_reported({"a": 4}, 0)
        for age in range(200):
            set_state(c, ages=c.state.ages | {"b": age})
            if prospects.may_be_better(c.state, "b"):
                break
        found.append(age)
        set_state(c, ages=c.state.ages | {"b": math.inf})  # there are other texts
        assert prospects.may_be_better(c.state, "b")
    assert found[0] < found[1] < found[2] < 199


def test_an_interval_that_follows_from_what_reassessing_costs():
    """HELIOS, §3.4.2: evaluations of all other candidates take a share `gain` of the time between.
    A token of 'a' takes 1 ms at its first exit, an answer of 20 tokens 20 ms; to bring 'b' whole
    takes 4 loads, and an answer of it 20 times its seconds a token."""
    shares = (0.9, 0.1, 0.0, 0.0)
    for load in (0.1, 0.4):
        loads = dict(load=(load,) * 4)
        profiles = {"a": profile(**loads), "b": profile(3.0, load=(3 * load,) * 4)}
        world = World(profiles, {"a": shares, "b": shares}, interval="auto")
        for _ in range(12):
            world.prompt()
        c = world.controller
        assert c.current == ModelDepth("a", 1)
        answer = 20 * profiles["b"].serving(shares, 4).tpot
        assert prospects.interval(c.state) == math.ceil((12 * load + answer) / (0.05 * 20 * 1e-3))
    alone = World({"a": profile()}, {"a": shares}, interval="auto")
    for _ in range(12):
        alone.prompt()
    assert prospects.interval(alone.controller.state) == 50  # nothing is to be brought
    # A server that begins with profiles has no model to serve yet when it first asks.
    profiles = {"a": profile(shares=shares), "b": profile(3.0, shares=shares)}
    known = World(profiles, {"a": shares, "b": shares}, interval="auto")
    known.prompt()
    assert known.controller.current is not None
    for wrong in ("often", 0, 2.5):
        with pytest.raises(ConfigError, match="interval = .*: must be "):
            ControllerOptions(interval=wrong)


@pytest.mark.parametrize("lasted", [True, False])
def test_a_breach_asks_for_evaluations_where_what_was_breached_had_lasted(lasted):
    """Soon after an assessment it says that the choice was wrong, not that texts are others."""
    early, late = (0.9, 0.05, 0.03, 0.02), (0.1, 0.1, 0.4, 0.4)
    # Not even after ten assessments would 'b' be hoped to win, unless texts are others.
    profiles = {"a": profile(), "b": profile(1.7)}
    world = World(profiles, {"a": early, "b": (0.0, 0.0, 0.0, 1.0)}, interval=40)
    c = world.controller
    while c.current != ModelDepth("a", 1) or c.state.plan:
        world.prompt()
    for _ in range(60 if lasted else 10):
        world.prompt()
    while c.state.plan:
        world.prompt()
    assert c.current == ModelDepth("a", 1) and "grow" not in world.kinds
    known = len(c.decisions)
    world.redraw("a", late)
    for _ in range(60):
        world.prompt()
    told = c.decisions[known:]
    assert told[0].kind == "grow"
    assert any(d.kind == "evaluate" and d.choice.model == "b" for d in told) is lasted
