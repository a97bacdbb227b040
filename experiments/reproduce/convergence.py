"""EE-LLM's convergence of training losses (Chen et al., ICML 2024: Figures 6 and 11).

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \\
        eejax reproduce convergence --workdir=runs/convergence

The paper trains early-exit GPTs beside standard ones and finds that the losses of all exits fall at
a similar pace, that early exits are slightly above the final one, and that the final exit's loss is
close to the standard model's. Figure 6 has two minimalistic exits without norms, (a) in a 1.3B
model whose embeddings are all tied, (b) in a 7B model whose embeddings are not (section 5.1);
Figure 11 has the latter with a norm and an MLP in each exit, and a tied 7B model with three exits
and norms (Appendix B.3). This is the same comparison on the standard library's text, with models
that 2 CPU cores can train for 19 tokens for each parameter. What is claimed, and checked over the
seeds:

- the training loss of every exit falls, and at the pace of the standard model's: the share of its
  whole fall that lies behind it is never more than 10 points from the standard model's share;
- held-out, every early exit is above the final one;
- the final exit's held-out loss is within 2 % of the standard model's with the same embeddings.

Expected, on Python 3.11's library: the standard models end at 1.50 (tied) and 1.47 (untied) nats
per byte, all final exits at 0.99 times that. Standard models that end where Figure 6's exits stand
say how much of an exit's distance is depth. Forty minutes of CPU time.

The exit status is 1 where a claim fails. Every run has its own folder in --workdir, so the same
command continues what was stopped and trains nothing that is done. Leaves there results.json,
fig6.png and fig11.png.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys
import time

import numpy as np
from absl import flags

from eejax.common.errors import require_one_of
from eejax.common.paths import expanded
from eejax.experiments import launch

_WORKDIR = flags.DEFINE_string("workdir", "runs/convergence", "Where everything is left.")
_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of every variant.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", None, "Another number of training steps.", lower_bound=1)
_VARIANTS = flags.DEFINE_list("variants", None, "Only these, and what they are compared with.")
_TINY = flags.DEFINE_bool("tiny", False, "A size for testing: seconds, and it shows nothing.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")

TOLERANCE = 0.02  # of the standard model's held-out loss
# 19 tokens for each of the 0.11 million parameters. A wider model in the same time is still in its
# early training, which exits speed up: at 12 layers of width 64 and 2.5 tokens for each parameter,
# the model with tied exits ends 3 % ahead of the standard one (one seed), at 1 token 9 %.
STEPS, BATCH, LENGTH, LAYERS, WIDTH = 2000, 8, 128, 8, 32
PEAK = 4e-3  # the standard model's best among 2e-3, 4e-3 and 8e-3
WARMUP = 250  # steps
HELD_OUT = 300  # batches
BINS = 60  # points of a curve


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model.

    Attributes:
      title: title of its panel in a figure.
      head: head of all exits: "tied" to the input embedding, or each its "own".
      exits: the early exits.
      weights: weights of their losses.
      layers: number of layers.
    """

    title: str
    head: str
    exits: tuple[dict, ...] = ()
    weights: tuple[float, ...] = ()
    layers: int = LAYERS

    @property
    def standard(self) -> str:
        """Name of the model without early exits that is the baseline of this one."""
        return f"standard_{self.head}"

    @property
    def alone(self) -> tuple[str, ...]:
        """Names of standard models that end at its early exits."""
        names = (f"{self.standard}_{e['boundary']}" for e in self.exits)
        return tuple(name for name in names if name in VARIANTS)


def variant(title: str, head: str, depths=(), weights=(), **fields) -> Variant:
    exits = tuple({"boundary": int(LAYERS * d), "head": head} | fields for d in depths)
    return Variant(title, head, exits, weights)


QUARTERS, EIGHTHS = (1 / 4, 1 / 2), (1 / 8, 3 / 8, 5 / 8)
VARIANTS = {
    "standard_tied": variant("no early exit, tied", "tied"),
    "fig6_tied": variant("(a) tied", "tied", QUARTERS, (1 / 4, 1 / 2), norm=False),
    "standard_own": variant("no early exit, untied", "own"),
    "fig6_own": variant("(b) untied", "own", QUARTERS, (0.1, 0.2), norm=False),
    "fig11_mlp": variant("untied, norm and MLP", "own", QUARTERS, (0.1, 0.2), norm=True, mlp=True),
    # Layers 4, 12 and 20 of 32.
    "fig11_three": variant("tied, three with norm", "tied", EIGHTHS, (0.1, 0.2, 0.3), norm=True),
}

# What the layers below an exit reach where nothing stands above them.
VARIANTS |= {
    f"standard_{head}_{n}": Variant(f"{n} layers, no early exit, {title}", head, layers=n)
    for head, title in (("tied", "tied"), ("own", "untied"))
    for n in (int(LAYERS * depth) for depth in QUARTERS)
}


def experiment(name: str, seed: int, steps: int, packed: pathlib.Path, tiny: bool = False):
    """Return the run of a variant.

    With equal seeds, all variants begin with the same layers and read the same text in the same
    order.
    """
    from eejax.train.config import Experiment, default_config

    variant = VARIANTS[name]
    config = default_config()
    # The shape of the paper's models but for its size: RMSNorm, rotary positions, gated MLP, no
    # biases, and AdamW with 0.9 / 0.95 / 1e-8, weight decay 0.1, clipping at 1, cosine to a tenth.
    config.model.update(
        vocab_size=257,
        n_layers=variant.layers,
        d_model=16 if tiny else WIDTH,
        n_heads=2,
        context_length=LENGTH,
        head=variant.head,
        exits=variant.exits,
    )
    config.exit_weights.update(weights=variant.weights)
    config.data.update(
        source="python-stdlib",
        tokenizer="bytes",
        length=32 if tiny else LENGTH,
        packed=str(packed),
        max_bytes=200_000 if tiny else None,
    )
    config.optimizer.update(learning_rate=PEAK, warmup_steps=min(WARMUP, steps // 4))
    config.train.update(
        steps=steps,
        batch_size=BATCH,
        seed=seed,
        log_every=1,  # curves are of all steps
        eval_every=0,  # a run's end has its evaluation
        eval_batches=4 if tiny else HELD_OUT,
        checkpoint_every=1000,
        keep_checkpoints=1,
    )
    return Experiment.from_dict(config)


@dataclasses.dataclass(frozen=True)
class Losses:
    """Losses of a finished run, by the name of the exit, in nats per token.

    Attributes:
      training: [steps], NaN where none was recorded.
      held_out: losses after the last step.
    """

    training: dict[str, np.ndarray]
    held_out: dict[str, float]


def read_losses(workdir: pathlib.Path, names: list[str], steps: int) -> Losses:
    """Read losses from the metrics of a finished run.

    Raises `FloatingPointError` where the last evaluation has no finite loss.
    """
    from eejax.train.metrics import read_metrics

    training = {name: np.full(steps, np.nan) for name in names}
    held_out: dict[str, float] = {}
    for record in read_metrics(workdir):
        for name in names:
            if (loss := record.get(f"loss/{name}")) is not None:
                training[name][record["step"] - 1] = loss
            if (loss := record.get(f"eval/loss/{name}")) is not None:
                held_out[name] = loss
    if missing := [name for name in names if name not in held_out]:
        raise FloatingPointError(
            f"{workdir}: no finite held-out loss of {', '.join(missing)}: the run has diverged, or "
            "its metrics.jsonl is damaged. Delete the folder to train it again."
        )
    return Losses(training, held_out)


def main() -> None:
    for name in _VARIANTS.value or ():
        require_one_of("--variants", name, tuple(VARIANTS))
    from eejax.checkpoint.files import write_text
    from eejax.train.loop import fit
    from eejax.train.metrics import duration, exit_names

    wanted = set(_VARIANTS.value or VARIANTS)
    wanted |= {name for other in wanted for name in VARIANTS[other].alone}
    wanted |= {VARIANTS[name].standard for name in wanted}
    names = [name for name in VARIANTS if name in wanted]
    steps = _STEPS.value or (8 if _TINY.value else STEPS)
    workdir = expanded(_WORKDIR.value)
    begin = time.perf_counter()
    runs: dict[str, list[Losses]] = {name: [] for name in names}
    # Seed by seed, so that the first comparison is there after a third of the time.
    for i, (seed, name) in enumerate((s, n) for s in range(_SEEDS.value) for n in names):
        print(f"[{i + 1}/{_SEEDS.value * len(names)}] {name}, seed {seed}", flush=True)
        one = experiment(name, seed, steps, workdir.absolute() / "data", _TINY.value)
        folder = workdir / f"{name}_{seed}"
        result = fit(one, folder)
        launch.end_if_stopped(result)
        runs[name].append(read_losses(folder, exit_names(one.model), steps))
    rows = compare(runs)
    verdicts = judge(rows)
    tokens_per_step = one.train.batch_size * one.data.length
    summary = {
        "steps": steps,
        "tokens": steps * tokens_per_step,
        "held_out_tokens": one.train.eval_batches * tokens_per_step,
        "seeds": _SEEDS.value,
        "variants": {name: dataclasses.asdict(VARIANTS[name]) for name in names},
        "exits": rows,
        "claims": verdicts,
        "findings": findings(rows),
    }
    write_text(workdir / "results.json", json.dumps(summary | {"curves": curves(runs)}, indent=1))
    drawn = draw(workdir, runs, tokens_per_step)
    show(rows, verdicts)
    print(f"\n{duration(time.perf_counter() - begin)}; look at {', '.join(map(str, drawn))}")
    print(f"all numbers are in {workdir / 'results.json'}", flush=True)
    if _JSON.value:
        print(json.dumps(summary))
    sys.exit(0 if all(v["holds"] for v in verdicts) else 1)


def compare(runs: dict[str, list[Losses]]) -> list[dict]:
    """Compare every exit of every variant with the final exit of its standard model.

    Ratios are taken seed by seed: runs of one seed share their beginning and their text, so that
    much of what the seed decides cancels.
    """
    from eejax.experiments.reproduce.loss_curves import SeedSpread, falls

    rows = []
    for variant, seeds in runs.items():
        standard = runs[VARIANTS[variant].standard]
        base = [run.held_out["final"] for run in standard]
        for name in seeds[0].held_out:
            losses = [run.held_out[name] for run in seeds]
            ratios = [loss / b for loss, b in zip(losses, base, strict=True)]
            curves = (
                np.stack([run.training[name] for run in seeds]),
                np.stack([run.training["final"] for run in standard]),
            )
            rows.append(
                {
                    "variant": variant,
                    "exit": name,
                    "losses": losses,
                    "loss": SeedSpread.of(losses)._asdict(),
                    "ratios": ratios,
                    "ratio": SeedSpread.of(ratios)._asdict(),
                    "falls": falls(np.stack([run.training[name] for run in seeds])),
                    "pace": pace(*curves),
                    "pace_after_warmup": pace(*curves, first=WARMUP / STEPS),
                }
            )
    return rows


def pace(
    losses: np.ndarray, standard: np.ndarray, bins: int = BINS, first: float = 0.0
) -> float | None:
    """Compare how far two losses have fallen in the course of training.

    Args:
      losses: [seeds, steps]; means over the seeds are compared.
      standard: [seeds, steps], the losses to compare with.
      bins: parts of the run whose means are the points of a curve.
      first: share of the run whose points are left out of the comparison, not of the fall.

    Returns:
      The largest difference of the shares of the whole fall, from the first part to the last one,
      that lie behind both curves at the same time; None where one of them does not fall.
    """
    from eejax.experiments.reproduce.loss_curves import bin_means

    curves = [bin_means(values, bins).mean(0) for values in (losses, standard)]
    if any(curve[0] <= curve[-1] for curve in curves):
        return None
    one, other = ((curve[0] - curve) / (curve[0] - curve[-1]) for curve in curves)
    apart = np.abs(one - other)
    return float(apart[math.ceil(first * len(apart)) :].max())


def judge(rows: list[dict]) -> list[dict]:
    """Judge the claims, each with a line that says what was found and whether it `holds`."""
    from eejax.experiments.reproduce.loss_curves import SeedSpread

    def named(wrong):
        return ", ".join(f"{row['variant']} {row['exit']}" for row in wrong)

    still = [row for row in rows if not row["falls"]]
    found = f"not {named(still)}" if still else f"all {len(rows)} do"
    claims = [{"claim": f"every training loss falls: {found}", "holds": not still}]
    final = {row["variant"]: row for row in rows if row["exit"] == "final"}
    early = [row for row in rows if row["exit"] != "final"]
    if early:
        below = [r for r in early if r["loss"]["mean"] <= final[r["variant"]]["loss"]["mean"]]
        found = f"not {named(below)}" if below else f"all {len(early)} are"
        claim = f"every early exit is above its final one: {found}"
        claims.append({"claim": claim, "holds": not below})
    for name, row in final.items():
        if VARIANTS[name].exits:
            ratio = SeedSpread(**row["ratio"])
            claim = (
                f"{name}: final exit within {TOLERANCE:.0%} of standard: "
                f"{ratio.mean - 1:+.2%} (seeds {ratio.low - 1:+.2%} to {ratio.high - 1:+.2%})"
            )
            claims.append({"claim": claim, "holds": abs(ratio.mean - 1) <= TOLERANCE})
    return claims


SLIGHTLY = 1.2  # times the final exit's loss
SIMILAR = 0.1  # of the whole fall, between two curves at the same step
COMPARED = ("fig6_tied", "fig6_own")  # with the standard model, in the paper's Figure 6


def findings(rows: list[dict]) -> list[dict]:
    """Return findings about the paper's Figures 6 and 11, whose values are only in its pictures."""
    from eejax.experiments.reproduce.catalogue import finding
    from eejax.experiments.reproduce.loss_curves import SeedSpread

    scale = f"0.1M parameters, {LAYERS} layers, bytes of Python's library, 2 cores"
    found = []

    def add(key: str, title: str, ours: str, holds: bool, why: str = ""):
        told = f"{title}: {ours}"
        found.append(finding("EE-LLM", key, told, scale, holds, why).to_dict())

    for name, variant in VARIANTS.items():
        mine = [row for row in rows if row["variant"] == name]
        if not mine or not variant.exits:
            continue
        title = variant.title
        final = next(row for row in mine if row["exit"] == "final")
        fall = ", ".join(row["exit"] for row in mine if row["falls"])
        falling = f"falling: {fall or 'none'}"
        if name not in COMPARED:
            rising = ", ".join(row["exit"] for row in mine if not row["falls"])
            why = f"these do not fall over the whole run: {rising}"
            add("figure-11", title, falling, all(row["falls"] for row in mine), why)
            continue
        paces = {row["exit"]: row["pace"] for row in mine}
        alike = all(pace is not None and pace <= SIMILAR for pace in paces.values())
        add(
            "figure-6",
            title,
            f"{falling}; largest distance from the standard model's curve, in points of the whole "
            f"fall: {_points(mine, 'pace')} (similar: up to {100 * SIMILAR:.0f})",
            alike and all(row["falls"] for row in mine),
            f"after the warm-up of the learning rate: {_points(mine, 'pace_after_warmup')}"
            + alone_pace(rows, name),
        )
        early = [row for row in mine if row is not final]
        losses = ", ".join(f"{row['loss']['mean']:.3f}" for row in mine)
        ratios = [row["loss"]["mean"] / final["loss"]["mean"] for row in early]
        over = ", ".join(f"{r:.2f}" for r in ratios)
        add(
            "figure-6-early",
            title,
            f"held-out {losses} nats per byte, {over} times the final exit's",
            all(1 < r <= SLIGHTLY for r in ratios),
            alone_losses(rows, name),
        )
        ratio = SeedSpread(**final["ratio"])
        add(
            "figure-6-final",
            title,
            f"held-out {ratio.mean - 1:+.2%} ({ratio.low - 1:+.2%} to {ratio.high - 1:+.2%})",
            abs(ratio.mean - 1) <= TOLERANCE,
            f"more than {TOLERANCE:.0%} apart",
        )
    return found


def _points(rows: list[dict], field: str) -> str:
    def told(pace):
        return "-" if pace is None else f"{100 * pace:.1f}"

    return ", ".join(f"{row['exit']} {told(row[field])}" for row in rows)


def alone_pace(rows: list[dict], name: str) -> str:
    """Describe how the losses of standard models that end at the variant's exits fall."""
    alone = [row for row in rows if row["variant"] in VARIANTS[name].alone]
    if not alone:
        return ""
    named = [row | {"exit": f"of {VARIANTS[row['variant']].layers} layers"} for row in alone]
    return f"; models by themselves: {_points(named, 'pace')}"


def alone_losses(rows: list[dict], name: str) -> str:
    """Describe the share of the exits' distance that standard models ending there have too."""
    losses = {(row["variant"], row["exit"]): row["loss"]["mean"] for row in rows}
    whole = losses[VARIANTS[name].standard, "final"]
    told = []
    for other in VARIANTS[name].alone:
        if (alone := losses.get((other, "final"))) is not None:
            layers = VARIANTS[other].layers
            share = (alone - whole) / (losses[name, f"exit_{layers}"] - whole)
            told.append(f"{layers} layers ends at {alone:.3f}, {share:.0%} of the distance")
    if not told:
        return "what models of as few layers reach by themselves was not run"
    return (
        f"by itself, a model of {' and one of '.join(told)}; the rest remains because the layers "
        "also serve later exits, whose losses have larger weights"
    )


def stacked(seeds: list[Losses]) -> dict[str, np.ndarray]:
    """Return the training losses [seeds, steps] of every exit."""
    return {name: np.stack([run.training[name] for run in seeds]) for name in seeds[0].training}


def curves(runs: dict[str, list[Losses]]) -> dict:
    """Return [seeds, bins], mean training losses of consecutive parts of a run."""
    from eejax.experiments.reproduce.loss_curves import bin_means

    return {
        variant: {name: bin_means(a, BINS).tolist() for name, a in stacked(seeds).items()}
        for variant, seeds in runs.items()
    }


def draw(workdir: pathlib.Path, runs: dict[str, list[Losses]], tokens_per_step: int):
    """Draw fig6.png and fig11.png, a panel for each variant that is named after it."""
    from eejax import analysis
    from eejax.experiments.reproduce.loss_curves import training_curves

    drawn = []
    for name in ("fig6", "fig11"):
        shown = [variant for variant in runs if variant.startswith(name)]
        if shown:
            panels = {VARIANTS[v].title: stacked(runs[v]) for v in shown}
            standard = {
                VARIANTS[v].title: stacked(runs[VARIANTS[v].standard])["final"] for v in shown
            }
            figure = training_curves(panels, standard, tokens_per_step, bins=BINS)
            drawn.append(analysis.save(figure, workdir / f"{name}.png"))
    return drawn


def show(rows: list[dict], verdicts: list[dict]) -> None:
    from eejax import analysis
    from eejax.experiments.reproduce.loss_curves import SeedSpread

    header = ["variant", "exit", "held-out loss (seeds)", "times standard's (seeds)", "falls"]
    cells = [
        [
            row["variant"],
            row["exit"],
            SeedSpread(**row["loss"]).text(),
            SeedSpread(**row["ratio"]).text(),
            "yes" if row["falls"] else "NO",
        ]
        for row in rows
    ]
    print("\n" + analysis.table(header, cells) + "\n")
    for v in verdicts:
        print(f"{'holds' if v['holds'] else 'FAILS'}  {v['claim']}")


if __name__ == "__main__":
    launch.run(main, interrupted="interrupted: the same command continues from the last checkpoint")
