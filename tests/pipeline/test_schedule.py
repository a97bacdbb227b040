"""Tables of steps: whole, in order, within their bounds, and refused where they are not."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import assert_right_values, assert_slots_hold

from eejax.common.errors import ConfigError
from eejax.models.config import ModelConfig
from eejax.pipeline.config import PipelineConfig
from eejax.pipeline.partition import partition
from eejax.pipeline.plan import plan
from eejax.pipeline.schedule import (
    BACKWARD,
    EXIT_POLICIES,
    EXITS,
    FORWARD,
    GENERATORS,
    IDLE,
    Operation,
    Route,
    Schedule,
    ScheduleStep,
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
            assert (
                at
                == {
                    "deferred": back,
                    "aligned": final,
                    "mixed": [
                        f if m >= n - late else b
                        for m, (f, b) in enumerate(zip(final, back, strict=True))
                    ],
                }[policy]
            )
            if policy == "mixed":  # those that are early fall into steps without a forward pass
                busy = {table.when[FORWARD, m, i] for m in range(n)}
                early = [t for t, b in zip(at, back, strict=True) if t != b]
                assert n < late or not busy & set(early)


@given(drawn())
def test_rings_hold_everything_in_as_few_slots_as_possible(case):
    assert_slots_hold(*case)
    assert_slots_hold(*case, distils=True)


def test_aligned_exits_cost_slots_and_mixed_ones_none():
    p, n = 4, 12

    def slots(policy, exits):
        return rings(one_f_one_b(p, n, exit_stages=exits, exits=policy), exits).n_states

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
            len(schedule.steps),
            schedule.stages,
        )
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
        s._replace(ops=tuple(map(tuple, row))) for s, row in zip(schedule.steps, table, strict=True)
    )
    return Schedule(schedule.name, schedule.stages, steps, schedule.routes)


F, E, B = (lambda m, kind=kind: Operation(kind, m) for kind in (FORWARD, EXITS, BACKWARD))


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda t: t[0][0].remove(F(0)), "no forward of microbatch 0 on stage 0"),
        (lambda t: t[4][0].remove(B(0)), "no backward of microbatch 0 on stage 0"),
        (lambda t: t[5][0].insert(0, F(0)), "an operation is done twice"),
        (lambda t: (t[4][0].remove(B(0)), t[5][0].append(B(0))), "out of order"),
        (lambda t: (t[1][1].remove(F(0)), t[2][1].insert(0, F(0))), "forward of 0 on stage 2 at"),
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


def test_no_plan_has_a_damaged_table(monkeypatch):
    cut = partition(ModelConfig(5, 3, 4, 1, 4), 3)
    settings = dict(length=4, remat="none")
    whole = plan(PipelineConfig(), cut, 4, **settings).schedule
    damaged = changed(whole, lambda t: t[0][0].append(B(7)))
    monkeypatch.setitem(GENERATORS, "1f1b", lambda *_, **__: damaged)
    with pytest.raises(ValueError, match="no such microbatch"):
        plan(PipelineConfig(), cut, 4, **settings)


def test_a_value_that_no_link_carries_is_refused():
    whole = one_f_one_b(3, 1)

    def edit(t, links):
        return (*whole.steps[:t], whole.steps[t]._replace(links=links))

    for t, links, message in (
        (0, (False, True), "forward of 0 on stage 1 needs a link of stages 0 and 1 at step 0"),
        (3, (False, True), "backward of 0 on stage 0 needs a link of stages 0 and 1 at step 3"),
    ):
        steps = (*edit(t, links), *whole.steps[t + 1 :])
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(whole, steps=steps).check()
    steps = (*edit(3, (True, False)), *whole.steps[4:])
    dataclasses.replace(whole, steps=steps).check()


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


def test_a_schedule_as_text():
    table = one_f_one_b(2, 2, exit_stages=(1,))
    steps = (*table.steps, ScheduleStep(((), ()), (False,)))
    assert str(dataclasses.replace(table, steps=steps)).splitlines() == [
        "1f1b",
        "step     0   1       2       3   4'",
        "stage 0  F0  F1      B0      B1",
        "stage 1      F0E0B0  F1E1B1",
    ]
