"""Two processes of four devices train what one process of eight does, and end together."""

import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest
from processes import start
from small_runs import write_text

from eejax.checkpoint.model import load_run
from eejax.configs import tiny
from eejax.train.config import Experiment
from eejax.train.loop import fit
from eejax.train.metrics import read_metrics

STEPS = 8
DIED = "another process of this run has died"
CHANGES = {
    "data.length": 16,
    "model.d_model": 16,
    "data.validation_fraction": 0.2,
    "data.max_bytes": None,
    "data.document_masks": True,
    "model.dropout": 0.1,
    "optimizer.learning_rate": 2e-3,
    "mesh.data": 8,
    "train.steps": STEPS,
    "train.batch_size": 16,
    "train.microbatches": 2,
    "train.log_every": 1,
    "train.eval_every": 4,
    "train.eval_batches": 1,
    "train.checkpoint_every": 2,
}


# As many steps as processes need that are stopped and killed on their way.
LONG = CHANGES | {"train.steps": 24, "train.eval_every": 12, "train.checkpoint_every": 6}


def as_flags(changes):
    return tuple(f"--config.{k}={v}" for k, v in changes.items() if v is not None)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder / "*.txt"


def experiment(text, changes=CHANGES):
    config = tiny.get_config()
    config.update_from_flattened_dict(changes | {"data.source": str(text)})
    return Experiment.from_dict(config.to_dict())


def train(folder, workdir, text, program=("-m", "eejax.experiments.train"), more=()):
    return start(
        folder,
        *program,
        "--config=configs/tiny.py",
        f"--workdir={workdir}",
        *as_flags(CHANGES),
        "--config.data.max_bytes=100000000",
        f"--config.data.source={text}",
        *more,
    )


def losses(workdir):
    return {r["step"]: r["loss"] for r in read_metrics(workdir) if "loss" in r}


def same_losses(workdir, other):
    """Every step once, and the same within the rounding of sums taken in another order."""
    mine, its = losses(workdir), losses(other)
    steps = [r["step"] for r in read_metrics(workdir) if "loss" in r]
    assert steps == list(range(1, max(its) + 1))
    assert mine == pytest.approx(its, rel=1e-5)
    for a, b in zip(read_metrics(workdir), read_metrics(other), strict=True):
        assert a["tokens_seen"] == b["tokens_seen"]
        evaluated = [k for k in b if k.startswith("eval/")]
        assert {k: a[k] for k in evaluated} == pytest.approx({k: b[k] for k in evaluated}, rel=1e-5)


@pytest.fixture(scope="module")
def one(text, tmp_path_factory):
    """A run of this process and its eight devices."""
    workdir = tmp_path_factory.mktemp("one")
    assert fit(experiment(text), workdir).step == STEPS
    return workdir


@pytest.fixture(scope="module")
def two(text, tmp_path_factory):
    """A run of two processes."""
    workdir = tmp_path_factory.mktemp("two")
    with train(workdir / "logs", workdir, text) as group:
        assert group.wait() == [0, 0], group.err(0) + group.err(1)
    return workdir, group


def test_two_processes_train_what_one_does(one, two):
    workdir, group = two
    same_losses(workdir, one)
    assert f"done: step {STEPS}" in group.err(0) and "exit_1" in group.out(0)
    # The first speaks for all; of the runtime's own chatter nothing is ours.
    assert "step" not in group.err(1) + group.out(1)


def test_a_checkpoint_of_two_processes_goes_on_in_one(text, one, two, tmp_path):
    theirs, mine = load_run(two[0]), load_run(one)
    for a, b in zip(*(jax.tree.leaves(m.params) for m in (theirs, mine)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    shutil.copytree(two[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(STEPS))
    assert fit(experiment(text), tmp_path / "run").step == STEPS
    same_losses(tmp_path / "run", one)


def test_a_checkpoint_of_one_process_goes_on_in_two(text, one, tmp_path):
    """And the damage to the newest is found by one process and heeded by both."""
    shutil.copytree(one, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / str(STEPS)
    data = max((newest / "params").glob("*/[0-9]*"), key=lambda p: p.stat().st_size)
    os.truncate(data, data.stat().st_size // 2)
    with train(tmp_path / "logs", tmp_path / "run", text) as group:
        assert group.wait() == [0, 0], group.err(0) + group.err(1)
    assert f"checkpoints/{STEPS} is damaged" in group.err(0)
    assert f"resuming after step {STEPS - 2}" in group.err(0)
    assert (tmp_path / "run" / "damaged" / str(STEPS)).is_dir()
    same_losses(tmp_path / "run", one)


@pytest.mark.slow
def test_stopped_and_killed_processes_go_on_where_they_were(text, tmp_path):
    workdir, one, more = tmp_path / "run", tmp_path / "one", as_flags(LONG)
    steps = fit(experiment(text, LONG), one).step

    def reached(step):
        return lambda: max(losses(workdir), default=0) >= step

    with train(tmp_path / "stopped", workdir, text, more=more) as group:
        group.until(reached(3))
        group.processes[1].send_signal(signal.SIGTERM)  # and not to the first
        assert group.wait() == [128 + signal.SIGTERM] * 2, group.err(0) + group.err(1)
    last = max(losses(workdir))
    assert 3 < last < steps
    assert f"stopped by SIGTERM after step {last}: checkpoint saved" in group.err(0)
    assert load_run(workdir).step == last

    for victim, step in ((1, 8), (0, 14)):
        with train(tmp_path / f"killed {victim}", workdir, text, more=more) as group:
            group.until(reached(step))
            group.processes[victim].kill()
            codes = group.wait(seconds=30)
        assert codes[victim] == -signal.SIGKILL and codes[1 - victim] not in (0, -signal.SIGKILL)
        lines = group.err(1 - victim).strip().splitlines()
        assert DIED in lines[-1] and "resumes from the last checkpoint" in lines[-1]
        assert max(losses(workdir)) < steps, "the run was over before it was killed"
        assert load_run(workdir).step in (last, 6, 12, 18)

    with train(tmp_path / "last", workdir, text, more=more) as group:
        assert group.wait() == [0, 0], group.err(0) + group.err(1)
    assert "resuming after step" in group.err(0)
    same_losses(workdir, one)


def test_what_the_first_process_cannot_prepare_ends_both_alike(tmp_path):
    nothing = tmp_path / "none" / "*.txt"
    with train(tmp_path / "logs", tmp_path / "run", nothing) as group:
        assert group.wait(seconds=60) == [1, 1]
    ends = [group.err(i).strip().splitlines()[-1] for i in (0, 1)]
    assert ends[0].startswith("error: ") and str(nothing) in ends[0] and ends[0] == ends[1]


@pytest.mark.slow
def test_stages_and_shards_on_two_hosts_train_what_one_process_does(text, tmp_path):
    changes = {"model.n_heads": 4, "model.vocab_size": 260, "mesh.data": 8, "train.steps": 6}
    assert fit(experiment(text, CHANGES | changes), tmp_path / "one").step == 6
    # The first host has the first stage, the other the second.
    changes |= {"mesh.data": 1, "mesh.pipe": 2, "mesh.model": 4}
    with train(tmp_path / "logs", tmp_path / "two", text, more=as_flags(changes)) as group:
        assert group.wait() == [0, 0], group.err(0) + group.err(1)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    theirs, mine = load_run(tmp_path / "two"), load_run(tmp_path / "one")
    for a, b in zip(*(jax.tree.leaves(m.params) for m in (theirs, mine)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


FAILING = """
import runpy, sys
from eejax.common.errors import DataError
from eejax.data import Loader
original = Loader.__next__
def fetch(loader):
    if loader.step == 9 and "--process=1" in sys.argv:
        raise DataError("the disk of this host is broken")
    return original(loader)
Loader.__next__ = fetch
runpy.run_module("eejax.experiments.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_process_that_fails_alone_says_why_and_ends_the_other(text, tmp_path):
    with train(tmp_path / "logs", tmp_path / "run", text, ("-c", FAILING), as_flags(LONG)) as group:
        codes = group.wait(seconds=60)
    assert codes == [1, 1]
    assert "error: the disk of this host is broken" in group.err(1).splitlines()
    assert DIED not in group.err(1)
    assert DIED in group.err(0).strip().splitlines()[-1]
    assert load_run(tmp_path / "run").step == 6


@pytest.mark.slow
def test_exits_are_tuned_and_evaluated_by_two_processes(two, tmp_path):
    """As by one, of whose launchers other tests speak."""
    of_base = [f"--base={two[0]}", "--exits=1", "--config.train.steps=6", "--config.mesh.data=8"]
    of_base += ["--config.train.batch_size=16", "--config.train.eval_batches=1"]
    runs = {}
    for name, how in (("two", {}), ("one", {"n": 1})):
        # One process has four devices only.
        mesh = [] if name == "two" else ["--config.mesh.data=4"]
        arguments = (*of_base, f"--workdir={tmp_path / name}", *mesh)
        with start(
            tmp_path / "tune", "-m", "eejax.experiments.tune_exits", *arguments, **how
        ) as group:
            assert set(group.wait()) == {0}, group.err(0)
        arguments = (f"--workdir={tmp_path / name}", "--batches=2")
        with start(
            tmp_path / "evaluate", "-m", "eejax.experiments.evaluate", *arguments, **how
        ) as group:
            assert set(group.wait()) == {0}, group.err(0)
        runs[name] = json.loads(group.out(0).splitlines()[-1])
        if name == "two":
            assert "exit_1" not in group.out(1)
    assert runs["two"] == pytest.approx(runs["one"], rel=1e-4)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
