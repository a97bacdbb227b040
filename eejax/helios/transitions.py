"""Transitions of the controller: the next state and the decision for each event.

HELIOS (Kumar et al., 2025), section 3. Its Algorithm 1 and its text differ; this module follows the
text, and counts breaches in a sliding window of tokens.

A function is named for its event. It takes the state, the time of the event in seconds and its
details, and returns a `Transition`. It is pure: it touches no clock, device, file or thread, and
every decision can be replayed from the events before it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from eejax.helios import breach_window, decisions, evaluations, prospects, strictness
from eejax.helios.choices import Assignment, ModelDepth
from eejax.helios.controller_state import ControllerRules, ControllerState, Transition
from eejax.helios.disagreement_bound import DisagreementBound
from eejax.helios.objectives import Telemetry


def rules_changed(state: ControllerState, time: float, rules: ControllerRules) -> Transition:
    """Follow other rules from now on."""
    return Transition(state.replaced(rules=rules))


def device_reported(
    state: ControllerState, time: float, depths: Mapping[str, int], num_cached_tokens: int
) -> Transition:
    """Record the loaded exits by model and the number of tokens on the device.

    Before the first report these are the current choice and one prompt.
    """
    return Transition(state.replaced(depths=depths, num_cached_tokens=num_cached_tokens))


def prompt_arrived(state: ControllerState, time: float) -> Transition:
    """Assign a prompt; while another model is evaluated, most go to the previous choice."""
    state = state.replaced(prompts=state.prompts + 1)
    outcome = Transition(state)
    if state.plan:
        running, serving = state.plan[0], state.serving
        if state.wanted == state.current == running.choice and running.left:
            state = state.with_first(evaluations.assign_prompt(running, time))
            return Transition(state, assignment=Assignment(running.choice, True))
        if serving is not None and serving in state.depths:
            choice = ModelDepth(serving, state.depths[serving])
            return Transition(state, assignment=Assignment(choice, False))
    else:
        state = prospects.fix_interval(state)
        due = state.prompts > prospects.interval(state) and state.wanted == state.current
        outcome = decisions.assess(state, time) if due else Transition(state)
    choice = outcome.state.current or outcome.state.require_wanted()
    return outcome._replace(assignment=Assignment(choice, False))


def model_loaded(state: ControllerState, time: float, choice: ModelDepth) -> Transition:
    """Serve a loaded choice from now on, if it is the wanted one."""
    if not choice == state.wanted != state.current:
        return Transition(state)
    window = breach_window.clear(state.window)
    state = state.replaced(current=choice, since=time, window=window, prompts=0, errors=0)
    if not state.plan:
        without_exits = state.without_exits & {choice.model}
        state = state.replaced(without_exits=without_exits, interval=None)
    return Transition(state)


def depth_limited(state: ControllerState, time: float, choice: ModelDepth) -> Transition:
    """Limit the wanted model to a depth, because no more of it can be loaded."""
    if state.plan and state.plan[0].model == choice.model:
        state = state.with_first(dataclasses.replace(state.plan[0], choice=choice))
    return Transition(state.replaced(wanted=choice))


def model_given_up(state: ControllerState, time: float, model: str, why: str) -> Transition:
    """Stop evaluating and serving a model, if there is another one."""
    return decisions.give_up(state, time, model, why)


def tokens_emitted(
    state: ControllerState, time: float, model: str, below: Sequence[bool], own: bool = False
) -> Transition:
    """Count tokens of a model, in order.

    Tokens of a model that is evaluated or no longer serves lead to no decision; neither do those of
    a request with its own objective.

    Args:
      below: for each token, whether it left below its threshold.
      own: whether they belong to a request with its own objective.
    """
    counts = dict(below=state.below + sum(below), emitted=state.emitted + len(below))
    if state.plan and state.plan[0].choice == state.current and state.plan[0].model == model:
        running = evaluations.count_tokens(state.plan[0], () if own else below)
        return Transition(state.with_first(running).replaced(**counts))
    if own or not state.serves(model):
        return Transition(state.replaced(**counts))
    window, share = breach_window.count_tokens(state.window, below)
    state = state.replaced(window=window, **counts)
    return Transition(state) if share is None else decisions.breach(state, time, share)


def first_token_emitted(
    state: ControllerState, time: float, model: str, seconds: float
) -> Transition:
    """Count the seconds from a request's arrival to its first token.

    A request that arrived before the current choice was loaded, or during an evaluation, waited for
    that. It counts only if its wait since then exceeds the limit by itself.
    """
    since, limit = time - state.since, state.rules.objective.limits.get("ttft_p99", math.inf)
    before, current = seconds > since and since <= limit, state.current
    if before or current is None or not state.serves(model) or model not in state.shares:
        return Transition(state)
    alone = state.rules.profiles[model].serving(state.shares[model], current.depth)
    lateness = state.expected.lateness.add(current, min(seconds, since), alone)
    return Transition(state.replaced(expected=state.expected.replaced(lateness=lateness)))


def answer_failed(state: ControllerState, time: float, model: str) -> Transition:
    """Count an answer, not one of an evaluation, that ended in an error.

    As many such answers as an evaluation has prompts start an evaluation.
    """
    if state.plan and state.plan[0].model == model:
        return _evaluation_failed(state, time)
    if state.plan or state.current is None or state.current.model != model:
        return Transition(state)
    state = state.replaced(errors=state.errors + 1)
    if state.errors < state.rules.options.prompts:
        return Transition(state)
    return decisions.evaluate(state, time, "answers end in errors")


def prompt_answered(
    state: ControllerState,
    time: float,
    model: str,
    telemetry: Telemetry,
    exits: Sequence[int],
    judged: bool = True,
) -> Transition:
    """Add the telemetry of an evaluation's answer, and the exits by which its tokens left.

    The quality of an answer that was not judged is the profile's, corrected by what was measured
    before, so that it changes nothing of that.
    """
    if not _is_open(state, model):
        return Transition(state)
    if not judged:
        telemetry = state.expected.with_quality(state.rules.profiles[model], model, telemetry)
    exits = [e for e in exits if 0 <= e < state.rules.profiles[model].exits]
    if not exits:  # no token, so no information
        return prompt_dropped(state, time, model)
    running = evaluations.record_answer(state.plan[0], telemetry, exits, judged)
    state = state.with_first(running)
    return decisions.finish_evaluation(state, time) if running.done else Transition(state)


def prompt_dropped(
    state: ControllerState, time: float, model: str, failed: bool = False
) -> Transition:
    """Give an evaluation another prompt, or give up a model that `failed` too often."""
    if not _is_open(state, model):
        return Transition(state)
    state = state.with_first(evaluations.return_prompt(state.plan[0]))
    return _evaluation_failed(state, time) if failed else Transition(state)


def answers_audited(
    state: ControllerState, time: float, model: str, audit: DisagreementBound
) -> Transition:
    """Load another exit of the serving model, or raise thresholds, if its audits require it.

    They do if the quality of its answers is too low (`strictness.too_many`). If the whole model
    would not keep the limit either, better models are evaluated, if there are any, once between two
    assessments.
    """
    current, allowed = state.current, state.rules.allowed
    if current is None or state.wanted != current or state.plan or model != state.serving:
        return Transition(state)
    state = state.replaced(bounds={**state.bounds, model: audit.high})
    expected = 1 - prospects.expected_of(state, current)[0].accuracy
    if not strictness.too_many(audit, allowed, expected):
        return Transition(state)
    quality = f"{1 - audit.high:.1%} to {1 - audit.low:.1%}"
    why = f"the quality of its answers is {quality}, and the limit is {1 - allowed:.1%}"
    others = () if model in state.compared else prospects.better_in_quality(state, model)
    if others and prospects.quality(state, model) < 1 - allowed:
        state = state.replaced(compared=state.compared | {model})
        # The model itself is evaluated too: its answers may be worse than expected.
        return decisions.evaluate(state, time, why, [model, *others])
    now, exits = state.strictness[model], state.rules.profiles[model].exits
    now = strictness.tightened(now, prospects.level(state, model), current.depth, exits)
    if now is None:
        return Transition(state)
    state = state.replaced(strictness={**state.strictness, model: now})
    state = prospects.fix_interval(state)
    wanted = ModelDepth(model, max(now.least, current.depth))
    telemetry, seconds = prospects.with_cost(state, wanted)
    return decisions.want(state, time, "tighten", wanted, why, seconds, telemetry)


def _evaluation_failed(state: ControllerState, time: float) -> Transition:
    running = evaluations.record_failure(state.plan[0])
    state = state.with_first(running)
    if running.failed < state.rules.options.prompts:
        return Transition(state)
    return decisions.give_up(state, time, running.model, "its answers end in errors")


def _is_open(state: ControllerState, model: str) -> bool:
    """Return whether a model is being evaluated and an answer is missing."""
    return bool(state.plan) and state.plan[0].model == model and bool(state.plan[0].open)
