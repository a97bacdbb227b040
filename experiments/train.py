"""Trains an early-exit language model, or resumes the run in --workdir.

    python -m experiments.train --config=configs/quickstart.py --config.train.steps=1000 \\
        --workdir=runs/quickstart

One of several processes, on several hosts that share the workdir (docs/SCALING.md):

    python -m experiments.train --config=... --workdir=... --distributed
    python -m experiments.train --config=... --workdir=... --coordinator=host0:9876 \\
        --processes=2 --process=0

Ctrl-C (or SIGTERM) saves a checkpoint and ends; the same command resumes. A second Ctrl-C ends at
once. Exit status: 0 done, 1 a problem that the message names, 128 + signal when stopped.
"""

from __future__ import annotations

import sys

from absl import flags
from ml_collections import config_flags

from experiments import launch

_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment, a file of configs/.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run lives; made if it is not there.")
launch.define_processes()
flags.mark_flags_as_required(["config", "workdir"])


def main() -> None:
    # Imported late: --help needs no JAX.
    from eejax.sharding import distributed
    from eejax.train.config import Experiment
    from eejax.train.loop import fit

    result = fit(Experiment.from_dict(_CONFIG.value), _WORKDIR.value)
    if result.evaluation is not None and distributed.is_first():
        print(result.evaluation.table())
    if result.stopped is not None:
        sys.exit(128 + result.stopped)


if __name__ == "__main__":
    launch.run(main, interrupted="interrupted before the first step: nothing to save")
