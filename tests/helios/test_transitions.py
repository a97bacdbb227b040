"""The controller as a state machine: frozen states, and transitions that a replay repeats."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from controlled import profile, telemetry
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.helios import decisions, transitions
from eejax.helios.choices import ControllerOptions, ModelDepth
from eejax.helios.controller import Controller
from eejax.helios.controller_state import ControllerRules, ControllerState
from eejax.helios.disagreement_bound import AnswerAudit, DisagreementBound
from eejax.helios.objectives import ServiceObjective
from eejax.helios.repository import Repository

MODELS, EXITS = "abc", 3
PROFILES = {
    "a": profile(1.0, EXITS, shares=(0.6, 0.2, 0.2)),
    "b": profile(1.5, EXITS, shares=(0.2, 0.3, 0.5), sure=(0.8, 0.9, 1.0)),
    "c": profile(0.7, EXITS, quality=((1.0, 0.8),), load=(5.0,) * EXITS),
}
OBJECTIVES = (
    ServiceObjective.of("throughput"),
    ServiceObjective.of("energy", accuracy=0.9),
    ServiceObjective.of("goodput", accuracy=0.7, ttft_p99=0.5),
)


def audit(n: int, wrong: float) -> DisagreementBound:
    found = DisagreementBound()
    for _ in range(n):
        found = found.with_answer(AnswerAudit(np.arange(20) >= 20 * wrong, np.zeros(20)))
    return found


AUDITS = [audit(n, wrong) for n, wrong in ((4, 0.0), (20, 0.3), (40, 0.9))]

# What comes of a choice: an event, and details that do not depend on the state. "wanted" and
# "current" stand for what the state says.
MODEL = st.sampled_from(["current", *MODELS])
DEPTHS = st.dictionaries(st.sampled_from(MODELS), st.integers(1, EXITS))
SECONDS = st.floats(0, 3)
BELOW = st.lists(st.booleans(), max_size=12).map(tuple)
LEFT = st.lists(st.integers(0, EXITS - 1), max_size=6).map(tuple)
TOLD = st.builds(
    telemetry,
    throughput=st.floats(1, 1000),
    ttft_p99=SECONDS,
    accuracy=st.floats(0, 1),
    energy=st.floats(0, 9),
    perplexity=st.floats(1, 9),
)
LOADED = st.tuples(st.just(transitions.model_loaded), st.just("wanted"))
EVENTS = st.one_of(
    LOADED,
    st.tuples(st.just(transitions.prompt_arrived)),
    st.tuples(st.just(transitions.device_reported), DEPTHS, st.integers(0, 5000)),
    st.tuples(st.just(transitions.tokens_emitted), MODEL, BELOW, st.booleans()),
    st.tuples(st.just(transitions.first_token_emitted), MODEL, SECONDS),
    st.tuples(st.just(transitions.answer_failed), MODEL),
    st.tuples(st.just(transitions.prompt_answered), MODEL, TOLD, LEFT),
    st.tuples(st.just(transitions.prompt_dropped), MODEL, st.booleans()),
    st.tuples(st.just(transitions.answers_audited), MODEL, st.sampled_from(AUDITS)),
)
RARE = st.one_of(
    st.tuples(st.just(transitions.model_given_up), st.sampled_from(MODELS), st.just("a reason")),
    st.tuples(st.just(transitions.depth_limited), st.integers(1, EXITS)),
)
# Prompts that are answered bring evaluations to an end, and waits count while none is under way.
ANSWERED = st.tuples(TOLD, st.lists(st.integers(0, EXITS - 1), min_size=1, max_size=6)).map(
    lambda told: [
        (transitions.model_loaded, "wanted"),
        (transitions.prompt_arrived,),
        (transitions.prompt_answered, "current", *told),
    ]
)
WAITED = SECONDS.map(lambda seconds: [(transitions.first_token_emitted, "current", seconds)] * 3)
ALONE = st.one_of(EVENTS, EVENTS, RARE).map(lambda event: [event])
SEQUENCES = st.lists(st.one_of(ALONE, ANSWERED, ANSWERED, WAITED), min_size=15, max_size=40).map(
    lambda parts: [event for part in parts for event in part]
)
OPTIONS = st.builds(
    ControllerOptions,
    candidates=st.integers(1, 3),
    prompts=st.integers(1, 2),
    interval=st.sampled_from([2, 9, "auto"]),
    window=st.just(8),
    breaches=st.integers(0, 8),
    greedy=st.booleans(),
)


def details_of(state: ControllerState, event, details: tuple) -> tuple:
    """The details of an event, in which names stand for what the state says."""
    if event is transitions.prompt_answered:
        model, told, left = details
        deepest = (state.current or state.wanted).depth - 1
        details = model, told, tuple(min(e, deepest) for e in left)
    if event is transitions.depth_limited:
        details = (ModelDepth(state.wanted.model, min(state.wanted.depth, *details)),)
    names = {"wanted": state.wanted, "current": (state.current or state.wanted).model}
    return tuple(names.get(d, d) if isinstance(d, str) else d for d in details)


def fields(value):
    """A state as plain data that shares nothing with it."""
    if dataclasses.is_dataclass(value):
        return {f.name: fields(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "items"):
        return [(key, fields(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [fields(one) for one in value]
    return value


def first(options: ControllerOptions, objective: ServiceObjective):
    rules = ControllerRules(PROFILES, objective, options, ranking=("c", "a", "b"))
    return decisions.begin(rules, 0.0, {})[-1].state


@settings(max_examples=40, deadline=None)
@given(options=OPTIONS, objective=st.sampled_from(OBJECTIVES), sequence=SEQUENCES)
@pytest.mark.filterwarnings("ignore:.* is no longer served")
def test_a_transition_is_pure(options, objective, sequence):
    """It leaves the state before it as it was; and the recorded events lead from the first state to
    the same decisions, assignments and states again, as they do in a `Controller`."""
    time, state, recorded, found = 0.0, first(options, objective), [], []
    begin = state
    for event, *details in sequence:
        time += 0.25
        details = details_of(state, event, tuple(details))
        before = fields(state)
        made = event(state, time, *details)
        assert fields(state) == before
        recorded.append((event, time, details))
        found.append(made)
        state = made.state
        assert not state.plan or state.wanted == state.plan[0].choice
    again = begin
    for (event, time, details), want in zip(recorded, found, strict=True):
        made = event(again, time, *details)
        assert made == want and fields(made.state) == fields(want.state)
        again = made.state
    now = [0.0]
    held = Controller(PROFILES, objective, Repository(), options, clock=lambda: now[0])
    held.state = begin
    held.decisions.clear()
    for event, now[0], details in recorded:
        held.apply(event, *details)
    assert held.state == state
    assert held.decisions == [made.decision for made in found if made.decision is not None]


def test_an_evaluation_goes_on_at_the_depth_that_can_be_loaded():
    state = first(ControllerOptions(prompts=1), OBJECTIVES[0])
    state = decisions.evaluate(state, 0.0, "a reason", ["b"]).state
    assert state.wanted == ModelDepth("b", EXITS)
    less = ModelDepth("b", 1)
    state = transitions.depth_limited(state, 1.0, less).state
    state = transitions.model_loaded(state, 2.0, less).state
    made = transitions.prompt_arrived(state, 3.0)
    assert made.assignment == (less, True)
    made = transitions.prompt_answered(made.state, 4.0, "b", telemetry(), (0, 0))
    assert made.evaluation.depth == 1 and not made.state.plan


def test_events_lead_to_every_kind_of_decision():
    """So that the test above is not of states in which nothing is decided."""
    rng, kinds = np.random.default_rng(0), set()
    for seed in range(30):
        limits = ({}, {"accuracy": 0.9})[seed % 2]
        state = first(
            ControllerOptions(prompts=1, interval=3, window=8, breaches=2),
            ServiceObjective.of("throughput", **limits),
        )
        for step in range(200):
            model, depth = state.current or state.wanted
            left = (int(rng.integers(depth)),) * 4
            event, *details = [
                (transitions.model_loaded, state.wanted),
                (transitions.prompt_arrived,),
                (transitions.tokens_emitted, model, (rng.random(4) < rng.random()).tolist()),
                (transitions.prompt_answered, model, telemetry(), left),
                (transitions.answers_audited, model, AUDITS[rng.integers(len(AUDITS))]),
            ][rng.integers(5)]
            made = event(state, float(step), *details)
            state = made.state
            if made.decision is not None:
                kinds.add(made.decision.kind)
    assert kinds == {"evaluate", "serve", "switch", "grow", "tighten"}


def test_a_state_cannot_be_changed_and_is_compared_by_value():
    state = first(ControllerOptions(), OBJECTIVES[0])
    assert state == first(ControllerOptions(), OBJECTIVES[0])
    assert state != first(ControllerOptions(prompts=4), OBJECTIVES[0])
    with pytest.raises(TypeError, match="ControllerState has no fields \\['age'\\]"):
        state.replaced(age=1)
    for field in dataclasses.fields(state):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(state, field.name, None)
    for table in (state.ages, state.strictness, state.expected.shares, state.rules.profiles):
        with pytest.raises(TypeError):
            table["a"] = None
    ages = {"a": 1}
    copied = state.replaced(ages=ages)
    ages["a"] = 2
    assert copied.ages == {"a": 1} and state.ages != copied.ages
