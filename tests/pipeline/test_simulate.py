"""Times of schedules, against closed forms, against rows of ticks made without a table, and
against each other."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.pipeline.schedule import (
    BACKWARD,
    EXITS,
    FORWARD,
    Operation,
    Schedule,
    gpipe,
    one_f_one_b,
)
from eejax.pipeline.simulate import (
    PassTime,
    StageCosts,
    Timeline,
    exit_time_overhead,
    neighbours_time,
    run_queues,
    simulate,
    stage_costs,
    step_costs,
)

# Sums of multiples of 1/4 are exact, so equality is equality.
times = st.integers(0, 20).map(lambda n: n / 4)
works = st.builds(PassTime, times, times)


@st.composite
def drawn(draw, most_stages=6):
    p, m = draw(st.integers(1, most_stages)), draw(st.integers(1, 12))

    def each():
        return tuple(draw(st.lists(works, min_size=p, max_size=p)))

    exits = draw(st.sets(st.integers(0, p - 1)))
    entry = tuple(w if i in exits else PassTime() for i, w in enumerate(each()))
    make = draw(st.sampled_from([gpipe, one_f_one_b]))
    policy = draw(st.sampled_from(["mixed", "aligned", "deferred"]))
    again = draw(st.booleans())
    schedule = make(p, m, exit_stages=sorted(exits), exits=policy, recompute=again)
    return schedule, StageCosts(each(), entry, each(), draw(works))


def barrier(schedule: Schedule, costs: StageCosts) -> float:
    """The time if a step begins when all stages have finished the previous one."""
    return step_costs(schedule, costs).max(1).sum()


def dataflow(schedule: Schedule, costs: StageCosts) -> Timeline:
    """Operations begin when their inputs are there and their stage is free: the earliest time that
    the order of a table allows."""
    queues = [[] for _ in range(schedule.stages)]
    for step in schedule.steps:
        for i, ops in enumerate(step.ops):
            queues[i] += [(op, costs.of(op.kind, i, schedule.recompute)) for op in ops]

    def before(op: Operation, stage: int) -> tuple[int, Operation] | None:
        if op.kind == FORWARD and stage > 0:
            return stage - 1, op
        if op.kind == BACKWARD and stage < schedule.routes[op.microbatch].top:
            return stage + 1, op
        return None  # its input was made on this stage, earlier in its order

    return run_queues(queues, before)


def rows_of_ticks(layers, entry, inner, final, n, policy, again):
    """Lockstep 1F1B [ticks][stages] straight from its law, without a table of operations."""
    p = len(layers)
    rows = []
    for t in range(n + 2 * p - 2):
        row = []
        for i in range(p):
            last, runs = i == p - 1, lambda m: 0 <= m < n
            back, aligned = t - (2 * p - 2 - i), t - (p - 1)

            def early(m, i=i):
                return policy == "aligned" or (policy == "mixed" and m >= n - (p - 1 - i))

            cost = layers[i].forward * (runs(t - i) and not (again and last))
            cost += (layers[i].backward + inner[i].total) * runs(back)
            cost += again * layers[i].forward * runs(back)
            cost += (final.total * last + entry[i].total * last) * runs(back)
            if not last:
                cost += entry[i].total * (runs(aligned) and early(aligned))
                cost += entry[i].total * (runs(back) and not early(back))
            row.append(cost)
        rows.append(row)
    return rows


@given(drawn(), st.sampled_from(["mixed", "aligned", "deferred"]), st.booleans())
def test_1f1b_takes_what_its_law_of_ticks_takes(case, policy, again):
    drawn_schedule, c = case
    p, n = c.stages, drawn_schedule.microbatches
    rows = rows_of_ticks(c.layers, c.entry, c.inner, c.final, n, policy, again)
    schedule = one_f_one_b(p, n, exit_stages=range(p), exits=policy, recompute=again)
    np.testing.assert_array_equal(step_costs(schedule, c), rows)
    end = [0.0] * p
    for row in rows:
        end = [max(end[max(i - 1, 0) : i + 2]) + cost for i, cost in enumerate(row)]
    assert simulate(schedule, c).time == neighbours_time(np.array(rows)) == max(end)


@given(drawn())
def test_no_faster_than_inputs_and_stages_allow_and_no_slower_than_a_barrier(case):
    schedule, c = case
    line, earliest = simulate(schedule, c), dataflow(schedule, c)
    busy = step_costs(schedule, c).sum(0)
    assert busy.max() <= earliest.time <= line.time <= barrier(schedule, c)
    for timeline in (line, earliest):
        np.testing.assert_array_equal(timeline.idle, timeline.time - busy)


@given(drawn())
def test_operations_wait_for_what_they_read_and_stages_do_one_at_a_time(case):
    schedule, c = case
    for line in (simulate(schedule, c), dataflow(schedule, c)):
        at = {(op.kind, op.microbatch, op.stage): op for op in line.ops}
        assert set(at) == set(schedule.when) and len(at) == len(line.ops)
        for (kind, m, i), op in at.items():
            assert op.end == op.begin + c.of(kind, i, schedule.recompute)
            if kind == FORWARD and i > 0:
                assert op.begin >= at[FORWARD, m, i - 1].end
            if kind == BACKWARD:
                assert op.begin >= at[FORWARD, m, i].end
                if i < c.stages - 1:
                    assert op.begin >= at[BACKWARD, m, i + 1].end
            if kind == EXITS:
                assert op.begin >= at[FORWARD, m, i].end and op.end <= at[BACKWARD, m, i].begin
        for i in range(c.stages):
            mine = [op for op in line.ops if op.stage == i]
            order = sorted(
                schedule.when, key=lambda k: (schedule.when[k], k[0] != FORWARD, k[0] == BACKWARD)
            )
            assert [
                (o.kind, o.microbatch)
                for o in sorted(mine, key=lambda o: (o.begin, o.end))
                if o.end > o.begin
            ] == [(k, m) for k, m, s in order if s == i and at[k, m, s].end > at[k, m, s].begin]
            assert all(a.end <= b.begin for a, b in itertools.pairwise(mine))


@given(drawn())
def test_the_critical_path_is_a_gapless_chain_as_long_as_all(case):
    schedule, c = case
    for line in (simulate(schedule, c), dataflow(schedule, c)):
        if line.time == 0:
            assert line.critical == ()
            continue
        assert line.critical[0].begin == 0 and line.critical[-1].end == line.time
        assert sum(op.end - op.begin for op in line.critical) == line.time
        for a, b in itertools.pairwise(line.critical):
            assert a.end == b.begin
        assert {bar.label for bar in line.bars() if bar.critical} == {
            str(op.microbatch) for op in line.critical
        }


@given(st.integers(1, 8), st.integers(1, 20), times, times)
def test_1f1b_without_exits_has_the_critical_path_of_1f1b(p, m, f, b):
    """EE-LLM, Appendix A.3.1: (P - 1) f + M (f + b) + (P - 1) b, which is also the earliest."""
    c = stage_costs((1,) * p, layer=PassTime(f, b))
    expected = (p - 1) * f + m * (f + b) + (p - 1) * b
    schedule = one_f_one_b(p, m)
    assert dataflow(schedule, c).time == simulate(schedule, c).time == expected
    assert barrier(schedule, c) == expected


@given(st.integers(1, 8), st.integers(1, 20), times, times)
def test_gpipe_takes_as_long(p, m, f, b):
    c = stage_costs((1,) * p, layer=PassTime(f, b))
    assert simulate(gpipe(p, m), c).time == (m + p - 1) * (f + b)


@st.composite
def one_exit_a_stage(draw):
    p = draw(st.integers(2, 8))
    stages = draw(st.sets(st.integers(0, p - 2), min_size=1))
    f = draw(st.integers(1, 12).map(lambda n: n / 4))
    fe, part = draw(times), draw(st.integers(0, 8))
    exit = PassTime(fe * part / 32, fe * part / 32)  # together at most fe, exactly
    return p, sorted(stages), f, fe, exit


def cost_of(p, stages, f, fe, exit):
    entry = [int(i in stages) for i in range(p)]
    return stage_costs((1,) * p, entry, layer=PassTime(f, 2 * f), exit=exit, final=PassTime(0, fe))


@given(one_exit_a_stage(), st.integers(1, 30))
def test_aligned_exits_cost_no_time(case, m):
    """Equal layers, one exit before the last stage at most as expensive as the final one."""
    p, stages, *_ = case
    c = cost_of(*case)
    without, aligned = one_f_one_b(p, m), one_f_one_b(p, m, exit_stages=stages, exits="aligned")
    assert exit_time_overhead(without, aligned, c) == 0
    assert dataflow(aligned, c).time == dataflow(without, c.without_exits).time
    assert barrier(aligned, c) == barrier(without, c.without_exits)


@given(one_exit_a_stage(), st.integers(0, 20))
def test_mixed_exits_cost_no_time_where_two_fit_beside_a_backward_pass(case, more):
    p, stages, f, fe, exit = case
    m = 2 * p + more
    half = exit * 0.5  # 2 ee <= fe <= f + fe, so both conditions hold
    c = cost_of(p, stages, f, fe, half)
    mixed = one_f_one_b(p, m, exit_stages=stages, exits="mixed")
    assert barrier(mixed, c) == barrier(one_f_one_b(p, m), c.without_exits)


@given(one_exit_a_stage(), st.integers(0, 20), times)
def test_what_aligned_exits_cost_under_recomputation(case, more, ee):
    """(M - 2 (P - 1 - s)) max(0, EE - max(0, FE - f)) by the barrier, s the deepest exit's stage,
    from M = 2P on: the last stage, without a forward pass of its own, is not the slowest any more.
    """
    p, stages, f, fe, _ = case
    m, ee = 2 * p + more, min(ee, fe)
    c = cost_of(p, stages, f, fe, PassTime(0, ee))
    aligned = one_f_one_b(p, m, exit_stages=stages, exits="aligned", recompute=True)
    base = barrier(one_f_one_b(p, m, recompute=True), c.without_exits)
    law = (m - 2 * (p - 1 - max(stages))) * max(0, ee - max(0, fe - f))
    assert barrier(aligned, c) - base == law


@given(one_exit_a_stage(), st.integers(1, 30))
def test_deferred_exits_cost_their_own_time_once(case, m):
    """On its way down, the last microbatch's gradient passes every exit once (EE-LLM, section
    3.2: the overhead of exits does not grow with the number of microbatches)."""
    p, stages, _, _, exit = case
    c = cost_of(*case)
    deferred = one_f_one_b(p, m, exit_stages=stages, exits="deferred")
    grown = simulate(deferred, c).time - simulate(one_f_one_b(p, m), c.without_exits).time
    assert grown == len(stages) * exit.total


def test_recomputation_moves_the_last_stages_forward_pass_into_its_backward_pass():
    c = stage_costs(
        (2, 1, 3),
        (0, 1, 1),
        (1, 0, 0),
        layer=PassTime(1, 2),
        exit=PassTime(0.5, 0.5),
        final=PassTime(1, 1),
        embedding=PassTime(0.25, 0.5),
    )
    keep = {k: [c.of(k, i) for i in range(3)] for k in (FORWARD, EXITS, BACKWARD)}
    again = {k: [c.of(k, i, True) for i in range(3)] for k in (FORWARD, EXITS, BACKWARD)}
    assert keep == {
        FORWARD: [2.25, 1, 3],
        EXITS: [0, 1, 1 + 2],
        BACKWARD: [4 + 0.5 + 1, 2, 6],
    }
    assert again == {
        FORWARD: [2.25, 1, 0],
        EXITS: [0, 1, 1 + 2],
        BACKWARD: [2.25 + 4 + 0.5 + 1, 3, 9],
    }


def test_costs_that_cannot_be_are_named():
    with pytest.raises(ConfigError, match=r"Costs.entry.*must have 2 entries"):
        StageCosts((PassTime(1, 2),) * 2, (PassTime(),), (PassTime(),) * 2)
    with pytest.raises(ConfigError, match=r"Costs.layers = \(-1, 2\)"):
        StageCosts((PassTime(-1, 2),), (PassTime(),), (PassTime(),))
    c = stage_costs((1, 1), layer=PassTime(1, 2))
    with pytest.raises(ConfigError, match="costs.stages = 2: must be the schedule's.*3"):
        simulate(one_f_one_b(3, 2), c)


def test_stages_that_wait_for_each_other_are_named():
    up, down = Operation(FORWARD, 0), Operation(BACKWARD, 0)
    elsewhere = {(up, 1): (0, up), (down, 0): (1, down)}

    def before(op, stage):
        return elsewhere.get((op, stage))

    right = [[(up, 1.0), (down, 2.0)], [(up, 1.0), (down, 2.0)]]
    assert run_queues(right, before).time == 6
    wrong = [[(down, 2.0), (up, 1.0)], right[1]]
    with pytest.raises(ValueError, match="wait for each other at .*backward.*forward"):
        run_queues(wrong, before)
