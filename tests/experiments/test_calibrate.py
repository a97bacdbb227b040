"""Routers for a run: made, kept beside its model, used by the other launchers, and refused."""

import json
import re
import shutil
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from launchers import call, functions_of
from matplotlib.image import imread

from eejax import data
from eejax.checkpoint.hf import load_pretrained, save_pretrained
from eejax.checkpoint.manager import Checkpoints
from eejax.checkpoint.model import CHECKPOINTS, TUNING, load_metadata, load_run
from eejax.checkpoint.overlay import open_overlay, write_overlay
from eejax.common.errors import CheckpointError, ConfigError, DataError
from eejax.models.config import ModelConfig
from eejax.sharding.mesh import MeshConfig, make_mesh
from eejax.train.base import with_base
from eejax.train.config import Experiment
from eejax.train.imported import import_pretrained
from eejax.train.loop import fit
from eejax.train.runs import open_run

FEW = ("--width=8", "--epochs=2", "--tokens=3000")


@pytest.fixture(scope="module")
def routed(small_run, tmp_path_factory):
    """(a run of routers for the exits of the small run, what its making printed)."""
    folder = tmp_path_factory.mktemp("routed")
    (folder / "run").mkdir()
    # A base of its own, so that tests may spoil it.
    shutil.copytree(small_run, folder / "base")
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *a, **k: lines.append(" ".join(map(str, a))))
        call(
            "eejax.experiments.calibrate",
            f"--base={folder / 'base'}",
            f"--workdir={folder / 'run'}",
            "--json",
            *FEW,
        )
    return folder / "run", "\n".join(lines)


def test_routers_lie_beside_the_model_they_are_of(routed, small_run):
    workdir, told = routed
    result = json.loads(told.splitlines()[-1])
    assert [q["boundary"] for q in result["exits"]] == [1, 2]
    assert all(0 <= q["error"] <= 1 for q in result["exits"]) and result["tokens"] == 3000
    assert set(result["points"]) == {"0.99", "0.95", "0.9"}
    promise = result["promise"]
    assert promise["delta"] == 0.05 and promise["windows"] > 1 and 0 <= promise["threshold"] <= 1
    assert result["points"]["0.9"]["depth"] <= promise["depth"]
    for name in ("convergence_by_depth.png", "exits.png"):
        assert imread(workdir / name).std() > 0.02
    assert not (workdir / CHECKPOINTS).exists() and not (workdir / "calibration").exists()
    size = sum(p.stat().st_size for p in workdir.rglob("*.safetensors"))
    assert 0 < size < 20_000  # of the exits alone
    base, run = open_run(small_run), open_run(workdir)
    assert [e.router for e in run.model.config.exits] == [8, 8]
    assert run.model.step == base.model.step
    for name in ("embed", "layers", "final"):
        jax.tree.map(np.testing.assert_array_equal, run.model.params[name], base.model.params[name])

    def norm(model):
        return model.params["exits"]["exit_2"]["norm"]["scale"]

    np.testing.assert_array_equal(norm(run.model), norm(base.model))
    mesh = make_mesh(MeshConfig(data=2))
    cut = load_run(workdir, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, cut.params, run.model.params)


def test_printed_thresholds_are_those_that_were_judged(routed):
    told = routed[1]
    result = json.loads(told.splitlines()[-1])

    def floats(text):
        return np.array(text.split(","), np.float32)

    command = re.search(r"eejax generate .*--threshold=(\S+)", told)[1]
    judged = {a: np.float32(p["threshold"]) for a, p in result["points"].items()}
    np.testing.assert_array_equal(floats(command), judged["0.95"])
    table = [line.split()[-1] for line in told.splitlines() if re.match(r"9\d% ", line)]
    for line, wanted in zip(table, judged.values(), strict=True):
        np.testing.assert_array_equal(floats(line), wanted)
    promised, line = result["promise"]["threshold"], re.search("but for a chance of 10%: .*", told)
    if promised < 1:
        one = re.search(r"--threshold=(\S+),", line[0])[1]
        np.testing.assert_array_equal(floats(one), np.float32([promised]))
    else:
        assert "windows are too few to promise it" in line[0]
    exact = functions_of("eejax.experiments.calibrate").exact
    below = np.nextafter(np.float32(1), np.float32(0))
    for value, text in ((1.0, "1"), (0.0, "0"), (0.99997, "0.99997"), (0.57, "0.57")):
        assert exact(value) == text
    for value in (below, np.float32(1e-30), np.float32(1 / 3)):
        assert np.float32(float(exact(value))) == value and "e" not in exact(value)


def test_an_imported_model_has_no_text_of_its_own(small_run, tmp_path, capsys, monkeypatch):
    save_pretrained(tmp_path / "hf", *(lambda m: (m.config, m.params))(load_run(small_run)))
    base = tmp_path / "base"
    import_pretrained(tmp_path / "hf", base, tokenizer="bytes", data={"length": 64})
    arguments = [f"--base={base}", f"--workdir={tmp_path / 'run'}", *FEW]
    with pytest.raises(ConfigError, match=r"--source = None: must name .*--source=python-stdlib"):
        call("eejax.experiments.calibrate", *arguments)
    tune = [sys.executable, "-m", "eejax.experiments.tune_exits", f"--base={base}", "--exits=1"]
    done = subprocess.run(
        [*tune, f"--workdir={tmp_path / 'tuned'}"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "error: --source = None: must name a text" in done.stderr
    texts = sorted(small_run.parent.glob("*.txt"))
    call("eejax.experiments.calibrate", *arguments, f"--source={','.join(map(str, texts))}")
    assert f"text: {', '.join(map(str, texts))}\n" in capsys.readouterr().out
    # As is said there, it is another thing to ask for that library.
    with pytest.raises(DataError, match="none of it today"):
        monkeypatch.setattr(data, "pack", lambda source, *a, **k: stop(source))
        other = f"--workdir={tmp_path / 'other'}"
        call("eejax.experiments.calibrate", *arguments, other, "--source=python-stdlib")


def stop(source):
    assert source == data.source("python-stdlib")
    raise DataError("none of it today")


def test_other_launchers_take_it_as_a_run(routed, tmp_path, capsys):
    workdir, _ = routed
    call(
        "eejax.experiments.generate",
        f"--workdir={workdir}",
        "--gate=router",
        "--threshold=0.3,0.3",
        "--prompt=exit early",
        "--max_new_tokens=12",
        "--engine=posthoc",
        "--json",
    )
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    call("eejax.experiments.evaluate", f"--workdir={workdir}", "--batches=1")
    assert "exit_1" in capsys.readouterr().out
    call("eejax.experiments.export_hf", f"--workdir={workdir}", f"--output={tmp_path / 'out'}")
    back = load_pretrained(tmp_path / "out")
    assert [e.router for e in back.config.exits] == [8, 8]
    jax.tree.map(np.testing.assert_array_equal, back.params, load_run(workdir).params)
    assert len(said["requests"][0]["tokens"]) == 12
    # Exits beside the weights of another model are not its exits.
    weights = tmp_path / "out" / "model.safetensors"
    from safetensors.numpy import load_file, save_file

    tensors = load_file(weights)
    name = next(n for n in tensors if "norm" in n)
    save_file(tensors | {name: tensors[name] + 0.5}, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="were trained on other parameters"):
        load_pretrained(tmp_path / "out")


def test_routers_of_another_model_are_refused(routed, tmp_path):
    workdir, _ = routed
    moved = tmp_path / "moved"
    shutil.copytree(workdir, moved)
    file = moved / "eejax.json"
    values = json.loads(file.read_text())
    with pytest.raises(CheckpointError, match="made of another run's model.*no checkpoint"):
        load_run(moved)  # its base is not where it says
    values["base"]["workdir"] = str(open_overlay(workdir).base.resolve())
    file.write_text(json.dumps(values))
    assert load_run(moved).config == load_run(workdir).config
    with pytest.raises(CheckpointError, match="and of no step 3"):
        load_run(moved, step=3)
    file.write_text(json.dumps(values | {"digest": "0" * 32}))
    with pytest.raises(CheckpointError, match="trained on other parameters"):
        load_run(moved)
    file.write_text(file.read_text()[:-20])
    with pytest.raises(CheckpointError, match="eejax.json: cannot be read"):
        load_run(moved)
    file.write_text(json.dumps(values))
    weights = moved / "eejax_exits.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # of the same shapes, and readable
    with pytest.raises(CheckpointError, match="eejax_exits.safetensors: is not the file that"):
        load_run(moved)
    weights.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match="eejax_exits.safetensors: cannot be read"):
        load_run(moved)
    weights.unlink()
    with pytest.raises(CheckpointError, match="eejax_exits.safetensors"):
        load_run(moved)


def test_a_calibration_takes_the_place_of_no_run(routed, tmp_path):
    workdir, _ = routed
    base = open_overlay(workdir).base
    (tmp_path / "link").symlink_to(base.resolve())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / CHECKPOINTS).mkdir()
    (tmp_path / "tuning" / TUNING).mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "eejax.json").write_text("{}")

    def files():
        return {p: p.stat().st_mtime_ns for d in (base, workdir) for p in d.rglob("*")}

    before = files()
    for of, to, reason in (
        (base, base, "cannot replace the one it is made of"),
        (base, tmp_path / "link", "cannot replace the one it is made of"),
        (workdir, workdir, "cannot replace the one it is made of"),
        (workdir, base, "the base is made of the run in that folder"),
        (base, tmp_path / "other", "there is a run in it"),
        (base, tmp_path / "tuning", "there is a run in it"),
        (base, tmp_path / "model", "there is an exported model in it"),
        (base, workdir, "there is a calibrated run in it"),
    ):
        with pytest.raises(
            ConfigError, match=f"--workdir = '{to}' with --base = '{of}': .*{reason}"
        ):
            call("eejax.experiments.calibrate", f"--base={of}", f"--workdir={to}", *FEW)
        model = load_run(workdir)
        with pytest.raises(ConfigError, match=f"workdir = '{to}' with base = '{of}': .*{reason}"):
            write_overlay(to, of, model.step, model.config, model.params, model.metadata)
    assert files() == before


def test_no_run_takes_the_place_of_a_calibration(routed, tmp_path):
    workdir, _ = routed
    base = open_overlay(workdir).base
    experiment = open_run(base).experiment
    values = {"train": {"base": str(base)}}
    (tmp_path / TUNING).mkdir()
    before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}
    for begin in (
        lambda: fit(experiment, workdir),
        lambda: with_base(values, workdir),
        lambda: import_pretrained(base, workdir),
    ):
        with pytest.raises(ConfigError, match="workdir = .*calibrated run .*would hide the new"):
            begin()
    with pytest.raises(CheckpointError, match="holds a run already"):
        import_pretrained(base, tmp_path)
    assert {p: p.stat().st_mtime_ns for p in workdir.rglob("*")} == before


def test_overlays_may_lie_on_overlays_but_in_no_circle(routed, tmp_path):
    workdir, _ = routed
    model = load_run(workdir)
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "above").symlink_to(tmp_path / "far" / "away")
    shutil.copytree(workdir / "tokenizer", tmp_path / "above" / "tokenizer")
    write_overlay(
        tmp_path / "above", workdir, model.step, model.config, model.params, model.metadata
    )
    jax.tree.map(np.testing.assert_array_equal, load_run(tmp_path / "above").params, model.params)
    file = tmp_path / "above" / "eejax.json"
    values = json.loads(file.read_text())
    shutil.copytree(tmp_path / "above", tmp_path / "round")
    for base in ("above", "round"):  # itself, and one that comes back
        values["base"]["workdir"] = str(tmp_path / base)
        file.write_text(json.dumps(values))
        (tmp_path / "round" / "eejax.json").write_text(
            json.dumps(values | {"base": {"workdir": "../far/away", "step": model.step}})
        )
        for read in (load_run, load_metadata):
            with pytest.raises(CheckpointError, match="made of it in turn.*base.workdir"):
                read(tmp_path / "above")


def test_a_model_without_exits_gets_them_and_a_killed_calibration_goes_on(
    small_run, tmp_path, monkeypatch, capsys
):
    model = open_run(small_run).model
    bare = tmp_path / "bare"
    shutil.copytree(small_run, bare)
    shutil.rmtree(bare / CHECKPOINTS)
    config = model.config.replace(exits=())
    metadata = model.metadata | {"model": config.to_dict()}
    experiment = dict(metadata["experiment"])
    experiment["model"] = config.to_dict()
    experiment["exit_weights"] = dict(experiment["exit_weights"]) | {"weights": []}
    checkpoints = Checkpoints(bare / CHECKPOINTS)
    params = model.params | {"exits": {}}
    checkpoints.save(0, {"params": params}, metadata | {"experiment": experiment})
    checkpoints.close()
    arguments = [f"--base={bare}", f"--workdir={tmp_path / 'run'}", "--every=1", *FEW]

    from eejax.calibration import routers

    real = routers.write_arrays

    def die(file, *args):
        real(file, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(routers, "write_arrays", die)
        call("eejax.experiments.calibrate", *arguments)
    assert list((tmp_path / "run" / "calibration").glob("states-*"))
    with pytest.raises(ConfigError, match=r"options.width = 16, there 8\. Remove"):
        call("eejax.experiments.calibrate", *arguments, "--width=16")
    capsys.readouterr()
    call("eejax.experiments.calibrate", *arguments)
    said = capsys.readouterr()
    assert "epoch 1 of" not in said.err and "epoch 2 of 2" in said.err
    made = load_run(tmp_path / "run")
    assert [e.boundary for e in made.config.exits] == [1, 2]
    norm = made.params["exits"]["exit_1"]["norm"]["scale"]
    np.testing.assert_array_equal(norm, model.params["final"]["norm"]["scale"])


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (["--label=cosine", "--bound=2"], ConfigError, "^--bound = .*must be cosines"),
        (["--boundaries=3"], ConfigError, r"^--boundaries = .*must be in 0..2"),
        (["--boundaries=one"], ConfigError, "--boundaries = 'one'"),
        (["--boundaries=1,1"], ConfigError, r"boundaries = \[1, 1\]: must be in 0..2, each once"),
        (["--seed=-1"], ConfigError, "^--seed = -1: must be an integer of at least 0"),
        (["--width=100000"], ConfigError, "^--width = 100000: must be at most 8192"),
        (["--source=absent.txt"], DataError, "--source = 'absent.txt': absent.txt does not exist"),
        (["--label=kl", "--bound=0"], DataError, "no exit has 100 positive tokens"),
    ],
)
def test_what_cannot_be_calibrated_is_told(small_run, tmp_path, arguments, error, message):
    given = [f"--base={small_run}", f"--workdir={tmp_path / 'run'}", *FEW, *arguments]
    with pytest.raises(error, match=message):
        call("eejax.experiments.calibrate", *given)
    with pytest.raises(CheckpointError, match="holds no checkpoints"):
        load_run(tmp_path / "run")
    # Nothing is left that would be in the way of the command with what was asked for.
    assert not list((tmp_path / "run").glob("calibration/calibration.json"))


@pytest.mark.parametrize("tune", [{"part": "all"}, {"part": "exits", "exits": [1]}])
def test_a_run_with_a_base_is_calibrated(tune):
    """Its experiment trains nothing of the base any more: exits with routers are not trained."""
    model = dict(
        vocab_size=257,
        n_layers=2,
        d_model=16,
        n_heads=2,
        context_length=16,
        exits=[{"boundary": 1}],
    )
    values = {"model": model, "tune": tune, "exit_weights": {"weights": [0.5]}}
    values |= {"train": {"base": "runs/a", "base_step": 3, "seed": 7}, "data": {"length": 16}}
    run = types.SimpleNamespace(experiment=Experiment.from_dict(values))
    routed = ModelConfig.from_dict(model | {"exits": [{"boundary": 1, "router": 8}]})
    made = functions_of("eejax.experiments.calibrate").experiment(run, routed)
    assert made.model == routed and made.tuned is None
    assert (made.train.base, made.train.base_step, made.train.seed) == (None, None, 7)
    assert Experiment.from_dict(made.to_dict()) == made


def test_an_empty_text_is_no_text(small_run, tmp_path):
    file = tmp_path / "empty.txt"
    file.write_text("")
    with pytest.raises(DataError, match=f"--source = '{file}': {file} is empty: give a file with"):
        call(
            "eejax.experiments.calibrate",
            f"--base={small_run}",
            f"--workdir={tmp_path / 'run'}",
            f"--source={file}",
            *FEW,
        )
