"""What a table of steps must do, whoever made it: run as an executor would; its slots filled."""

from eejax.pipeline.schedule import BACKWARD, EXITS, FORWARD, rings


def run_as_the_executor(schedule):
    """Return what every operation reads: [(operation, stage, value)].

    Every stage hands on its newest state and gradient after each step, over the links of the step;
    what arrives takes the slot that `rings` gives it. A state is (microbatch, stages it went
    through); the gradient of stage i is (microbatch, stages from the top down to i).
    """
    p = schedule.stages
    found = rings(schedule, ())
    arrived = [[None] * found.arrived.n for _ in range(p)]
    returned = [[None] * found.returned.n for _ in range(p)]
    newest_up, newest_down = [None] * p, [None] * p
    read = []
    for t, step in enumerate(schedule.steps):
        for i, ops in enumerate(step.ops):
            for op in ops:
                m = op.microbatch
                if op.kind == FORWARD:
                    state = (m, ()) if i == 0 else arrived[i][found.arrived.read[m, i]]
                    read.append((op, i, state))
                    newest_up[i] = (state[0], (*state[1], i)) if state else None
                if op.kind == BACKWARD:
                    top = i == schedule.routes[m].top
                    gradient = (m, ()) if top else returned[i][found.returned.read[m, i]]
                    read.append((op, i, gradient))
                    newest_down[i] = (gradient[0], (*gradient[1], i)) if gradient else None
        for i in range(p):
            below = newest_up[i - 1] if i > 0 and step.linked(i - 1) else None
            above = newest_down[i + 1] if i < p - 1 and step.linked(i) else None
            arrived[i][found.arrived.write[t, i]] = below
            returned[i][found.returned.write[t, i]] = above
    return read


def assert_right_values(schedule):
    for op, i, value in run_as_the_executor(schedule):
        top = schedule.routes[op.microbatch].top
        way = range(i) if op.kind == FORWARD else range(top, i, -1)
        assert value == (op.microbatch, tuple(way)), (op, i, value)


def spans(schedule, exits, i, distils):
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
            if distils:
                out.append(("teacher", m, at, max(at, end)))
    return out


def assert_slots_hold(schedule, exits, distils=False):
    """No two values that are held at the same time share a slot, and no slot is for nothing."""
    found = rings(schedule, exits, distils)
    most = {"states": 1, "residuals": 1}
    for i in range(schedule.stages):
        for ring, kinds in (
            ("states", ("inputs", "cotangents", "outputs", "teacher")),
            ("residuals", ("residuals",)),
        ):
            held = [s for s in spans(schedule, exits, i, distils) if s[0] in kinds]
            for t in range(len(schedule.steps)):
                slots = [getattr(found, k)[m, i] for k, m, a, b in held if a <= t <= b]
                assert len(slots) == len(set(slots))
                assert all(0 <= s < getattr(found, f"n_{ring}") for s in slots)
                most[ring] = max(most[ring], len(slots))
    assert (found.n_states, found.n_residuals) == (most["states"], most["residuals"])
