"""Exits are turned off where they cost more than they save, and on again where they do not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.inference.payoff import Payoff


def run(payoff, seconds, calls):
    """Tells `calls` calls, which take seconds(exits, i) for 8 tokens; which used exits."""
    used = []
    for i in range(calls):
        used.append(payoff.next())
        payoff.add(seconds(used[-1], i), 8)
    return used


def test_pairs_come_first_in_turning_order():
    used = run(Payoff(pairs=3), lambda exits, i: 1.0 if exits else 2.0, 16)
    on, off = [True] * 2, [False] * 2
    assert used == on + off + off + on + on + off + [True] * 4


@settings(max_examples=50)
@given(
    ratio=st.floats(0.5, 2).filter(lambda r: abs(r - 1) > 0.02),
    noise=st.floats(0, 0.4),
    pairs=st.integers(1, 6),
)
def test_the_faster_way_is_taken_however_slow_the_machine_becomes(ratio, noise, pairs):
    """What slows both calls of a pair does not decide."""
    payoff = Payoff(pairs=pairs, calls=20)

    def slow(exits, i):
        return (1 + noise * (i // 4 % 3)) * (1.0 if exits else ratio)

    used = run(payoff, slow, 4 * pairs + 20)
    assert payoff.ratio == pytest.approx(ratio)
    assert used[4 * pairs :] == [ratio > 1] * 20
    # The text changes: within two rounds the other way is taken.
    used = run(payoff, lambda exits, i: ratio if exits else 1.0, 4 * pairs + 20)
    assert used[4 * pairs :] == [ratio < 1] * 20


@pytest.mark.parametrize("slower", [0.9, 1.25])
@pytest.mark.parametrize("pairs", [2, 4])
def test_who_comes_first_in_a_pair_does_not_decide(slower, pairs):
    """Exits are 1 % slower, and so is, by far more, whatever is measured first."""
    payoff = Payoff(pairs=pairs, calls=5)
    run(payoff, lambda exits, i: (1.01 if exits else 1.0) * (slower if i % 4 < 2 else 1), 4 * pairs)
    assert payoff.ratio == pytest.approx(1 / 1.01) and not payoff.exits


def test_tokens_left_waiting_are_paid_for_by_those_who_left_them():
    """With exits a call leaves work behind, as much as it spares: nothing is won."""
    payoff, waits = Payoff(pairs=4, calls=5), False
    for _ in range(16):
        exits = payoff.next()
        payoff.add(1.0 + 0.5 * waits - 0.5 * exits, 8)
        waits = exits
    assert payoff.ratio == pytest.approx(1.0)


def test_a_pair_is_of_calls_of_one_kind():
    """Batches of one and of eight come in turns too short for a pair; exits are slower in both,
    and a token of the batch of eight is faster by far."""
    payoff, used = Payoff(pairs=4, calls=50), []
    for kind in [1, 1, 1, 8, 8, 8] * 3:
        used.append((kind, payoff.next(kind)))
        payoff.add(1.2 if used[-1][1] else 1.0, kind, kind)
    assert payoff.ratio == pytest.approx(1 / 1.2) and not payoff.exits
    on, off = [True] * 2, [False] * 2
    # Each kind has its pairs, and who comes first takes turns.
    assert [way for kind, way in used if kind == 1][:8] == on + off + on + off
    assert [way for kind, way in used if kind == 8][:8] == off + on + off + on


def test_calls_that_compile_or_emit_nothing_do_not_count():
    payoff = Payoff(pairs=1, calls=5)
    payoff.add(None)
    payoff.add(9.0, 0)
    assert payoff.ratio is None and payoff.exits
    used = run(payoff, lambda exits, i: 2.0 if exits else 1.0, 6)
    assert used == [True, True, *[False] * 4] and payoff.ratio == 0.5


def test_calls_of_another_length_compare_by_the_token():
    payoff = Payoff(pairs=1, calls=2)
    for tokens in (10, 10, 5, 5):
        payoff.add(1.0, tokens)
    assert payoff.ratio == 2.0


def test_calls_that_a_clock_sees_take_no_time_count_for_nothing():
    payoff = Payoff(pairs=1, calls=2)
    for seconds in (0.0, 2.0, float("nan"), 2.0, 0.0, 1.0, float("inf"), 1.0):
        payoff.next()
        payoff.add(seconds, 1)
    assert payoff.ratio == 0.5 and not payoff.measuring


@pytest.mark.parametrize("field, value", [("pairs", 0), ("pairs", 1.5), ("calls", -5)])
def test_payoffs_that_cannot_be(field, value):
    with pytest.raises(ConfigError, match=field):
        Payoff(**{field: value})
