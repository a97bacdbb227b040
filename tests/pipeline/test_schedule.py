"""Tables of steps: whole, in order, within their bounds, and refused where they are not."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.pipeline.schedule import (
    BACKWARD,
    EXIT_POLICIES,
    EXITS,
    FORWARD,
    IDLE,
    Op,
    Route,
    Schedule,
    Step,
    gpipe,
    one_f_one_b,
    rings,
)

SETTINGS = {"1f1b": one_f_one_b, "gpipe": gpipe}


@st.composite
def drawn(draw, names=tuple(SETTINGS)):
    p, m = draw(st.integers(1, 8)), draw(st.integers(1, 20))
    exits = draw(st.sets(st.integers(0, p - 1)))
    make = SETTINGS[draw(st.sampled_from(names))]
    policy, again = draw(st.sampled_from(EXIT_POLICIES)), draw(st.booleans())
    return make(p, m, exit_stages=sorted(exits), exits=policy, recompute=again), sorted(exits)


def run_as_the_executor(schedule):
    """Values with one buffer for each stage, channel and direction, as steps hand them on.

    Gives what every operation read. A state is (microbatch, stages it went through); the gradient
    of stage i is (microbatch, stages from the top down to i).
    """
    p = schedule.stages
    up = {c: [None] * p for c in range(schedule.channels)}
    down = {c: [None] * p for c in range(schedule.channels)}
    newest_up, newest_down = [None] * p, [None] * p
    read = []
    for step in schedule.steps:
        for i, ops in enumerate(step.ops):
            for op in ops:
                if op.kind == FORWARD:
                    state = (op.microbatch, ()) if i == 0 else up[step.channel][i]
                    read.append((op, i, state))
                    newest_up[i] = (state[0], (*state[1], i)) if state else None
                if op.kind == BACKWARD:
                    top = schedule.routes[op.microbatch].top
                    gradient = (op.microbatch, ()) if i == top else down[step.channel][i]
                    read.append((op, i, gradient))
                    newest_down[i] = (gradient[0], (*gradient[1], i)) if gradient else None
        up[step.channel] = [None, *newest_up[:-1]]
        down[step.channel] = [*newest_down[1:], None]
    return read


def assert_right_values(schedule):
    for op, i, value in run_as_the_executor(schedule):
        top = schedule.routes[op.microbatch].top
        way = range(i) if op.kind == FORWARD else range(top, i, -1)
        assert value == (op.microbatch, tuple(way)), (op, i, value)


@given(drawn())
def test_every_operation_reads_what_it_should(case):
    schedule, _ = case
    schedule.check()
    assert_right_values(schedule)


@given(drawn())
def test_every_operation_is_there_once(case):
    schedule, exits = case
    p, n = schedule.stages, schedule.microbatches
    stages = {kind: range(p) for kind in (FORWARD, BACKWARD)}
    stages[EXITS] = sorted({*exits, p - 1})
    expected = {(k, m, i) for k, where in stages.items() for m in range(n) for i in where}
    assert set(schedule.when) == expected
    assert sum(len(ops) for s in schedule.steps for ops in s.ops) == len(expected)
    assert any(schedule.steps[-1].ops) and any(schedule.steps[0].ops)


@given(drawn(["1f1b"]))
def test_1f1b_is_as_long_and_as_full_as_it_says(case):
    schedule, _ = case
    p, n = schedule.stages, schedule.microbatches
    assert len(schedule.steps) == n + 2 * p - 2
    for i in range(p):
        # Forward at m + i, backward at m + 2P - 2 - i, both counted.
        assert schedule.in_flight(i) == min(n, 2 * (p - i) - 1)


@given(drawn(["gpipe"]))
def test_gpipe_keeps_all_microbatches(case):
    schedule, _ = case
    p, n = schedule.stages, schedule.microbatches
    assert len(schedule.steps) == 2 * (n + p - 1)
    assert [schedule.in_flight(i) for i in range(p)] == [n] * p
    for i in range(p):
        last_forward = max(t for (k, _, s), t in schedule.when.items() if (k, s) == (FORWARD, i))
        first = min(t for (k, _, s), t in schedule.when.items() if (k, s) == (BACKWARD, i))
        assert last_forward < first


@given(drawn(["1f1b"]))
def test_when_exits_are_computed(case):
    schedule, exits = case
    p, n = schedule.stages, schedule.microbatches
    for policy in EXIT_POLICIES:
        table = one_f_one_b(p, n, exit_stages=exits, exits=policy)
        for i in set(exits) - {p - 1}:
            at = [table.when[EXITS, m, i] for m in range(n)]
            back = [table.when[BACKWARD, m, i] for m in range(n)]
            final = [table.when[EXITS, m, p - 1] for m in range(n)]
            late = p - 1 - i
            assert at == {
                "deferred": back,
                "aligned": final,
                "mixed": [f if m >= n - late else b
                          for m, (f, b) in enumerate(zip(final, back, strict=True))],
            }[policy]  # fmt: skip
            if policy == "mixed":  # those that are early fall into steps without a forward pass
                busy = {table.when[FORWARD, m, i] for m in range(n)}
                early = [t for t, b in zip(at, back, strict=True) if t != b]
                assert n < late or not busy & set(early)


def spans(schedule, exits, i):
    """What stage i must hold from step to step, by kind: [(table, microbatch, first, last)]."""
    when, out = schedule.when, []
    for m, route in enumerate(schedule.routes):
        if i > route.top:
            continue
        begin = when[FORWARD, m, i]
        end = when.get((BACKWARD, m, i), begin)
        at = when.get((EXITS, m, i))
        out.append(("residuals", m, begin, end))
        out.append(("inputs", m, begin, max(end, begin if at is None else at)))
        if at is not None and i in exits:
            out.append(("cotangents", m, at, max(at, end)))
        if at is not None and i == schedule.stages - 1:
            out.append(("outputs", m, at, max(at, end)))
    return out


def assert_slots_hold(schedule, exits):
    """No two values that are held at the same time share a slot, and no slot is for nothing."""
    found = rings(schedule, exits)
    most = {"states": 1, "residuals": 1}
    for i in range(schedule.stages):
        for ring, kinds in (
            ("states", ("inputs", "cotangents", "outputs")),
            ("residuals", ("residuals",)),
        ):
            held = [s for s in spans(schedule, exits, i) if s[0] in kinds]
            for t in range(len(schedule.steps)):
                slots = [getattr(found, k)[m, i] for k, m, a, b in held if a <= t <= b]
                assert len(slots) == len(set(slots))
                assert all(0 <= s < getattr(found, f"n_{ring}") for s in slots)
                most[ring] = max(most[ring], len(slots))
    assert (found.n_states, found.n_residuals) == (most["states"], most["residuals"])


@given(drawn())
def test_rings_hold_everything_in_as_few_slots_as_possible(case):
    assert_slots_hold(*case)


def test_aligned_exits_cost_slots_and_mixed_ones_none():
    p, n = 4, 12
    slots = lambda policy, exits: (
        rings(one_f_one_b(p, n, exit_stages=exits, exits=policy), exits).n_states
    )
    assert slots("deferred", ()) == 2 * p - 1
    # Deferred, an exit's gradient is held within one step; aligned, for P - 1 - i more.
    assert slots("mixed", (1,)) == slots("deferred", (1,)) == 2 * p - 1
    assert slots("deferred", (0,)) == 2 * p
    assert slots("aligned", (0,)) == 2 * p - 1 + p


@given(drawn())
def test_tables_tell_the_same(case):
    schedule, _ = case
    for kind in (FORWARD, EXITS, BACKWARD):
        table = schedule.table(kind)
        assert table.dtype == np.int32 and table.shape[::2] == (
            len(schedule.steps), schedule.stages,
        )  # fmt: skip
        got = {
            (kind, int(m), i): t
            for t, row in enumerate(table)
            for column in row
            for i, m in enumerate(column)
            if m != IDLE
        }
        assert got == {key: t for key, t in schedule.when.items() if key[0] == kind}
        assert (table != IDLE).any(axis=(0, 2)).all()  # no column that is never used


def changed(schedule, edit):
    """The schedule after `edit(table)` of its operations, as lists [steps][stages]."""
    table = [[list(ops) for ops in step.ops] for step in schedule.steps]
    edit(table)
    steps = tuple(
        Step(s.channel, tuple(map(tuple, row)))
        for s, row in zip(schedule.steps, table, strict=True)
    )
    return Schedule(schedule.name, schedule.stages, steps, schedule.routes)


F, E, B = (lambda m, kind=kind: Op(kind, m) for kind in (FORWARD, EXITS, BACKWARD))


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda t: t[0][0].remove(F(0)), "no forward of microbatch 0 on stage 0"),
        (lambda t: t[4][0].remove(B(0)), "no backward of microbatch 0 on stage 0"),
        (lambda t: t[5][0].insert(0, F(0)), "an operation is done twice"),
        (lambda t: (t[4][0].remove(B(0)), t[5][0].append(B(0))), "backward of 0 on stage 0 at"),
        (lambda t: (t[1][1].remove(F(0)), t[2][1].insert(0, F(0))), "forward of 0 on stage 1 at"),
        (lambda t: (t[4][0].remove(B(0)), t[1][0].append(B(0))), "backward of 0 on stage 0 at"),
        (lambda t: t[5][1].append(E(0)), "exits of 0 on stage 1 at step 5"),
        (lambda t: t[2][2].reverse(), "out of order"),
        (lambda t: t[0][0].append(B(7)), "backward of 7: no such microbatch"),
    ],
)
def test_a_damaged_table_is_refused(edit, message):
    whole = one_f_one_b(3, 4)
    changed(whole, lambda t: None).check()
    with pytest.raises(ValueError, match=message):
        changed(whole, edit).check()


def test_a_visit_beyond_the_route_is_refused():
    whole = one_f_one_b(3, 2)
    shorter = dataclasses.replace(whole, routes=(Route(2, 1), Route(2)))
    with pytest.raises(ValueError, match="backward of 0 on stage 0, which it does not visit"):
        shorter.check()


@pytest.mark.parametrize("make", [one_f_one_b, gpipe])
@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(stages=0, microbatches=1), "stages = 0"),
        (dict(stages=2, microbatches=0), "microbatches = 0"),
        (dict(stages=2, microbatches=2, exits="late"), "exits = 'late'.*'aligned'"),
    ],
)
def test_settings_that_make_no_schedule_are_named(make, arguments, message):
    with pytest.raises(ConfigError, match=message):
        make(**arguments)
