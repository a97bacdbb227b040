"""EE-LLM's convergence of training losses (Chen et al., ICML 2024: Figures 6 and 11).

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \\
        python -m experiments.reproduce.convergence --workdir=runs/convergence

The paper trains early-exit GPTs beside a standard one and finds that the losses of all exits fall
together and that the final exit's is that of the standard model: Figure 6 with two minimalistic
exits (section 5.1), Figure 11 with exits that have more layers, or more exits (Appendix B.3). This
is the same comparison on the standard library's text, with a model that 2 CPU cores can train for
19 tokens for each parameter. What is claimed, and checked over the seeds:

- the training loss of every exit falls;
- the final exit's held-out loss is within 2 % of the standard model's.

Expected, on Python 3.11's library: the standard model ends at 1.36 nats per byte; Figure 6's final
exit at 1.01 times that, those of Figure 11 at 1.00 times. 20 minutes of CPU time, half an hour on
2 cores that do other things too.

The exit status is 1 where a claim fails. Every run has its own folder in --workdir, so the same
command continues what was stopped and trains nothing that is done. Leaves there results.json,
fig6.png and fig11.png.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time

import numpy as np
from absl import flags

from eejax.common.errors import require_one_of
from experiments import launch

_WORKDIR = flags.DEFINE_string("workdir", "runs/convergence", "Where everything is left.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of every variant.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", None, "Another number of training steps.", lower_bound=1)
_VARIANTS = flags.DEFINE_list("variants", None, "Only these, and standard; all by default.")
_TINY = flags.DEFINE_bool("tiny", False, "A size for testing: seconds, and it shows nothing.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object at the end.")

STANDARD = "standard"
TOLERANCE = 0.02  # of the standard model's held-out loss
# 19 tokens for each of the 0.16 million parameters. A wider model in the same time is still in its
# early training, which exits speed up: at width 64 and 2.5 tokens for each parameter, Figure 6's
# model ends 3 % ahead of the standard one (one seed), at 1 token 9 %.
STEPS, BATCH, LENGTH, WIDTH = 3000, 8, 128, 32
PEAK = 4e-3  # the standard model's best among 2e-3, 4e-3 and 8e-3
HELD_OUT = 300  # batches
BINS = 60  # points of a curve


@dataclasses.dataclass(frozen=True)
class Variant:
    """Exits of a model of 12 layers, with the weights of their losses."""

    title: str
    exits: tuple[dict, ...] = ()
    weights: tuple[float, ...] = ()


def exits_at(*boundaries: int, **fields) -> tuple[dict, ...]:
    return tuple({"boundary": n, "head": "tied"} | fields for n in boundaries)


VARIANTS = {
    STANDARD: Variant("no early exit"),
    # The minimalistic exit is a head alone: no norm.
    "fig6": Variant("exits at 1/4 and 1/2", exits_at(3, 6, norm=False), (1 / 4, 1 / 2)),
    "fig11_mlp": Variant(
        "exits at 1/4 and 1/2, norm and MLP", exits_at(3, 6, norm=True, mlp=True), (1 / 4, 1 / 2)
    ),
    # The paper's lie at 4, 12 and 20 of 24 layers.
    "fig11_three": Variant(
        "exits at 1/6, 1/2 and 5/6, norm", exits_at(2, 6, 10, norm=True), (0.1, 0.2, 0.3)
    ),
}  # fmt: skip


def experiment(name: str, seed: int, steps: int, packed: pathlib.Path, tiny: bool = False):
    """The run of a variant. Of equal seeds, all variants begin with the same trunk and read the
    same text in the same order."""
    from eejax.train.config import Experiment, default_config

    variant = VARIANTS[name]
    config = default_config()
    # The shape of the paper's models but for its size: RMSNorm, rotary positions, gated MLP, no
    # biases, and AdamW with 0.9 / 0.95 / 1e-8, weight decay 0.1, clipping at 1, cosine to a tenth.
    config.model.update(
        vocab_size=257,
        n_layers=12,
        d_model=16 if tiny else WIDTH,
        n_heads=2,
        context_length=LENGTH,
        head="tied",
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
    config.optimizer.update(learning_rate=PEAK, warmup_steps=min(250, steps // 4))
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
    """Of one finished run, by the name of the exit, in nats per token.

    training: [steps], NaN where none was recorded. held_out: after the last step.
    """

    training: dict[str, np.ndarray]
    held_out: dict[str, float]


def read_losses(workdir: pathlib.Path, names: list[str], steps: int) -> Losses:
    """From the metrics of a finished run.

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

    wanted = (STANDARD, *(_VARIANTS.value or VARIANTS))
    names = [name for name in VARIANTS if name in wanted]
    steps = _STEPS.value or (8 if _TINY.value else STEPS)
    workdir = pathlib.Path(_WORKDIR.value).expanduser()
    begin = time.perf_counter()
    runs: dict[str, list[Losses]] = {name: [] for name in names}
    # Seed by seed, so that the first comparison is there after a third of the time.
    for i, (seed, name) in enumerate((s, n) for s in range(_SEEDS.value) for n in names):
        print(f"[{i + 1}/{_SEEDS.value * len(names)}] {name}, seed {seed}", flush=True)
        one = experiment(name, seed, steps, workdir.absolute() / "data", _TINY.value)
        folder = workdir / f"{name}_{seed}"
        result = fit(one, folder)
        if result.stopped is not None:
            sys.exit(128 + result.stopped)
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
    """A row for every exit of every variant, beside the standard model's final exit.

    Ratios are taken seed by seed: runs of one seed share their beginning and their text, so that
    much of what the seed decides cancels.
    """
    from eejax.analysis.convergence import Spread, falls

    base = [run.held_out["final"] for run in runs[STANDARD]]
    rows = []
    for variant, seeds in runs.items():
        for name in seeds[0].held_out:
            losses = [run.held_out[name] for run in seeds]
            ratios = [loss / b for loss, b in zip(losses, base, strict=True)]
            rows.append({
                "variant": variant,
                "exit": name,
                "losses": losses,
                "loss": Spread.of(losses)._asdict(),
                "ratios": ratios,
                "ratio": Spread.of(ratios)._asdict(),
                "falls": falls(np.stack([run.training[name] for run in seeds])),
            })  # fmt: skip
    return rows


def judge(rows: list[dict]) -> list[dict]:
    """The claims, each with a line that says what was found and whether it `holds`."""
    from eejax.analysis.convergence import Spread

    still = [f"{row['variant']} {row['exit']}" for row in rows if not row["falls"]]
    found = f"all {len(rows)} do" if not still else f"not {', '.join(still)}"
    claims = [{"claim": f"every training loss falls: {found}", "holds": not still}]
    for row in rows:
        if row["exit"] == "final" and row["variant"] != STANDARD:
            ratio = Spread(**row["ratio"])
            claim = (
                f"{row['variant']}: final exit within {TOLERANCE:.0%} of standard: "
                f"{ratio.mean - 1:+.2%} (seeds {ratio.low - 1:+.2%} to {ratio.high - 1:+.2%})"
            )
            claims.append({"claim": claim, "holds": abs(ratio.mean - 1) <= TOLERANCE})
    return claims


def stacked(seeds: list[Losses]) -> dict[str, np.ndarray]:
    """Training losses [seeds, steps] of every exit."""
    return {name: np.stack([run.training[name] for run in seeds]) for name in seeds[0].training}


def curves(runs: dict[str, list[Losses]]) -> dict:
    """What the figures show: [seeds, bins] mean training losses of consecutive parts of a run."""
    from eejax.analysis.convergence import bin_means

    return {
        variant: {name: bin_means(a, BINS).tolist() for name, a in stacked(seeds).items()}
        for variant, seeds in runs.items()
    }


def draw(workdir: pathlib.Path, runs: dict[str, list[Losses]], tokens_per_step: int):
    """Draws fig6.png and fig11.png, each of the variants named after it; gives their paths."""
    from eejax import analysis
    from eejax.analysis.convergence import training_curves

    drawn = []
    reference = ("standard model", stacked(runs[STANDARD])["final"])
    for name in ("fig6", "fig11"):
        panels = {
            VARIANTS[variant].title: stacked(seeds)
            for variant, seeds in runs.items()
            if variant.startswith(name)
        }
        if panels:
            figure = training_curves(panels, reference, tokens_per_step, bins=BINS)
            drawn.append(analysis.save(figure, workdir / f"{name}.png"))
    return drawn


def show(rows: list[dict], verdicts: list[dict]) -> None:
    from eejax import analysis
    from eejax.analysis.convergence import Spread

    header = ["variant", "exit", "held-out loss (seeds)", "times standard's (seeds)", "falls"]
    cells = [
        [
            row["variant"],
            row["exit"],
            Spread(**row["loss"]).text(),
            Spread(**row["ratio"]).text(),
            "yes" if row["falls"] else "NO",
        ]
        for row in rows
    ]
    print("\n" + analysis.table(header, cells) + "\n")
    for v in verdicts:
        print(f"{'holds' if v['holds'] else 'FAILS'}  {v['claim']}")


if __name__ == "__main__":
    launch.run(main, interrupted="interrupted: the same command continues from the last checkpoint")
