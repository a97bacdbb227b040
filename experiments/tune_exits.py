"""Tune early exits for a trained model, which stays as it is (EE-Tuning).

    eejax tune --base=runs/demo --exits=2,5 --workdir=runs/tuned

It is eejax train with train.base, tune.part = "exits" and tune.exits, on the base's own text. Only
the layers below the deepest tuned exit are read and run, except with --config.loss.distillation=1,
where exits learn from the final one and all layers are run. The workdir ends with the whole model,
old and new exits, and no longer needs the base: evaluate and generate take it as any run. Exits of
the base are tuned from their values there, if they are named. The same command resumes; the exit
status is that of eejax train.
"""

from __future__ import annotations

import dataclasses
import re
import sys

from absl import flags
from ml_collections import config_flags

from eejax.common.paths import expanded
from eejax.experiments import config_files, field_flags, launch
from eejax.models.config import ExitConfig
from eejax.train.scope import TuneConfig

for _argument in sys.argv[1:]:  # before reading the file, which lacks these sections
    if re.match(r"--?(no)?config\.((model|data|tune)\b|train\.base)", _argument):
        sys.exit(
            f"error: {_argument.split('=')[0]}: model and text of a tuning run are those of the "
            "base; set --source, --exits, --head, --head_rank, --norm, --mlp, --mlp_width, --block "
            "and --start instead."
        )

_DEFAULT = config_files.FOLDER / "tune_exits.py"
_CONFIG = config_flags.DEFINE_config_file("config", str(_DEFAULT), "Settings of the training.")
_BASE = flags.DEFINE_string(
    "base", None, "The model: a run's workdir, a Hugging Face folder, a GGUF file or a name."
)
_BASE_STEP = flags.DEFINE_integer("base_step", None, "A run's checkpoint, by default the newest.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; made if it does not exist.")
_EXITS = flags.DEFINE_list("exits", None, "Boundaries of the exits: 2,5 is after layers 2 and 5.")
_EXIT = field_flags.define(
    ExitConfig,
    ("head", "head_rank", "norm", "mlp", "mlp_width", "block"),
    defaults={"head": "own"},
    note="A new exit: ",
)
_TUNE = field_flags.define(TuneConfig, ["start"])
_SOURCE = flags.DEFINE_list("source", None, "Text files or globs; by default the base's text.")
launch.define_processes()
flags.mark_flags_as_required(["base", "workdir", "exits"])


def main() -> None:
    from eejax.sharding import distributed
    from eejax.train.loop import fit

    result = fit(experiment(), _WORKDIR.value)
    if result.evaluation is not None and distributed.is_first():
        print(result.evaluation.table())
    launch.end_if_stopped(result)


def experiment():
    """Return the experiment: the base's model and text, its exits tuned as the config file says."""
    from eejax.common.errors import ConfigError
    from eejax.train.base import base_model, with_base

    boundaries = sorted(launch.numbers("exits", _EXITS.value, int))
    base = base_model(_BASE.value, _BASE_STEP.value, _WORKDIR.value)
    have = {e.boundary for e in base.exits}
    new = [n for n in boundaries if n not in have]
    shape = [*_EXIT.on_command_line(), *_TUNE.on_command_line()]
    if shape and not new:
        raise ConfigError(
            f"--{shape[0]}: the base has all of --exits = {','.join(_EXITS.value or ())}, which "
            "keep their form. Leave the flag out, or name a new exit."
        )
    values = _CONFIG.value.to_dict()
    values["model"] = {"exits": [{"boundary": n, **_EXIT.values()} for n in dict.fromkeys(new)]}
    values["data"] = text(base)
    values["train"] |= {"base": _BASE.value, "base_step": _BASE_STEP.value}
    values["tune"] = {"part": "exits", "exits": tuple(boundaries), **_TUNE.values()}
    with _EXIT.named():
        return with_base(values, _WORKDIR.value)


def text(base) -> dict:
    """Return the text of a base with this configuration, as a section of the experiment.

    It is the base's own if that is a run, or --source.
    """
    from eejax.checkpoint.model import is_run, load_metadata
    from eejax.common.errors import require
    from eejax.train.config import DataConfig
    from eejax.train.runs import saved_experiment

    if is_run(expanded(_BASE.value)):
        metadata = load_metadata(_BASE.value, step=_BASE_STEP.value)
        values = dataclasses.asdict(saved_experiment(metadata).data)
        if not _SOURCE.value:
            launch.require_text(values["source"], _BASE.value)
    else:
        require(
            bool(_SOURCE.value),
            "--source",
            _SOURCE.value,
            f"must name a text: {_BASE.value} is a pretrained model and has none",
        )
        values = {"length": min(base.context_length, DataConfig.length)}
    if _SOURCE.value:
        values |= {
            "source": tuple(_SOURCE.value),
            "packed": None,
            "max_bytes": None,
            "weights": None,
        }
    # The base's tokenizer, which may have moved since.
    return values | {"tokenizer": DataConfig.tokenizer}


if __name__ == "__main__":
    launch.run(main, interrupted="interrupted: the same command continues from the last checkpoint")
