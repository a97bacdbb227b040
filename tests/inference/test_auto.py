"""Exits on where they pay and off where they do not, with the tokens that go with it."""

from __future__ import annotations

import numpy as np
import pytest

from eejax.common.errors import ConfigError
from eejax.inference import AutoGenerator, EngineOptions, Generator
from eejax.inference.payoff import Payoff


class Clock:
    """A clock on which a decoding call takes 1 s a step without exits and `exits` s with."""

    def __init__(self, exits: float):
        self.exits, self.now, self.auto = exits, 0.0, None
        self.inside = False

    def __call__(self) -> float:
        if self.inside:
            self.now += 4 * (self.exits if self.auto.payoff.said else 1.0)
        self.inside = not self.inside
        return self.now


class Told(Payoff):
    """Keeps what it said last."""

    def next(self, kind=None) -> bool:
        self.said = super().next(kind)
        return self.said


def made(subset, exits: float, drafts: int = 0, layout=(1, 3)) -> AutoGenerator:
    p, config = subset(layout)
    clock = Clock(exits)
    options = EngineOptions("recompute", cap=4, buckets=(4,), drafts=drafts)
    generator = Generator.make(p, config, options)
    clock.auto = AutoGenerator(generator, Told(pairs=2, calls=100), clock)
    return clock.auto


@pytest.mark.parametrize("exits, on", [(0.5, True), (2.0, False)])
def test_exits_are_used_where_they_pay(subset, prompts, exits, on):
    auto = made(subset, exits)
    asked, kwargs = prompts(3, [9]), dict(threshold=0.0)
    auto.generate(asked, 40, chunk=4, **kwargs)  # compiles, and measures two pairs
    assert auto.payoff.ratio == pytest.approx(1 / exits) and auto.payoff.exits == on
    got = auto.generate(asked, 40, chunk=4, **kwargs)
    other = Generator.make(*subset((1, 3)), "posthoc")
    want = other.generate(asked, 40, threshold=0.0 if on else 1.0)
    assert got.ids(0) == want.ids(0)
    np.testing.assert_array_equal(got.exits, want.exits)


def test_turning_exits_off_and_on_keeps_keys_and_values(subset, prompts):
    """Every token is what `posthoc` says after the text so far, with exits or without."""
    auto = made(subset, 1.0)
    got = auto.generate(prompts(5, [12]), 30, chunk=4, threshold=0.0)
    p, config = subset((1, 3))
    oracle = Generator.make(p, config, "posthoc")
    ids = prompts(5, [12])[0]
    assert {0, 2} == set(got.exits[0, 1:].tolist())
    early = got.exits[0, 1:, None] == 0
    want = oracle.generate(
        [ids + got.ids(0)[:j] for j in range(1, 30)],
        1,
        prefill_exit=True,
        threshold=np.where(early, 0.0, 1.0).repeat(config.n_exits, 1),
    )
    clear = want.margins[:, 0] > 1e-4
    np.testing.assert_array_equal(want.tokens[clear, 0], got.tokens[0, 1:][clear])


def test_another_engine_is_refused(subset):
    with pytest.raises(ConfigError, match="engine = 'full': must be one of .*'speculative'"):
        AutoGenerator.make(*subset((1,)), EngineOptions("full"))
    with pytest.raises(ConfigError, match="options = 3: must be EngineOptions, or the name"):
        AutoGenerator.make(*subset((1,)), 3)


def test_drafts_of_recompute_are_measured(subset, prompts):
    """Where no exit can fire, drafts still make a difference."""
    auto = made(subset, 2.0, drafts=2, layout=(1,))
    auto.generate(prompts(3, [9]), 50, chunk=4, threshold=1.0)
    assert auto.payoff.ratio is not None


@pytest.mark.slow
@pytest.mark.parametrize("drafts, on", [(0.5, True), (4.0, False)])
def test_drafts_are_made_where_they_pay(subset, prompts, drafts, on):
    """A step with two drafts writes at most three tokens; a clock says what it takes."""
    p, config = subset((1, 4))
    options = EngineOptions("speculative", drafts=2, draft_exit=4, adapt=False)
    clock = Clock(drafts)
    auto = AutoGenerator(Generator.make(p, config, options), Told(pairs=2, calls=100), clock)
    clock.auto = auto
    asked = prompts(3, [9])
    auto.generate(asked, 90, chunk=4)
    assert auto.payoff.exits == on
    got = auto.generate(asked, 30, chunk=4)
    assert got.ids(0) == Generator.make(p, config, "full").generate(asked, 30).ids(0)
    assert (got.drafted.sum() > 0) == on


def test_calls_whose_exits_cannot_fire_are_not_measured(subset, prompts):
    auto = made(subset, 2.0)
    auto.generate(prompts(3, [9]), 50, chunk=4, threshold=1.0)
    assert auto.payoff.ratio is None
    auto.generate(prompts(3, [9]), 50, chunk=4, threshold=[1.0, 0.9])
    assert auto.payoff.ratio is not None
