"""Who serves while models come, are evaluated, or fail."""

from __future__ import annotations

import warnings

import pytest
from controlled import World, profile, set_state

from eejax.helios import decisions, prospects
from eejax.helios.choices import STRICTEST, ModelDepth
from eejax.helios.objectives import ServiceObjective


def test_nobody_is_given_to_a_model_that_fails():
    shares = dict.fromkeys("ab", (0.6, 0.2, 0.1, 0.1))
    world = World({"a": profile(), "b": profile(2.0)}, shares)
    c = world.controller
    c.model_loaded(c.wanted)
    with pytest.warns(UserWarning, match="'a' is no longer served"):
        for _ in range(5):
            assert c.prompt_arrived() == (ModelDepth("a", 4), True)
            c.prompt_dropped("a", failed=True)
    assert c.current is None and c.wanted == ModelDepth("b", 4)
    for _ in range(6):
        world.prompt()
    assert world.served[-1] == ModelDepth("b", 1) and "a" not in prospects.candidates(c.state)[1]
    for _ in range(5):
        assert not c.state.plan
        c.answer_failed("b")  # which served well before
    assert c.state.plan and c.decisions[-1].why == "answers end in errors"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is the last one
        c.model_loaded(c.wanted)
        for _ in range(20):
            assert c.prompt_arrived().choice.model == "b"
            c.prompt_dropped("b", failed=True)


def test_a_limit_holds_for_who_serves_until_another_one_is_there():
    wrong = dict(sure=(0.8, 0.8, 0.8, 1.0))
    goal = ServiceObjective.of("throughput", accuracy=0.95)
    profiles = {"a": profile(**wrong), "b": profile(3.0, **wrong)}
    world = World(profiles, dict.fromkeys("ab", (0.6, 0.2, 0.1, 0.1)), goal)
    c = world.controller
    for _ in range(12):
        world.prompt()
    assert c.current == ModelDepth("a", 4) and c.level("a") == STRICTEST
    c.apply(decisions.want, "switch", ModelDepth("b", 4), "for the test")
    assert c.level("a") == STRICTEST and c.level("b") == STRICTEST
    c.model_loaded(c.wanted)
    assert c.level("a") == 0 and c.level("b") == STRICTEST


def test_between_two_evaluations_who_served_goes_on():
    """And what takes long to load is not assessed for the prompts that others served meanwhile."""
    shares = dict.fromkeys("abc", (0.6, 0.2, 0.1, 0.1))
    profiles = {"a": profile(1.0), "b": profile(0.85), "c": profile(0.85)}
    world = World(profiles, shares, candidates=3, interval=20)
    c = world.controller
    while c.state.serving is None:
        world.prompt()
    set_state(c, serving="a")
    c.apply(decisions.want, "serve", ModelDepth("a", 1), "for the test")
    c.model_loaded(c.wanted)
    # As if they were evaluated long ago.
    set_state(c, ages=c.state.ages | dict.fromkeys("bc", 20))
    c.apply(decisions.evaluate, "for the test")
    assert [seen.choice for seen in c.state.plan] == [
        ModelDepth("a", 1),
        ModelDepth("b", 4),
        ModelDepth("c", 4),
    ]
    c.device_reported({"a": 1}, 0)
    for _ in range(5):
        assert c.prompt_arrived() == (ModelDepth("a", 1), True)
        c.prompt_answered("a", profiles["a"].serving(shares["a"], 1), [0] * 10)
    assert c.wanted == ModelDepth("b", 4)
    c.device_reported({"a": 1, "b": 4}, 0)
    c.model_loaded(c.wanted)
    for _ in range(5):
        assert c.prompt_arrived() == (ModelDepth("b", 4), True)
        c.prompt_answered("b", profiles["b"].serving(shares["b"], 4), [0] * 10)
    assert c.wanted == ModelDepth("c", 4) and c.prompt_arrived() == (ModelDepth("a", 1), False)
    set_state(c, plan=())
    c.apply(decisions.want, "switch", ModelDepth("c", 1), "for the test")
    for _ in range(30):
        assert not c.prompt_arrived().evaluated
    c.model_loaded(c.wanted)
    c.prompt_arrived()
    assert not c.state.plan
