"""Comparison of choices in a state of the controller: their expected performance and cost.

Functions that fix the interval between two reassessments return the state with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from eejax.helios import forecast, selection
from eejax.helios.choices import AUTO, STRICTEST, ModelDepth
from eejax.helios.controller_state import ControllerState
from eejax.helios.forecast import DeviceState
from eejax.helios.objectives import Telemetry


def expected_of(
    state: ControllerState,
    choice: ModelDepth,
    shares: Sequence[float] | None = None,
    hope: float = 0.0,
) -> tuple[Telemetry, bool]:
    """Return the expected telemetry of a choice (`Expectations.expected`)."""
    profile, objective = state.rules.profiles[choice.model], state.rules.objective
    return state.expected.expected(profile, objective, choice, shares, hope)


def rank_of(
    state: ControllerState,
    choice: ModelDepth,
    shares: Sequence[float] | None = None,
    hope: float = 0.0,
) -> tuple[float, float]:
    """Return the rank of a choice's expected telemetry by the objective."""
    return state.rules.objective.rank(expected_of(state, choice, shares, hope)[0])


def quality(state: ControllerState, model: str) -> float:
    """Return the expected quality of a whole model if no token leaves early."""
    return state.expected.without_exits(state.rules.profiles[model], model).accuracy


def better_in_quality(state: ControllerState, model: str) -> list[str]:
    """Return other models with better answers than a model's own without exits, best first."""
    found = {m: quality(state, m) for m in state.rules.profiles if m not in state.failing}
    least = quality(state, model)
    return sorted((m for m in found if found[m] > least), key=found.__getitem__, reverse=True)


def level(state: ControllerState, model: str, evaluated: bool = False) -> int:
    """Return how strict a model's thresholds are now (`choices.stricter`).

    An evaluated model uses its exits even if a limit forbids them for other prompts.
    """
    forbidden = model in state.without_exits and not evaluated
    return STRICTEST if forbidden else state.strictness[model].level


def best_loaded(state: ControllerState, weights: Mapping[str, float]) -> str | None:
    """Return the best loaded model by other weights than the server's, within its limits.

    The result is None if no model was evaluated yet.
    """
    objective = dataclasses.replace(state.rules.objective, weights=weights)
    rules = state.rules.replaced(objective=objective)
    other = state.replaced(rules=rules)
    ranks = {
        model: rank_of(other, ModelDepth(model, depth))
        for model, depth in state.depths.items()
        if model in state.shares
    }
    return max(ranks, key=ranks.__getitem__, default=None)


def greedy_depth(
    state: ControllerState, model: str, shares: Sequence[float] | None = None, hope: float = 0.0
) -> int:
    """Return the depth up to the exit by which most tokens leave.

    It is larger if the objective, its limits, or the limit on breaches require it. shares, hope: as
    in `Expectations.expected`.
    """
    if not state.rules.options.greedy:
        return state.rules.profiles[model].exits
    known = state.shares[model] if shares is None else shares

    def rank(depth: int) -> tuple[float, float]:
        return rank_of(state, ModelDepth(model, depth), known, hope)

    def calm(depth: int) -> bool:
        return is_calm(state, ModelDepth(model, depth), known)

    return selection.greedy_depth(known, state.strictness[model].least, calm, rank)


def is_calm(state: ControllerState, choice: ModelDepth, shares: Sequence[float]) -> bool:
    """Return whether no breaches are expected of a choice."""
    return selection.calm(choice, shares, state.rules.options, state.breaches.get(choice, 0))


def device_of(state: ControllerState) -> DeviceState:
    """Return the part of the state that the cost of a change depends on."""
    budget = state.rules.options.budget
    return DeviceState(state.depths, state.num_cached_tokens, state.current, budget)


def cost(state: ControllerState, choice: ModelDepth) -> float:
    """Return the seconds of changing to a choice (`forecast.change_cost`)."""
    return forecast.change_cost(state.rules.profiles, device_of(state), choice)


def evaluation_cost(state: ControllerState, model: str) -> float:
    """Return the seconds of an evaluation (`forecast.evaluation_cost`)."""
    profiles, shares = state.rules.profiles, state.shares.get(model)
    length = state.expected.length
    return forecast.evaluation_cost(profiles, device_of(state), model, shares, length)


def interval(state: ControllerState) -> int:
    """Return the prompts between two reassessments.

    HELIOS §3.4.2 derives it from the latency of the candidates and the cost of loading them. "auto"
    is the number of prompts for which evaluating all other candidates whole takes a share `gain` of
    the time in which they are served, so that it costs no more than a change must gain.
    """
    options = state.rules.options
    if options.interval != AUTO:
        return options.interval
    if state.interval is not None:
        return state.interval
    least, now = 10 * options.prompts, state.current or state.wanted
    if now is None or now.model not in state.shares:
        return least
    seconds = sum(evaluation_cost(state, m) for m in state.shares if m != state.serving)
    each = state.expected.length / expected_of(state, now)[0].throughput
    return forecast.interval(seconds, each, options.gain, least)


def fix_interval(state: ControllerState) -> ControllerState:
    """Fix the interval as computed now, unless nothing is known yet about the serving model."""
    now = state.current or state.wanted
    if state.interval is not None or now is None or now.model not in state.shares:
        return state
    return state.replaced(interval=interval(state))


def with_cost(state: ControllerState, choice: ModelDepth) -> tuple[Telemetry, float]:
    """Return (expected telemetry of a choice until the next assessment, seconds of changing)."""
    seconds, (expected, _) = cost(state, choice), expected_of(state, choice)
    energy = seconds * expected.energy * expected.throughput
    length = state.expected.length
    return expected.with_overhead(seconds, energy, interval(state), length), seconds


def best_choice(
    state: ControllerState, options: Sequence[ModelDepth], assessed: bool = False
) -> tuple[ModelDepth, Telemetry, float]:
    """Return (choice, its expected telemetry, its cost in seconds).

    The current choice stays unless another one is better by the gain, costs included. The cost of
    continuing with fewer layers of the serving model does not count. If models were `assessed`, the
    cost of continuing with any part of it does not count either: a model that replaced it would
    have the same cost once both are evaluated again, and the two would take turns.
    """
    found, device, rules = [], device_of(state), state.rules
    for choice in options:
        expected, seconds = with_cost(state, choice)
        stays = choice.model == state.serving
        if stays and (assessed or device.has(choice)):
            expected, _ = expected_of(state, choice)
        rank = rules.objective.rank(expected)
        rank = selection.favoured(rank, rules.options.gain if stays else 0.0)
        found.append((rank, choice, expected, seconds))
    return max(found, key=lambda row: row[0])[1:]


def may_be_better(state: ControllerState, model: str) -> bool:
    """Return whether a model might beat the one that serves by the gain.

    Its tokens leave and are right as `forecast.hoped` assumes. The cost of another evaluation has
    to pay off in as many intervals as have passed since its last one.
    """
    others = [m for m in state.shares if state.serving in (None, m)]
    if not others:
        return True
    objective, age = state.rules.objective, state.ages[model]
    exits = state.rules.profiles[model].exits
    hope, shares = forecast.hoped(state.shares.get(model), age, exits)
    choice = ModelDepth(model, greedy_depth(state, model, shares, hope))
    expected, _ = expected_of(state, choice, shares, hope)
    if _cost_counts(state, model):
        seconds = evaluation_cost(state, model)
        energy = seconds * expected.energy * expected.throughput
        prompts = interval(state) * max(age, 1)
        expected = expected.with_overhead(seconds, energy, prompts, state.expected.length)
    now = (rank_of(state, ModelDepth(m, greedy_depth(state, m))) for m in others)
    excess, score = max(now)
    return objective.rank(expected) > (excess, score + state.rules.options.gain)


def _cost_counts(state: ControllerState, model: str) -> bool:
    return model in state.shares and state.ages[model] < math.inf


def contenders(state: ControllerState, models: Sequence[str]) -> tuple[ControllerState, list[str]]:
    """Return (state, those of the models that may be better than the one that serves)."""
    serves = state.serving is None or state.serving in state.shares
    if serves and any(_cost_counts(state, model) for model in models):
        state = fix_interval(state)
    return state, [model for model in models if may_be_better(state, model)]


def candidates(state: ControllerState) -> tuple[ControllerState, list[str]]:
    """Return (state, models to evaluate).

    The one that serves comes first, because its evaluation costs nothing and shows which others
    could be better.
    """
    rules = state.rules
    most = None if rules.ranking is None else rules.options.candidates
    ranked = rules.profiles if rules.ranking is None else rules.ranking
    names = [model for model in ranked if model not in state.failing][:most]
    serving = state.serving
    if serving is None:
        return state, names
    state, others = contenders(state, [n for n in names if n != serving])
    return state, [serving, *others]


def is_settled(state: ControllerState) -> bool:
    """Return whether an assessment could change nothing.

    That is so if no model may be better than the serving one, which has no layers to spare.
    Breaches and audits show whether it needs more.
    """
    assert state.current is not None  # something serves
    model, depth = state.current
    return depth == greedy_depth(state, model) == 1 and candidates(state)[1] == [model]
