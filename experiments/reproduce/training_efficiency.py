"""EE-LLM's training efficiency (Chen et al., ICML 2024: Table 1, Figures 3, 4, 7 and 9), simulated.

    python -m experiments.reproduce.training_efficiency --workdir=runs/training_efficiency

What early exits cost a pipeline of four stages in time and memory, by the simulators of
`eejax.pipeline`: in EE-LLM's asynchronous 1F1B with and without its two optimizations, and in our
lockstep table. No device is needed and nothing is trained; it takes some seconds. Times are ratios
to the same model without early exits, from counts of floating-point operations.

From the paper: the five rows of Table 1 (exits at 1/4 and 1/2 of the depth; optimization 1 defers
an exit's forward pass to its backward pass, optimization 2 moves exits from the end of a stage to
the beginning of the next), and of Figure 3 that stages are 4, microbatches 6, an exit half a stage,
a backward pass twice a forward pass. From the authors' scripts (examples/ee_training/ in
github.com/pan-x-c/EE-LLM): the models, 4 stages, no tensor parallelism, 2048 sequences of 2048
tokens a step, 4 (1.3B) or 2 (7B) in a microbatch. From their README: 16 GPUs, so 4 replicas.

Ours: where Figure 7 has its third exit, which is tried on the embedding and at 3/4; bytes of
Megatron-LM, which are 18 for each parameter (bf16 with float32 gradients, master copy and Adam),
34 b t d for each layer (Korthikanti et al. 2022, without attention's scores) and 4 for each logit.
Of the paper's measurements one is printed alongside: 0.19 % more time per iteration of the 1.3B
model with both optimizations. Its seconds and gigabytes were not at hand, and none are made up.

Claims, checked: with the paper's optimizations exits cost at most 2 % of time, and the fullest
device no memory; in the lockstep table aligned exits before the last stage cost no time at all;
inserted microbatches cost none. Expected: 0.26 % of time for the 1.3B model and 0.06 % for the 7B
one; without the optimizations 26 % and 9 % more memory on the first device.

The exit status is 1 where a claim fails. Leaves results.json, fig3.png, fig4.png, fig7.png and
fig9.png in --workdir.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys

from absl import flags

from experiments import launch

_WORKDIR = flags.DEFINE_string("workdir", "runs/training_efficiency", "Where everything is left.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")

STAGES, LENGTH = 4, 2048
STATE_BYTES, LAYER_BYTES, LOGIT_BYTES = 18, 34, 4
GIB = 2**30
# Rows of Table 1: name, with exits, optimization 1, optimization 2
ROWS = (
    ("standard", False, True, True),
    ("early-exit", True, False, False),
    ("early-exit (1)", True, True, False),
    ("early-exit (2)", True, False, True),
    ("early-exit (1&2)", True, True, True),
)
# Measured by the paper (Table 1): time over that of the standard model.
PAPER = {("1.3B", "early-exit (1&2)"): 1.0019}
# Figure 7: name and depths of exits. Between the third and the last stage, optimization 2 puts an
# exit beside the final one.
EXITS = {
    "0": (),
    "1": (1 / 4,),
    "2": (1 / 4, 1 / 2),
    "3 from 0 on": (0, 1 / 4, 1 / 2),
    "3 from 1/4 on": (1 / 4, 1 / 2, 3 / 4),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model of the paper: its configuration, sequences and number of microbatches."""

    config: str
    rows: int
    microbatches: int


SETTINGS = {"1.3B": Setting("ee_llm_1b3", 4, 128), "7B": Setting("ee_llm_7b", 2, 256)}


def model_of(setting: Setting, fractions: tuple[float, ...] = (1 / 4, 1 / 2)):
    """(the model with exits at these fractions of its depth, layers of each stage)."""
    import importlib

    from eejax.models.config import ModelConfig

    values = importlib.import_module(f"configs.{setting.config}").get_config().model.to_dict()
    kind = dict(values.pop("exits")[0])
    exits = [kind | {"boundary": int(f * values["n_layers"])} for f in fractions]
    model = ModelConfig.from_dict(values | {"exits": exits})
    return model, [model.n_layers // STAGES] * STAGES


def paper_row(setting: Setting, fractions, deferred: bool, moved: bool) -> dict:
    """EE-LLM's schedule: time in floating-point operations, and bytes of each stage."""
    from eejax.pipeline.async_1f1b import async_1f1b
    from eejax.pipeline.costs import model_costs, model_sizes, peak_memory

    model, layers = model_of(setting, fractions)
    tokens = setting.rows * LENGTH
    how = {"deferred": deferred, "exits_at_end": not moved}
    costs = model_costs(model, layers, setting.rows, LENGTH)
    sizes = model_sizes(
        model, layers, layer_kept=LAYER_BYTES * tokens * model.d_model,
        exit_kept=LOGIT_BYTES * tokens * model.padded_vocab, state_bytes=STATE_BYTES,
    )  # fmt: skip
    line = async_1f1b(costs, setting.microbatches, **how)
    forward = [sum(o.end - o.begin for o in line.ops
                   if (o.stage, o.microbatch) == (i, 0) and "forward" in o.kind)
               for i in range(STAGES)]  # fmt: skip
    backward = [sum(o.end - o.begin for o in line.ops
                    if (o.stage, o.microbatch) == (i, 0) and "backward" in o.kind)
                for i in range(STAGES)]  # fmt: skip
    memory = peak_memory(sizes, setting.microbatches, **how)
    return {
        "time": line.time, "forward": forward, "backward": backward,
        "gib": [float(m / GIB) for m in memory], "peak_gib": float(memory.max() / GIB),
    }  # fmt: skip


def table1(setting: Setting) -> list[dict]:
    rows = [
        {"row": name} | paper_row(setting, (1 / 4, 1 / 2) if exits else (), one, two)
        for name, exits, one, two in ROWS
    ]
    return [row | {"ratio": row["time"] / rows[0]["time"]} for row in rows]


def figure7(setting: Setting) -> list[dict]:
    """0 to 3 exits, with both optimizations, with none, and in the lockstep table."""
    from eejax.pipeline.costs import model_costs
    from eejax.pipeline.schedule import one_f_one_b
    from eejax.pipeline.simulate import exit_time_overhead

    out = []
    for name, fractions in EXITS.items():
        both, none = (paper_row(setting, fractions, one, one) for one in (True, False))
        model, layers = model_of(setting, fractions)
        costs = model_costs(model, layers, setting.rows, LENGTH)
        table = functools.partial(one_f_one_b, STAGES, setting.microbatches)
        stages = [int(f * STAGES) for f in fractions]
        ours = {
            exits: exit_time_overhead(table(), table(exit_stages=stages, exits=exits), costs)
            for exits in ("deferred", "mixed", "aligned")
        }
        out.append({"exits": name, "both": both, "none": none, "lockstep_overhead": ours})
    for row in out:
        for how in ("both", "none"):
            row[how]["ratio"] = row[how]["time"] / out[0][how]["time"]
    return out


def lockstep(setting: Setting) -> list[dict]:
    """Our schedule beside the paper's, by activation policy: GiB of activations, and the most
    microbatches under way."""
    from eejax.pipeline.costs import memory_vs_1f1b

    model, layers = model_of(setting)
    out = []
    for remat in ("none", "dots", "full"):
        ours, theirs = memory_vs_1f1b(
            model, layers, setting.microbatches, setting.rows, LENGTH, remat=remat
        )
        row = {"remat": remat, "total_ratio": float(ours.total.max() / theirs.total.max())}
        for name, peak in (("lockstep", ours), ("async", theirs)):
            row[name] = {"activations_gib": (peak.activations / GIB).tolist(),
                         "peak_gib": float(peak.total.max() / GIB),
                         "in_flight": peak.in_flight.tolist()}  # fmt: skip
        out.append(row)
    return out


def filling(setting: Setting, microbatches: int = 16) -> list[dict]:
    """Appendix C.2 in the lockstep table, deferred exits at the beginnings of stages 1 and 2."""
    from eejax.pipeline.costs import model_costs
    from eejax.pipeline.schedule import one_f_one_b
    from eejax.pipeline.schedule_fill import filled, filled_to, most_inserted
    from eejax.pipeline.simulate import FORWARD, simulate

    model, layers = model_of(setting)
    costs = model_costs(model, layers, setting.rows, LENGTH)
    how = {"exit_stages": (1, 2), "exits": "deferred"}
    more, less = filled(costs, microbatches, **how), filled_to(costs, microbatches, **how)
    alone = simulate(one_f_one_b(STAGES, microbatches, **how), costs).time
    k = most_inserted(STAGES, costs.of(FORWARD, 0), costs.layers[0].backward)
    row = lambda name, found: {
        "perspective": name, "microbatches": microbatches, "whole": found.main, "paper_k": k,
        "part1": found.part1, "part2": found.part2, "time_ratio": found.time / alone,
        "loss_factors": found.loss_factors.tolist(),
        "gradient_factors": found.gradient_factors.tolist(),
    }  # fmt: skip
    return [row("more in the same time", more), row("the same number in less time", less)]


def pictures(workdir: pathlib.Path, efficiency: dict) -> list[pathlib.Path]:
    from eejax import analysis
    from eejax.analysis.bars import grouped_bars
    from eejax.analysis.gantt import gantt
    from eejax.pipeline.async_1f1b import async_1f1b
    from eejax.pipeline.schedule import one_f_one_b
    from eejax.pipeline.schedule_fill import filled
    from eejax.pipeline.simulate import Work, simulate, stage_costs

    # Figure 3's setting: a stage's layers 2, an exit 1 forward, and twice that backward.
    costs = stage_costs((1,) * 4, (0, 1, 1, 0), layer=Work(2, 4), exit=Work(1, 2), final=Work(1, 2))
    table = lambda exits: one_f_one_b(4, 6, exit_stages=(1, 2), exits=exits)
    fig3 = {
        "1F1B without exits": async_1f1b(costs.without_exits, 6),
        "early exits, no optimization": async_1f1b(costs, 6, deferred=False, exits_at_end=True),
        "early exits, both optimizations": async_1f1b(costs, 6),
        "lockstep, deferred exits": simulate(table("deferred"), costs),
        "lockstep, aligned exits": simulate(table("aligned"), costs),
    }
    inserted = filled(costs, 6, exit_stages=(1, 2), exits="deferred")
    plain = stage_costs((1,) * 4, layer=Work(2, 4))
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
    counts, stages = list(EXITS), [f"stage {i}" for i in range(STAGES)]
    seven, nine = {}, {}
    for name, found in efficiency.items():
        rows = found["figure7"]
        ours = lambda rows, e: [1 + r["lockstep_overhead"][e] for r in rows]
        time = {"EE-LLM, (1&2)": [r["both"]["ratio"] for r in rows],
                "EE-LLM, none": [r["none"]["ratio"] for r in rows],
                "lockstep, aligned": ours(rows, "aligned")}  # fmt: skip
        seven[f"{name}: % more time"] = {k: [100 * (x - 1) for x in v] for k, v in time.items()}
        of = {r["row"]: r for r in found["table1"]}
        for what, title in (("forward", "forward pass (stages)"),
                            ("backward", "backward pass (stages)"), ("gib", "GiB")):  # fmt: skip
            one = of["standard"][what][1] if what != "gib" else 1
            nine[f"{name}: {title}"] = {
                row: [x / one for x in of[row][what]] for row in ("standard", "early-exit (1&2)")
            }
    figures = (("fig7.png", seven, counts, "early exits"), ("fig9.png", nine, stages, ""))
    for name, panels, groups, xlabel in figures:
        drawn.append(analysis.save(grouped_bars(panels, groups, xlabel=xlabel), workdir / name))
    return drawn


def judge(efficiency: dict) -> list[dict]:
    """The claims, each with a line that says what was found and whether it `holds`."""
    claims = []
    for name, found in efficiency.items():
        row = {r["row"]: r for r in found["table1"]}
        best, base = row["early-exit (1&2)"], row["standard"]
        more = best["ratio"] - 1
        claims.append({
            "claim": f"{name}: exits with both optimizations cost at most 2 % of time: {more:.2%}",
            "holds": more <= 0.02,
        })  # fmt: skip
        grown = best["peak_gib"] / base["peak_gib"] - 1
        worst = row["early-exit"]["peak_gib"] / base["peak_gib"] - 1
        claims.append({
            "claim": f"{name}: and no memory on the fullest device: {grown:.2%} "
                     f"({worst:.2%} without the optimizations)",
            "holds": grown <= 1e-9 and worst >= grown,
        })  # fmt: skip
        aligned = max(r["lockstep_overhead"]["aligned"] for r in found["figure7"][:-1])
        claims.append({
            "claim": f"{name}: aligned exits before the last stage cost the lockstep table no "
                     f"time: {aligned:.2%}",
            "holds": abs(aligned) <= 1e-9,
        })  # fmt: skip
        more, less = found["filling"]
        claims.append({
            "claim": f"{name}: {more['part1'] + more['part2']} inserted microbatches cost "
                     f"{more['time_ratio'] - 1:.2%} of time, or save {1 - less['time_ratio']:.2%}",
            "holds": more["time_ratio"] <= 1 + 1e-6 and less["time_ratio"] < 1,
        })  # fmt: skip
    return claims


def main() -> None:
    from eejax.checkpoint.files import write_text

    workdir = pathlib.Path(_WORKDIR.value).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    parts = {"table1": table1, "figure7": figure7, "lockstep": lockstep, "filling": filling}
    efficiency = {
        name: {part: make(setting) for part, make in parts.items()}
        for name, setting in SETTINGS.items()
    }
    claims = judge(efficiency)
    summary = {
        "settings": {k: dataclasses.asdict(s) for k, s in SETTINGS.items()},
        "models": efficiency,
        "claims": claims,
    }
    write_text(workdir / "results.json", json.dumps(summary, indent=1))
    drawn = pictures(workdir, efficiency)
    show(efficiency, claims)
    print(f"\nlook at {', '.join(map(str, drawn))}")
    print(f"all numbers are in {workdir / 'results.json'}", flush=True)
    if _JSON.value:
        print(json.dumps(summary))
    sys.exit(0 if all(c["holds"] for c in claims) else 1)


def paper(model: str, row: str) -> str:
    """What the paper measured, where it is known."""
    return f"{PAPER[model, row]:.4f}" if (model, row) in PAPER else "-"


def show(efficiency: dict, claims: list[dict]) -> None:
    from eejax import analysis

    for name, found in efficiency.items():
        print(f"\n{name}, EE-LLM's 1F1B (Table 1, simulated)")
        cells = [[r["row"], f"{r['ratio']:.4f}", *(f"{g:.1f}" for g in r["gib"]),
                  f"{r['peak_gib']:.1f}", paper(name, r["row"])]
                 for r in found["table1"]]  # fmt: skip
        header = ["setup", "time", *(f"GiB {i}" for i in range(STAGES)), "peak GiB", "paper's time"]
        print(analysis.table(header, cells))
        print(f"\n{name}, more time by the number of exits (Figure 7, simulated)")
        cells = [[r["exits"], f"{r['none']['ratio'] - 1:.2%}", f"{r['both']['ratio'] - 1:.2%}",
                  *(f"{x:.2%}" for x in r["lockstep_overhead"].values())]
                 for r in found["figure7"]]  # fmt: skip
        header = ["exits", "EE-LLM", "(1&2)", "deferred", "mixed", "aligned"]
        print(analysis.table(header, cells))
        print(f"\n{name}, activations of the lockstep table beside EE-LLM's 1F1B in our program")
        cells = [[r["remat"], f"{max(r['lockstep']['activations_gib']):.1f}",
                  f"{max(r['async']['activations_gib']):.1f}", f"{r['total_ratio']:.2f}"]
                 for r in found["lockstep"]]  # fmt: skip
        header = ["remat", "lockstep GiB", "1F1B GiB", "ratio with the state"]
        print(analysis.table(header, cells))
        print(f"\n{name}, filled bubbles (Appendix C.2)")
        cells = [[r["perspective"], str(r["whole"]), str(r["part1"]), str(r["part2"]),
                  f"{r['time_ratio']:.4f}"] for r in found["filling"]]  # fmt: skip
        print(analysis.table(["", "whole", "part 1", "part 2", "time"], cells))
    print()
    for claim in claims:
        print(f"{'holds' if claim['holds'] else 'FAILS'}  {claim['claim']}")


if __name__ == "__main__":
    launch.run(main)
