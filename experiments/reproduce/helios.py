"""HELIOS' tables, figures and numbers (Kumar et al., arXiv 2504.10724) with two small models.

    EEJAX_DATA=DATA eejax reproduce helios --workdir=runs/helios --json

Everything is done by this one command, and what is there already is not done again:

1. Two early-exit models and a judge are trained on text of the prompts' tasks, by --train of the
   steps in configs/mixed_*.py (`helios_training`; 20 minutes on 2 cores at the default).
2. What every exit says of --new tokens of each prompt is recorded along each model's own greedy
   text, and what both models cost here is measured (trace.npz and trace.npz.json; 10 minutes).
3. Serving is SIMULATED from there by the controller that serves, prompt by prompt and task after
   task as in the paper, at batch size 1 (section 5.1), with the time of a clock that the simulation
   moves. Shapes alone give Tables 2 and 4 and Figures 6 and 15, at the paper's own sizes.

"small" stands for OPT-1.3B and "large" for OPT-6.7B. One threshold for all exits of a model lets
--early of its tokens leave before the last layer, as 77.7 % of OPT-1.3B's do (Table 5). Perplexity
is that of each model's own probabilities at the exits that tokens leave by; Table 1 has it under
the judge, too. Accuracy, as an objective, is perplexity under the judge. Operations
stand for energy, which is not measured.

--workdir is left with results.json, whose last field `findings` has the paper's value and ours for
every claim, and a picture of each figure. Claims that do not hold are no error. With --live=N a
real fleet answers the first N prompts, and the simulation is compared with it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import flags

from eejax.common.paths import expanded
from eejax.experiments import launch
from eejax.experiments.reproduce import (
    helios_evidence,
    helios_models,
    helios_shapes,
    helios_simulated,
)

_WORKDIR = flags.DEFINE_string("workdir", "runs/helios", "Where everything is left.")
_TRAIN = flags.DEFINE_float("train", 0.35, "Share of the training steps of configs/mixed_*.py.")
_NEW = flags.DEFINE_integer("new", 100, "Tokens of every prompt.", lower_bound=2)
_PROMPTS = flags.DEFINE_integer("prompts", None, "Most prompts; default: all.", lower_bound=8)
_SLOTS = flags.DEFINE_integer("slots", 1, "Requests that a model serves at a time.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 4, "Steps between two looks of a server.", lower_bound=1)
_CALLS = flags.DEFINE_integer("calls", 160, "Calls in which a model is timed.", lower_bound=20)
_EARLY = flags.DEFINE_float(
    "early",
    0.78,
    "Share of tokens that leave before the last layer.",
    lower_bound=0.0,
    upper_bound=1.0,
)
_LIVE = flags.DEFINE_integer("live", 0, "Prompts that a real fleet answers too.", lower_bound=0)
_TINY = flags.DEFINE_bool("tiny", False, "A size for tests: seconds, and it shows nothing.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")

SPECULATED = "summarization"  # CNN/DailyMail, on which section 6 compares


def main() -> None:
    from eejax import analysis
    from eejax.checkpoint.files import write_text
    from eejax.experiments.reproduce import helios_figures, helios_findings

    workdir = expanded(_WORKDIR.value)
    measured, models = prepare(workdir)

    def world(early=_EARLY.value):
        return helios_simulated.World.make(
            measured, helios_models.paces(measured), early, _STEPS.value
        )

    result, lines = reproduce(measured, world)
    if _LIVE.value:
        result["live"] = live(models, measured, world())
    result["findings"] = helios_findings.findings(result, lines, scale(measured))
    show_findings(result["findings"])
    for name, figure in helios_figures.figures(result, lines).items():
        analysis.save(figure, workdir / name)
    timelines = {name: line.to_dict() for name, line in lines.items()}
    write_text(workdir / "results.json", json.dumps(result | {"timelines": timelines}, indent=1))
    print(f"\nresults.json and the figures are in {workdir}", flush=True)
    if _JSON.value:
        print(json.dumps(result))


def prepare(workdir: pathlib.Path) -> tuple[Any, dict[str, Any]]:
    """Return the measurements, and models if opened; train and record what is missing.

    A recorded trace is taken as it is, whatever the flags of training say.
    """
    from eejax.experiments.reproduce import helios_training

    path = workdir / "trace.npz"
    known, models = path.exists(), {}
    if not known or _LIVE.value:
        models = helios_models.opened(helios_training.train(workdir, _TRAIN.value, _TINY.value))
    if known:
        return helios_models.load(path), models
    measured = helios_models.record(models, _NEW.value, _PROMPTS.value, _SLOTS.value, _CALLS.value)
    helios_models.save(measured, path)
    return measured, models


def scale(measured) -> str:
    sizes = " and ".join(
        f"{sum(p.bytes) / 4e6:.1f}M parameters ({name})" for name, p in measured.profiles.items()
    )
    trace = measured.trace
    return (
        f"{sizes}, {len(trace)} prompts of {trace.new} tokens, batch {measured.slots}, SIMULATED "
        "with times measured on a CPU"
    )


def reproduce(measured, world) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all numbers by table and figure, and the timelines of simulations.

    Numbers are printed as they are computed.

    Args:
      measured: `helios_models.Measured`.
      world: `helios_simulated.World` by the share of tokens that leave early.
    """
    from eejax.helios.choices import ControllerOptions

    one = world()
    trace, limits = one.trace, one.thresholds
    back = [*map(int, helios_simulated.task_order(measured.trace))]
    judged = {name: [own[i] for i in back] for name, own in measured.judged.items()}
    along = {pair: model.part(back) for pair, model in measured.along.items()}
    options = ControllerOptions()
    defaults = {
        name: getattr(options, name)
        for name in ("candidates", "prompts", "interval", "breaches", "window")
    }
    result: dict[str, Any] = {
        "prompts": len(trace),
        "new": trace.new,
        "slots": measured.slots,
        "order": list(trace.kinds),
        "thresholds": dict(limits),
        "trained": f"{_TRAIN.value:g} of the steps of configs/mixed_*.py",
        "defaults": defaults,
        "table_1": helios_evidence.table_1(trace, judged, limits),
        "table_2": helios_shapes.table_2(),
        "table_4": helios_shapes.table_4(),
        "figure_6": helios_shapes.figure_6(),
        "figure_7": helios_evidence.exit_shares(trace, limits),
        "figure_8": helios_evidence.unchanged(trace),
        "figure_9": helios_evidence.complementary(trace, along, limits),
        "figure_15": helios_shapes.figure_15(),
        "section_6": helios_evidence.speculative(trace, along, one.profiles, limits, SPECULATED),
    }
    result["figure_6_savings"] = helios_shapes.savings_at(result["figure_6"], 16)
    result["table_1_choices"] = {
        measure: helios_evidence.choices(result["table_1"], measure) for measure in ("own", "judge")
    }
    launch.say("simulating ...")
    result["simulated"], lines = helios_simulated.compared(one)
    show_simulated(result["simulated"])
    launch.say("simulating, sensitivity ...")
    result["figure_17"] = helios_simulated.sensitivity(one, world)
    return result, lines


def live(models, measured, world) -> dict[str, Any]:
    """Return relative errors of the simulation against a real fleet.

    They are of each whole model, and of HELIOS.
    """
    from eejax.experiments.helios_simulation import policies
    from eejax.experiments.helios_simulation.result import show_errors, validate
    from eejax.experiments.helios_simulation.simulator import simulate
    from eejax.experiments.helios_simulation.traces import PromptTrace
    from eejax.helios.choices import ControllerOptions
    from eejax.helios.objectives import ServiceObjective

    trace = measured.trace  # in the order in which a fleet is asked
    n, found, lines = min(_LIVE.value, len(trace)), {}, {}
    part, throughput = trace.part(0, n), ServiceObjective.of("throughput")
    whole = ControllerOptions(candidates=1, greedy=False, interval=10**6, tokens=part.new)
    ways = {name: ([name], whole) for name in world.profiles}
    ways["HELIOS"] = ([*world.profiles], ControllerOptions(tokens=part.new))
    for name, (served, options) in ways.items():
        launch.say(f"live: {name} ...")
        profiles = {m: world.profiles[m] for m in served}
        own = measured._replace(profiles=profiles)
        real, _ = helios_models.live(
            models, own, world.thresholds, throughput, options, n, world.setting
        )
        some = PromptTrace({m: part.models[m] for m in served}, part.kinds)
        make = policies.helios(profiles, throughput, options)
        simulated = simulate(some, profiles, world.paces, make, world.setting)
        lines[name] = simulated, real
        found[name] = validate(simulated, real) | dataclasses.asdict(real)
    print(f"\nSimulated against measured, {n} prompts:\n{show_errors(lines)}\n", flush=True)
    return found


def show_simulated(rows: list[dict]) -> None:
    from eejax.analysis import table
    from eejax.experiments.reproduce.findings import percent

    exits = [(model, e) for model, own in rows[0]["exits"].items() for e in range(len(own))]
    cells = [
        [
            r["name"],
            f"{r['throughput']:.0f}",
            f"{1e3 * r['ttft']['mean']:.0f}",
            f"{r['perplexity']:.2f}",
            percent(r["agreement"]),
            f"{r['operations'] / 1e9:.2f}",
            *(f"{100 * r['exits'][model][e]:.1f}" for model, e in exits),
            f"{r['loads']}, {r['switches']}",
        ]
        for r in rows
    ]
    header = ["", "tokens/s", "TTFT, ms", "perplexity", "agreement", "Gops a prompt"]
    header += [*(f"{model} {e + 1}, %" for model, e in exits), "LD, SW"]
    print(f"\nTable 5 and sections 5.1 to 5.5, SIMULATED\n{table(header, cells)}\n", flush=True)


def show_findings(findings: list[Mapping[str, str]]) -> None:
    from eejax.analysis import table

    cells = [[f["place"], f["claim"], f["theirs"], f["ours"], f["verdict"]] for f in findings]
    print(table(["place", "claim", "theirs", "ours", ""], cells), flush=True)


if __name__ == "__main__":
    launch.run(main)
