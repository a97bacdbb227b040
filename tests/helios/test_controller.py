"""Every decision of the controller, by hand-made traces and drawn ones."""

from __future__ import annotations

import math
import re
import types
import warnings
from unittest import mock

import numpy as np
import pytest
from controlled import World, profile, set_state, telemetry

from eejax.common.errors import ConfigError
from eejax.helios import decisions, prospects
from eejax.helios.choices import STRICTEST, ControllerOptions, ModelDepth, breaches, stricter
from eejax.helios.objectives import NAMED, ServiceObjective
from eejax.serving.worker import EngineWorker


def test_candidates_are_evaluated_and_the_best_is_loaded_up_to_its_mode():
    world = World(
        {"small": profile(), "large": profile(3.0)},
        {"small": (0.1, 0.7, 0.1, 0.1), "large": (0.6, 0.2, 0.1, 0.1)},
    )
    served = [world.prompt() for _ in range(12)]
    assert (
        served[:5] == [ModelDepth("small", 4)] * 5 and served[5:10] == [ModelDepth("large", 4)] * 5
    )
    assert served[10:] == [ModelDepth("small", 2)] * 2
    assert world.kinds == ["evaluate", "evaluate", "serve"]
    rows = world.repository.history("small", 5)
    assert [(r.prompts, r.tokens, r.exits) for r in rows] == [(5, 100, (10, 70, 10, 10))]
    assert world.controller.decisions[-1].expected.throughput > 0


def test_large_serves_where_its_tokens_leave_so_early_that_it_is_faster():
    world = World(
        {"small": profile(), "large": profile(1.5)},
        {"small": (0.0, 0.0, 0.1, 0.9), "large": (0.9, 0.1, 0.0, 0.0)},
    )
    served = [world.prompt() for _ in range(12)]
    assert served[-1] == ModelDepth("large", 1)


def test_limits_that_nothing_keeps_are_told_of():
    """In the reason of each choice, and once in the log; models that keep them are as before."""
    models = {"small": profile(), "large": profile(3.0)}
    shares = {"small": (0.1, 0.7, 0.1, 0.1), "large": (0.6, 0.2, 0.1, 0.1)}
    pattern = r"(ttft|accuracy): (\S+) where at (most|least) (\S+) is allowed"
    for limits in (
        dict(ttft=1e-6, accuracy=1.0),
        dict(ttft=1e-6, accuracy=0.01),
        dict(ttft=1e3, accuracy=0.01),
    ):
        world = World(models, shares, ServiceObjective.of("throughput", **limits), interval=20)
        for _ in range(60):
            world.prompt()
        controller = world.controller
        chosen = [d for d in controller.decisions if d.kind != "evaluate"]
        assert len(chosen) > 1
        for decision in controller.decisions:
            found = re.findall(pattern, decision.why)
            wanted, told = [], decision.expected
            if told is not None:
                wanted += ["ttft"] if told.ttft > limits["ttft"] else []
                wanted += ["accuracy"] if told.accuracy < limits["accuracy"] else []
            assert [metric for metric, *_ in found] == wanted, decision
            for metric, value, bound, limit in found:
                assert float(limit) == limits[metric]
                assert float(value) == pytest.approx(getattr(decision.expected, metric), rel=5e-3)
                assert (float(value) > limits[metric]) is (bound == "most")
        report = types.SimpleNamespace(decisions=controller.decisions, points=())
        fleet = mock.Mock(controller=controller, **{"report.return_value": report})
        built = mock.Mock(**{"fleet.return_value": fleet})
        worker = EngineWorker(built)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            worker._report()
            worker._report()
        assert len(said) == (len({d.choice for d in chosen}) if limits["ttft"] < 1 else 0)
        assert all(re.search(f"though it misses {pattern}", str(w.message)) for w in said)


def test_a_value_that_misses_a_limit_by_little_is_told_from_it():
    for metric, value in (("ttft", 0.5), ("accuracy", 0.9), ("memory", 2e9)):
        towards = 0.0 if metric == "accuracy" else math.inf
        for off in (math.nextafter(value, towards), value * (1 + math.copysign(1e-5, towards - 1))):
            objective = ServiceObjective.of("energy", **{metric: value})
            if objective.excess(telemetry(**{metric: off})) == 0:
                continue  # so little that its log is the same
            told = objective.missed(telemetry(**{metric: off}))
            assert (float(told.split()[1]) > value) is (towards > 0), told
        assert objective.missed(telemetry(**{metric: value})) == ""


def test_a_window_of_breaches_and_not_their_sum():
    """50 in each 100 tokens are borne for ever; 51 in 100 are not."""
    shares = (0.6, 0.2, 0.1, 0.1)
    for above, changes in ((0.5, False), (0.51, True)):
        world = World({"m": profile()}, {"m": shares}, interval=10**6)
        for _ in range(6):
            world.prompt()
        assert world.served[-1] == ModelDepth("m", 1)
        world.redraw("m", (1 - above, above, 0.0, 0.0))
        for _ in range(100):
            world.prompt()
        assert ("grow" in world.kinds) is changes, above


def test_the_window_is_empty_after_a_decision():
    world = World({"m": profile()}, {"m": (0.6, 0.2, 0.1, 0.1)}, interval=10**6)
    for _ in range(5):
        world.prompt()
    world.prompt(tokens=0)
    c = world.controller
    c.tokens_emitted("m", [True] * 50)
    assert world.kinds == ["evaluate", "serve"]
    c.tokens_emitted("m", [True])
    assert world.kinds[-1] == "grow"
    grown = c.wanted
    c.tokens_emitted("m", [True] * 50)  # while it is loaded nothing more is decided
    assert c.wanted == grown and len(world.kinds) == 3
    c.model_loaded(grown)
    c.tokens_emitted("m", [True] * 50)
    assert len(world.kinds) == 3


def test_more_layers_or_another_model_whichever_is_better_by_what_it_costs():
    for load, kind in ((0.1, "switch"), (1e4, "grow")):
        small = profile()
        large = profile(1.2, load=(load,) * 4)
        world = World(
            {"small": small, "large": large},
            {"small": (0.9, 0.0, 0.0, 0.1), "large": (0.9, 0.1, 0.0, 0.0)},
            interval=1000,
        )
        for _ in range(11):
            world.prompt()
        assert world.served[-1] == ModelDepth("small", 1)
        world.redraw("small", (0.0, 0.0, 0.0, 1.0))
        for _ in range(6):
            world.prompt()
        assert world.kinds[-1] == kind
        assert world.controller.decisions[-1].seconds > 0


def test_who_has_layers_to_spare_is_assessed_again():
    world = World({"m": profile()}, {"m": (0.2, 0.6, 0.1, 0.1)}, interval=20)
    for _ in range(10):
        world.prompt()
    assert world.served[-1] == ModelDepth("m", 2)
    world.redraw("m", (0.7, 0.1, 0.1, 0.1))
    for _ in range(30):
        world.prompt()
    assert world.served[-1] == ModelDepth("m", 1) and world.kinds[-2:] == ["evaluate", "serve"]
    for _ in range(100):
        world.prompt()
    assert world.kinds.count("evaluate") == 2


def test_while_another_is_evaluated_the_one_that_served_goes_on():
    shares = {"a": (0.7, 0.1, 0.1, 0.1), "b": (0.1, 0.1, 0.1, 0.7)}
    world = World({"a": profile(1.0), "b": profile(0.9)}, shares, interval=20)
    c = world.controller
    while c.state.serving is None:
        world.prompt()
    c.model_loaded(c.wanted)
    c.apply(decisions.evaluate, "for the test", ["b"])
    c.model_loaded(c.wanted)
    assert c.current == ModelDepth("b", 4)
    c.device_reported({"a": 1, "b": 4}, 0)
    given = [c.prompt_arrived() for _ in range(7)]
    assert given == [(ModelDepth("b", 4), True)] * 5 + [(ModelDepth("a", 1), False)] * 2
    c.device_reported({"b": 4}, 0)  # "a" had to go
    assert c.prompt_arrived() == (ModelDepth("b", 4), False)


def test_an_evaluation_pools_perplexity_over_tokens():
    """Two answers of 1 and 3 tokens pool as exp of the mean of all negative log-probabilities."""
    world = World({"m": profile(n=1)}, {"m": (1.0,)}, prompts=2)
    c = world.controller
    c.model_loaded(c.wanted)
    for perplexity, tokens in ((16.0, 1), (2.0, 3)):
        c.prompt_arrived()
        c.prompt_answered("m", telemetry(perplexity=perplexity), [0] * tokens)
    (row,) = world.repository.history("m")
    nats = [math.log(16.0)] + [math.log(2.0)] * 3
    assert row.telemetry.perplexity == pytest.approx(math.exp(np.mean(nats)))
    assert row.strictness == 0


def test_a_request_of_its_own_objective_is_ranked_by_that():
    """Its own objective, not the server's, also decides whether exits are taken."""
    fast = profile(1.0, n=2, sure=(0.2, 1.0), quality=((1.0, 0.8),), ceiling=0.8)
    slow = profile(3.0, n=2, sure=(0.9, 1.0), quality=((1.0, 0.75),), ceiling=0.75)
    shares = {"fast": (1.0, 0.0), "slow": (1.0, 0.0)}
    world = World({"fast": fast, "slow": slow}, shares)
    c = world.controller
    set_state(c, shares=shares)
    c.device_reported({"fast": 2, "slow": 2}, 0)
    assert c.best_loaded(NAMED["throughput"]) == "fast"
    # Without exits the fast one's answers are the better ones; with them, by far the worse ones.
    assert c.best_loaded(NAMED["accuracy"]) == "fast"


def test_the_objective_says_how_deep():
    """Most tokens leave by the first exit; who asks for accuracy gets all layers."""
    for goal, depth in (("throughput", 1), ("response_time", 1), ("energy", 1), ("accuracy", 4)):
        world = World({"m": profile()}, {"m": (0.6, 0.2, 0.1, 0.1)}, ServiceObjective.of(goal))
        for _ in range(6):
            world.prompt()
        assert world.served[-1] == ModelDepth("m", depth), goal


def test_joules_that_were_measured_decide():
    """Operations say that 'a' takes less; a counter, that it takes more."""
    for joules, model in ((1.0, "a"), (3.0, "b")):
        profiles = {"a": profile(), "b": profile(energy=(2.0,) * 4)}
        world = World(
            profiles, dict.fromkeys("ab", (0.6, 0.2, 0.1, 0.1)), ServiceObjective.of("energy")
        )
        told = {m: p.serving((0.6, 0.2, 0.1, 0.1), 4) for m, p in profiles.items()}
        c = world.controller
        for name in ("a", "b"):
            c.model_loaded(c.wanted)
            for _ in range(5):
                c.prompt_arrived()
                energy = told[name].energy * (joules if name == "a" else 1.0)
                seen = telemetry(energy=energy)
                c.prompt_answered(name, seen, [0] * 6 + [1] * 2 + [2, 3])
        assert c.wanted.model == model


def test_tokens_that_are_not_of_an_evaluation_say_nothing_of_the_whole_model():
    world = World({"m": profile()}, {"m": (0.1, 0.1, 0.1, 0.7)})
    c = world.controller
    c.tokens_emitted("m", [False] * 1000)  # while it is loaded
    c.model_loaded(c.wanted)
    c.tokens_emitted("m", [False] * 1000)  # of prompts that were there before
    for _ in range(6):
        world.prompt()
    assert c.state.shares["m"] == (0.1, 0.1, 0.1, 0.7) and world.served[-1].depth == 4


def test_what_a_change_costs_is_of_all_requests_under_way():
    world = World({"a": profile(), "b": profile()}, dict.fromkeys("ab", (0.6, 0.2, 0.1, 0.1)))
    for _ in range(11):
        world.prompt()
    c = world.controller

    def cost(choice):
        return prospects.cost(c.state, choice)

    assert c.current == ModelDepth("b", 1)
    c.device_reported({"b": 1}, 5000)
    assert cost(ModelDepth("b", 3)) == pytest.approx(2 * 0.1 + 2 * 5000 * 1e-5)
    # Those of 'b' end where they are.
    assert cost(ModelDepth("a", 2)) == pytest.approx(2 * 0.1)
    c.device_reported({"b": 1, "a": 4}, 5000)
    assert cost(ModelDepth("a", 2)) == 0.0
    set_state(c, current=ModelDepth("b", 3))
    c.device_reported({"b": 3}, 5000)
    assert cost(ModelDepth("b", 1)) == pytest.approx(5000 * 1e-5)
    c.change_rules(options=ControllerOptions(budget=450))
    assert cost(ModelDepth("a", 2)) == pytest.approx(2 * 0.1 + 2 * 5000 * 1e-5)


def test_the_best_of_what_is_loaded_for_an_objective_of_ones_own():
    world = World(
        {"a": profile(), "b": profile(2.0, unsure=(0.9,) * 3 + (1.0,))},
        {"a": (0.5, 0.0, 0.0, 0.5), "b": (0.5, 0.0, 0.0, 0.5)},
    )
    c, fast, right = world.controller, NAMED["throughput"], NAMED["accuracy"]
    c.device_reported({"a": 1}, 0)
    assert c.best_loaded(fast) is None  # nobody was evaluated yet
    for _ in range(11):
        world.prompt()
    assert c.best_loaded(right) == "a"
    c.device_reported({"a": 1, "b": 1}, 0)
    assert c.best_loaded(fast) == "a" and c.best_loaded(right) == "b"
    c.change_rules(objective=ServiceObjective.of("throughput", accuracy=0.9))
    assert c.best_loaded(fast) == "b"  # within the server's limits


def test_limits_come_before_the_score():
    shares = {"m": (0.6, 0.2, 0.1, 0.1)}
    for least, depth in ((0.7, 1), (0.9, 2), (0.95, 3), (0.98, 4)):
        goal = ServiceObjective.of("goodput", accuracy=least, ttft_p99=1.0)
        world = World({"m": profile()}, shares, goal)
        for _ in range(6):
            world.prompt()
        assert world.served[-1].depth == depth


def test_what_is_breached_again_and_again_is_not_taken_again_and_again():
    """Whenever models are evaluated the first exit is sure of three tokens in five, and of two as
    soon as it serves by itself."""
    sure, unsure = (0.6, 0.3, 0.05, 0.05), (0.4, 0.5, 0.05, 0.05)
    world = World({"m": profile()}, {"m": sure}, interval=30)
    told = world.controller.decisions

    def prompts(n: int, rough: bool = True) -> list:
        known = len(told)
        for _ in range(n):
            evaluating = world.controller.state.plan
            world.redraw("m", sure if evaluating or not rough else unsure)
            world.prompt(100)
        return [(d.kind, d.choice.depth) for d in told[known:] if d.kind != "evaluate"]

    found = prompts(400)
    # Two of five above are too many where half of them were, twice.
    assert found[:4] == [("serve", 1), ("grow", 2), ("serve", 1), ("grow", 2)]
    assert {*found[4:]} == {("serve", 2)}
    # Once all tokens leave by the first exit it is taken all the same.
    sure = (0.9, 0.04, 0.03, 0.03)
    assert prompts(100, rough=False)[-1] == ("serve", 1)


def test_where_exits_are_too_often_wrong_none_is_taken():
    """A whole model without them keeps any limit on agreement; the faster one of two is taken."""
    wrong = dict(sure=(0.8, 0.8, 0.8, 1.0))
    world = World(
        {"small": profile(**wrong), "large": profile(3.0, sure=(0.85, 0.85, 0.85, 1.0))},
        {"small": (0.6, 0.2, 0.1, 0.1), "large": (0.6, 0.2, 0.1, 0.1)},
        ServiceObjective.of("throughput", accuracy=0.95),
        interval=30,
    )
    c = world.controller
    for _ in range(10):
        assert c.level("small") == 0
        world.prompt()
    world.prompt()
    assert world.served[-1] == ModelDepth("small", 4) and stricter(0.3, c.level("small")) == 1.0
    assert c.decisions[-1].expected.accuracy == 1.0
    while not c.state.plan:
        world.prompt()
    # What is evaluated shows where its tokens would leave; the limit holds for everybody else.
    assert c.level("small", evaluated=True) == 0 and c.level("small") == STRICTEST


def test_for_accuracy_alone_nobody_leaves_early():
    """And of two whole models the faster one serves."""
    shares = dict.fromkeys("ab", (0.6, 0.2, 0.1, 0.1))
    world = World({"a": profile(2.0), "b": profile()}, shares, ServiceObjective.of("accuracy"))
    for _ in range(20):
        world.prompt()
    c = world.controller
    assert c.current == ModelDepth("b", 4) and c.level("b") == STRICTEST
    assert c.decisions[-1].expected.accuracy == 1.0


def test_a_mode_in_which_no_token_leaves_below_its_threshold():
    world = World({"m": profile()}, {"m": (0.6, 0.2, 0.1, 0.1)}, greedy=False)
    for _ in range(300):
        world.prompt()
    assert {c.depth for c in world.served} == {4} and world.controller.below_share == 0
    world = World({"m": profile()}, {"m": (0.6, 0.2, 0.1, 0.1)})
    for _ in range(10):
        world.prompt()
    assert world.controller.below_share == pytest.approx(0.4 * 5 / 10, abs=0.02)


def test_prompts_that_are_dropped_are_given_again():
    world = World({"m": profile()}, {"m": (0.6, 0.2, 0.1, 0.1)})
    c = world.controller
    c.model_loaded(c.wanted)
    for _ in range(5):
        c.prompt_arrived()
    c.prompt_dropped("m")
    for _ in range(4):
        c.prompt_answered("m", telemetry(), [1] * 10)
    assert c.state.plan
    c.prompt_arrived()
    c.prompt_answered("m", telemetry(), [1] * 10)
    assert not c.state.plan and c.wanted == ModelDepth("m", 2)


def test_what_does_not_fit_is_refused_or_freed_first():
    with pytest.raises(ConfigError, match=r"budget = 350: holds no whole 'm', which has 400"):
        World({"m": profile()}, {"m": (1, 0, 0, 0)}, budget=350)
    world = World(
        {"a": profile(), "b": profile()}, {"a": (1, 0, 0, 0), "b": (1, 0, 0, 0)}, budget=450
    )
    for _ in range(5):
        world.prompt()
    assert world.controller.wanted.model == "b"


def test_an_answer_of_no_tokens_says_nothing():
    world = World({"m": profile()}, {"m": (0.6, 0.2, 0.1, 0.1)})
    c = world.controller
    c.model_loaded(c.wanted)
    for exits in ([], [9], []):
        c.prompt_arrived()
        c.prompt_answered("m", telemetry(), exits)
    for _ in range(6):
        world.prompt()
    assert world.served[-1] == ModelDepth("m", 1)


def test_shares_above_a_depth():
    shares = (0.6, 0.2, 0.1, 0.1)
    assert breaches(shares, 1) == pytest.approx(0.4) and breaches(shares, 4) == 0
    told = profile().serving(shares, 2)
    assert told.tpot == pytest.approx(1e-3 * (1 + 0.4)) and told.memory == 200
    assert told.accuracy == pytest.approx(0.8 * 0.98 + 0.2 * 0.75)
