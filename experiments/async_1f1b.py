"""EE-LLM's own schedule, for comparison: 1F1B without common steps (section 3.1.3, Figure 3).

Stage i (from 0) begins with P - i forward passes, alternates, and ends with P - i backward passes;
an operation begins when its inputs are there and its stage is free. At most P - i microbatches are
in flight on a stage. This is simulated and never run: all devices run one program in common steps,
so no stage can wait for a single message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eejax.common.errors import require
from eejax.pipeline.schedule import BACKWARD, FORWARD
from eejax.pipeline.simulate import NO_WORK, StageCosts, Timeline, run_queues

EXIT_FORWARD, EXIT_BACKWARD = "exit forward", "exit backward"


class _Part(NamedTuple):
    kind: str
    microbatch: int
    backward: bool  # part of the backward pass, to which forward passes of deferred exits belong


def async_1f1b(
    costs: StageCosts,
    microbatches: int,
    *,
    deferred: bool = True,
    exits_at_end: bool = False,
    exits_in_bubbles: bool = False,
) -> Timeline:
    """Simulate EE-LLM's schedule, by default with both optimizations of its Table 1.

    A stage sends its results when its whole pass is over, exits included.

    Args:
      costs: time of the parts of each stage.
      microbatches: M, the number in one iteration.
      deferred: whether an exit's forward pass comes with its backward pass, not with the stage's
        forward pass (optimization 1, Appendix A.2).
      exits_at_end: whether exits between two stages lie at the end of the earlier one instead of
        the beginning of the later one (without optimization 2).
      exits_in_bubbles: whether deferred exits run their forward pass in the cool-down while the
        stage waits for the gradient (Remark A.2). It costs no time if it is no longer than the
        stage's forward pass.

    Returns:
      Begin and end of each operation.
    """
    require(microbatches >= 1, "microbatches", microbatches, "must be at least 1")
    p = costs.stages
    queues, first, last, after_exit_forward = [], {}, {}, {}
    entry = at_end(costs.entry, NO_WORK) if exits_at_end else costs.entry
    for i in range(p):
        exits = entry[i].plus(costs.inner[i]).plus(costs.final if i == p - 1 else NO_WORK)
        exit_forward = (EXIT_FORWARD, exits.forward)
        ahead = [(FORWARD, costs.layers[i].forward)]
        back = [(EXIT_BACKWARD, exits.backward), (BACKWARD, costs.layers[i].backward)]
        if deferred:
            back.insert(0, exit_forward)
        else:
            ahead.append(exit_forward)
        # Exits that take no time are left out.
        ahead, back = (
            [part for part in parts if part[1] > 0 or part[0] in (FORWARD, BACKWARD)]
            for parts in (ahead, back)
        )
        for parts, backward in ((ahead, False), (back, True)):
            first[i, backward], last[i, backward] = parts[0][0], parts[-1][0]
        after_exit_forward[i] = back[1][0] if len(back) > 1 else None
        passes = {
            backward: lambda m, parts=parts, backward=backward: [
                (_Part(kind, m, backward), cost) for kind, cost in parts
            ]
            for backward, parts in ((False, ahead), (True, back))
        }
        warm = min(p - i, microbatches)
        queue = [op for m in range(warm) for op in passes[False](m)]
        for m in range(microbatches):
            queue += passes[True](m)
            if m + warm < microbatches:
                queue += passes[False](m + warm)
        queues.append(queue)

    def before(op: _Part, stage: int):
        cooling_down = op.backward and op.microbatch > microbatches - min(p - stage, microbatches)
        waiting = first[stage, op.backward]
        if exits_in_bubbles and cooling_down and waiting == EXIT_FORWARD:
            waiting = after_exit_forward[stage]
        if op.kind != waiting:
            return None
        there = stage + 1 if op.backward else stage - 1
        if not 0 <= there < p:
            return None
        return there, op._replace(kind=last[there, op.backward])

    return run_queues(queues, before)


def at_end(entry: Sequence, nothing) -> list:
    """Move exits at the beginnings of stages [stages] to the ends of the stages before.

    Exits on the embedding have no stage before them and stay. Entries are anything with `plus`.
    """
    moved = [entry[0].plus(entry[1]) if len(entry) > 1 else entry[0], *entry[2:]]
    return moved + [nothing] * (len(entry) - len(moved))


def max_kept(timeline: Timeline, since: str, until: str) -> np.ndarray:
    """Return [stages], the maximum number of microbatches between the ops `since` and `until`.

    A microbatch counts from the beginning of `since` to the end of `until`. FORWARD and BACKWARD
    count those with residuals of the layers, EXIT_FORWARD and EXIT_BACKWARD those with residuals of
    exits. The number is 0 for a stage that runs neither.
    """
    out = np.zeros(timeline.stages, int)
    for i in range(timeline.stages):
        changes = [(op.begin, 1) for op in timeline.ops if (op.stage, op.kind) == (i, since)]
        changes += [(op.end, -1) for op in timeline.ops if (op.stage, op.kind) == (i, until)]
        now = 0
        for _, change in sorted(changes):  # an end comes before a beginning at the same time
            now += change
            out[i] = max(out[i], now)
    return out
