"""HELIOS and its baselines, SIMULATED on a trace, prompt by prompt.

The controller that decides is the one that serves; only time is simulated
(`helios_simulation.simulator`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eejax.experiments.reproduce import helios_evidence as evidence

INTERVALS = (25, 50, 100, 150, 200, 250, 300)  # Figure 17a
EARLY = (0.9, 0.78, 0.6, 0.4, 0.2)  # Figure 17b: share of tokens that leave early
OBJECTIVES = {
    "throughput": "throughput",
    "response time": "response_time",
    "accuracy": "perplexity",
    "energy": "energy",
}
"""The paper's service-level objectives (Table 5), and `ServiceObjective.of`'s names of them."""
CHANGES = {"grow": "LD", "switch": "SW"}  # as Figure 13c marks them


@dataclasses.dataclass(frozen=True)
class World:
    """Setting that simulations of one order of prompts share.

    Attributes:
      trace: `helios_simulation.traces.PromptTrace`, in the order in which prompts come.
      profiles: profiles by model.
      paces: `StepSeconds` by model.
      setting: `helios_simulation.simulator.SimulationSetting`.
      thresholds: by model, one for all of its exits.
    """

    trace: Any
    profiles: Mapping[str, Any]
    paces: Mapping[str, Any]
    setting: Any
    thresholds: Mapping[str, float]

    @classmethod
    def make(cls, measured, paces: Mapping[str, Any], early: float, steps: int):
        """Build the world: task after task, as in the paper's figures.

        A share `early` of the tokens leaves early.
        """
        from eejax.experiments.helios_simulation.simulator import SimulationSetting

        trace = measured.trace.ordered(task_order(measured.trace))
        limits = {n: evidence.threshold_for(m, early) for n, m in trace.models.items()}
        profiles = evidence.prices(measured.profiles, trace, limits)
        for name, nats in measured.judged.items():  # section 3.4 and 4.4; the judge is ours
            judged = ((1.0, float(np.exp(-np.mean(nats)))),)
            profiles[name] = dataclasses.replace(profiles[name], perplexity=judged)
        setting = SimulationSetting(slots=measured.slots, steps=steps, thresholds=limits)
        return cls(trace, profiles, paces, setting, limits)

    def run(self, make: Callable, **changes):
        from eejax.experiments.helios_simulation.simulator import simulate

        setting = dataclasses.replace(self.setting, **changes)
        return simulate(self.trace, self.profiles, self.paces, make, setting)

    def helios(self, objective: str, **options):
        """Return a policy: the controller under an objective, for texts as long as the trace's."""
        from eejax.experiments.helios_simulation import policies
        from eejax.helios.choices import ControllerOptions
        from eejax.helios.objectives import ServiceObjective

        own = ControllerOptions(**(dict(tokens=self.trace.new) | options))
        return policies.helios(self.profiles, ServiceObjective.of(OBJECTIVES[objective]), own)


def task_order(trace) -> list[int]:
    """Order prompts task after task, each task's in their order."""
    first = {kind: i for i, kind in reversed([*enumerate(trace.kinds)])}
    return sorted(range(len(trace)), key=lambda i: first[trace.kinds[i]])


def served_depths(simulated, profiles: Mapping[str, Any]) -> list[int]:
    """Return the loaded exits of each prompt's model when its first token came."""
    loaded = dict.fromkeys(profiles, 0)
    depths, events = [0] * len(simulated.models), [*simulated.timeline]
    for i in np.argsort(simulated.first, kind="stable"):
        while events and events[0].time <= simulated.first[i]:
            event = events.pop(0)
            if event.what in ("load", "grown", "shrink", "stay"):
                loaded[event.model] = event.depth
        depths[i] = loaded[simulated.models[i]]
    return depths


@dataclasses.dataclass(frozen=True)
class PromptCurves:
    """A simulation over prompts, as Figures 13, 14 and 16 show it.

    Attributes:
      throughput: tokens a second of decoding, 1 / TPOT (Table 3), by prompt.
      ttft: seconds to the first token, loading included, by prompt.
      perplexity: of each prompt's tokens, under their model at the exits that they leave by.
      whole: whether a prompt's model was loaded with all its layers.
      assessments: prompts at which candidates are evaluated.
      changes: (prompt, "LD" or "SW") where more layers, or another model, are loaded.
    """

    throughput: np.ndarray
    ttft: np.ndarray
    perplexity: np.ndarray
    whole: np.ndarray
    assessments: tuple[int, ...]
    changes: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, simulated, world: World, thresholds=None) -> PromptCurves:
        """Return the curves of a simulation at `thresholds`, by default the world's."""
        limits = world.thresholds if thresholds is None else thresholds
        depths = served_depths(simulated, world.profiles)
        perplexity = np.zeros(len(depths))
        for name, depth in {*zip(simulated.models, depths, strict=True)}:
            model = world.trace.models[name]
            exits, _ = model.leaves(limits[name], depth)
            which = [
                i
                for i, own in enumerate(zip(simulated.models, depths, strict=True))
                if own == (name, depth)
            ]
            perplexity[which] = evidence.perplexities(model, exits)[which]
        each = (simulated.ended - simulated.first) / np.maximum(simulated.tokens - 1, 1)

        def at(time):
            return int((simulated.first < time).sum())

        decisions = simulated.decisions
        whole = [
            d == world.profiles[m].exits for m, d in zip(simulated.models, depths, strict=True)
        ]
        return cls(
            1 / np.maximum(each, 1e-12),
            simulated.first - simulated.arrived,
            perplexity,
            np.array(whole),
            tuple(sorted({at(d.time) for d in decisions if d.kind == "evaluate"})),
            tuple((at(d.time), CHANGES[d.kind]) for d in decisions if d.kind in CHANGES),
        )

    def to_dict(self) -> dict[str, Any]:
        def lists(v):
            return v.tolist() if isinstance(v, np.ndarray) else v

        return {f.name: lists(getattr(self, f.name)) for f in dataclasses.fields(self)}


def row(name: str, simulated, timeline: PromptCurves, world: World) -> dict:
    """Return the numbers of a simulation.

    `exits` is the share of all tokens by model and exit, as in Table 5.
    """
    total = float(simulated.tokens.sum())
    events = [e for e in simulated.timeline if e.what in ("load", "grow", "grown")]
    kinds = [d.kind for d in simulated.decisions]
    latency = simulated.ended - simulated.arrived
    printed = (timeline.ttft + 1 / timeline.throughput) * simulated.tokens
    return {
        "name": name,
        "throughput": simulated.throughput,
        "decoding": float(timeline.throughput.mean()),
        "ttft": simulated.ttft,
        "ttft_by_prompt": float(timeline.ttft.mean()),
        "latency": float(latency.mean()),
        "printed_latency": float(printed.mean()),
        "perplexity": evidence.mean_perplexity(timeline.perplexity),
        "agreement": simulated.agreement,
        "below": simulated.below_share,
        "operations": simulated.flops * world.trace.new,
        "bytes": simulated.memory,
        "exits": {m: [n / total for n in own] for m, own in simulated.exits.items()},
        "answered": int((simulated.tokens > 0).sum()),
        "partly_loaded": float(1 - timeline.whole.mean()),
        "loading": sum(e.seconds for e in events),
        "seconds": simulated.seconds,
        "switches": kinds.count("switch"),
        "loads": kinds.count("grow"),
        "assessments": kinds.count("evaluate"),
    }


def compared(world: World) -> tuple[list[dict], dict[str, PromptCurves]]:
    """Return rows of Table 5 and sections 5.1 to 5.5, and the timelines of the figures, by name.

    They are each model alone with its exits and without them, HELIOS under every objective, and
    HELIOS for throughput where only one model fits the memory.
    """
    from eejax.experiments.helios_simulation import policies

    rows, lines = [], {}

    def add(name: str, simulated, thresholds=None) -> None:
        lines[name] = PromptCurves.of(simulated, world, thresholds)
        rows.append(row(name, simulated, lines[name], world))

    for model, profile in world.profiles.items():
        make = policies.fixed(model, profile.exits)
        add(f"{model} only", world.run(make))
        none = dict.fromkeys(world.profiles, 1.0)
        add(f"{model}, no early exits", world.run(make, thresholds=none), none)
    for objective in OBJECTIVES:
        add(f"HELIOS, {objective}", world.run(world.helios(objective)))
    largest = max(p.size(p.exits) for p in world.profiles.values())
    alone = world.helios("throughput", budget=largest)
    add("HELIOS, throughput, memory for one model", world.run(alone))
    return rows, lines


def sensitivity(world: World, at: Callable[[float], World]) -> dict[str, list[dict]]:
    """Compute Figure 17: throughput over reassessment intervals (a) and over thresholds (b).

    `at` gives the world in which a share of the tokens leaves early.
    """
    from eejax.experiments.helios_simulation import policies

    def value(x: float, there: World, static: bool, **options) -> dict:
        simulated = there.run(there.helios("throughput", **options))
        kinds = [d.kind for d in simulated.decisions]
        each = there.profiles.items() if static else ()
        alone = {m: there.run(policies.fixed(m, p.exits)).throughput for m, p in each}
        return {
            "value": x,
            "throughput": simulated.throughput,
            "below": simulated.below_share,
            "agreement": simulated.agreement,
            "static": alone,
            "thresholds": dict(there.thresholds),
            "assessments": kinds.count("evaluate"),
        }

    return {
        "interval": [value(n, world, False, interval=n) for n in INTERVALS],
        "early": [value(early, at(early), True) for early in EARLY],
    }


def of(rows: Sequence[dict], name: str) -> dict:
    """Return the row of a name."""
    return next(r for r in rows if r["name"] == name)
