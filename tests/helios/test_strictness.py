"""Audits make a controller load more layers, raise thresholds or take a better model."""

from __future__ import annotations

import numpy as np
import pytest
from controlled import World, profile, set_state

from eejax.helios.choices import ModelDepth, stricter
from eejax.helios.disagreement_bound import AnswerAudit, DisagreementBound
from eejax.helios.objectives import ServiceObjective
from eejax.helios.strictness import Strictness


def looked_at(n: int, wrong: float) -> DisagreementBound:
    """An audit of n answers, each with this share of tokens that the whole model does not write."""
    audit = DisagreementBound()
    for _ in range(n):
        audit = audit.with_answer(AnswerAudit(np.arange(100) >= 100 * wrong, np.zeros(100)))
    return audit


CERTAIN, FAULTLESS = looked_at(40, 0.5), looked_at(60, 0.0)


def begun(profiles, shares, goal, **options) -> World:
    """A server in which the whole small model serves; shares: of the tokens of every model."""
    world = World(profiles, dict.fromkeys(profiles, shares), goal, **options)
    whole, shares = ModelDepth("small", 3), dict.fromkeys(profiles, shares)
    own = dict(serving="small", plan=(), wanted=whole, current=whole, shares=shares)
    set_state(world.controller, **own)
    return world


def test_audits_ask_for_more_layers_and_then_for_surer_tokens():
    goal = ServiceObjective.of("throughput", accuracy=0.75)
    world = World({"m": profile(n=3)}, {"m": (0.8, 0.1, 0.1)}, goal, interval=30)
    for _ in range(6):
        world.prompt()
    c = world.controller
    assert c.current == ModelDepth("m", 1)
    expected = 1 - c.decisions[-1].expected.accuracy
    assert expected == pytest.approx(1 - 0.8 * 0.98 - 0.2 * 2 / 3)
    few, good = looked_at(10, 0.1), looked_at(40, 0.1)
    assert few.low < few.had_been(expected) < few.high and good.high < 0.25
    c.answers_audited("m", few)  # of as many that are as expected no more would be known
    c.answers_audited("m", good)  # as good as it has to be
    assert world.kinds[-1] == "serve"
    near, top_logprobs = looked_at(20, 0.24), looked_at(20, 0.3)
    for audit in (near, top_logprobs):
        assert audit.low < audit.had_been(expected) < 0.25 < audit.high and CERTAIN.low > 0.25
    c.answers_audited("m", near)  # it is not certain yet, but looks like it
    assert world.kinds[-1] == "serve"
    for depth, audit in ((2, top_logprobs), (3, CERTAIN)):
        c.answers_audited("m", audit)
        assert world.kinds[-1] == "tighten" and c.wanted == ModelDepth("m", depth)
        c.answers_audited("m", audit)  # while that is loaded nothing more is decided
        assert c.wanted == ModelDepth("m", depth)
        c.model_loaded(c.wanted)
    why = c.decisions[-1].why
    assert why == "the quality of its answers is 45.3% to 54.7%, and the limit is 75.0%"
    assert stricter(0.6, c.level("m")) == 0.6
    for threshold in (0.8, 0.9, 0.95, 1.0, 1.0):
        c.answers_audited("m", CERTAIN)
        assert stricter(0.6, c.level("m")) == pytest.approx(threshold)
    assert world.kinds.count("tighten") == 6
    without = World({"m": profile()}, {"m": (0.9, 0.1, 0.0, 0.0)})
    for _ in range(6):
        without.prompt()
    without.controller.answers_audited("m", CERTAIN)
    assert without.kinds == ["evaluate", "serve"]


def test_audits_of_a_whole_model_without_exits_change_nothing():
    """A limit forbids its exits already, so neither thresholds nor their rest have to rise."""
    goal = ServiceObjective.of("throughput", accuracy=0.75)
    world = World({"m": profile(n=3)}, {"m": (0.8, 0.1, 0.1)}, goal, interval=30)
    for _ in range(6):
        world.prompt()
    c = world.controller
    whole, kinds = ModelDepth("m", 3), world.kinds
    set_state(c, wanted=whole, current=whole, without_exits=frozenset("m"))
    for _ in range(3):
        c.answers_audited("m", CERTAIN)
    assert world.kinds == kinds and c.state.strictness["m"] == Strictness()
    set_state(c, without_exits=frozenset())
    c.answers_audited("m", CERTAIN)
    assert world.kinds == [*kinds, "tighten"]
    assert c.state.strictness["m"] == Strictness(level=1, failed=1, rest=2)


def test_audits_that_no_tightening_can_help_bring_a_better_model():
    """The whole small model keeps less of the limit than was thought, and the large one more."""
    goal, shares = ServiceObjective.of("throughput", accuracy=0.75), (0.8, 0.1, 0.1)
    own = {"small": (1.0, 0.7), "large": (3.0, 1.0), "bad": (0.5, 0.5)}
    profiles = {
        name: profile(scale, n=3, quality=((1.0, value),), ceiling=value)
        for name, (scale, value) in own.items()
    }

    c = begun(profiles, shares, goal).controller
    c.answers_audited("small", CERTAIN)
    assert c.decisions[-1].kind == "evaluate" and c.decisions[-1].choice.model == "small"
    assert [seen.model for seen in c.state.plan] == ["small", "large"]  # which tells of both
    assert c.state.strictness["small"].level == 0
    # Of none that is better, surer tokens are nearer to the limit at least.
    del profiles["large"]
    c = begun(profiles, shares, goal).controller
    c.answers_audited("small", CERTAIN)
    assert c.decisions[-1].kind == "tighten" and c.state.strictness["small"].level == 1


def test_better_models_are_evaluated_once_between_two_assessments():
    """The other model's answers are better by less than what a change has to bring."""
    goal, shares = ServiceObjective.of("throughput", accuracy=0.75), (0.8, 0.1, 0.1)
    own = dict(n=3, sure=(1.0, 1.0, 1.0))
    profiles = {
        "small": profile(1.0, quality=((1.0, 0.70),), ceiling=0.70, **own),
        "near": profile(3.0, quality=((1.0, 0.71),), ceiling=0.71, **own),
    }
    world = begun(profiles, shares, goal, interval=30)
    c = world.controller

    def evaluated():
        while c.state.plan:
            world.prompt()
        c.model_loaded(c.wanted)
        assert c.current == ModelDepth("small", 3) and not c.state.without_exits

    for _ in range(2):
        c.answers_audited("small", CERTAIN)
        assert world.kinds[-1] == "evaluate"
        assert [seen.model for seen in c.state.plan] == ["small", "near"]
        evaluated()  # which keeps it
        level = c.state.strictness["small"].level
        c.answers_audited("small", CERTAIN)
        assert world.kinds[-1] == "tighten" and c.state.strictness["small"].level == level + 1
        while not c.state.plan:  # up to the next assessment
            world.prompt()
        evaluated()


def test_what_was_too_strict_is_taken_back_step_by_step_and_ever_more_rarely():
    goal = ServiceObjective.of("throughput", accuracy=0.75)
    world = World({"m": profile(n=3)}, {"m": (0.8, 0.1, 0.1)}, goal, interval=10)
    c = world.controller

    def reassessed():
        n = world.kinds.count("serve")
        while world.kinds.count("serve") == n:
            world.prompt()
            if not c.state.plan:
                c.model_loaded(c.wanted)
                c.answers_audited("m", FAULTLESS)

    reassessed()
    c.model_loaded(c.wanted)
    c.answers_audited("m", CERTAIN)
    assert c.state.strictness["m"].least == 2
    turns = []
    for _ in range(4):
        n = 0
        while c.state.strictness["m"].least == 2:
            reassessed()
            n += 1
        turns.append(n)
        c.model_loaded(c.wanted)
        c.answers_audited("m", CERTAIN)
        assert world.kinds[-1] == "tighten"
    assert turns == [2, 4, 8, 16]
    c.model_loaded(c.wanted)
    set_state(c, strictness={"m": Strictness(least=2, level=1)})
    reassessed()
    found = c.state.strictness["m"]
    assert (found.level, found.least) == (0, 2)  # the last step first
