import jax
import numpy as np
import pytest

from eejax.checkpoint.language_model import load
from eejax.checkpoint.manager import Checkpoints
from eejax.checkpoint.model import CHECKPOINTS, TOKENIZER, abstract_params, load_run, model_config
from eejax.common.errors import CheckpointError, DataError
from eejax.data import ByteTokenizer, save_tokenizer, train_bpe
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig, make_mesh

CONFIG = ModelConfig(
    vocab_size=260,
    n_layers=2,
    d_model=8,
    n_heads=2,
    context_length=8,
    temperature=0.7,
    sliding_window=(4, None),
    exits=(ExitConfig(1, temperature=1.3),),
)


@pytest.fixture(scope="module")
def values():
    return jax.jit(lambda: params.init(CONFIG, jax.random.key(0)))()


@pytest.fixture
def workdir(tmp_path, values):
    tokenizer = ByteTokenizer()
    save_tokenizer(tokenizer, tmp_path / TOKENIZER)
    checkpoints = Checkpoints(tmp_path / CHECKPOINTS)
    meta = {"model": CONFIG.to_dict(), "tokenizer": tokenizer.fingerprint}
    for step in (3, 6):
        tree = jax.tree.map(lambda a, step=step: a * step, values)
        checkpoints.save(step, {"params": tree, "training": {"big": values}}, meta)
    checkpoints.close()
    return tmp_path


def test_the_model_comes_back_whole(workdir, values):
    model = load_run(workdir)
    assert (model.config, model.step) == (CONFIG, 6)
    assert model.tokenizer.fingerprint == ByteTokenizer.fingerprint
    for a, b in zip(*map(jax.tree.leaves, (model.params, values)), strict=True):
        np.testing.assert_array_equal(a, b * 6)
    assert load_run(workdir, step=3).step == 3


def test_the_model_comes_back_on_any_mesh(workdir, values):
    mesh = make_mesh(MeshConfig(data=2, pipe=2, model=2))
    model = load(workdir, mesh=mesh)
    wanted = abstract_params(CONFIG, mesh)
    for a, b, w in zip(*map(jax.tree.leaves, (model.params, values, wanted)), strict=True):
        np.testing.assert_array_equal(a, b * 6)
        assert a.sharding == w.sharding


def test_reading_leaves_the_run_untouched(workdir):
    before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}
    load_run(workdir)
    assert {p: p.stat().st_mtime_ns for p in workdir.rglob("*")} == before


def test_what_is_missing_is_named(workdir, tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoints"):
        load_run(tmp_path / "elsewhere")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    told = f"a model's folder. .* import-hf --model={tmp_path / 'model'} "
    with pytest.raises(CheckpointError, match=told):
        load_run(tmp_path / "model")
    (tmp_path / "empty" / CHECKPOINTS).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="is empty"):
        load_run(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="no checkpoint of step 4, only 3, 6"):
        load_run(workdir, step=4)


def test_another_tokenizer_is_refused(workdir):
    other = train_bpe(["some text, and more of it"], 258)
    save_tokenizer(other, workdir / TOKENIZER)
    with pytest.raises((CheckpointError, DataError)) as error:
        load_run(workdir)
    assert ByteTokenizer.fingerprint in str(error.value)


def test_a_model_of_another_version_is_an_error_not_a_crash():
    meta = {"model": CONFIG.to_dict() | {"new_field": 1}, "version": "9.9"}
    with pytest.raises(CheckpointError, match="another version of eejax .9.9."):
        model_config(meta)
