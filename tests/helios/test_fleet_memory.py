"""What models take on the device as they come, grow and shrink, and what if there is no room."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from adding import add
from fleet_of_one import NEW, OPTIONS, evaluated, fleet_of

from eejax.checkpoint.model import load_run
from eejax.common.trees import nbytes
from eejax.experiments.helios_runs import is_settled
from eejax.helios import decisions
from eejax.helios.choices import ModelDepth
from eejax.helios.disagreement_bound import AnswerAudit
from eejax.helios.verifier import AnswerVerifier
from eejax.inference import deepening, partial
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.partial import PartialModel


@pytest.fixture(scope="module")
def model(small_run):
    return load_run(small_run)


EXHAUSTED = RuntimeError("RESOURCE_EXHAUSTED: out of memory")


def fails(*args, **kwargs):
    raise EXHAUSTED


def half_done(engine, state, rows):
    """As `select_slots`, until there is no room for the next array."""
    jax.tree.leaves(state.cache)[0].delete()
    raise EXHAUSTED


def lowest(model, names="m", **own):
    """(fleet, controller) of models of which the one that serves does so by its first exit, with
    requests under way."""
    made = dict(slots=dict.fromkeys(names, (3, 2, 1)), audits=0.0)
    fleet, controller = fleet_of(model, names, prompts=2, interval=1000, made=made, **own)
    evaluated(fleet, model)
    serves = controller.current.model
    controller.apply(decisions.want, "serve", ModelDepth(serves, 1), "for the test")
    while controller.current != controller.wanted:
        fleet.step()
    numbers = [add(fleet, model.tokenizer.encode(f"c{i}").tolist(), NEW) for i in range(5)]
    for _ in range(3):
        fleet.step()
    assert len(fleet.running) == 3
    return fleet, controller, serves, numbers


def counted(outputs) -> dict[str, int]:
    """Tokens of requests, none of which ended but by its limit."""
    found = dict.fromkeys((output.request_id for output in outputs), 0)
    for output in outputs:
        assert output.finish in (None, "length")
        found[output.request_id] += len(output.tokens)
    return found


@pytest.mark.parametrize(
    "name, broken", [("more_weights", fails), ("select_slots", half_done), ("deepen", fails)]
)
def test_a_model_there_is_no_room_to_grow_stays_as_it_is(model, monkeypatch, name, broken):
    """Whichever part of it fails. All requests are answered, and it is not tried again."""
    fleet, controller, _, numbers = lowest(model)
    tried = []
    monkeypatch.setattr(partial, name, lambda *args: (tried.append(1), broken(*args)))
    part = fleet.parts["m"]
    with pytest.warns(UserWarning, match="'m' stays at 1 exits, as 3 cannot be loaded: RESOURCE"):
        controller.apply(decisions.want, "grow", ModelDepth("m", 3), "for the test")
        while not tried:
            fleet.step()
    assert (part.depth, part.target_segments, part.engine.slots) == (1, 1, 3)
    for _ in range(3):
        fleet.step()
        controller.apply(decisions.want, "grow", ModelDepth("m", 3), "for the test")
    fleet.run()
    assert controller.wanted == controller.current == ModelDepth("m", 1) and len(tried) == 1
    assert [change.kind for change in fleet.changes][-1] == "stay" and not fleet.pool._growing
    number = add(fleet, [65], NEW)
    assert counted(fleet.run()) == {number: NEW} and number not in numbers


def test_another_model_serves_in_place_of_one_that_cannot_grow(model, monkeypatch):
    fleet, controller, serves, numbers = lowest(model, "ab")
    monkeypatch.setattr(partial, "more_weights", fails)
    controller.apply(decisions.want, "grow", ModelDepth(serves, 3), "for the test")
    with pytest.warns(UserWarning, match=f"'{serves}' is no longer served: it cannot grow"):
        outputs = fleet.run()
    assert {o.request_id for o in outputs if o.finish == "length"} == {*numbers}
    assert controller.state.failing == {serves} and controller.current.model != serves


def not_a_number(self, loaded, prompt, tokens):
    return AnswerAudit(np.zeros(len(tokens), bool), np.full(len(tokens), np.nan))


@pytest.mark.parametrize("judge, why", [(fails, "RESOURCE"), (not_a_number, "the judge's log-")])
def test_an_audit_that_fails_is_left_out(model, monkeypatch, judge, why):
    """Of an evaluation too, which goes by what was expected."""
    fleet, controller = fleet_of(model, prompts=2, interval=1000, made=dict(audits=1.0))
    monkeypatch.setattr(AnswerVerifier, "judge", judge)
    with pytest.warns(UserWarning, match=f"an answer of 'm' was not audited: {why}"):
        evaluated(fleet, model)
        numbers = [add(fleet, [65 + i], NEW) for i in range(4)]
        outputs = fleet.run()
    assert counted(outputs) == dict.fromkeys(numbers, NEW)
    assert not fleet.dispatcher.audits
    assert judge is not fails or not any(fleet.pool.audited.values())
    (row,) = controller.repository.history("m")
    assert row.telemetry.accuracy == pytest.approx(1.0)  # as the profile says


def test_what_is_called_off_before_it_is_there_runs_nobody_anew(model, monkeypatch):
    fleet, controller, _, numbers = lowest(model, breaches=100)  # nothing else is asked for
    monkeypatch.setattr(PartialModel, "growth_ready", False)
    part = fleet.parts["m"]
    for choice in (ModelDepth("m", 3), ModelDepth("m", 2), ModelDepth("m", 1)):
        controller.apply(decisions.want, "evaluate", choice, "for the test")
        fleet.step()
        assert (part.depth, part.target_segments) == (1, choice.depth)
        assert part.engine.slots == part.slots[choice.depth - 1]
    running, preempted = part.scheduler.running, []
    monkeypatch.setattr(part.scheduler, "preempt", preempted.append)
    assert running and controller.current == ModelDepth("m", 1)
    outputs = fleet.run()
    assert {o.request_id for o in outputs if o.finish == "length"} <= {*numbers} and not preempted
    kinds = [change.kind for change in fleet.changes]
    assert kinds.count("stay") == 2 and "grow" not in kinds and is_settled(fleet)


def test_models_lie_on_the_host_once(model):
    """What is loaded anew, and what looks at answers again, have no copies of their own."""
    fleet, controller, *_ = lowest(model)
    fleet.run()
    part = fleet.parts["m"]
    audits, other = AnswerVerifier(part.host, part.config), fleet.pool.make(ModelDepth("m", 2))
    want = jax.tree.leaves(fleet.pool.members["m"].params)
    for host in (part.host, audits._host, other.host):
        assert all(a is b for a, b in zip(jax.tree.leaves(host), want, strict=True))


@pytest.mark.slow
def test_there_is_room_for_a_change_of_depth_while_it_is_made(model, monkeypatch):
    """Arrays on the device when a state is made anew, or made smaller: weights and states of the
    larger of the two depths, and no more than one array beside; of what grows nothing twice."""
    slots = (6, 4, 2)
    host = deepening.on_host(model.params, model.config)  # here that is a device too
    base = sum(a.nbytes for a in jax.live_arrays())
    part = PartialModel(host, model.config, OPTIONS, slots=slots, depth=3, context=96)
    for i in range(5):
        add(part.scheduler, model.tokenizer.encode(f"z{i}").tolist(), 60)

    def live():
        return sum(a.nbytes for a in jax.live_arrays()) - base

    most, seen = part.total_bytes, []
    start, rows = EarlyExitEngine.start, deepening._rows

    def started(engine):
        seen.append(live() + nbytes(jax.eval_shape(lambda: start(engine))))
        return start(engine)

    def narrowed(a, *args, **named):
        own = rows(a, *args, **named)
        seen.append(live() - a.nbytes)
        return own

    monkeypatch.setattr(EarlyExitEngine, "start", started)
    monkeypatch.setattr(deepening, "_rows", narrowed)
    for _ in range(4):
        part.step()
    small = 0
    for depth in (1, 2, 3, 2):
        if depth < part.depth:
            part.shrink(depth)
        else:
            part.grow(depth)
            seen.append(live())
            part.adopt_growth()
        small = max(small, part.total_bytes)
        for _ in range(4):
            part.step()
    assert len(seen) > 10 and max(seen) <= 1.1 * max(most, small)
