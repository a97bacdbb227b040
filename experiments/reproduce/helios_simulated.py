"""HELIOS and what it is compared with, SIMULATED on a trace, for `experiments.reproduce.helios`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.reproduce import helios_evidence as evidence

ORDERS = ("mixed", "by task")
INTERVALS = (10, 25, 50, 100, 150, 200, 250, 300)
BREACHES = (10, 30, 50, 70, 90)
WINDOWS = (25, 50, 100, 200, 400)
EARLY = (0.2, 0.4, 0.6, 0.75, 0.9)
STRETCH = 50  # prompts for which hindsight chooses


@dataclasses.dataclass(frozen=True)
class World:
    """What simulations share: by an order of prompts, at thresholds that let a share of `early`
    tokens leave before the last layer."""

    trace: Any
    profiles: Mapping[str, Any]
    paces: Mapping[str, Any]
    setting: Any
    thresholds: Mapping[str, float]

    @classmethod
    def make(cls, measured, paces: Mapping[str, Any], order: str, early: float, steps: int):
        from eejax.serving.simulator import Setting

        trace = measured.trace
        if order == "by task":
            first = {kind: i for i, kind in reversed([*enumerate(trace.kinds)])}
            trace = trace.ordered(sorted(range(len(trace)), key=lambda i: first[trace.kinds[i]]))
        limits = {n: evidence.threshold_for(m, early) for n, m in trace.models.items()}
        profiles = evidence.prices(measured.profiles, trace, limits)
        setting = Setting(slots=measured.slots, steps=steps, thresholds=limits)
        return cls(trace, profiles, paces, setting, limits)

    def run(self, make: Callable, **changes):
        from eejax.serving.simulator import simulate

        setting = dataclasses.replace(self.setting, **changes)
        return simulate(self.trace, self.profiles, self.paces, make, setting)

    def helios(self, objective, **options):
        """The controller's, of prompts of as many tokens as there are."""
        from eejax.serving import policies
        from eejax.serving.choices import ControllerOptions

        own = ControllerOptions(**(dict(tokens=self.trace.new) | options))
        return policies.helios(self.profiles, objective, own)


def row(name: str, simulated) -> dict:
    """Numbers of a simulation."""
    kinds = [d.kind for d in simulated.decisions]
    share = {m: simulated.models.count(m) / len(simulated.models) for m in simulated.exits}
    return {
        "name": name, "throughput": simulated.throughput, "ttft": simulated.ttft,
        "agreement": simulated.agreement, "below": simulated.below_share,
        "flops": simulated.flops, "bytes": simulated.memory, "models": share,
        "changes": sum(kinds.count(k) for k in ("switch", "grow", "tighten")),
        "evaluations": kinds.count("evaluate"),
        "last_layer": last_layer(simulated),
    }  # fmt: skip


def last_layer(simulated) -> float:
    """Share of tokens that go through all layers."""
    return float(sum(n[-1] for n in simulated.exits.values()) / simulated.tokens.sum())


def objectives(accuracy: float) -> dict[str, tuple[Any, float]]:
    """(objective, share of answers that are audited) by name."""
    from eejax.serving.objectives import Objective

    named = {name: (Objective.of(name), 0.0) for name in ("throughput", "response_time", "energy")}
    limited = Objective({"throughput": 1.0}, {"accuracy": accuracy})
    return named | {f"throughput, {accuracy:.0%} right": (limited, 0.05)}


def compared(world: World, accuracy: float) -> list[dict]:
    """The tables of objectives: what is static first."""
    from eejax.serving import policies
    from eejax.serving.objectives import Objective

    rows, throughput = [], Objective.of("throughput")
    for model, depth in policies.choices_of(world.profiles):
        whole = depth == world.profiles[model].exits
        name = f"{model}, {'whole' if whole else f'{depth} exits'}"
        rows.append(row(name, world.run(policies.fixed(model, depth))) | {"whole": whole})
        if whole:
            no = world.run(policies.fixed(model, depth), thresholds=1.0)
            rows.append(row(f"{model}, no early exits", no))
    for name, (objective, audits) in objectives(accuracy).items():
        rows.append(row(f"HELIOS: {name}", world.run(world.helios(objective), audits=audits)))
    largest = max(p.size(p.exits) for p in world.profiles.values())
    variants = {
        "one model at a time": dict(budget=largest), "one candidate": dict(candidates=1),
        "whole models": dict(greedy=False),
    }  # fmt: skip
    for name, options in variants.items():
        make = world.helios(throughput, **options)
        rows.append(row(f"HELIOS, {name}", world.run(make)))
    random = policies.at_random(world.profiles, STRETCH, len(world.trace))
    rows.append(row("at random", world.run(random)))
    own = next(r for r in rows if r["name"] == "HELIOS: throughput")
    make, _ = policies.hindsight(
        world.trace, world.profiles, world.paces, STRETCH, world.setting, own["agreement"]
    )
    rows.append(row("hindsight, as right", world.run(make, free=True)))
    return rows


def sensitivity(world: World, at: Callable[[float], World]) -> dict[str, list[dict]]:
    """HELIOS' throughput and what it costs over each of its settings, the others as they are. at:
    the world where another share of the tokens leaves early."""
    from eejax.serving import policies
    from eejax.serving.objectives import Objective

    throughput = Objective.of("throughput")
    one = lambda w=world, **options: w.run(w.helios(throughput, **options))
    value = lambda v, s: {"value": v} | row("HELIOS", s)
    found = {
        "interval": [value(n, one(interval=n)) for n in INTERVALS],
        "breaches": [value(n, one(breaches=n)) for n in BREACHES],
        "window": [value(n, one(window=n, breaches=n // 2)) for n in WINDOWS],
    }
    rows = []
    for early in EARLY:
        there = at(early)
        best = {
            m: there.run(policies.fixed(m, p.exits)).throughput for m, p in there.profiles.items()
        }
        rows.append(value(early, one(there)) | {"static": best, "thresholds": there.thresholds})
    return found | {"early": rows}


def ratio(rows: Sequence[dict], name: str, to: str, key: str = "throughput") -> float:
    of = {r["name"]: r for r in rows}
    get = lambda r: r["ttft"]["mean"] if key == "ttft" else r[key]
    return get(of[name]) / max(get(of[to]), 1e-12)


def claims(
    tables: Mapping[str, Sequence[dict]], over: Mapping[str, Sequence[dict]],
    unchanged: Sequence[dict], both: Sequence[dict],
) -> list[dict]:  # fmt: skip
    """What the paper says, and whether it holds here. tables: by order; the others as made."""
    made: list[dict] = []

    def claim(text: str, holds: bool) -> None:
        made.append({"claim": text, "holds": bool(holds)})

    seen = [r for r in unchanged if r["unchanged"] is not None]
    told = ", ".join(f"{r['unchanged']:.0%} ({r['model']}, layer {r['layers']})" for r in seen)
    claim(
        f"most tokens below the threshold of an exit are the full model's already: {told}",
        seen and min(r["unchanged"] for r in seen) > 0.5,
    )
    for r in both:
        if r["rescued"] is not None:
            claim(
                f"most tokens that {r['writer']} takes to the end leave early in {r['reader']}: "
                f"{r['rescued']:.0%} (of its others {r['late_early'] or 0:.0%})",
                r["rescued"] > 0.5,
            )
            claim(
                f"more tokens leave early in one of the two, {r['either']:.0%}, than in "
                f"{r['writer']} alone, {r['early']:.0%}, by a fifth of the rest at least",
                r["either"] - r["early"] > 0.2 * (1 - r["early"]),
            )
    for order, rows in tables.items():
        whole = [r for r in rows if r.get("whole")]
        own = next(r for r in rows if r["name"] == "HELIOS: throughput")
        times = {r["name"]: own["throughput"] / r["throughput"] for r in whole}
        claim(
            f"{order}: more tokens a second than either whole model with its exits: "
            + ", ".join(f"{t:.2f} times {n}" for n, t in times.items()),
            min(times.values()) > 1,
        )
        least = min(r["agreement"] for r in whole)
        claim(
            f"{order}: agreement with the full model is that of whole models to 2 points: "
            f"{own['agreement']:.1%}, of theirs {least:.1%} at least",
            own["agreement"] >= least - 0.02,
        )
        large = max(whole, key=lambda r: r["bytes"])
        times = ratio(rows, "HELIOS, one model at a time", large["name"], "bytes")
        claim(
            f"{order}: with one model at a time, {times:.2f} times the bytes of the larger one",
            times < 1,
        )
        for name, key in (("response_time", "ttft"), ("energy", "flops")):
            times = ratio(rows, f"HELIOS: {name}", large["name"], key)
            what = "seconds to the first token" if key == "ttft" else "operations a token"
            claim(f"{order}: asked for {name}, {times:.2f} times the {what} of {large['name']}",
                  times < 1)  # fmt: skip
        for name, above in (("at random", True), ("hindsight, as right", False)):
            times = ratio(rows, "HELIOS: throughput", name)
            claim(
                f"{order}: {times:.2f} times the tokens a second {name}",
                times > 1 if above else times <= 1.01,
            )
    by = {r["value"]: r["throughput"] for r in over["interval"]}
    spread = max(by[n] for n in (50, 150)) / min(by[n] for n in (50, 150)) - 1
    claim(
        f"assessed every 50 or 150 prompts it is as fast, to 10 %: {spread:.1%} apart", spread < 0.1
    )
    claim(f"every 10 prompts is slower than every 150: {by[10] / by[150]:.2f} times",
          by[10] < by[150])  # fmt: skip
    rows = over["breaches"]
    claim(
        "the more breaches are borne the more tokens leave below their threshold: "
        + ", ".join(f"{r['below']:.0%} at {r['value']}" for r in rows),
        rows[-1]["below"] >= rows[0]["below"],
    )
    rows = over["early"]
    gains = [r["throughput"] / max(r["static"].values()) for r in rows]
    claim(
        "the fewer tokens leave early the more it gains on the best whole model: "
        + ", ".join(f"{g:.2f} at {r['value']:.0%}" for g, r in zip(gains, rows, strict=True)),
        gains[0] > gains[-1],
    )
    return made


def figures(over: Mapping[str, Sequence[dict]], unchanged: Sequence[dict]) -> dict[str, Any]:
    """By the name of a file."""
    from eejax import analysis

    titles = {
        "interval": "prompts between reassessments", "breaches": "breaches borne in 100 tokens",
        "window": "tokens of the window, half of them borne", "early": "% of tokens sure early",
    }  # fmt: skip
    panels = []
    for key, label in titles.items():
        rows = over[key]
        x = [r["value"] * (100 if key == "early" else 1) for r in rows]
        curves = {"HELIOS": (x, [r["throughput"] for r in rows])}
        if key == "early":
            curves |= {
                f"{m}, whole": (x, [r["static"][m] for r in rows]) for m in rows[0]["static"]
            }
        panels.append(analysis.Panel(label, label, "tokens a second", curves))
        y = [r["below"] for r in rows]
        panels.append(analysis.Panel("", label, "share below threshold", {"HELIOS": (x, y)}))
    names = ["HELIOS", *(f"{m}, whole" for m in over["early"][0]["static"])]
    found = {
        "sensitivity.png": analysis.compare(panels, names, title="SIMULATED", columns=2),
    }
    middle = 50 * (np.array(evidence.BINS[:-1]) + np.minimum(evidence.BINS[1:], 1))
    panels = []
    for model in dict.fromkeys(r["model"] for r in unchanged):
        curves = {}
        for r in (r for r in unchanged if r["model"] == model):
            there = [(x, s) for x, s in zip(middle, r["by_confidence"], strict=True)
                     if s is not None]  # fmt: skip
            curves[f"layer {r['layers']}"] = tuple(map(list, zip(*there, strict=True)))
        panels.append(analysis.Panel(model, "confidence, %", "share that stays", curves))
    names = [*dict.fromkeys(name for p in panels for name in p.curves)]
    title = "Tokens of an exit that are the full model's"
    return found | {"unchanged.png": analysis.compare(panels, names, title=title, columns=2)}
