"""Train an early-exit language model, or resume the run in --workdir.

    eejax train --config=configs/demo.py --config.train.steps=1000 \\
        --workdir=runs/demo

A run that begins with the weights of a trained model (docs/PRETRAINED.md, "From a checkpoint"):

    eejax train --config=configs/finetune.py --config.train.base=runs/demo \\
        --config.data.source='texts/*.txt' --workdir=runs/mine

One of several processes, on several hosts that share the workdir (docs/SCALING.md):

    eejax train --config=... --workdir=... --distributed
    eejax train --config=... --workdir=... --coordinator=host0:9876 \\
        --processes=2 --process=0

Ctrl-C (or SIGTERM) saves a checkpoint and ends; the same command resumes. A second Ctrl-C ends at
once. Exit status: 0 done, 1 a problem that the message names, 128 + signal when stopped.
"""

from __future__ import annotations

from absl import flags
from ml_collections import config_flags

from eejax.experiments import config_files, launch

_DEFAULT = config_files.FOLDER / "finetune.py"
config_flags.DEFINE_config_file(
    "config",
    str(_DEFAULT),
    "The experiment: a config file, or the name of an installed one. The default needs a "
    "train.base.",
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; made if it does not exist.")
launch.define_processes()
flags.mark_flags_as_required(["workdir"])


def main() -> None:
    # Imported late: --help needs no JAX.
    from eejax.sharding import distributed
    from eejax.train.loop import fit

    result = fit(launch.configured(_WORKDIR.value), _WORKDIR.value)
    if result.evaluation is not None and distributed.is_first():
        print(result.evaluation.table())
    launch.end_if_stopped(result)


if __name__ == "__main__":
    launch.run(main, interrupted="interrupted before the first step: nothing to save")
