"""Exits are turned off where they cost more than they save, and on again where they do not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.inference.payoff import Payoff


def run(payoff, seconds, calls):
    """Tells `calls` calls, which take seconds(exits, i) for 8 tokens; which used exits."""
    used = []
    for i in range(calls):
        used.append(payoff.next())
        payoff.add(seconds(used[-1], i), 8)
    return used


def test_pairs_come_first_in_turning_order():
    used = run(Payoff(pairs=3), lambda exits, i: 1.0 if exits else 2.0, 10)
    assert used == [True, False, False, True, True, False] + [True] * 4


@settings(max_examples=50)
@given(
    ratio=st.floats(0.5, 2).filter(lambda r: abs(r - 1) > 0.02),
    noise=st.floats(0, 0.4), pairs=st.integers(1, 6),
)  # fmt: skip
def test_the_faster_way_is_taken_however_slow_the_machine_becomes(ratio, noise, pairs):
    """What slows both calls of a pair does not decide."""
    payoff = Payoff(pairs=pairs, calls=20)
    slow = lambda exits, i: (1 + noise * (i // 2 % 3)) * (1.0 if exits else ratio)
    used = run(payoff, slow, 2 * pairs + 20)
    assert payoff.ratio == pytest.approx(ratio)
    assert used[2 * pairs :] == [ratio > 1] * 20
    # The text changes: within two rounds the other way is taken.
    used = run(payoff, lambda exits, i: ratio if exits else 1.0, 2 * pairs + 20)
    assert used[2 * pairs :] == [ratio < 1] * 20


def test_calls_that_compile_or_emit_nothing_do_not_count():
    payoff = Payoff(pairs=1, calls=5)
    payoff.add(None)
    payoff.add(9.0, 0)
    assert payoff.ratio is None and payoff.exits
    used = run(payoff, lambda exits, i: 2.0 if exits else 1.0, 4)
    assert used == [True, False, False, False] and payoff.ratio == 0.5


def test_calls_of_another_length_compare_by_the_token():
    payoff = Payoff(pairs=1, calls=2)
    payoff.add(1.0, 10)
    payoff.add(1.0, 5)
    assert payoff.ratio == 2.0
