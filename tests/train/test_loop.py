import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from absl import logging
from small_runs import STEPS, config, stop_at, write_text

from eejax import data
from eejax.checkpoint.files import finished_steps
from eejax.checkpoint.model import load_run
from eejax.common.errors import CheckpointError, ConfigError, DataError
from eejax.data import Loader
from eejax.train.config import Experiment
from eejax.train.loop import fit
from eejax.train.metrics import read_metrics


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that nothing interrupts, and the batches that it took."""
    workdir = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patched:
        batches = noted_batches(patched)
        result = fit(Experiment.from_dict(config(text)), workdir)
    assert (result.step, result.stopped) == (STEPS, None)
    return workdir, batches


@pytest.fixture(scope="module")
def uninterrupted(whole):
    return whole[0]


def noted_batches(monkeypatch) -> list[tuple[int, int]]:
    """First sequence and size of each batch, as they are taken."""
    taken, original = [], Loader.batch_at

    def batch_at(loader, n):
        taken.append((n, loader.size_at(n)))
        return original(loader, n)

    monkeypatch.setattr(Loader, "batch_at", batch_at)
    return taken


def as_it_was(run, workdir, step):
    """A copy of a run as it was when it saved its checkpoint of a step."""
    shutil.copytree(run, workdir, dirs_exist_ok=True)
    for folder in (workdir / "checkpoints").iterdir():
        if int(folder.name) > step:
            shutil.rmtree(folder)


def bits(workdir):
    """Every array of the newest checkpoint's parameters, and everything timeless it recorded."""
    model = load_run(workdir)
    timed = ("tokens_per_second", "mfu", "memory/host_peak_bytes")
    records = [
        {k: v for k, v in record.items() if k not in timed} for record in read_metrics(workdir)
    ]
    arrays = [np.asarray(a) for a in jax.tree.leaves(model.params)]
    return model.step, arrays, records, model.metadata["data"]


def same(a, b):
    (step, arrays, records, position), (step2, arrays2, records2, position2) = bits(a), bits(b)
    assert step == step2 and records == records2 and position == position2
    for x, y in zip(arrays, arrays2, strict=True):
        assert x.tobytes() == y.tobytes()


def test_an_evaluation_without_a_token_keeps_what_was_trained(tmp_path):
    record = json.dumps({"prompt": "x" * 777, "completion": "y"}) + "\n"
    (tmp_path / "a.jsonl").write_text(record * 40)
    values = config(tmp_path, steps=4, eval_every=2, eval_batches=1, checkpoint_every=0)
    values["train"] |= {"batch_size": 1, "microbatches": 1}
    values["data"]["source"] = f"completion:{tmp_path}/a.jsonl"
    with pytest.raises(DataError, match="none of the windows that were chosen has a token that c"):
        fit(Experiment.from_dict(values), tmp_path / "run")
    assert finished_steps(tmp_path / "run" / "checkpoints") == [2]


def test_a_run_learns_and_records(uninterrupted):
    records = read_metrics(uninterrupted)
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss/final"] < steps[0]["loss/final"] - 1.0
    for r in steps:
        assert r["loss"] == pytest.approx(0.5 * r["loss/exit_1"] + r["loss/final"], rel=1e-6)
    assert steps[-1]["tokens_per_second"] > 0 and steps[-1]["mfu"] > 0
    evaluations = [r for r in records if "eval/loss/final" in r]
    assert [r["step"] for r in evaluations] == [7, 14]
    for name in ("exit_1", "final"):
        loss = evaluations[-1][f"eval/loss/{name}"]
        assert evaluations[-1][f"eval/perplexity/{name}"] == pytest.approx(np.exp(loss))
        # Bytes are the tokens: only the documents' ends, if any was scored, have no byte.
        bpb = evaluations[-1][f"eval/bits_per_byte/{name}"]
        assert (1 - 1e-6) * loss / np.log(2) < bpb < 1.01 * loss / np.log(2)
    assert json.loads((uninterrupted / "config.json").read_text())["train"]["steps"] == STEPS
    assert any((uninterrupted / "tensorboard").iterdir())
    assert (uninterrupted / "checkpoints" / "14").is_dir()


@pytest.mark.parametrize(
    "number, step",
    [pytest.param(signal.SIGTERM, 5, marks=pytest.mark.slow), (signal.SIGINT, 8)],
)
def test_a_stopped_run_saves_and_resumes_to_the_same_bits(
    text, uninterrupted, tmp_path, monkeypatch, capfd, number, step
):
    with monkeypatch.context() as patched:
        stop_at(patched, step, number)
        result = fit(Experiment.from_dict(config(text)), tmp_path)
    assert (result.stopped, result.step) == (number, step + 1)
    assert load_run(tmp_path).step == step + 1
    assert "checkpoint saved, the same command resumes" in capfd.readouterr().err
    if step > 7:  # it evaluates every 7 steps
        assert result.evaluation.table().startswith("last evaluation: step 7\n")
    with monkeypatch.context() as patched:
        stop_at(patched, STEPS - 1, number)  # with nothing left to do behind that step
        result = fit(Experiment.from_dict(config(text)), tmp_path)
    assert (result.step, result.stopped) == (STEPS, None)
    assert f"done: step {STEPS} in" in capfd.readouterr().err
    same(tmp_path, uninterrupted)
    assert fit(Experiment.from_dict(config(text)), tmp_path).step == STEPS  # nothing left to do
    same(tmp_path, uninterrupted)


def test_a_damaged_newest_checkpoint_costs_steps_not_the_run(text, uninterrupted, tmp_path, caplog):
    as_it_was(uninterrupted, tmp_path, STEPS)
    newest = tmp_path / "checkpoints" / str(STEPS)
    data = max((newest / "params").glob("*/[0-9]*"), key=lambda p: p.stat().st_size)
    os.truncate(data, data.stat().st_size // 2)
    logging.set_verbosity(logging.WARNING)
    fit(Experiment.from_dict(config(text)), tmp_path)
    assert "checkpoints/14 is damaged" in caplog.text
    same(tmp_path, uninterrupted)


def test_another_model_in_the_workdir_is_refused_by_field(text, uninterrupted):
    other = config(text)
    other["model"] |= {"d_model": 32, "n_heads": 4}
    with pytest.raises(CheckpointError) as error:
        fit(Experiment.from_dict(other), uninterrupted)
    assert "model.d_model: 16 in the checkpoint, 32 in the configuration" in str(error.value)
    assert "model.n_heads: 2 in the checkpoint, 4" in str(error.value)


def test_another_recipe_in_the_workdir_is_refused(text, uninterrupted):
    with pytest.raises(CheckpointError, match="train.ema: None in the checkpoint, 0.9 in"):
        fit(Experiment.from_dict(config(text, ema=0.9)), uninterrupted)
    other = config(text) | {"loss": {"z_loss": 1e-4}}
    with pytest.raises(CheckpointError, match="loss.z_loss: 0.0 in the checkpoint, 0.0001 in"):
        fit(Experiment.from_dict(other), uninterrupted)


def test_a_run_goes_on_with_other_batches_where_it_was(text, whole, tmp_path, monkeypatch, capfd):
    before, batches = whole
    assert batches == [(4 * i, 4) for i in range(STEPS)]
    as_it_was(before, tmp_path, 8)
    taken = noted_batches(monkeypatch)
    fit(Experiment.from_dict(config(text, batch_size=8)), tmp_path)
    assert taken == [(32 + 8 * i, 8) for i in range(6)]
    assert "batches of 8 instead of 4 sequences, from sequence 32 on" in capfd.readouterr().err
    assert read_metrics(tmp_path)[-2]["step"] == STEPS


# Everything that draws, averages, scales or schedules, in one run.
RECIPE = {
    "exit_weights": {
        "weights": [0.5],
        "kind": "linear",
        "initial": [0.1],
        "curriculum": "gradual",
    },
    "loss": {
        "z_loss": 1e-3,
        "confidence_weighted": True,
        "distillation": 0.3,
        "distillation_temperature": 2.0,
    },
}


def recipe(text):
    values = config(
        text,
        ema=0.8,
        layer_dropout=0.3,
        layer_dropout_growth="exponential",
        loss_scale=2.0**24,
        loss_scale_interval=3,
        batch_rampup=[2, 2, 10],
        profile_begin=4,
        profile_steps=2,
    )
    values["model"] = values["model"] | {"dtype": "float16"}
    values["data"] = values["data"] | {"prefetch": 2}
    return Experiment.from_dict(values | RECIPE)


def test_a_run_with_every_recipe_resumes_to_the_same_bits(text, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert fit(recipe(text), whole).step == STEPS
    as_it_was(whole, parts, 8)
    assert fit(recipe(text), parts).step == STEPS
    same(parts, whole)
    averaged = [load_run(w, ema=True) for w in (whole, parts)]
    for a, b in zip(*(jax.tree.leaves(m.params) for m in averaged), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    raw = jax.tree.leaves(load_run(whole).params)
    assert any(
        (a != b).any() for a, b in zip(raw, jax.tree.leaves(averaged[0].params), strict=True)
    )
    records = read_metrics(whole)
    steps = [r for r in records if "learning_rate" in r]
    assert steps[0]["skipped"] == 1 and steps[0]["loss_scale"] == 2.0**24  # an overflow at once
    assert steps[-1]["skipped"] < 10 and steps[-1]["loss_scale"] < 2.0**24
    assert "loss/exit_1" not in steps[2] and "loss/exit_1" in steps[-1]  # the curriculum
    assert steps[-1]["grad_norm/exit_1"] > 0 and steps[-1]["grad_norm/final"] > 0
    assert any("eval_ema/loss/final" in r for r in records)
    assert list((whole / "profile").rglob("*.xplane.pb"))


def test_averaged_parameters_that_were_not_kept_are_missed_by_name(uninterrupted):
    with pytest.raises(CheckpointError, match="trained without train.ema"):
        load_run(uninterrupted, ema=True)


@pytest.mark.slow
def test_another_mesh_resumes_to_the_same_losses(text, uninterrupted, tmp_path):
    as_it_was(uninterrupted, tmp_path, 8)
    fit(Experiment.from_dict(config(text) | {"mesh": {"data": 2}}), tmp_path)
    for a, b in zip(read_metrics(tmp_path), read_metrics(uninterrupted), strict=True):
        if "loss" in a:
            # Six Adam steps amplify the rounding of sums taken in another order.
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_steps_that_are_skipped_are_reported(text, tmp_path, monkeypatch, capfd):
    """One without a finite gradient, and one without a counted token."""
    original = Loader.__next__

    def poisoned(loader):
        batch = original(loader)
        if loader.step == 3:
            batch["labels"][0, 3] = 9999
        if loader.step == 5:
            batch["labels"][:] = data.IGNORE
        return batch

    monkeypatch.setattr(Loader, "__next__", poisoned)
    result = fit(Experiment.from_dict(config(text)), tmp_path)
    assert int(result.state.skipped) == 2
    told = capfd.readouterr().err
    assert "step 3: loss or gradient not finite, step skipped (1 so far)" in told
    assert "step 5: no token counted, step skipped (2 so far)" in told
    records = {r["step"]: r for r in read_metrics(tmp_path) if "tokens" in r}
    assert records[3]["loss"] is None and records[3]["skipped"] == 1
    assert records[5]["tokens"] == 0 and records[5]["skipped"] == 2 and "loss" not in records[5]
    assert all(np.isfinite(r["loss"]) for step, r in records.items() if step not in (3, 5))
    assert list(records) == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    "section, field, message",
    [
        ("train", "stepz", "config.train.stepz = 1: no such field. Known: steps"),
        ("model", "layers", "ModelConfig.layers = 1: no such field"),
        ("optimizer", "lr", "config.optimizer.lr = 1: no such field"),
        ("mesh", "expert", "config.mesh.expert = 1: no such field"),
    ],
)
def test_unknown_fields_are_refused(text, section, field, message):
    values = config(text)
    values[section] = values.get(section, {}) | {field: 1}
    with pytest.raises(ConfigError, match=message):
        Experiment.from_dict(values)


def test_other_bad_settings_are_refused(text, tmp_path):
    with pytest.raises(ConfigError, match="config.training: no such section"):
        Experiment.from_dict(config(text) | {"training": {}})
    with pytest.raises(ConfigError, match="one weight for each of the model's 1 early exits"):
        Experiment.from_dict(config(text) | {"exit_weights": {}})
    with pytest.raises(ConfigError, match="data.length = 99"):
        Experiment.from_dict(config(text) | {"data": {"length": 99}})
    with pytest.raises(ConfigError, match="train.batch_size = 5: must be a multiple of"):
        fit(Experiment.from_dict(config(text, batch_size=5)), tmp_path)
    with pytest.raises(ConfigError, match="needs 64 devices"):
        fit(Experiment.from_dict(config(text) | {"mesh": {"data": 64}}), tmp_path / "mesh")
    assert not (tmp_path / "mesh").exists(), "refused before any work"


def test_experiments_survive_json(text):
    experiment = Experiment.from_dict(config(text))
    assert Experiment.from_dict(json.loads(json.dumps(experiment.to_dict()))) == experiment


def test_a_run_without_held_out_text_only_trains(text, tmp_path):
    values = config(text, steps=2)
    values["data"] |= {"validation_fraction": 0.0}
    assert fit(Experiment.from_dict(values), tmp_path).evaluation is None


def test_a_damaged_data_set_is_not_a_run_without_evaluation(text, tmp_path, monkeypatch):
    original = data.PackedDataset.split

    def split(dataset, name):
        if name == "validation":
            raise DataError("the index is damaged")
        return original(dataset, name)

    monkeypatch.setattr(data.PackedDataset, "split", split)
    with pytest.raises(DataError, match="the index is damaged"):
        fit(Experiment.from_dict(config(text)), tmp_path)


def test_a_full_disk_names_what_could_not_be_written(text, tmp_path, monkeypatch):
    original = os.fsync

    def run():
        return fit(Experiment.from_dict(config(text, steps=1)), tmp_path)

    for name in ("config.json", "metrics.jsonl", "tokenizer"):

        def full(descriptor, name=name):
            file = os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)
            if name in file.split("/")[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(descriptor)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(OSError) as error:
                run()
        assert str(error.value).startswith(
            f"{tmp_path / name} could not be written: No space left on device. There is no checkp"
        )
        assert not (tmp_path / name).exists() and not list(tmp_path.glob("*.part"))
        for file in tmp_path.iterdir():  # each name's run is the first in its folder
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    assert run().step == 1


LIMITED = """
import json, os, resource, sys, time
from eejax.data import Loader
from eejax.train.config import Experiment
from eejax.train.loop import fit
original = Loader.__next__
def fetch(loader):
    if loader.step == 6:
        while not os.path.exists(sys.argv[2] + "/checkpoints/4/CHECKSUMS.json"):
            time.sleep(0.05)
        size = os.path.getsize(sys.argv[2] + "/metrics.jsonl") + 10
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return original(loader)
Loader.__next__ = fetch
try:
    fit(Experiment.from_dict(json.loads(sys.argv[1])), sys.argv[2])
except OSError as error:
    print(error)
"""


def test_a_run_that_may_write_no_more_ends_and_can_be_resumed(text, uninterrupted, tmp_path):
    # A limit of the system and not a patch: writes fail wherever they happen to.
    ended = subprocess.run(
        [sys.executable, "-P", "-c", LIMITED, json.dumps(config(text)), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    first, rest = ended.stdout.split(" could not be written: ")
    assert first in (f"{tmp_path}/metrics.jsonl", f"{tmp_path}/tensorboard")
    assert rest.startswith(f"File too large. The checkpoint {tmp_path}/checkpoints/4 stays usable")
    fit(Experiment.from_dict(config(text)), tmp_path)
    same(tmp_path, uninterrupted)


PROGRAM = """
import json, sys
from eejax.train.config import Experiment
from eejax.train.loop import fit
result = fit(Experiment.from_dict(json.loads(sys.argv[1])), sys.argv[2])
sys.exit(128 + result.stopped if result.stopped else 0)
"""


def start(text, workdir, errors=subprocess.DEVNULL, **train):
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, json.dumps(config(text, **train)), str(workdir)],
        stderr=errors,
        text=True,
    )


def wait_for(workdir, process, step, seconds=300):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if any(r["step"] >= step for r in read_metrics(workdir)):
            return
        time.sleep(0.002)
    assert process.poll() is not None, "the run neither got on nor ended"


def kill_and_resume(text, workdir, kills, seed):
    """Kills the run at random steps, and a few milliseconds into whatever it then does."""
    rng = random.Random(seed)
    for at in sorted(rng.sample(range(1, STEPS), kills)):
        process = start(text, workdir)
        wait_for(workdir, process, at)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.wait()
    fit(Experiment.from_dict(config(text)), workdir)


def test_killed_at_random_steps_a_run_resumes_to_the_same_bits(text, uninterrupted, tmp_path):
    kill_and_resume(text, tmp_path, kills=1, seed=0)
    same(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_killed_again_and_again_a_run_resumes_to_the_same_bits(text, uninterrupted, tmp_path, seed):
    kill_and_resume(text, tmp_path, kills=6, seed=seed)
    same(tmp_path, uninterrupted)
