"""A run that took seconds, for the launchers and notebooks that read one."""

import os

import pytest
import small_runs

from eejax.train.config import Experiment
from eejax.train.loop import fit


@pytest.fixture(scope="session")
def one_device():
    """XLA_FLAGS of a process with one device, as a user has, that compiles as these tests do."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(flag for flag in flags if "device_count" not in flag)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """Its folder: three layers with exits after the first two, over bytes, a context of 128."""
    folder = tmp_path_factory.mktemp("run")
    small_runs.write_text(folder)
    values = small_runs.config(
        folder, microbatches=1, steps=250, eval_every=0, checkpoint_every=0, log_every=50
    )
    values["model"] |= {
        "n_layers": 3, "context_length": 128, "exits": [{"boundary": 1}, {"boundary": 2}]
    }  # fmt: skip
    values["exit_weights"] = {"weights": [0.5, 0.5]}
    fit(Experiment.from_dict(values), folder / "run")
    return folder / "run"
