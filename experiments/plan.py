"""Plan a pipelined run: time and memory of each stage, and faster settings; nothing is run.

    eejax plan --config=configs/ee_llm_7b.py --config.mesh.pipe=4 [--memory_gib=80]

It shows the time of each stage, memory of a device, the simulated step and its bubbles, all
activation and exit policies beside each other, and suggestions: how to lay layers and exits onto
stages, the policies, the number of microbatches, and the gain of filling the bubbles.

Times are counts of floating-point operations (`pipeline.costs.model_costs`), divided by mesh.model,
in seconds at 1 TFLOP/s. They do not include communication, the speed of small microbatches and
anything that is not a matrix product. With --measure they are seconds of three stages on this
machine's devices (`slot_costs`; every exit as long as the first). Memory is estimated: the state
exactly, activations by the needs of one layer's backward pass
(`experiments.stage_memory.layer_kept`), without XLA's own temporaries. --out saves a Gantt picture
there, --json prints one JSON object at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib

from absl import flags
from ml_collections import config_flags

from eejax.common.errors import require
from eejax.common.paths import expanded
from eejax.experiments import launch
from eejax.experiments.stages import ExperimentStages

config_flags.DEFINE_config_file(
    "config", None, "The experiment: a config file, or the name of an installed one."
)
_MEMORY = flags.DEFINE_float("memory_gib", None, "Memory of a device.", lower_bound=0)
_MEASURE = flags.DEFINE_bool("measure", False, "Measure times on the devices of this machine.")
_OUT = flags.DEFINE_string("out", None, "Folder for gantt.png.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")
flags.mark_flags_as_required(["config"])

GIB = 2**30
REMATS = ("none", "dots", "full")
BUBBLE = 0.1  # share of a step above which bubbles count as too large


def main() -> None:
    experiment = launch.configured()
    parts = measured(experiment) if _MEASURE.value else None
    memory = _MEMORY.value
    finite = memory is None or math.isfinite(memory)
    require(finite, "--memory_gib", memory, "must be a number of GiB", "Leave it out for no limit.")
    limit = None if memory is None else int(memory * GIB)
    result = plan(experiment, limit, parts)
    show(result)
    if _OUT.value:
        print(f"\nlook at {picture(experiment, parts, expanded(_OUT.value))}")
    if _JSON.value:
        print(json.dumps(result))


def measured(experiment):
    from eejax.experiments import slot_costs

    stages = ExperimentStages.of(experiment)
    mesh = dataclasses.replace(experiment.mesh, data=1)
    return slot_costs.measure(
        experiment.model,
        stages.partition.max_layers,
        stages.rows,
        experiment.data.length,
        mesh=mesh,
        remat=experiment.train.remat,
    )


def plan(experiment, limit: int | None = None, parts=None) -> dict:
    """Return everything that is shown, as JSON values.

    Args:
      experiment: the experiment.
      limit: bytes of a device.
      parts: measured times.
    """
    from eejax.experiments.stage_memory import memory_vs_1f1b

    now = ExperimentStages.of(experiment, parts)
    p = now.partition
    ours, theirs = memory_vs_1f1b(
        experiment.model,
        p.layers,
        now.microbatches,
        now.rows,
        experiment.data.length,
        remat=now.remat,
        exits=now.exits,
    )
    policies = [
        {"remat": way.remat, "exits": way.exits, "step": way.step, "bytes": way.bytes}
        for way in (now.replace(remat=r, exits=e) for r in REMATS for e in now.exit_policies)
    ]
    best = suggested(now, limit)
    return {
        "unit": "seconds at 1 TFLOP/s" if parts is None else "seconds, measured",
        "stages": [
            {
                "layers": p.layers[i],
                "boundaries": [experiment.model.exit_boundaries[x.exit] for x in p.on(i)],
            }
            | now.work(i)
            for i in range(p.stages)
        ],
        "microbatches": now.microbatches,
        "rows": now.rows,
        "step": now.step,
        "bubble": now.bubble,
        "memory": now.memory | {"total": now.bytes},
        "memory_vs_1f1b": float(ours.total.max() / theirs.total.max()),
        "policies": policies,
        "filling": filling(now),
        "suggested": best,
        "warnings": warnings(now, limit),
    }


def suggested(now: ExperimentStages, limit: int | None) -> dict:
    """Return the fastest settings of those that fit.

    Of equally fast ones it is the one that keeps most of its activations where the memory is known,
    else the smallest. It considers layers and placement first, then policies, then the smallest
    number of microbatches with bubbles below a tenth of the step.
    """
    from eejax.pipeline.partition import BALANCED, EVEN, PLACEMENTS, partition

    model, p = now.experiment.model, now.partition
    cuts = [p] + [
        partition(model, p.stages, layers, placement, length=now.experiment.data.length)
        for layers, placement in itertools.product((EVEN, BALANCED), PLACEMENTS)
    ]

    def fits(way):
        return limit is None or way.bytes <= limit

    def faster(ways):
        return min(ways, key=lambda w: round(w.step / now.step, 9))  # the first of equals

    best = faster([now.replace(partition=cut) for cut in cuts])

    def rank(way):
        keeps = REMATS.index(way.remat) if limit is not None else way.bytes
        return round(way.step / now.step, 9), keeps, way.bytes

    ways = [best.replace(remat=r, exits=e) for r in REMATS for e in now.exit_policies]
    best = min(filter(fits, ways), key=rank, default=min(ways, key=lambda w: w.bytes))
    counts = few_bubbles(best, fits)
    changed = best.replace(microbatches=counts) if counts else best
    return {
        "layers": list(changed.partition.layers),
        "placement": changed.partition.placement,
        "exits": changed.exits,
        "remat": changed.remat,
        "microbatches": changed.microbatches,
        "rows": changed.rows,
        "step": changed.step,
        "bubble": changed.bubble,
        "bytes": changed.bytes,
        "fits": None if limit is None else fits(changed),
        "boundaries": free_boundaries(changed),
    }


def few_bubbles(now: ExperimentStages, fits) -> int | None:
    """Return the smallest number of microbatches with a bubble below `BUBBLE`.

    It divides the batch. If none has such a bubble, the number with the smallest bubble is
    returned, and None if nothing fits.
    """
    each = now.experiment.train.batch_size // now.experiment.mesh.data
    ways = [now.replace(microbatches=m) for m in range(1, each + 1) if each % m == 0]
    ways = [way for way in ways if fits(way)]
    low = (way.microbatches for way in ways if way.bubble < BUBBLE)
    least = min(ways, key=lambda way: way.bubble, default=None)
    return next(low, least.microbatches if least else None)


def free_boundaries(now: ExperimentStages) -> list[int]:
    """Return for each early exit a boundary at which it makes no step longer, if there is one.

    It is its own boundary or, where that makes a step longer, the nearest beginning of a stage
    where it would not.
    """
    p, model = now.partition, now.experiment.model
    loads = without_early(now)
    most, found = max(loads) * (1 + 1e-9), []
    for e in sorted(p.which, key=lambda e: model.exit_boundaries[e]):
        if e == model.n_exits:
            continue
        own = next(x.stage for x in p.places if x.exit == e)
        one = (now.work(own)["total"] - loads[own]) / sum(x.exit < model.n_exits for x in p.on(own))
        stages = [i for i in range(p.stages) if loads[i] + one <= most]
        taken = {
            *found,
            *(model.exit_boundaries[x] for x in p.which if x not in (e, model.n_exits)),
        }
        free = [p.starts[i] for i in stages if p.starts[i] or model.exit_boundaries[e] == 0]
        free = [n for n in free if n not in taken]
        if own not in stages and free:
            boundary = min(free, key=lambda n: abs(n - model.exit_boundaries[e]))
            own = p.starts.index(boundary)
        else:
            boundary = model.exit_boundaries[e]
        loads[own] += one
        found.append(boundary)
    return found


def without_early(now: ExperimentStages) -> list[float]:
    """Return the time [stages] of a microbatch without the early exits."""
    costs, kinds = now.costs.without_exits, ("forward", "exits", "backward")
    return [
        sum(costs.of(kind, i, now.recompute) for kind in kinds) for i in range(now.partition.stages)
    ]


def filling(now: ExperimentStages) -> dict | None:
    """Return the microbatches that fit into the bubbles (EE-LLM, Appendix C.2), or None."""
    from eejax.pipeline.partition import INSIDE
    from eejax.pipeline.schedule_fill import filled

    p = now.partition
    if p.stages == 1 or now.experiment.pipeline.schedule != "1f1b":
        return None
    # Bubbles are at the ends of a step, and a step of few microbatches has the same ones.
    few = min(now.microbatches, 4 * p.stages)
    part1 = 0 if now.experiment.loss.distillation else None  # it never meets the final exit
    found = filled(
        now.costs,
        few,
        part1=part1,
        exit_stages=p.input_exit_stages,
        exits="deferred",
        inner_stages=[i for i in range(p.stages) if p.on(i, INSIDE)],
        recompute=now.recompute,
    )
    return {"part1": found.part1, "part2": found.part2, "more": found.inserted / now.microbatches}


def warnings(now: ExperimentStages, limit: int | None) -> list[str]:
    p, found, model = now.partition, [], now.experiment.model
    most = max(without_early(now)) * (1 + 1e-9)
    for i in range(p.stages):
        early = [str(model.exit_boundaries[x.exit]) for x in p.on(i) if x.exit < model.n_exits]
        if early and (load := now.work(i)["total"]) > most:
            found.append(
                f"stage {i} is slower than any without its exit at {', '.join(early)}, "
                f"by {load / most - 1:.1%} of each microbatch"
            )
    if not p.even:
        found.append(
            f"the {p.depth} layers do not divide by {p.stages} stages: every device holds "
            f"and keeps what {p.max_layers} layers need"
        )
    if now.microbatches < p.stages:
        found.append(
            f"{now.microbatches} microbatches for {p.stages} stages: some stages always "
            "wait. Set train.microbatches higher."
        )
    if now.experiment.loss.distillation:
        found.append(
            "distillation: times leave out that each early exit computes the final exit's "
            "logits, too"
        )
    if limit is not None and now.bytes > limit:
        found.append(f"{now.bytes / GIB:.1f} GiB do not fit into {limit / GIB:.1f}")
    return found


def show(result: dict) -> None:
    from eejax.analysis import table

    def number(t):
        return f"{t:.4g}"

    rows = [
        (
            str(i),
            str(s["layers"]),
            " ".join(map(str, s["boundaries"])) or "-",
            *(number(s[k]) for k in ("forward", "backward", "exits", "total")),
            f"{s['share of exits']:.1%}",
        )
        for i, s in enumerate(result["stages"])
    ]
    header = (
        "stage",
        "layers",
        "exits at",
        "forward",
        "backward",
        "exits",
        "total",
        "exits' share",
    )
    print(f"A microbatch ({result['rows']} sequences), {result['unit']}")
    print(table(header, rows), end="\n\n")

    def gib(n):
        return f"{n / GIB:.2f}"

    print(table(("memory of a device", "GiB"), [(k, gib(n)) for k, n in result["memory"].items()]))
    print(f"memory_vs_1f1b {result['memory_vs_1f1b']:.3f}\n")
    print(
        f"a step of {result['microbatches']} microbatches {number(result['step'])}, bubbles "
        f"{result['bubble']:.1%}"
    )
    if result["filling"]:
        f = result["filling"]
        print(
            f"filling: {f['part1']} + {f['part2']} microbatches could be added in the bubbles, "
            f"{f['more']:.1%} more for the same time (pipeline.fill)"
        )
    rows = [
        (f"{r['remat']}, {r['exits']}", number(r["step"]), gib(r["bytes"]))
        for r in result["policies"]
    ]
    print("\n" + table(("activations, exits", "step", "GiB"), rows))
    best = result["suggested"]
    print(
        f"\nsuggested: pipeline.layers={tuple(best['layers'])}, placement={best['placement']}, "
        f"exits={best['exits']}, train.remat={best['remat']}, "
        f"microbatches={best['microbatches']}\n"
        f"  a step {number(best['step'])}, bubbles {best['bubble']:.1%}, "
        f"{gib(best['bytes'])} GiB" + (", which does not fit" if best["fits"] is False else "")
    )
    if best["boundaries"]:
        print(f"  exits at {', '.join(map(str, best['boundaries']))}")
    for line in result["warnings"]:
        print(f"warning: {line}")


def picture(experiment, parts, folder: pathlib.Path) -> pathlib.Path:
    """Draw the first and last steps, of as many microbatches as can be distinguished."""
    from eejax import analysis
    from eejax.analysis.gantt import gantt
    from eejax.pipeline.simulate import simulate

    now = ExperimentStages.of(experiment, parts)
    few = min(now.microbatches, 2 * now.partition.stages)
    ways = {e: simulate(now.replace(exits=e).table(few), now.costs) for e in now.exit_policies}
    folder.mkdir(parents=True, exist_ok=True)
    bars = {f"{few} microbatches, exits {e}": line.bars() for e, line in ways.items()}
    return analysis.save(gantt(bars), folder / "gantt.png")


if __name__ == "__main__":
    launch.run(main)
