"""HELIOS's decisions about the time and the candidates of assessments (section 3.4.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eejax.experiments.reproduce.catalogue import finding
from eejax.experiments.reproduce.claims import Finding

SCALE = "eejax's controller, costs made up"
LOADS = (0.05, 0.1, 0.2)  # seconds of a segment
SHARES = (0.9, 0.1, 0.0, 0.0)  # of tokens by the exit they leave by


def findings() -> list[Finding]:
    """Return every finding about reassessments."""
    return [*intervals(), *overlaps(), *others()]


def judged(key: str, holds: bool, ours: str, why: str) -> Finding:
    return finding("HELIOS", key, ours, SCALE, bool(holds), why)


def profile(scale: float, load: float):
    """Return the profile of a model of four segments that takes `scale` ms a token in each."""
    from eejax.helios.choices import ModelProfile

    def each(value):
        return (value,) * len(SHARES)

    return ModelProfile(
        each(1e-3 * scale),
        each(1e-2 * scale),
        each(load * scale),
        each(0.0),
        each(100.0 * scale),
        each(scale),
        (0.98, 0.98, 0.98, 1.0),
        (0.6, 0.7, 0.8, 1.0),
    )


def controller(profiles, **options):
    from eejax.helios.choices import ControllerOptions
    from eejax.helios.controller import Controller
    from eejax.helios.objectives import ServiceObjective
    from eejax.helios.repository import Repository

    return Controller(
        profiles,
        ServiceObjective.of("throughput"),
        Repository(),
        ControllerOptions(**options),
        clock=lambda: 0.0,
    )


def serve(one, prompts: int, tokens: int = 20) -> list[str]:
    """Answer prompts at once, as they are assigned, and return the model of each."""
    exits = [e for e, share in enumerate(SHARES) for _ in range(round(tokens * share))]
    served = []
    for _ in range(prompts):
        one.model_loaded(one.wanted)
        choice, evaluated = one.prompt_arrived()
        served.append(choice.model)
        one.tokens_emitted(choice.model, [e >= choice.depth for e in exits])
        if evaluated:
            told = one.state.rules.profiles[choice.model].serving(SHARES, choice.depth)
            one.prompt_answered(choice.model, told, [min(e, choice.depth - 1) for e in exits])
    return served


def intervals() -> Iterator[Finding]:
    """Compare the interval that "auto" chooses with the seconds that it follows from."""
    from eejax.helios import prospects

    found, right = [], True
    for load in LOADS:
        own = {"a": profile(1.0, load), "b": profile(3.0, load)}
        one = controller(own, interval="auto")
        serve(one, 12)
        # Evaluating b loads all of it and makes an answer of 20 tokens; a's leave by exit 1.
        cost = 4 * 3 * load + 20 * own["b"].serving(SHARES, 4).tpot
        each = 20 * own["a"].serving(SHARES, one.current.depth).tpot
        right &= abs(prospects.interval(one.state) - cost / (one.options.gain * each)) <= 1
        found.append(prospects.interval(one.state))
    yield judged(
        "interval-by-cost",
        right and found == sorted(set(found)),
        f'interval="auto" gives {_told(found)} prompts where a segment loads in {_told(LOADS)} s: '
        "enough that evaluations take 5 % of the time between; the default is 150",
        "the interval does not follow from these costs",
    )


def overlaps() -> Iterator[Finding]:
    """Return the model that serves prompts while a chosen one is not loaded yet."""
    one = controller({"a": profile(1.0, 0.1), "b": profile(1.2, 0.1)}, interval=20)
    before, served = "", []
    for _ in range(400):
        before = serve(one, 1)[0]
        if one.state.serving and one.wanted.model != before:
            one.device_reported({before: one.current.depth}, 0)  # what is wanted is never loaded
            served = [one.prompt_arrived()[0].model for _ in range(10)]
            break
    yield judged(
        "overlap",
        bool(served) and set(served) == {before},
        f"the controller sends {served.count(before)} of {len(served)} prompts to the loaded "
        "model while the next one is not loaded; no time of loading is measured here",
        "prompts wait for the model that is loaded" if served else "no other model is loaded",
    )


def others() -> Iterator[Finding]:
    """Return candidates of reassessments, before and after one of them was given up."""
    import warnings

    names = ("a", "b", "c")
    own = {name: profile(scale, 0.1) for name, scale in zip(names, (1.0, 1.4, 1.2), strict=True)}
    one = controller(own, interval=20)
    first = sorted(set(serve(one, 200)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one.model_given_up(first[0], "its answers end in errors")
    later = sorted(set(serve(one, 200)))
    new = sorted({*later} - {*first})
    yield judged(
        "other-candidates",
        len(first) == 2 and new and first[0] not in later,
        f"of the models {_told(names)} the candidates {_told(first)} serve 200 prompts; once "
        f"{first[0]} is given up, {_told(later)} do",
        "no other model of the repository serves a prompt",
    )


def _told(values: Sequence) -> str:
    return ", ".join(map(str, values))
