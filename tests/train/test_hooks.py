"""The points at which the training loop calls its hooks, with a step that only counts."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from eejax.train.clock import StepClock
from eejax.train.hooks import Hooks, RunPosition
from eejax.train.loop import run_steps
from eejax.train.signals import Stopping, StopRequest

TOKENS = 6
BATCH = {"tokens": np.zeros((2, 3), np.int32)}


@pytest.fixture
def request_to_stop():
    return StopRequest()  # not entered: it catches no signal


def run(request_to_stop, last, evaluate_every, after_step=None):
    """The calls of all hooks, and the position at the end."""
    calls, position = [], RunPosition(state=0)

    def after(step, metrics):
        calls.append(("after", step))
        if after_step is not None:
            after_step(step)

    hooks = Hooks(
        before_step=lambda step, state: calls.append(("before", step, state)),
        after_step=after,
        on_metrics=lambda step, metrics, tokens: calls.append(("metrics", step, tokens)),
        at_intervals=(
            (evaluate_every, lambda p: calls.append(("evaluate", p.step, p.tokens))),
            (0, lambda p: calls.append(("save", p.step, p.tokens))),
        ),
    )

    def step(state, batch):
        return (state + 1, {"tokens": np.int32(TOKENS)})

    stop = Stopping(request_to_stop, None)
    run_steps(position, last, step, iter([BATCH] * 9), hooks, stop, StepClock())
    return calls, position


def test_hooks_are_called_at_their_points(request_to_stop):
    calls, position = run(request_to_stop, last=4, evaluate_every=2)
    assert calls == [
        *[("before", 1, 0), ("after", 1)],
        # A step's metrics are fetched while the next one runs, or before hooks at intervals.
        *[("before", 2, 1), ("after", 2), ("metrics", 1, 6), ("metrics", 2, 12)],
        ("evaluate", 2, 12),
        *[("before", 3, 2), ("after", 3)],
        *[("before", 4, 3), ("after", 4), ("metrics", 3, 18), ("metrics", 4, 24)],
        *[("evaluate", 4, 24), ("save", 4, 24)],
    ]
    assert (position.state, position.step, position.tokens) == (4, 4, 24)


def test_a_stop_ends_the_loop_after_the_step_and_fetches_it(request_to_stop):
    def interrupt(step):
        if step == 2:
            request_to_stop.signal = signal.SIGTERM

    calls, position = run(request_to_stop, last=4, evaluate_every=3, after_step=interrupt)
    assert calls[-2:] == [("metrics", 1, 6), ("metrics", 2, 12)]
    assert (position.step, position.tokens) == (2, 12)


def test_nothing_is_left_to_do_behind_the_last_step(request_to_stop):
    calls, position = run(request_to_stop, last=0, evaluate_every=1)
    assert calls == [] and position.step == 0
