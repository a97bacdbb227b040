"""A limit on first tokens: how late they come while something serves, and what follows."""

from __future__ import annotations

import itertools

import pytest
from controlled import World, profile

from eejax.helios import decisions
from eejax.helios.objectives import ServiceObjective


def test_first_tokens_may_not_come_too_late():
    """All but one in a hundred, as they were served: what is ahead of them is done sooner with less
    loaded. What was too slow is tried again, ever more rarely."""

    def depths(prompts: int, **limits) -> list[int]:
        goal, shares = ServiceObjective.of("accuracy", **limits), {"m": (0.6, 0.2, 0.1, 0.1)}
        world = World({"m": profile()}, shares, goal, interval=60, breaches=100)
        for _ in range(prompts):
            choice = world.prompt()
            world.controller.first_token_emitted("m", 2.0 if choice.depth == 4 else 0.1)
        told = world.controller.decisions
        assert told[1].expected.ttft_p99 == pytest.approx(0.04)  # nobody was served yet
        return [d.choice.depth for d in told if d.kind == "serve"]

    assert {*depths(60 * 10)} == {4}
    assert {*depths(60 * 10, ttft_p99=2.5)} == {4}
    found = depths(60 * 80, ttft_p99=1.0)
    # The tokens that were ahead of those who waited for two seconds would take 1.16 with depth 1.
    assert found[:4] == [4, 1, 3, 3]
    slow = [i for i, depth in enumerate(found) if depth == 4]
    assert 4 < len(slow) < 9
    gaps = [b - a for a, b in itertools.pairwise(slow)]
    assert gaps == sorted(gaps) and gaps[-1] >= 2 * gaps[0]


def test_who_waited_for_something_else_says_nothing():
    world = World({"m": profile()}, {"m": (0.6, 0.2, 0.1, 0.1)}, ServiceObjective.of("accuracy"))
    c = world.controller
    for _ in range(40):
        world.prompt()
        c.first_token_emitted("m", world.time - c.state.since + 0.5)  # came before what serves
        c.first_token_emitted("other", 9.0)
    c.apply(decisions.evaluate, "now")
    assert c.decisions[-2].expected.ttft_p99 == pytest.approx(0.04)
    for _ in range(6):
        c.first_token_emitted("m", 9.0)  # of an evaluation
        world.prompt()
    assert c.decisions[-1].expected.ttft_p99 == pytest.approx(0.04)


def test_a_queue_that_only_grows_is_seen():
    """Everybody came before what serves was there, and waits for far longer than the limit."""
    goal = ServiceObjective.of("accuracy", ttft_p99=10.0)
    world = World({"m": profile()}, {"m": (0.6, 0.2, 0.1, 0.1)}, goal, interval=60, breaches=100)
    for _ in range(200):
        world.prompt()
        world.controller.first_token_emitted("m", 150.0)
    served = [d.choice.depth for d in world.controller.decisions if d.kind == "serve"]
    assert served[0] == 4 and served[1] == 1
