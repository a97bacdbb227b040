"""Whole runs on meshes: the same losses, and checkpoints that know of no mesh."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import small_runs

from eejax.checkpoint.model import load_run
from eejax.common.errors import ConfigError
from eejax.inference import Generator
from eejax.losses import LossObjective
from eejax.models import params
from eejax.pipeline.config import FILLS
from eejax.sharding.mesh import make_mesh
from eejax.train.config import ExitWeights, Experiment, TuneConfig
from eejax.train.loop import fit
from eejax.train.program import Program

MODEL = {
    "vocab_size": 257,
    "vocab_multiple": 8,
    "n_layers": 4,
    "d_model": 16,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_ff": 24,
    "context_length": 16,
    "dropout": 0.1,
    "head": "shared",
    "exits": [
        {"boundary": 0, "head": "tied"},
        {"boundary": 2, "head": "own"},
        {"boundary": 3, "head": "shared", "mlp": True},
    ],
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    small_runs.write_text(folder)
    return folder


def experiment(texts, mesh=(1, 1, 1), pipeline=None, **train) -> Experiment:
    train = {"batch_size": 16, "eval_every": 0, "microbatches": 2, "ema": 0.9} | train
    values = small_runs.config(texts, **train)
    values["model"] = MODEL
    values["exit_weights"] = {
        "kind": "linear",
        "initial": [0.1, 0.2, 0.3],
        "weights": [0.3, 0.5, 0.4],
    }
    values["mesh"] = dict(zip(("data", "pipe", "model"), mesh, strict=True))
    values["pipeline"] = pipeline or {}
    values["optimizer"] |= {"clip_norm": 0.5}
    return Experiment.from_dict(values)


def losses(workdir) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    wanted = ("loss", "grad_norm")
    return {
        line["step"]: {k: v for k, v in line.items() if k.split("/")[0] in wanted}
        for line in lines
        if "loss" in line
    }


def assert_close(got, want, rtol):
    assert got.keys() == want.keys() and got
    for step, values in want.items():
        assert got[step].keys() == values.keys()
        for name, value in values.items():
            if value is None:  # not finite: the step was skipped
                assert got[step][name] is None, (step, name)
                continue
            np.testing.assert_allclose(got[step][name], value, rtol=rtol, err_msg=f"{step} {name}")


@pytest.fixture(scope="module")
def reference(texts, tmp_path_factory):
    """Twenty steps of one device."""
    workdir = tmp_path_factory.mktemp("reference")
    result = fit(experiment(texts, steps=20, checkpoint_every=0), workdir)
    return losses(workdir), result.evaluation


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 4, 2), (8, 1, 1)])
def test_twenty_steps_have_the_same_losses_on_every_mesh(texts, reference, mesh, tmp_path, capfd):
    # Eight devices along data leave two sequences for each.
    parts = {"microbatches": 1} if mesh[0] == 8 else {}
    run = experiment(texts, mesh, steps=20, checkpoint_every=0, **parts)
    result = fit(run, tmp_path)
    # Copies of a table on several stages are one parameter.
    assert f"starting: {params.count(run.model):,} parameters" in capfd.readouterr().err
    assert_close(losses(tmp_path), reference[0], 1e-4)
    np.testing.assert_allclose(result.evaluation.losses, reference[1].losses, rtol=1e-4)
    assert result.evaluation.tokens == reference[1].tokens


@pytest.fixture(scope="module")
def went_on(texts, tmp_path_factory):
    """The folder of a run on (2, 2, 2) that was saved after three steps and after four."""
    workdir = tmp_path_factory.mktemp("went_on")
    with pytest.MonkeyPatch.context() as patch:
        small_runs.stop_at(patch, 3)
        assert fit(experiment(texts, (2, 2, 2), steps=20, checkpoint_every=3), workdir).step == 4
    return workdir


@pytest.fixture(scope="module")
def saved(went_on, tmp_path_factory):
    """The same as it was after three steps."""
    workdir = tmp_path_factory.mktemp("saved")
    shutil.copytree(went_on, workdir, dirs_exist_ok=True)
    shutil.rmtree(workdir / "checkpoints" / "4")
    return workdir


def resumed(texts, saved, workdir, mesh, **pipeline):
    shutil.copytree(saved, workdir, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        small_runs.stop_at(patch, 4)
        parts = {"microbatches": 1} if mesh[0] == 8 else {}
        run = experiment(texts, mesh, pipeline, steps=20, checkpoint_every=0, **parts)
        result = fit(run, workdir)
    return losses(workdir)[4], result.state


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, pipeline",
    [
        pytest.param((2, 2, 2), {}, marks=pytest.mark.slow),
        pytest.param((1, 4, 2), {}, marks=pytest.mark.slow),
        pytest.param((8, 1, 1), {}, marks=pytest.mark.slow),
        pytest.param((1, 1, 1), {}, marks=pytest.mark.slow),
        ((2, 3, 1), {"layers": (1, 1, 2)}),
    ],
)
def test_a_checkpoint_is_restored_on_any_mesh(texts, saved, went_on, tmp_path, mesh, pipeline):
    got, _ = resumed(texts, saved, tmp_path / "other", mesh, **pipeline)
    for name, value in losses(went_on)[4].items():
        if name.startswith("loss"):  # of the very next step
            np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=name)


def test_uneven_stages_save_what_they_restored(texts, saved, tmp_path):
    """Through a pipeline of uneven stages and back: every value of the state, to the bit."""
    first = load_run(saved)
    workdir = tmp_path / "run"
    shutil.copytree(saved, workdir)
    program_run = experiment(texts, (2, 3, 1), {"layers": (2, 1, 1)}, steps=20)
    program = Program(program_run, make_mesh(program_run.mesh))
    state = program.create()
    there = program.to_portable(state)
    back = program.from_portable(there)
    program.to_portable(back)
    assert program._take._cache_size() == 1  # one program for every save
    for a, b in zip(*map(jax.tree.leaves, (state, back)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding == b.sharding
    assert jax.tree.structure(there.params) == jax.tree.structure(first.params)


@pytest.mark.slow
def test_generation_from_a_pipelined_run_is_that_of_one_device(texts, saved, tmp_path):
    alone = experiment(texts, steps=3, checkpoint_every=0)
    fit(alone, tmp_path / "alone")
    made = []
    for workdir in (saved, tmp_path / "alone"):
        model = load_run(workdir)
        engine = Generator.make(model.params, model.config)
        made.append(engine.generate([[101, 120, 105, 116], [104, 101]], 8).tokens)
    np.testing.assert_array_equal(*made)


@pytest.mark.slow
def test_recipes_are_the_same_on_stages(texts, tmp_path):
    """Layer dropout, exits in turns, z-loss, confidence weights and distillation, document masks,
    on uneven stages with exits in the middle of one."""
    found = []
    for mesh in ((1, 1, 1), (2, 2, 2)):
        run = experiment(
            texts,
            mesh,
            {"layers": (1, 3)} if mesh[1] > 1 else {},
            steps=6,
            layer_dropout=0.3,
            checkpoint_every=0,
        )
        run = dataclasses.replace(
            run,
            exit_weights=ExitWeights((0.3, 0.5, 0.4), curriculum="rotating"),
            loss=LossObjective(z_loss=1e-3, confidence_weighted=True, distillation=0.4),
        )
        workdir = tmp_path / str(mesh[1])
        fit(run, workdir)
        found.append(losses(workdir))
    assert_close(found[1], found[0], 1e-4)


@pytest.mark.slow
def test_float16_is_scaled_on_stages(texts, tmp_path):
    found = []
    for mesh in ((1, 1, 1), (1, 2, 2)):
        run = experiment(texts, mesh, steps=6, loss_scale=2.0**16, checkpoint_every=0)
        run = dataclasses.replace(run, model=run.model.replace(dtype="float16", dropout=0.0))
        workdir = tmp_path / str(mesh[1])
        result = fit(run, workdir)
        assert 0 < int(result.state.skipped) < 6  # overflows, halves the scale, and goes on
        found.append((losses(workdir), int(result.state.skipped)))
    assert found[0][1] == found[1][1]

    # Float16 rounds at 5e-4, in another order here; norms of gradients feel six steps of it.
    def only(of):
        return {s: {k: v for k, v in x.items() if k[:4] == "loss"} for s, x in of.items()}

    assert_close(*(only(f[0]) for f in found), 3e-3)


@pytest.mark.slow
def test_exits_are_tuned_on_stages(texts, tmp_path):
    """The trunk runs without gradients and sends nothing backward; the stages share the layers
    below the deepest tuned exit, whether these or all of the base's divide by them."""
    base = tmp_path / "base"
    fit(experiment(texts, steps=3, checkpoint_every=0), base)
    found, states = [], []
    for mesh in ((1, 1, 1), (2, 3, 1), (1, 2, 2)):
        values = small_runs.config(texts, steps=5, batch_size=16, eval_every=0, checkpoint_every=0)
        values["model"] = MODEL
        values["exit_weights"] = {"weights": [0.5, 0.4]}
        values["train"]["base"] = str(base)
        values["tune"] = {"part": "exits", "exits": [2, 3]}
        values["mesh"] = dict(zip(("data", "pipe", "model"), mesh, strict=True))
        workdir = tmp_path / str(mesh[1])
        result = fit(Experiment.from_dict(values), workdir)
        found.append(losses(workdir))
        states.append(load_run(workdir).params)
        assert result.evaluation is not None
    before = load_run(base).params
    for losses_, state in zip(found[1:], states[1:], strict=True):
        assert_close(losses_, found[0], 1e-4)
        for name in ("embed", "layers", "final", "shared_head"):
            for a, b in zip(*(jax.tree.leaves(p[name]) for p in (before, state)), strict=True):
                np.testing.assert_array_equal(a, b)
        for a, b in zip(*(jax.tree.leaves(s["exits"]) for s in (states[0], state)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_filled_bubbles_are_announced_and_trained(texts, tmp_path, capfd):
    """The first and the last stage's idle time, divided by a microbatch's, gives the counts.

    A backward pass takes 2 forward passes, so K = floor(3 / (1/2 + 1)) = 2 for 4 stages. Part 1
    holds 2, which turn at the exit of boundary 0. The last stage has most of the work (2 exits), so
    that its idle time holds only 1 in Part 2.
    """
    d, ff, vocab, length = 16, 24, 264, 16
    # FLOPs of a token: four projections, with half as many key and value heads, MLP, attention.
    layer = 2 * (2 * d * d + 2 * d * (d // 2) + 3 * d * ff) + 2 * d * (length + 1)
    tied, mlp = 2 * d * vocab, 2 * 3 * d * ff
    passes = [layer + tied, layer, layer + tied, layer + 2 * tied + mlp]  # by stage, forward
    # The last gradient goes down through stages 2, 1, 0, whose deferred exits run forward too.
    idle = sum(2 * stage for stage in passes[:3]) + 2 * tied
    part2 = idle // (3 * passes[3])
    assert part2 == 1
    main = 8 - 2 - part2
    run = experiment(texts, (1, 4, 1), {"fill": "both"}, steps=3, microbatches=8)
    result = fit(run, tmp_path)
    assert f"bubbles filled with {8 - main} of 8 microbatches" in capfd.readouterr().err
    counted = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    tokens = [line["tokens"] for line in counted if "tokens" in line]
    assert tokens == [16 * length * main // 8] * 3
    assert int(result.state.skipped) == 0


def test_filling_is_refused_where_nothing_waits(texts):
    values = small_runs.config(texts) | {"model": MODEL, "pipeline": {"fill": "both"}}
    values |= {"exit_weights": {"weights": [0.5]}, "tune": {"part": "exits", "exits": [2]}}
    values["train"]["base"] = "runs/base"
    with pytest.raises(ConfigError, match="pipeline.fill = 'both': must be 'none'"):
        Experiment.from_dict(values)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1)])
def test_one_stage_has_no_bubbles_to_fill(texts, fill, mesh):
    run = experiment(texts, mesh, {"fill": fill})
    program = Program(run, make_mesh(run.mesh))
    if fill == "none":
        program.check()
        return
    with pytest.raises(
        ConfigError, match=f"pipeline.fill = {fill!r}: must be 'none' on one stage.*Set pipeline"
    ):
        program.check()


def test_exits_of_a_smaller_vocabulary_are_not_trained_on_labels(texts):
    run = experiment(texts, (1, 1, 1), {})
    early = dataclasses.replace(run.model.exits[0], vocabulary=32)
    model = run.model.replace(exits=(early, *run.model.exits[1:]))
    run = dataclasses.replace(run, model=model)  # which may be read
    message = rf"model.exits.vocabulary = {{{early.boundary}: 32}}: must be 0 .*tune.part = 'exits'"
    with pytest.raises(ConfigError, match=message):
        Program(run, make_mesh(run.mesh)).check()
    others = dataclasses.replace(
        run,
        tune=TuneConfig("exits", (2, 3)),
        exit_weights=ExitWeights((1.0, 1.0)),
        train=dataclasses.replace(run.train, base="a model with the first exit"),
    )
    Program(others, make_mesh(run.mesh)).check()
