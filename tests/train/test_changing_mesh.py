"""A run that is begun, resumed and ended on different meshes."""

import jax
import numpy as np
import pytest
from small_runs import STEPS, config, stop_at, write_text

from eejax.checkpoint.model import load_run
from eejax.train.config import Experiment
from eejax.train.loop import fit
from eejax.train.metrics import read_metrics


def experiment(folder, mesh=None, tune=None):
    values = config(folder, batch_size=8, microbatches=1, ema=0.9)
    values["model"] |= {"vocab_multiple": 4, "n_kv_heads": 1}
    if tune:
        values |= {"tune": {"part": "exits"}, "exit_weights": {"weights": [1.0]}}
        values["train"]["base"] = str(tune)
    return Experiment.from_dict(values | {"mesh": mesh or {}})


@pytest.mark.slow
def test_any_mesh_goes_on_where_another_stopped(tmp_path, monkeypatch):
    write_text(tmp_path)
    fit(experiment(tmp_path), tmp_path / "one")
    meshes = [
        {"data": 2, "model": 2, "sequence": True, "shard_params": True},
        {"data": 8},
        {"data": 2, "model": 2, "shard_optimizer": False},
    ]
    for n, mesh in zip((5, 10, None), meshes, strict=True):
        with monkeypatch.context() as patched:
            if n:
                stop_at(patched, n)
            result = fit(experiment(tmp_path, mesh), tmp_path / "many")
    assert result.step == STEPS and result.stopped is None
    for a, b in zip(*(read_metrics(tmp_path / name) for name in ("many", "one")), strict=True):
        names = [k for k in b if k.startswith(("loss", "eval/loss", "eval_ema/loss"))]
        assert names
        for name in names:
            # Adam's steps amplify the rounding of sums taken in another order.
            assert a[name] == pytest.approx(b[name], rel=1e-4), (a["step"], name)
    for ema in (False, True):
        got, want = (load_run(tmp_path / name, ema=ema).params for name in ("many", "one"))
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-3)

    # And its exits can be tuned on such a mesh.
    one, other = tmp_path / "tuned", tmp_path / "tuned_apart"
    fit(experiment(tmp_path, tune=tmp_path / "one"), one)
    fit(experiment(tmp_path, meshes[0], tune=tmp_path / "one"), other)
    assert [r["step"] for r in read_metrics(other)] == [r["step"] for r in read_metrics(one)]
    for a, b in zip(read_metrics(other), read_metrics(one), strict=True):
        for name in [k for k in b if k.startswith(("loss", "eval/loss", "grad_norm"))]:
            assert a[name] == pytest.approx(b[name], rel=1e-4), (a["step"], name)
    assert load_run(other).step == STEPS
