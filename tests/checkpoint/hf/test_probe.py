"""Models of unknown types: recognised by their tensors, compared with transformers."""

import json
import os

import hf_models
import jax
import numpy as np
import pytest
from hf_models import LENGTH, RECORDED, REFUSED, UNKNOWN, recorded, saved, theirs, tokens
from safetensors.numpy import save_file

from eejax.checkpoint.hf import compare, load_pretrained
from eejax.checkpoint.hf.fields import Raw
from eejax.checkpoint.hf.load import pretrained_config
from eejax.common.errors import CheckpointError
from eejax.models import exits, transformer

# Of which all that matters can be read off their tensors and settings.
TOLD = ["phi", "llama", "llama_tied", "llama3", "qwen2", "qwen3", "olmo2"]
# Which must be compared, and why; of a type that transformers does not know, nothing can be.
UNTOLD = {
    "gpt2": r"transformer.h.0.attn.c_attn.weight, a fused projection whose order is never",
    "falcon_7b": r"h.0.self_attention.query_key_value.weight, a fused projection",
    "phi3": r"model.layers.0.mlp.gate_up_proj.weight, a fused projection",
    "opt": r"do_layer_norm_before = True, which nothing here reads",
    "stablelm_parallel": r"use_parallel_residual = True, which nothing here reads",
    "granite": r"attention_multiplier = 0.2 .a scale., which nothing here reads",
}


def logits(loaded):
    config = loaded.config

    @jax.jit
    def run(tree, asked):
        states = transformer.exit_states(tree, config, asked)
        return exits.logits(exits.head(tree, config, 0), states[-1])

    got = run(loaded.params, tokens(LENGTH).astype(np.int32))
    return np.asarray(got)[0, :, : config.vocab_size]


@pytest.mark.parametrize("name", TOLD)
def test_a_known_model_under_another_name(name, tmp_path):
    recorded(name, tmp_path / name, model_type="of_nobody")
    with pytest.warns(UserWarning, match="'of_nobody' is not known.*a guess"):
        loaded = load_pretrained(tmp_path / name)
    assert np.abs(logits(loaded) - RECORDED[f"{name}/logits"]).max() <= 1e-4


@pytest.mark.parametrize("name", UNTOLD)
def test_what_nothing_can_verify_is_refused(name, tmp_path):
    recorded(name, tmp_path / name, model_type="of_nobody")
    with pytest.raises(CheckpointError, match="nothing verifies.*" + UNTOLD[name]):
        load_pretrained(tmp_path / name)


LLAMA = {
    "model.embed_tokens.weight": (11, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (11, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (8, 8),
    "model.layers.0.self_attn.v_proj.weight": (8, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
}
SIZES = dict(
    vocab_size=11,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=16,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
)
INTERNLM2 = {
    "model.tok_embeddings.weight": (11, 8),
    "model.norm.weight": (8,),
    "output.weight": (11, 8),
    "model.layers.0.attention.wqkv.weight": (16, 8),
    "model.layers.0.attention.wo.weight": (8, 8),
    "model.layers.0.attention_norm.weight": (8,),
    "model.layers.0.ffn_norm.weight": (8,),
    "model.layers.0.feed_forward.w1.weight": (12, 8),
    "model.layers.0.feed_forward.w3.weight": (12, 8),
    "model.layers.0.feed_forward.w2.weight": (8, 12),
}
MPT = {
    "transformer.wte.weight": (11, 8),
    "transformer.norm_f.weight": (8,),
    "transformer.blocks.0.norm_1.weight": (8,),
    "transformer.blocks.0.norm_2.weight": (8,),
    "transformer.blocks.0.attn.Wqkv.weight": (24, 8),
    "transformer.blocks.0.attn.out_proj.weight": (8, 8),
    "transformer.blocks.0.ffn.up_proj.weight": (32, 8),
    "transformer.blocks.0.ffn.down_proj.weight": (8, 32),
}
# type -> (settings, tensors, the cause in the family's own words)
CAUSES = {
    "internlm2": ({}, INTERNLM2, "attention.wqkv.weight, a fused projection whose order is never"),
    "mpt": (
        dict(
            d_model=8,
            n_layers=1,
            n_heads=2,
            max_seq_len=16,
            hidden_size=None,
            rope_theta=None,
            num_hidden_layers=None,
            attn_config=dict(alibi=True, clip_qkv=None),
        ),
        MPT,
        r"ALiBi .attn_config.alibi = true.",
    ),
    "mpt_clipped": (
        dict(attn_config=dict(clip_qkv=8)),
        MPT,
        r"attn_config.clip_qkv = 8: clipped queries",
    ),
    "olmo": ({}, {n: s for n, s in LLAMA.items() if "norm" not in n}, "norms without weights"),
    "xglm": (
        dict(attention_heads=2, num_attention_heads=None, rope_theta=None, scale_embedding=True),
        LLAMA,
        "neither a table of positions nor settings of rotary ones or ALiBi: others .sinusoidal",
    ),
    "gemma3n": (
        dict.fromkeys(SIZES) | dict(text_config=SIZES),
        LLAMA,
        "in a nested text_config",
    ),
    "persimmon": (
        dict(qk_layernorm=True),
        LLAMA
        | {
            f"model.layers.0.self_attn.{x}_layernorm.{part}": (4,)
            for x in "qk"
            for part in ("weight", "bias")
        },
        "self_attn.[qk]_layernorm.bias, for which there is no place",
    ),
    "cohere": (dict(logit_scale=0.0625), LLAMA, r"logit_scale = 0.0625 .a scale., which nothing"),
    "minicpm": (dict(scale_emb=12, dim_model_base=256), LLAMA, r"scale_emb = 12.*dim_model_base"),
    "capped": (dict(final_logit_softcapping=30.0), LLAMA, "softcapping = 30.0: a soft cap"),
    "turned": (dict(rope_interleaved=True), LLAMA, "rope_interleaved = True, which nothing"),
}


@pytest.mark.parametrize("kind", CAUSES)
def test_the_cause_is_told_in_the_words_of_the_family(kind, tmp_path):
    settings, shapes, cause = CAUSES[kind]
    values = {"model_type": f"a_{kind}"} | SIZES | settings
    config = {name: value for name, value in values.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=cause):
        load_pretrained(tmp_path)


def test_a_tied_head_of_an_unknown_type_under_its_own_name(tmp_path):
    tensors = {n: np.ones(s, np.float32) for n, s in LLAMA.items() if "embed" not in n}
    save_file(tensors, tmp_path / "model.safetensors")
    config = dict(SIZES, model_type="of_nobody", tie_word_embeddings=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="a guess"):
        loaded = load_pretrained(tmp_path)
    assert loaded.config.head == "tied" and np.all(loaded.params["embed"]["tokens"] == 1)


def test_what_is_compared_is_told(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    path = tmp_path / "ministral"  # windows of 16 tokens, of which 16 tokens show nothing
    saved("ministral", path)
    loaded = load_pretrained(path, dtype="bfloat16")  # rounds as much as a wrong model is off
    assert "computes what transformers does over 96 tokens" in loaded.guessed
    assert loaded.config.dtype == "bfloat16"
    raw = Raw(path / "config.json", loaded.raw)
    with monkeypatch.context() as patch:
        patch.setattr(compare, "variants", lambda config: [config.replace(sliding_window=17)])
        with pytest.raises(CheckpointError, match="computes something else"):
            compare.verified(raw, loaded.config, loaded.params)
    for name, most, told in (
        ("MAX_TOKENS", 12, "over 12 tokens, to .* only more than 16 tokens tell"),
        ("MAX_PARAMETERS", 1000, "nothing was compared with .it has more than 1e.03 parameters"),
    ):
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match=f"a guess.*{told}"):
            patch.setattr(compare, name, most)
            (path / name).touch()  # so that the folder is compared anew
            load_pretrained(path)


def test_a_folder_is_compared_once_until_its_files_change(tmp_path, monkeypatch):
    recorded("llama", tmp_path / "m", model_type="of_nobody")
    seen = []

    def verified(raw, config, tree, say):
        seen.append(raw.path)
        return compare.ComparedConfig(config.replace(norm_plus_one=True), True, "which fits")

    monkeypatch.setattr(compare, "incomparable", lambda path, config: "")
    monkeypatch.setattr(compare, "verified", verified)
    first, again = (load_pretrained(tmp_path / "m", dtype="bfloat16").config for _ in range(2))
    described, _ = pretrained_config(tmp_path / "m")
    assert first.norm_plus_one and again == first and len(seen) == 1
    assert described == first.replace(dtype="float32")
    os.utime(tmp_path / "m" / "config.json", ns=(0, 0))
    assert pretrained_config(tmp_path / "m")[0] == described and len(seen) == 2


def test_code_of_a_folder_is_never_run(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    path, made = tmp_path / "model", tmp_path / "made"
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    recorded("llama", path, model_type="of_nobody", auto_map=code)
    (path / "own.py").write_text(f"open({str(made)!r}, 'w').close()\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers asks whether to run it
    with pytest.warns(UserWarning, match="a guess, which nothing was compared with"):
        load_pretrained(path)
    assert not made.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", UNKNOWN)
def test_models_that_only_transformers_knows(name, tmp_path):
    pytest.importorskip("transformers")
    saved(name, tmp_path / name)
    want, _ = theirs(hf_models.opened(tmp_path / name))
    loaded = load_pretrained(tmp_path / name)
    assert "computes what transformers does" in loaded.guessed
    assert np.abs(logits(loaded) - want).max() <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_models_of_transformers_that_are_refused(name, tmp_path):
    pytest.importorskip("transformers", reason="make bench-env installs transformers")
    saved(name, tmp_path / name)
    with pytest.raises(CheckpointError, match=REFUSED[name][2]):
        load_pretrained(tmp_path / name)
