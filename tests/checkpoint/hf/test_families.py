"""Settings of config.json that change logits: each is read, or refused by its name."""

import json

import jax
import numpy as np
import pytest
from hf_models import FILE, GQA
from hf_sweep import SPACE, draw

from eejax.checkpoint.hf import save_pretrained
from eejax.checkpoint.hf.families import FAMILIES
from eejax.checkpoint.hf.fields import Raw
from eejax.checkpoint.hf.keys import is_idle
from eejax.common.errors import CheckpointError, ConfigError
from eejax.models import params
from eejax.models.config import ModelConfig
from eejax.models.rotary_config import RotaryConfig

KEYS = json.loads(FILE.with_name("config_keys.json").read_text())
# Keys that a family's model reads and that change no logits of those that are read.
BUT = {
    "phi3": {"original_max_position_embeddings": "of longrope, which is refused"},
    "gemma3_text": dict.fromkeys(
        ("image_token_id", "mm_tokens_per_image", "text_config", "vision_config"),
        "of its model of images, in the same module",
    ),
}


def raw(path, kind, **values):
    return Raw(path / "config.json", {"model_type": kind} | values)


@pytest.mark.parametrize("family", SPACE)
def test_every_key_that_transformers_reads_is_read_or_idle(family, tmp_path):
    seen = set()
    for number in range(60):
        one = Raw(tmp_path / "config.json", draw(family, number).config)
        try:
            FAMILIES[family].read(one)
        except CheckpointError:
            pass
        seen |= one.fields_read
    left = {key for key in KEYS[family] if not is_idle(key)} - seen - BUT.get(family, {}).keys()
    assert not left
    assert {*SPACE} == {*FAMILIES} == {*KEYS}


@pytest.mark.parametrize("family", SPACE)
def test_a_size_of_heads_is_read_or_refused_by_name(family, tmp_path):
    base, _ = SPACE[family]
    given = raw(tmp_path, family, **base, num_key_value_heads=2, head_dim=16)
    try:
        assert FAMILIES[family].read(given).head_dim == 16
    except CheckpointError as error:
        assert "head_dim = 16: must be 8" in str(error)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(per_layer_config={"0": {"num_attention_heads": 2}}), "per_layer_config"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5: must be 1"),
        (dict(sliding_window=0, model_type="mistral"), "sliding_window = 0: must be a positive"),
        (dict(sliding_window="x", model_type="phi3"), "sliding_window = 'x'"),
        (
            dict(model_type="mistral", layer_types=["sliding_attention"] + ["full_attention"] * 2),
            "layer_types = .*a mistral has windows in all of its layers, or in none",
        ),
        (
            dict(rope_scaling=dict(type="yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.5)),
            "rope_scaling.mscale = 0.7: .*attention is scaled by",
        ),
        (
            dict(rope_scaling=dict(type="yarn", factor=4.0, attention_factor=[1])),
            "rope_scaling.attention_factor = .1.: must be a number",
        ),
        # Whose scaling transformers overlooks (configuration_gemma3.py).
        (
            dict(model_type="gemma3_text", rope_scaling=dict(type="linear", factor=4.0)),
            "rope_scaling.type = 'linear': must be called rope_type",
        ),
        (dict(rope_scaling=dict(type="dynamic", factor=4.0)), "rope_scaling.rope_type = 'dynamic'"),
        (
            dict(rope_parameters=dict(full_attention=dict(rope_type="default"))),
            "rope_parameters = .*must be the same for all layers",
        ),
    ],
)
def test_what_cannot_be_represented_is_named(values, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        one = raw(tmp_path, **dict(kind="llama") | GQA | values)
        FAMILIES[one("model_type")].read(one)


def test_the_scaling_table_of_old_files_goes_before_the_new_one(tmp_path):
    """transformers' modeling_rope_utils.py, convert_rope_params_to_dict."""
    new, old = dict(rope_type="default", rope_theta=7.0), dict(type="linear", factor=2.0)
    one = raw(tmp_path, "llama", **GQA, rope_parameters=new, rope_scaling=old, rope_theta=9.0)
    want = RotaryConfig(theta=9.0, scaling="linear", factor=2.0)
    assert FAMILIES["llama"].read(one).rotary == want


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
@pytest.mark.parametrize("within", [{}, dict(original_max_position_embeddings=64)])
def test_the_original_context_beside_the_table_goes_before_one_within(kind, within, tmp_path):
    scaling = dict(rope_type=kind, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0) | within
    beside = dict(original_max_position_embeddings=16)
    one = raw(tmp_path, "llama", **GQA, rope_scaling=scaling, **beside)
    assert FAMILIES["llama"].read(one).rotary.original_context == 16
    one = raw(tmp_path, "llama", **GQA, rope_scaling=scaling)
    assert FAMILIES["llama"].read(one).rotary.original_context == (64 if within else 96)


PLAIN = ModelConfig(
    vocab_size=61, n_layers=4, d_model=32, n_heads=4, context_length=64, d_ff=48, norm_eps=1e-6
)
GEMMA = PLAIN.replace(
    norm_plus_one=True,
    norm_placement="pre_post",
    activation="gelu_tanh",
    head="tied",
    embedding_scale=32**0.5,
)


def written(path, config, family=None):
    kind = save_pretrained(path, config, params.init(config, jax.random.key(0)), family=family)
    return kind, json.loads((path / "config.json").read_text())


@pytest.mark.parametrize(
    ("config", "family", "kind", "window"),
    [
        (PLAIN.replace(sliding_window=(None, 8, None, 8)), None, "smollm3", 8),
        (PLAIN.replace(sliding_window=8), None, "mistral", 8),
        # A mask of a window is made for a Gemma that has none, too.
        (GEMMA.replace(attention_softcap=50.0, logit_softcap=30.0), "gemma2", "gemma2", 64),
        (GEMMA.replace(qk_norm="head"), "gemma3_text", "gemma3_text", 64),
    ],
)
def test_windows_are_written_as_transformers_reads_them(config, family, kind, window, tmp_path):
    found, values = written(tmp_path / "m", config, family)
    assert (found, values["sliding_window"]) == (kind, window)
    one = Raw(tmp_path / "config.json", values)
    read = FAMILIES[kind].read(one)
    assert [read.window(i) for i in range(4)] == [config.window(i) for i in range(4)]


@pytest.mark.parametrize(
    ("config", "family", "message"),
    [
        (PLAIN.replace(sliding_window=(8, 5, 8, 8)), None, "any family.*sliding_window = .8, 5"),
        (PLAIN.replace(sliding_window=(8, 5, 8, 8)), "smollm3", "must be of one size"),
        (PLAIN.replace(sliding_window=(None, 8) * 2), "phi3", "must be the same in all layers"),
        (PLAIN.replace(d_model=30, head_dim=8), "llama", "n_heads = 4: must divide d_model .30."),
    ],
)
def test_what_transformers_would_not_open_is_not_written(config, family, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        written(tmp_path / "m", config, family)
    assert not (tmp_path / "m").exists()


def test_a_width_that_heads_do_not_divide_finds_a_family(tmp_path):
    kind, values = written(tmp_path / "m", PLAIN.replace(d_model=30, head_dim=8))
    assert kind != "llama" and values["head_dim"] == 8


def test_numbers_of_one_kind_are_the_same_everywhere():
    """The sweep is drawn alike in every run."""
    first = draw("llama", 3)
    assert first == draw("llama", 3) and first.config != draw("llama", 4).config
    assert np.unique([draw("opt", n).stored for n in range(60)]).size > 5
