"""Decisions of the controller: what to evaluate, what to serve, and when to change.

HELIOS (Kumar et al., 2025), section 3. The model that serves is evaluated at its depth. Others are
evaluated whole, one after the other, and only if they may be better (`prospects.may_be_better`).

Functions are pure. Each takes the time in seconds and returns a `Transition`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from eejax.helios import breach_window, evaluations, prospects, strictness
from eejax.helios.choices import Decision, ModelDepth
from eejax.helios.controller_state import ControllerRules, ControllerState, Transition
from eejax.helios.evaluations import RunningEvaluation
from eejax.helios.objectives import Telemetry
from eejax.helios.repository import StoredEvaluation


def begin(
    rules: ControllerRules, time: float, known: Mapping[str, StoredEvaluation]
) -> list[Transition]:
    """Serve the best of the candidates, by their earlier evaluations or else by their profiles.

    Candidates for which neither says where tokens leave are evaluated first. known: by model,
    earlier evaluations that still hold.
    """
    state, names = prospects.candidates(ControllerState.first(rules))
    for name in names:
        profile, expected = rules.profiles[name], state.expected
        if name in known:
            state = state.replaced(expected=expected.learn(profile, known[name]))
        elif profile.shares:
            # As if one assessment had passed since.
            expected = expected.with_shares(name, profile.shares)
            state = state.replaced(expected=expected, ages={**state.ages, name: 1})
    new, why = [name for name in names if name not in known], "the server begins"
    if missing := [name for name in new if name not in state.shares]:
        return [evaluate(state, time, why, missing)]
    before = "it was the best when it was evaluated before"
    first = serve(state, time, "it is best by its profile" if new else before)
    serving = first.state.serving
    state, names = prospects.contenders(first.state, [name for name in new if name != serving])
    names = [*([serving] if serving in new else []), *names]
    first = first._replace(state=state)
    return [first, evaluate(state, time, why, names)] if names else [first]


def want(
    state: ControllerState,
    time: float,
    kind: str,
    choice: ModelDepth,
    why: str,
    seconds: float = 0.0,
    expected: Telemetry | None = None,
) -> Transition:
    """Make a choice the wanted one. The arguments are those of the `Decision`."""
    if kind == "serve" and state.serving not in (None, choice.model):
        kind = "switch"
    if kind != "evaluate":
        known = choice.model in state.shares
        off = known and prospects.expected_of(state, choice)[1]
        # A model that serves until this one is loaded keeps its exits.
        without = state.without_exits - {choice.model} | ({choice.model} if off else set())
        state = state.replaced(without_exits=without, serving=choice.model)
    state = state.replaced(wanted=choice, window=breach_window.clear(state.window))
    why = state.rules.objective.reason(why, expected)
    return Transition(state, Decision(time, kind, choice, why, seconds, expected))


def evaluate(
    state: ControllerState, time: float, why: str, names: Sequence[str] = ()
) -> Transition:
    """Evaluate models one after the other, by default the candidates.

    The one that serves is evaluated at its depth, others whole.
    """
    if not names:
        state, names = prospects.candidates(state)
    own = state.wanted if state.wanted and state.wanted.model == state.serving else None
    choices = [
        own if own and name == own.model else ModelDepth(name, state.rules.profiles[name].exits)
        for name in names
    ]
    plan = tuple(RunningEvaluation(choice, state.rules.options.prompts) for choice in choices)
    state = state.replaced(plan=plan, prompts=0, errors=0)
    return want(state, time, "evaluate", choices[0], why)


def serve(
    state: ControllerState, time: float, why: str = "it is best for the objective"
) -> Transition:
    """Serve the best of the candidates, each up to the exit by which most tokens leave."""
    assessed = {
        model: strictness.assessed(state.strictness[model], bound, state.rules.allowed)
        for model, bound in state.bounds.items()
    }
    state = state.replaced(prompts=0, bounds={}, strictness={**state.strictness, **assessed})
    state = prospects.fix_interval(state)
    options = [ModelDepth(m, prospects.greedy_depth(state, m)) for m in state.shares]
    best, expected, seconds = prospects.best_choice(state, options, assessed=True)
    return want(state, time, "serve", best, why, seconds, expected)


def assess(state: ControllerState, time: float) -> Transition:
    """Reassess after an interval."""
    current, expected = state.current, state.expected
    assert current is not None  # an interval has passed
    late = prospects.expected_of(state, current)[0].ttft_p99
    limit = state.rules.objective.limits.get("ttft_p99", math.inf)
    state = state.replaced(
        expected=expected.replaced(lateness=expected.lateness.forget(current, late > limit)),
        # It was not breached during the whole interval.
        breaches={choice: n for choice, n in state.breaches.items() if choice != current},
        lasted=current,
        compared=frozenset(),
        ages={model: age + 1 for model, age in state.ages.items()},
    )
    if prospects.is_settled(state):
        return Transition(state.replaced(prompts=0))
    return evaluate(state, time, f"{prospects.interval(state)} prompts were served")


def breach(state: ControllerState, time: float, share: float) -> Transition:
    """Load more layers, or another model, whichever is better with its cost.

    share: share of tokens below their threshold.
    """
    state = state.replaced(window=breach_window.clear(state.window))
    current = state.current
    assert current is not None  # only a model that serves is breached
    exits = state.rules.profiles[current.model].exits
    if current.depth == exits:  # tokens leave below their threshold only at a last loaded exit
        return Transition(state)
    # After a whole interval a breach means that texts changed: all models may be better now.
    ages = dict.fromkeys(state.ages, math.inf) if state.lasted == current else state.ages
    state = state.replaced(
        breaches={**state.breaches, current: state.breaches.get(current, 0) + 1},
        ages=ages,
        lasted=None,
        expected=state.expected.breached(current.model, current.depth, share),
        prompts=0,
    )
    state = prospects.fix_interval(state)
    model, shares = current.model, state.shares[current.model]
    more = [ModelDepth(model, depth) for depth in range(current.depth + 1, exits + 1)]
    more = [c for c in more if prospects.is_calm(state, c, shares)] or more[-1:]
    others = [ModelDepth(m, prospects.greedy_depth(state, m)) for m in state.shares if m != model]
    best, expected, seconds = prospects.best_choice(state, [*more, *others])
    kind = "grow" if best.model == model else "switch"
    why = "too many tokens left below their threshold"
    return want(state, time, kind, best, why, seconds, expected)


def give_up(state: ControllerState, time: float, model: str, why: str) -> Transition:
    """Stop evaluating and serving a model, if there is another one."""
    if len(state.failing | {model}) == len(state.rules.profiles):
        return Transition(state)
    warning = f"{model!r} is no longer served: {why}"
    current = state.current
    state = state.replaced(
        failing=state.failing | {model},
        # Requests that arrive now wait for another model.
        current=None if current is not None and current.model == model else current,
        expected=state.expected.without(model),
        serving=None if state.serving == model else state.serving,
        plan=tuple(running for running in state.plan if running.model != model),
    )
    if state.require_wanted().model != model:
        return Transition(state, warning=warning)
    why = f"{model}: {why}"
    if state.plan:
        outcome = want(state, time, "evaluate", state.plan[0].choice, why)
    elif state.shares:
        outcome = serve(state, time)
    else:
        outcome = evaluate(state, time, why)
    return outcome._replace(warning=warning)


def finish_evaluation(state: ControllerState, time: float) -> Transition:
    """Learn from the running evaluation, and begin the next one or serve the best model."""
    running, *rest = state.plan
    model, profile = running.model, state.rules.profiles[running.model]
    strict = prospects.level(state, model, evaluated=True)
    row = evaluations.history_row(running, profile, state.expected, state.rules.counted, strict)
    expected, ages = state.expected.learn(profile, row), {**state.ages, model: 0}
    if not running.judged:
        before = state.expected
        expected = expected.replaced(shortfall=before.shortfall, perplexity=before.perplexity)
    state = state.replaced(expected=expected, ages=ages, plan=())
    known = [n.model for n in rest if n.model != state.serving and n.model in state.shares]
    state, better = prospects.contenders(state, known)
    plan = tuple(n for n in rest if n.model not in known or n.model in better)
    state = state.replaced(plan=plan)
    if plan:
        outcome = want(state, time, "evaluate", plan[0].choice, "the next candidate")
    else:
        outcome = serve(state, time)
    return outcome._replace(evaluation=row)
