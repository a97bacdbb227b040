"""EE-LLM's training efficiency (Chen et al., ICML 2024: Table 1, Figures 3, 4, 7 and 9), simulated.

    eejax reproduce training-efficiency --workdir=runs/training_efficiency

What early exits cost a pipeline in time and memory, beside what the paper measured: EE-LLM's
asynchronous 1F1B with and without its two optimizations, and our lockstep table. No device is
needed and nothing is trained; it takes half a minute.

Times and bytes are those of `reproduce.megatron`: operations and bytes counted from the
authors' code, on A100 GPUs. Two constants are fitted to Table 1. The rate of matrix products is
fitted to each model's Standard row. The share of the memory's bandwidth that the gradient of the
input embedding reaches is fitted to one difference, what optimization 2 saves the 1.3B model. The
7B model's rows with exits are predictions, as are all bytes.

- Table 1 (setting of Figure 9: 4 stages, no data or tensor parallelism, microbatches of 2 sequences
  of 2048 tokens, 64 of them): all 20 numbers of the paper beside ours. The paper does not say
  whether the 1.3B model's embeddings are tied; its bytes say that they are not.
- Figure 9: the stages of the same runs. Figure 3: 4 stages, 6 microbatches. Figure 4: fillings.
- Figure 7: 0 to 3 exits, at 1/4, at 1/2, then before the first layer; 2048 sequences over 4
  replicas, microbatches of 2 (1.3B, 7B) or 1 (13B, 30B). With 4 stages tensor parallelism is that
  of the authors' scripts (examples/ee_training/ in github.com/pan-x-c/EE-LLM: 1, 1, 2, 4), without
  stages 4, 4, 8 and 8; the paper has more combinations, whose numbers are in its picture only. 13B
  and 30B run at the 7B model's rate.

In the cool-down the released code computes an exit before it waits for the gradient from the next
stage, as Remark A.2 proposes; the paper says that its implementation does not. Times are judged by
the paper's order, with the other one as a note, and by the 7B model's, to which no difference is
fitted.

Findings about each claim are printed and are part of the summary. Leaves results.json, fig3.png,
fig4.png, fig7.png and fig9.png in --workdir.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

from absl import flags

from eejax.common.paths import expanded
from eejax.experiments import launch
from eejax.experiments.reproduce import megatron

_WORKDIR = flags.DEFINE_string("workdir", "runs/training_efficiency", "Where everything is left.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")

STAGES, LENGTH, MICROBATCHES = 4, 2048, 64
STANDARD, BOTH = "Standard", "Early-exit (1&2)"
# Rows of Table 1: with exits, optimization 1, optimization 2.
ROWS = {
    STANDARD: (False, True, True),
    "Early-exit": (True, False, False),
    "Early-exit (1)": (True, True, False),
    "Early-exit (2)": (True, False, True),
    BOTH: (True, True, True),
}
# Table 1: seconds of an iteration, GB at the peak, the stage (from 1) whose peak that is.
TABLE1 = {
    "1.3B": {
        STANDARD: (5.23, 19.85, 1),
        "Early-exit": (5.31, 24.05, 1),
        "Early-exit (1)": (5.29, 22.56, 1),
        "Early-exit (2)": (5.28, 20.23, 2),
        BOTH: (5.24, 19.85, 1),
    },
    "7B": {
        STANDARD: (17.75, 62.27, 1),
        "Early-exit": (17.93, 67.42, 1),
        "Early-exit (1)": (17.91, 65.79, 1),
        "Early-exit (2)": (17.81, 62.27, 1),
        BOTH: (17.79, 62.27, 1),
    },
}
# Figure 7: depths of exits, in the order in which the paper adds them.
DEPTHS = ((), (1 / 4,), (1 / 4, 1 / 2), (1 / 4, 1 / 2, 0))
REPLICAS, BATCH = 4, 2048
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class EfficiencySetting:
    """A model of Figure 7.

    Attributes:
      config: its config file.
      rows: sequences in a microbatch.
      shards: tensor parallelism with 4 stages, and without stages.
    """

    config: str
    rows: int
    shards: tuple[int, int]


SETTINGS = {
    "1.3B": EfficiencySetting("ee_llm_1b3", 2, (1, 4)),
    "7B": EfficiencySetting("ee_llm_7b", 2, (1, 4)),
    "13B": EfficiencySetting("ee_llm_13b", 1, (2, 8)),
    "30B": EfficiencySetting("ee_llm_30b", 1, (4, 8)),
}


def model_of(setting: EfficiencySetting, depths: tuple[float, ...] = (1 / 4, 1 / 2)):
    """Return the model with minimalistic exits at these fractions of its depth.

    All embeddings are untied.
    """
    import importlib

    from eejax.models.config import ModelConfig

    values = importlib.import_module(f"eejax.configs.{setting.config}").get_config().model.to_dict()
    exit = {"norm": False, "head": "own"}
    exits = [exit | {"boundary": int(d * values["n_layers"])} for d in sorted(depths)]
    return ModelConfig.from_dict(values | {"head": "own", "exits": exits})


def table1_run(name: str, exits: bool) -> megatron.ReplicaRun:
    setting = SETTINGS[name]
    model = model_of(setting, (1 / 4, 1 / 2) if exits else ())
    return megatron.ReplicaRun(model, STAGES, 1, setting.rows, LENGTH, MICROBATCHES)


def how_of(row: str) -> dict:
    """Return the schedule of a row of Table 1; the cool-down's exits are the released code's."""
    _, one, two = ROWS[row]
    return {"deferred": one, "exits_at_end": not two, "exits_in_bubbles": one}


def fit() -> dict[str, megatron.Gpu]:
    """Fit the two constants to Table 1 and give the GPU of each model."""
    from scipy.optimize import brentq

    def gpu(name: str, share: float) -> megatron.Gpu:
        return megatron.fitted(table1_run(name, False), TABLE1[name][STANDARD][0], share)

    def too_much(share: float) -> float:
        run = table1_run("1.3B", True)
        at = functools.partial(megatron.iteration_seconds, run, gpu("1.3B", share))
        rows = ("Early-exit (1)", BOTH)
        ours = at(**how_of(rows[0])) - at(**how_of(rows[1]))
        paper = TABLE1["1.3B"][rows[0]][0] - TABLE1["1.3B"][rows[1]][0]
        return ours - paper

    share = brentq(too_much, 0.05, 1.0, rtol=1e-4)
    found = {name: gpu(name, share) for name in TABLE1}
    return found | {"13B": found["7B"], "30B": found["7B"]}


def table1(name: str, gpu: megatron.Gpu) -> list[dict]:
    """Return the rows of Table 1, the paper's numbers and ours.

    They have each stage's times and bytes.
    """
    out = []
    paper_base = TABLE1[name][STANDARD]
    for row, (exits, _, _) in ROWS.items():
        run, how = table1_run(name, exits), how_of(row)
        seconds = megatron.iteration_seconds(run, gpu, **how)
        waiting = megatron.iteration_seconds(run, gpu, **(how | {"exits_in_bubbles": False}))
        placed = {k: how[k] for k in ("deferred", "exits_at_end")}
        gb = megatron.peak_bytes(run, **placed) / 1e9
        base = out[0] if out else {"seconds": seconds, "peak_gb": float(gb.max())}
        their_seconds, their_gb, their_stage = TABLE1[name][row]
        out.append(
            {
                "row": row,
                "seconds": seconds,
                "more_time": seconds / base["seconds"] - 1,
                "more_time_waiting": waiting / base["seconds"] - 1,
                "gb": gb.tolist(),
                "peak_gb": float(gb.max()),
                "peak_stage": int(gb.argmax()) + 1,
                "more_gb": float(gb.max()) - base["peak_gb"],
                "paper_seconds": their_seconds,
                "paper_more_time": their_seconds / paper_base[0] - 1,
                "paper_gb": their_gb,
                "paper_more_gb": their_gb - paper_base[1],
                "paper_stage": their_stage,
                "stages": megatron.stage_seconds(run, gpu, **placed),
            }
        )
    return out


def figure7(name: str, gpu: megatron.Gpu) -> dict:
    """Compute seconds and GB by the number of exits, with 4 stages and without any.

    They are for optimizations 1 and 2. `lockstep` is the overhead of the lockstep table over the
    one without exits, by exit policy.
    """
    setting = SETTINGS[name]
    microbatches = BATCH // REPLICAS // setting.rows
    out = {}
    for stages, shards in zip((STAGES, 1), setting.shards, strict=True):
        found = []
        for depths in DEPTHS:
            model = model_of(setting, depths)
            run = megatron.ReplicaRun(model, stages, shards, setting.rows, LENGTH, microbatches)
            found.append(
                {
                    "exits": len(depths),
                    "seconds": megatron.iteration_seconds(run, gpu),
                    "peak_gb": float(megatron.peak_bytes(run).max() / 1e9),
                }
            )
            if stages > 1:
                found[-1]["lockstep"] = lockstep_overhead(run, gpu)
        out[f"{stages} x {shards}"] = found
    return out


def lockstep_overhead(run: megatron.ReplicaRun, gpu: megatron.Gpu) -> dict[str, float]:
    from eejax.pipeline.schedule import EXIT_POLICIES, one_f_one_b
    from eejax.pipeline.simulate import exit_time_overhead

    costs = megatron.costs(run, gpu)
    table = functools.partial(one_f_one_b, run.stages, run.microbatches)
    stages = [i for i, work in enumerate(costs.entry) if work.total > 0]

    def with_exits(policy):
        return table(exit_stages=stages, exits=policy)

    return {e: exit_time_overhead(table(), with_exits(e), costs) for e in EXIT_POLICIES}


def lockstep(name: str) -> list[dict]:
    """Compare the activations of the lockstep table with EE-LLM's 1F1B, by activation policy."""
    from eejax.experiments.stage_memory import memory_vs_1f1b

    run, out = table1_run(name, True), []
    for remat in ("none", "dots", "full"):
        ours, theirs = memory_vs_1f1b(
            run.model, run.layers, MICROBATCHES, run.rows, LENGTH, remat=remat
        )
        row = {"remat": remat, "total_ratio": float(ours.total.max() / theirs.total.max())}
        for name, peak in (("lockstep", ours), ("async", theirs)):
            row[name] = {
                "activations_gib": (peak.activations / GIB).tolist(),
                "peak_gib": float(peak.total.max() / GIB),
                "in_flight": peak.in_flight.tolist(),
            }
        out.append(row)
    return out


def filling(name: str, gpu: megatron.Gpu, microbatches: int = 16) -> list[dict]:
    """Fill the lockstep table's bubbles (Appendix C.2), deferred exits at the beginnings of stages.

    `paper_k` is the number of microbatches that the paper inserts into either part.
    """
    from eejax.pipeline.schedule import one_f_one_b
    from eejax.pipeline.schedule_fill import filled, filled_to, max_inserted
    from eejax.pipeline.simulate import FORWARD, simulate

    costs = megatron.costs(table1_run(name, True), gpu)
    how = {"exit_stages": (1, 2), "exits": "deferred"}
    more, less = filled(costs, microbatches, **how), filled_to(costs, microbatches, **how)
    alone = simulate(one_f_one_b(STAGES, microbatches, **how), costs).time
    k = max_inserted(STAGES, costs.of(FORWARD, 0), costs.layers[0].backward)

    def row(name, found):
        return {
            "perspective": name,
            "microbatches": microbatches,
            "whole": found.main,
            "paper_k": k,
            "part1": found.part1,
            "part2": found.part2,
            "time_ratio": found.time / alone,
            "loss_factors": found.loss_factors.tolist(),
            "gradient_factors": found.gradient_factors.tolist(),
        }

    return [row("more in the same time", more), row("the same number in less time", less)]


def pictures(workdir: pathlib.Path, efficiency: dict) -> list[pathlib.Path]:
    from eejax import analysis
    from eejax.analysis.gantt import gantt
    from eejax.experiments.async_1f1b import async_1f1b
    from eejax.experiments.reproduce.bars import grouped_bars
    from eejax.pipeline.schedule import one_f_one_b
    from eejax.pipeline.schedule_fill import filled
    from eejax.pipeline.simulate import PassTime, simulate, stage_costs

    # Figure 3: a stage's layers take 2, an exit 1 forward, and twice that backward.
    costs = stage_costs(
        (1,) * 4, (0, 1, 1, 0), layer=PassTime(2, 4), exit=PassTime(1, 2), final=PassTime(1, 2)
    )

    def table(exits):
        return one_f_one_b(4, 6, exit_stages=(1, 2), exits=exits)

    fig3 = {
        "(a) 1F1B without early exits": async_1f1b(costs.without_exits, 6),
        "(b) early exits on the middle stages": async_1f1b(costs, 6, deferred=False),
        "(c) deferred": async_1f1b(costs, 6),
        "deferred, in the bubbles of the cool-down": async_1f1b(costs, 6, exits_in_bubbles=True),
        "lockstep, deferred exits": simulate(table("deferred"), costs),
        "lockstep, aligned exits": simulate(table("aligned"), costs),
    }
    inserted = filled(costs, 6, exit_stages=(1, 2), exits="deferred")
    plain = stage_costs((1,) * 4, layer=PassTime(2, 4))
    fig4 = {
        "lockstep, deferred exits": fig3["lockstep, deferred exits"],
        "filled": simulate(inserted.schedule, costs),
        "filled, exits on every stage that take no time": simulate(
            filled(plain, 6, inner_stages=range(4)).schedule, plain
        ),
    }
    drawn = [
        analysis.save(gantt({k: line.bars() for k, line in lines.items()}), workdir / name)
        for name, lines in (("fig3.png", fig3), ("fig4.png", fig4))
    ]
    stages = [f"stage {i + 1}" for i in range(STAGES)]
    seven, nine = {}, {}
    for name, found in efficiency.items():
        piped, whole = found["figure7"].values()

        def more(rows):
            return [100 * (row["seconds"] / rows[0]["seconds"] - 1) for row in rows]

        def gb(rows):
            return [row["peak_gb"] for row in rows]

        for what, of in (("% more time", more), ("GB", gb)):
            seven[f"{name}: {what}"] = {"4 stages": of(piped), "no stages": of(whole)}
        for row in found.get("table1", ()):
            if row["row"] in (STANDARD, BOTH):
                for what in ("forward", "backward"):
                    panel = nine.setdefault(f"{name}: {what} pass (ms)", {})
                    panel[row["row"]] = [1e3 * stage[what] for stage in row["stages"]]
                nine.setdefault(f"{name}: GB", {})[row["row"]] = row["gb"]
    counts = [str(len(depths)) for depths in DEPTHS]
    figures = (("fig7.png", seven, counts, "early exits"), ("fig9.png", nine, stages, ""))
    for name, panels, groups, xlabel in figures:
        drawn.append(analysis.save(grouped_bars(panels, groups, xlabel=xlabel), workdir / name))
    return drawn


def main() -> None:
    from eejax.checkpoint.files import write_text
    from eejax.experiments.reproduce import efficiency_findings

    workdir = expanded(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    gpus = fit()
    efficiency = {name: {"figure7": figure7(name, gpu)} for name, gpu in gpus.items()}
    for name in TABLE1:
        efficiency[name] |= {
            "table1": table1(name, gpus[name]),
            "lockstep": lockstep(name),
            "filling": filling(name, gpus[name]),
        }
    findings = efficiency_findings.of(efficiency)
    summary = {
        "gpus": {name: dataclasses.asdict(gpu) for name, gpu in gpus.items()},
        "models": efficiency,
        "findings": [found.to_dict() for found in findings],
    }
    write_text(workdir / "results.json", json.dumps(summary, indent=1))
    drawn = pictures(workdir, efficiency)
    show(efficiency, findings)
    print(f"\nlook at {', '.join(map(str, drawn))}")
    print(f"all numbers are in {workdir / 'results.json'}", flush=True)
    if _JSON.value:
        print(json.dumps(summary))


def show(efficiency: dict, findings) -> None:
    from eejax import analysis

    def percent(x):
        return f"{x:+.2%}"

    for name, found in efficiency.items():
        if "table1" in found:
            print(f"\n{name}, Table 1: the paper's numbers and ours")
            cells = [
                [
                    r["row"],
                    f"{r['paper_seconds']:.2f}",
                    f"{r['seconds']:.2f}",
                    percent(r["paper_more_time"]),
                    percent(r["more_time"]),
                    percent(r["more_time_waiting"]),
                    f"{r['paper_gb']:.2f}",
                    f"{r['peak_gb']:.2f}",
                    f"{r['paper_more_gb']:+.2f}",
                    f"{r['more_gb']:+.2f}",
                    f"{r['paper_stage']}",
                    f"{r['peak_stage']}",
                ]
                for r in found["table1"]
            ]
            header = [
                "setup",
                "s, paper",
                "s",
                "more, paper",
                "more",
                "without A.2",
                "GB, paper",
                "GB",
                "more, paper",
                "more",
                "stage, paper",
                "stage",
            ]
            print(analysis.table(header, cells))
        print(f"\n{name}, Figure 7: by the number of early exits")
        cells = [
            [
                ways,
                str(r["exits"]),
                f"{r['seconds']:.2f}",
                percent(r["seconds"] / rows[0]["seconds"] - 1),
                f"{r['peak_gb']:.2f}",
                *(percent(x) for x in r.get("lockstep", {}).values()),
            ]
            for ways, rows in found["figure7"].items()
            for r in rows
        ]
        policies = next(iter(found["figure7"].values()))[0]["lockstep"]
        width = 5 + len(policies)
        cells = [row + ["-"] * (width - len(row)) for row in cells]
        header = [
            "stages x shards",
            "exits",
            "s",
            "more",
            "GB",
            *(f"table, {p}" for p in policies),
        ]
        print(analysis.table(header, cells))
        if "lockstep" in found:
            print(f"\n{name}, activations in our program: lockstep table and EE-LLM's 1F1B")
            cells = [
                [
                    r["remat"],
                    f"{max(r['lockstep']['activations_gib']):.1f}",
                    f"{max(r['async']['activations_gib']):.1f}",
                    f"{r['total_ratio']:.2f}",
                ]
                for r in found["lockstep"]
            ]
            header = ["remat", "lockstep GiB", "1F1B GiB", "ratio with the state"]
            print(analysis.table(header, cells))
            print(f"\n{name}, filled bubbles (Appendix C.2)")
            cells = [
                [
                    r["perspective"],
                    str(r["whole"]),
                    str(r["part1"]),
                    str(r["part2"]),
                    f"{r['time_ratio']:.4f}",
                ]
                for r in found["filling"]
            ]
            print(analysis.table(["", "whole", "part 1", "part 2", "time"], cells))
    print()
    for found in findings:
        print(f"{found.verdict.value}: {found.place}, {found.claim}")
        print(f"    paper: {found.theirs}; ours: {found.ours}. {found.why}".rstrip())


if __name__ == "__main__":
    launch.run(main)
