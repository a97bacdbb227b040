"""Files that are cut off, of another model, or that would run something: told by name."""

import contextlib
import json
import os
import pathlib
import pickle
import resource
import stat
import zipfile

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eejax.checkpoint.hf import load_pretrained, save, save_pretrained
from eejax.checkpoint.hf.load import pretrained_config
from eejax.checkpoint.hf.torch_file import TorchFile
from eejax.common.errors import CheckpointError, ConfigError
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.models.rotary_config import RotaryConfig

CONFIG = ModelConfig(
    vocab_size=11,
    n_layers=2,
    d_model=8,
    n_heads=2,
    context_length=16,
    d_ff=12,
    norm_eps=1e-6,
    exits=(ExitConfig(1, mlp=True, head="own"),),
)
WEIGHTS = "model.safetensors"
HERE = pathlib.Path(__file__).parent


@pytest.fixture
def model(tmp_path):
    tree = params.init(CONFIG, jax.random.key(0))
    save_pretrained(tmp_path / "model", CONFIG, tree)
    return tmp_path / "model"


def change(path, **values):
    """config.json with other values; None leaves one out."""
    file = path / "config.json"
    whole = json.loads(file.read_text()) | values
    file.write_text(json.dumps({k: v for k, v in whole.items() if v is not None}))


def side(path, **values):
    """The side file with other values, of the model or (digest, model) of its own."""
    file = path / "eejax.json"
    whole = json.loads(file.read_text())
    for name, value in values.items():
        (whole if name in whole else whole["model"])[name] = value
    file.write_text(json.dumps(whole))


def plain(path, **values):
    """As `change`, of the model without exits."""
    for name in ("eejax.json", "eejax_exits.safetensors"):
        (path / name).unlink()
    change(path, **values)


def tensors(path, edit):
    made = load_file(path / WEIGHTS)
    edit(made)
    save_file(made, path / WEIGHTS)


def more(path, **added):
    """The model without exits, of an unknown type, with other tensors {name: shape}."""
    plain(path, model_type="new")
    tensors(path, lambda t: t.update({n: np.ones(s, np.float32) for n, s in added.items()}))


def cut(path, name=WEIGHTS, part=0.7):
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[: int(part * len(data))])


def shards(path, **more):
    """The weights in two files, and what tells of them."""
    made = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    names = sorted(made)
    where = {}
    for file, half in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({n: made[n] for n in half}, path / file)
        where |= dict.fromkeys(half, file)
    index = {"weight_map": where | more}
    (path / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


BREAKS = {
    "cut_off": (cut, r"model.safetensors: cannot be read"),
    "header_cut_off": (lambda p: cut(p, part=0.01), r"model.safetensors: cannot be read"),
    "empty": (lambda p: (p / WEIGHTS).write_bytes(b""), r"model.safetensors: cannot be read"),
    "no_weights": (lambda p: (p / WEIGHTS).unlink(), "holds no weights"),
    "no_config": (lambda p: (p / "config.json").unlink(), "no config.json"),
    "config_cut_off": (lambda p: cut(p, "config.json"), r"config.json: cannot be read"),
    "config_is_a_list": (lambda p: (p / "config.json").write_text("[]"), "must be a JSON object"),
    "shard_missing": (
        lambda p: (shards(p), (p / "b.safetensors").unlink()),
        r"1 of 2 shards.*b.safetensors",
    ),
    "shard_of_another": (
        lambda p: shards(p, other="a.safetensors"),
        r"a.safetensors: has no .'other'",
    ),
    "shard_elsewhere": (lambda p: shards(p, other="../a.safetensors"), "must be in this folder"),
    "no_weight_map": (
        lambda p: (shards(p), (p / f"{WEIGHTS}.index.json").write_text("{}")),
        "weight_map",
    ),
    "tensor_missing": (
        lambda p: tensors(p, lambda t: t.pop("model.norm.weight")),
        r"has no .'model.norm.weight'",
    ),
    "tensor_too_many": (
        lambda p: tensors(p, lambda t: t.update(other=np.zeros(2))),
        r"it has .'other'",
    ),
    "more_layers": (lambda p: change(p, num_hidden_layers=3), r"3 layers.*layers.2"),
    "fewer_layers": (lambda p: change(p, num_hidden_layers=1), r"1 layers.*layers.1"),
    "other_width": (
        lambda p: plain(p, intermediate_size=16),
        r"layers.0.mlp.down_proj.weight has shape \(8, 12\)",
    ),
    "other_vocabulary": (lambda p: plain(p, vocab_size=12), r"has shape \(11, 8\)"),
    "experts": (
        lambda p: plain(p, model_type="mixtral", num_local_experts=8),
        "'mixtral': is a mixture of experts .num_local_experts., which cannot be represented",
    ),
    "latent": (
        lambda p: more(p, **{"model.layers.0.self_attn.kv_a_proj.weight": (3, 3)}),
        "multi-head latent attention",
    ),
    "state_space": (lambda p: plain(p, model_type="mamba", state_size=16), "a state-space"),
    "encoder": (lambda p: plain(p, model_type="t5", is_encoder_decoder=True), "an encoder and"),
    "odd_place": (
        lambda p: more(p, **{f"model.layers.{i}.odd.weight": (3, 3) for i in (0, 1)}),
        r"odd of shape \(3, 3\), whose place is not known",
    ),
    "layers_not_alike": (
        lambda p: more(p, **{"model.layers.1.odd.weight": (3, 3)}),
        "layers that are not alike",
    ),
    "no_sizes": (lambda p: plain(p, model_type="new", hidden_size=None), "nothing of d_model"),
    "no_type": (lambda p: change(p, model_type=None), "model_type is missing"),
    "no_size": (lambda p: change(p, hidden_size=None), "hidden_size is missing"),
    "odd_size": (lambda p: change(p, num_attention_heads=3), r"model_type = 'llama': as .*n_heads"),
    "activation": (lambda p: change(p, hidden_act="mish"), r"hidden_act = 'mish'"),
    "scaling": (
        lambda p: change(p, rope_scaling={"rope_type": "longrope"}),
        r"rope_type = 'longrope'",
    ),
    "phi3_yarn": (
        lambda p: plain(
            p,
            model_type="phi3",
            rope_scaling={"type": "yarn", "long_factor": [2.0] * 2, "short_factor": [1.0] * 2},
        ),
        r"rope_type = 'yarn': must be 'default': a phi3 is scaled by longrope",
    ),
    "no_factor": (
        lambda p: change(p, rope_scaling={"type": "linear"}),
        r"rope_scaling.factor is missing: rope_type 'linear' needs it",
    ),
    "no_low_freq_factor": (
        lambda p: change(p, rope_scaling={"type": "llama3", "factor": 8.0}),
        r"rope_scaling.low_freq_factor is missing",
    ),
    "sees_what_follows": (
        lambda p: plain(p, model_type="gemma3_text", use_bidirectional_attention=True),
        r"use_bidirectional_attention = True: cannot be represented",
    ),
    "alibi": (lambda p: change(p, model_type="falcon", alibi=True), r"alibi = True"),
    "exits_of_another": (
        lambda p: change(p, rms_norm_eps=1e-5),
        r"eejax.json: is of another model.*norm_eps",
    ),
    "exits_cut_off": (lambda p: cut(p, "eejax_exits.safetensors"), "eejax_exits.*cannot be read"),
    "exits_gone": (
        lambda p: (p / "eejax_exits.safetensors").unlink(),
        "eejax_exits.safetensors: is missing",
    ),
    "exits_of_null": (lambda p: side(p, model=None), "eejax.json: model = None: must be an object"),
    "exits_without_model": (lambda p: (p / "eejax.json").write_text("{}"), "eejax.json: model ="),
    "exits_no_list": (lambda p: side(p, exits=3), r"eejax.json: model.*\b3\b"),
    "exits_digest": (lambda p: side(p, digest=3), "eejax.json: digest = 3: must be a string"),
    "layers_a_text": (
        lambda p: change(p, num_hidden_layers="2"),
        "config.json: num_hidden_layers = '2': must be a positive whole number",
    ),
    "width_a_text": (
        lambda p: plain(p, model_type="gemma", hidden_size="8"),
        "hidden_size = '8': must be",
    ),
    "huge": (lambda p: plain(p, head_dim=10**30), "head_dim = 10+: must be .* below 2"),
    "more_than_memory": (
        lambda p: plain(p, intermediate_size=2 * 10**9),
        r"has shape \(8, 12\)|has shape \(12, 8\)",
    ),
    "heads_of_unknown": (
        lambda p: plain(p, model_type="new", num_attention_heads=3),
        "num_attention_heads = 3: must divide",
    ),
    "base_of_unknown": (
        lambda p: plain(p, model_type="new", rope_theta=0),
        "'new': as RotaryConfig.theta = 0",
    ),
    "rotary_a_text": (
        lambda p: change(p, rope_parameters="x"),
        "config.json: rope_parameters = 'x': must be an object",
    ),
    "rotary_a_number": (
        lambda p: change(p, rope_parameters=3),
        "rope_parameters = 3: must be an object",
    ),
    "rotary_false": (
        lambda p: plain(p, model_type="phi3", rope_scaling=False),
        "rope_scaling = False: must be an object",
    ),
    "rotary_of_kinds": (
        lambda p: plain(p, model_type="gemma3_text", rope_parameters={"full_attention": "x"}),
        "rope_parameters.full_attention = 'x': must be an object",
    ),
    "rotary_kind": (
        lambda p: change(p, rope_scaling={"rope_type": {"a": 1}}),
        r"rope_scaling.rope_type = {'a': 1}: must be among default",
    ),
    "activation_no_text": (
        lambda p: change(p, hidden_act={"a": 1}),
        r"hidden_act = {'a': 1}: must be among gelu",
    ),
    "type_no_text": (
        lambda p: change(p, model_type={"a": 1}),
        r"model_type = {'a': 1}: must be a string",
    ),
    "tied_no_switch": (
        lambda p: change(p, tie_word_embeddings="x"),
        "tie_word_embeddings = 'x': must be true or false",
    ),
    "base_no_number": (lambda p: change(p, rope_theta="x"), "rope_theta = 'x': must be a number"),
    "kinds_no_texts": (
        lambda p: plain(p, model_type="mistral", layer_types=[{}, {}]),
        r"layer_types = \[{}, {}\]",
    ),
    "every_0th": (
        lambda p: plain(p, model_type="smollm3", no_rope_layer_interval=0),
        "no_rope_layer_interval = 0: must be positive",
    ),
    "quantised": (
        lambda p: change(p, quantization_config={"quant_method": "gptq"}),
        "quantization_config = .*gptq.*: quantised weights are not read",
    ),
    "exits_unknown": (lambda p: (p / "eejax.json").write_text('{"model": {"a": 1}}'), "eejax.json"),
}


@contextlib.contextmanager
def little_memory():
    """Lists of 10**9 do not fit: without this they would take the machine with them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# model_type, and what it calls the number of layers: of a pattern by layer, plain, and unknown.
COUNTS = {"smollm3": "num_hidden_layers", "gpt2": "n_layer", "new": "n_layers"}


@pytest.mark.parametrize("kind", COUNTS)
def test_many_layers_are_told_before_any_is_made(model, kind):
    plain(model, **{"model_type": kind, "num_hidden_layers": None, COUNTS[kind]: 10**9})
    message = f"config.json: {COUNTS[kind]} = 1000000000: must be 2, as many layers as the weights"
    with little_memory(), pytest.raises(CheckpointError, match=message):
        load_pretrained(model)


def test_many_layers_beside_are_told_before_any_is_made(model):
    side(model, n_layers=10**9)
    with little_memory(), pytest.raises(CheckpointError, match="n_layers = 1000000000 and not 2"):
        load_pretrained(model)


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_wrong_is_named(model, name):
    spoil, message = BREAKS[name]
    spoil(model)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(model)


@pytest.mark.parametrize("read", [load_pretrained, pretrained_config])
def test_type_must_be_a_text_for_every_reader(model, read):
    for kind in (["llama"], {"a": 1}, 5, True):
        change(model, model_type=kind)
        with pytest.raises(CheckpointError, match="config.json: model_type = .*: must be a string"):
            read(model)


@pytest.mark.parametrize("read", [load_pretrained, pretrained_config])
def test_quantised_weights_are_refused_by_every_reader(model, read):
    change(model, quantization_config={"bits": 4})
    with pytest.raises(CheckpointError, match="quantised weights are not read"):
        read(model)


def test_exits_without_their_settings_are_told(model):
    (model / "eejax.json").unlink()
    with pytest.warns(UserWarning, match="eejax_exits.safetensors is not read, because eejax.json"):
        assert not load_pretrained(model).config.exits


def test_exits_come_back(model):
    loaded = load_pretrained(model)
    assert loaded.config == CONFIG
    jax.tree.map(
        np.testing.assert_array_equal, loaded.params, params.init(CONFIG, jax.random.key(0))
    )


def test_shards_are_one_model(model):
    whole = load_pretrained(model).params
    shards(model)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(model).params, whole)


def test_several_files_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "SHARD", 700)
    tree = params.init(CONFIG, jax.random.key(0))
    save_pretrained(tmp_path / "model", CONFIG, tree)
    assert len([*(tmp_path / "model").glob("model-*-of-*.safetensors")]) > 3
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(tmp_path / "model").params, tree)


@contextlib.contextmanager
def no_renaming_of(name):
    """A disk that is full when a file or folder is to get this name."""
    replace = os.replace

    def full(source, target):
        if pathlib.Path(target).name == name:
            raise OSError(28, "No space left on device")
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", full)
        yield


@contextlib.contextmanager
def small_files():
    """No file may grow beyond config.json: writing weights fails within safetensors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


FAILURES = {
    "exits": (lambda: no_renaming_of("eejax_exits.safetensors"), "No space left"),
    "folder": (lambda: no_renaming_of("new"), "No space left"),
    "weights": (small_files, "File too large"),
}


def test_what_lies_beside_is_left_alone(tmp_path):
    (tmp_path / "new.part").mkdir()
    (tmp_path / "new.part" / "mine").write_text("kept")
    save_pretrained(tmp_path / "new", CONFIG, params.init(CONFIG, jax.random.key(0)))
    assert (tmp_path / "new.part" / "mine").read_text() == "kept"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "new.part"]


@pytest.mark.parametrize("mask", [0o022, 0o007])
def test_all_files_have_the_mode_of_open(tmp_path, mask):
    old = os.umask(mask)
    try:
        save_pretrained(tmp_path / "new", CONFIG, params.init(CONFIG, jax.random.key(0)))
    finally:
        os.umask(old)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "new").iterdir()}
    assert {WEIGHTS, "eejax_exits.safetensors", "config.json"} <= set(modes)
    assert set(modes.values()) == {0o666 & ~mask}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o777 & ~mask


def test_a_place_that_cannot_be_written_is_named():
    with pytest.raises(CheckpointError, match="^/proc/foo: cannot be written") as told:
        save_pretrained("/proc/foo", CONFIG, params.init(CONFIG, jax.random.key(0)))
    assert ".part" not in str(told.value)


@pytest.mark.parametrize("name", FAILURES)
def test_nothing_is_written_over_and_nothing_half_written_stays(model, tmp_path, name):
    fails, message = FAILURES[name]
    tree = params.init(CONFIG, jax.random.key(0))
    with pytest.raises(CheckpointError, match="is there already"):
        save_pretrained(model, CONFIG, tree)
    with fails(), pytest.raises(CheckpointError, match=rf"new: cannot be written .*{message}"):
        save_pretrained(tmp_path / "new", CONFIG, tree)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    save_pretrained(tmp_path / "new", CONFIG, tree)
    assert load_pretrained(tmp_path / "new").config == CONFIG


def test_a_model_of_no_family_is_told(tmp_path):
    odd = CONFIG.replace(rotary=RotaryConfig(interleaved=True), qkv_bias=True)
    with pytest.raises(ConfigError, match="no model of any family.*Nearest is"):
        save_pretrained(tmp_path / "odd", odd, params.init(odd, jax.random.key(0)))
    with pytest.raises(ConfigError, match="family = 'bert'"):
        save_pretrained(tmp_path / "odd", CONFIG, {}, family="bert")
    assert not (tmp_path / "odd").exists()


def test_a_name_that_is_almost_known_and_a_file_that_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match="smolm2: no such folder.*Did you mean 'smollm2'"):
        load_pretrained("smolm2")
    with pytest.raises(CheckpointError, match=r"none.gguf: no such file\.$"):
        load_pretrained(tmp_path / "none.gguf")


def test_names_that_are_no_folder(tmp_path):
    for source in (tmp_path / "none", "no such", "a/b/c"):
        with pytest.raises(CheckpointError, match="no such folder"):
            load_pretrained(source)
    with pytest.raises(CheckpointError, match="has no config.json"):
        load_pretrained(tmp_path)


def test_tensors_of_a_torch_file():
    file = TorchFile(HERE / "tensors.bin")
    a = np.arange(24, dtype=np.float32).reshape(4, 6)
    want = {
        "whole": a,
        "view": a[1:3, ::2],
        "transposed": a.T,
        "half": a.astype(np.float16),
        "brain": a,
        "whole_numbers": np.arange(5),
        "parameter": a[0],
        "scalar": np.float32(2.5),
        "empty": np.zeros((0, 3), np.float32),
    }
    assert {n: np.shape(v) for n, v in want.items()} == dict(file.names())
    for name, values in want.items():
        np.testing.assert_array_equal(file.read(name).astype(values.dtype), values)


class _Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_torch_file_runs_nothing(model, tmp_path):
    (model / WEIGHTS).unlink()
    made = tmp_path / "made"
    with zipfile.ZipFile(model / "pytorch_model.bin", "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps({"a": _Runs(made)}))
    with pytest.raises(CheckpointError, match="not a file of weights alone.*Nothing of it was run"):
        load_pretrained(model)
    assert not made.exists()


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_torch_file_that_is_cut_off(tmp_path, part):
    data = (HERE / "tensors.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(data[: int(part * len(data))])
    with pytest.raises(CheckpointError, match="a.bin: cannot be read"):
        TorchFile(tmp_path / "a.bin")
