"""Check and measure the project on one GPU, stage after stage.

    eejax gpu-check --stages=smoke,decode:engines --out=runs/gpu
    JAX_PLATFORMS=cpu eejax gpu-check --dry_run --out=runs/dry

It needs no workdir and no network. Each stage runs in processes of its own, and prints one JSON
line when it ends: its name, whether all went well, seconds, and figures, or the error beside the
earlier measurements. The parts of a stage share its time, except a part that is named by itself, as
STAGE:PART. Results and logs go to --out. docs/GPU.md says what the figures decide.

smoke: versions, rates of copies and products, kernels against float64. decode: engines against
their oracle; time, launches and copies of a token. train: time and memory of a step, against
PyTorch. batch: continuous batching with exits and without. serve: a server with clients. helios:
two models under a controller, and their energy.

--dry_run compiles every program of the stages for a card that need not exist, and runs the stages
with tiny models on the CPU. Its times mean nothing.
"""

from __future__ import annotations

import json
from typing import Any

from absl import flags

from eejax.common.errors import ConfigError, require
from eejax.common.paths import expanded
from eejax.experiments import launch
from eejax.experiments.gpu_check import stages

_STAGES = flags.DEFINE_list(
    "stages", ["all"], "Names of stages, or STAGE:PART, in order; all: every stage."
)
_OUT = flags.DEFINE_string("out", None, "The folder of results and logs.")
_SECONDS = flags.DEFINE_float(
    "seconds",
    None,
    "Seconds for each named stage or part; by default 300, and 7200 with --dry_run.",
    lower_bound=1.0,
)
_SMALL = flags.DEFINE_bool("small", False, "Tiny models, for a trial.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Compile without a GPU, and run on the CPU.")
_CARD = flags.DEFINE_enum("card", "h100", ("a100", "h100"), "The GPU that --dry_run compiles for.")
flags.mark_flags_as_required(["out"])

LONG = ("names", "threads", "log", "errors")
"""Fields of results that only their files have."""


def main() -> None:
    seconds = _SECONDS.value or (7200.0 if _DRY_RUN.value else 300.0)
    require(_OUT.value, "--out", _OUT.value, "must name a folder")
    settings = stages.RunSettings(
        expanded(_OUT.value), seconds, _SMALL.value, _DRY_RUN.value, _CARD.value
    )
    named = chosen(_STAGES.value)
    if not (settings.small or settings.dry_run) and (why := stages.missing_gpu()):
        raise ConfigError(
            f"there is no GPU to check: {why}. See docs/GPU.md for what a GPU needs. "
            "--small tries stages out on the CPU; --dry_run compiles them for a GPU without one."
        )
    failed = 0
    for result in stages.run(named, settings):
        print(json.dumps(brief(result)), flush=True)
        failed += not result["ok"]
    if failed:
        raise SystemExit(1)


def brief(value: Any) -> Any:
    """Leave out the parts of a result that only its file has, and round numbers."""
    if isinstance(value, dict):
        return {k: brief(v) for k, v in value.items() if k not in LONG}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def chosen(names: list[str]) -> list[stages.GpuStage]:
    """Find stages, and parts of stages, by their names.

    Raises:
      ConfigError: for an unknown name, for no name, and for names beside "all".
    """
    if names == ["all"]:
        return [*stages.STAGES]
    if not names or "all" in names:
        given = ",".join(names)
        raise ConfigError(f"--stages = {given!r}: must name stages, or be all and nothing else.")
    known = {stage.name: stage for stage in stages.STAGES}
    for stage in stages.STAGES:
        known |= {f"{stage.name}:{part}": stage.only(part) for part in stage.parts if part}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--stages = {','.join(unknown)}: must be among {', '.join(known)}.")
    return [known[name] for name in names]


if __name__ == "__main__":
    launch.run(main)
