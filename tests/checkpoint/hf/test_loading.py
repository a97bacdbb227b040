"""Loading onto meshes, into other dtypes, and from files that are other than most."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hf_models import LENGTH, RECORDED, recorded, tokens
from safetensors.numpy import load_file, save_file

from eejax.checkpoint.hf import load_pretrained, save_pretrained
from eejax.checkpoint.hf.load import fetched
from eejax.common.errors import CheckpointError, ConfigError
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig, make_mesh

PLAIN = ModelConfig(vocab_size=61, n_layers=2, d_model=8, n_heads=2, context_length=16, d_ff=12)
EXITS = PLAIN.replace(
    exits=(ExitConfig(1, mlp=True, head="own", router=4, mlp_width=4, head_rank=3),)
)
WEIGHTS = "model.safetensors"


def drawn(config):
    """Parameters whose scales and biases are no powers of 2, of which rounding shows."""
    rng = np.random.default_rng(0)

    def draw(p):
        return jnp.float32(p.fill + (p.std or 0.1) * rng.standard_normal(p.shape))

    return params.map_params(draw, params.abstract(config))


def logits(tree, config, e, asked):
    """[t, v] of exit e, padded tokens too."""

    @jax.jit
    def run(tree, asked):
        states = transformer.exit_states(tree, config, asked, which=(e,))
        return exits.logits(exits.head(tree, config, e), states[0])

    return np.asarray(run(tree, asked.astype(np.int32)))[0]


def by_name(tree):
    return {jax.tree_util.keystr(p): a for p, a in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("config", [PLAIN, EXITS], ids=["plain", "exits"])
def test_a_padded_vocabulary_comes_back(config, tmp_path):
    config = config.replace(vocab_multiple=32)
    tree = drawn(config)
    save_pretrained(tmp_path / "model", config, tree)
    assert load_file(tmp_path / "model" / WEIGHTS)["model.embed_tokens.weight"].shape == (61, 8)
    loaded = load_pretrained(tmp_path / "model")
    assert loaded.config == config
    for name, leaf in by_name(loaded.params).items():
        want = np.array(by_name(tree)[name])
        if leaf.shape[:1] == (64,) and "exits" not in name:  # what others read has no such rows
            want[61:] = 0
        np.testing.assert_array_equal(leaf, want)
    asked = np.arange(12)[None]
    for e in range(config.n_exits + 1):
        np.testing.assert_array_equal(
            logits(loaded.params, config, e, asked), logits(tree, config, e, asked)
        )


def test_an_odd_vocabulary_is_padded_for_two_devices(tmp_path):
    two = make_mesh(MeshConfig(model=2))
    recorded("gpt2", tmp_path / "gpt2")
    loaded = load_pretrained(tmp_path / "gpt2", mesh=two)
    assert loaded.config.padded_vocab == 62
    table = loaded.params["embed"]["tokens"]
    assert {s.data.shape[0] for s in table.addressable_shards} == {31}
    assert not np.asarray(table)[61].any()
    got = logits(loaded.params, loaded.config, 0, tokens(LENGTH))
    assert np.abs(got[:, :61] - RECORDED["gpt2/logits"]).max() <= 1e-4
    assert (got[:, 61] < -1e9).all()

    # An exit's own head, which lies in the side file.
    save_pretrained(tmp_path / "exits", EXITS, drawn(EXITS))
    one, cut = (load_pretrained(tmp_path / "exits", mesh=mesh) for mesh in (None, two))
    asked = np.arange(12)[None]
    for e in (0, 1):
        want = logits(one.params, one.config, e, asked)
        got = logits(cut.params, cut.config, e, asked)
        # Float32 sums of 8 to 12 numbers of order 1, in another order.
        np.testing.assert_allclose(got[:, :61], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_model_of_fewer_bits_keeps_its_own_exits_and_small_leaves(dtype, tmp_path):
    tree = drawn(EXITS)
    save_pretrained(tmp_path / "model", EXITS, tree)
    loaded = load_pretrained(tmp_path / "model", dtype=dtype)
    for name, leaf in by_name(loaded.params).items():
        small = "norm" in name or "bias" in name or "router" in name
        assert leaf.dtype == jnp.dtype("float32" if small else dtype), name
        want = by_name(tree)[name]
        np.testing.assert_array_equal(leaf, want if small else want.astype(dtype))
    # Of other parameters they are refused as ever.
    made = load_file(tmp_path / "model" / WEIGHTS)
    save_file({n: a * np.float32(1.1) for n, a in made.items()}, tmp_path / "model" / WEIGHTS)
    with pytest.raises(CheckpointError, match="trained on other parameters"):
        load_pretrained(tmp_path / "model", dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_fewer_bits_beside_exits(dtype, tmp_path):
    # A shared head beside a tied one lies in the side file, with all of its bits.
    config = PLAIN.replace(head="tied", exits=(ExitConfig(1, head="shared"),))
    save_pretrained(tmp_path / "model", config, drawn(config), dtype=dtype)
    for other in ("float32", "bfloat16", "float16"):
        assert load_pretrained(tmp_path / "model", dtype=other).config.n_exits == 1


def test_scaled_matrices_are_rounded_once(tmp_path):
    recorded("granite", tmp_path / "granite")
    file = tmp_path / "granite" / WEIGHTS
    stored = {n: a.astype(ml_dtypes.bfloat16) for n, a in load_file(file).items()}
    save_file(stored, file)
    want = stored["model.layers.1.mlp.down_proj.weight"].astype(np.float64).T * 0.4
    for dtype, rounding in (("float32", 2**-23), ("bfloat16", 2**-8)):
        tree = load_pretrained(tmp_path / "granite", dtype=dtype).params
        got = np.asarray(tree["layers"]["mlp"]["down"])[1].astype(np.float64)
        assert np.abs(got / want - 1).max() <= rounding


def test_projections_of_opt_beside_their_tied_head(tmp_path):
    recorded("opt_350m", tmp_path / "opt")
    file = tmp_path / "opt" / WEIGHTS
    made = load_file(file)
    # As .bin files hold it, which know no tensors that are the same.
    made["lm_head.weight"] = made["model.decoder.embed_tokens.weight"].copy()
    save_file(made, file)
    loaded = load_pretrained(tmp_path / "opt")
    got = logits(loaded.params, loaded.config, 0, tokens(LENGTH))
    assert np.abs(got - RECORDED["opt_350m/logits"]).max() <= 1e-4


def test_gelu_is_its_tanh_form_in_the_first_gemmas_alone(tmp_path):
    # transformers' configuration_gemma.py, GemmaConfig.__post_init__
    recorded("gemma", tmp_path / "gemma", hidden_act="gelu")
    loaded = load_pretrained(tmp_path / "gemma")
    got = logits(loaded.params, loaded.config, 0, tokens(LENGTH))
    assert np.abs(got - RECORDED["gemma/logits"]).max() <= 1e-4
    recorded("gemma2", tmp_path / "gemma2", hidden_activation="gelu")
    assert load_pretrained(tmp_path / "gemma2").config.activation == "gelu"
    # Nor is an exact one written as a gelu that is read as another.
    with pytest.raises(ConfigError, match="activation = 'gelu' and not 'gelu_tanh'"):
        save_pretrained(
            tmp_path / "exact", loaded.config.replace(activation="gelu"), {}, family="gemma"
        )


@pytest.mark.parametrize("weights", [WEIGHTS, "pytorch_model.bin"])
def test_everything_that_is_read_and_no_weights_twice_come_from_the_hub(
    weights, tmp_path, monkeypatch
):
    hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    read = ["config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", weights]
    offered = {*read, "pytorch_model.bin", "model.onnx", "README.md"}

    def download(name, allow_patterns):
        assert name == "org/model"
        for file in hub.utils.filter_repo_objects(offered, allow_patterns=allow_patterns):
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert fetched("org/model") == tmp_path
    assert {file.name for file in tmp_path.iterdir()} == {*read}
