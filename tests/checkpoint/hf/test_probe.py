"""Models of unknown types: recognised by their tensors, compared with transformers."""

import hf_models
import jax
import numpy as np
import pytest
from hf_models import LENGTH, RECORDED, UNKNOWN, recorded, saved, theirs, tokens

from eejax.checkpoint.hf import compare, load_pretrained
from eejax.checkpoint.hf.fields import Raw
from eejax.common.errors import CheckpointError
from eejax.models import exits, transformer

# Of which all that matters can be read off their tensors and settings.
TOLD = ["phi", "llama", "llama_tied", "llama3", "qwen2", "qwen3", "olmo2"]
# Which must be compared, and why; of a type that transformers does not know, nothing can be.
UNTOLD = {
    "gpt2": r"order within transformer.h.0.attn.c_attn.weight, a fused projection",
    "falcon_7b": r"order within transformer.h.0.self_attention.query_key_value.weight",
    "phi3": r"order within model.layers.0.mlp.gate_up_proj.weight",
    "opt": r"do_layer_norm_before = True: a setting",
    "stablelm_parallel": r"use_parallel_residual = True: a setting",
    "granite": r"attention_multiplier = 0.2: a scale",
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
    with pytest.raises(CheckpointError, match=UNTOLD[name] + ".*compared with nothing"):
        load_pretrained(tmp_path / name)


def test_what_is_compared_is_told(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    path = tmp_path / "ministral"  # windows of 16 tokens, of which 16 tokens show nothing
    saved("ministral", path)
    loaded = load_pretrained(path, dtype="bfloat16")  # rounds as much as a wrong model is off
    assert "computes what transformers does over 96 tokens" in loaded.guessed
    assert loaded.config.dtype == "bfloat16"
    raw = Raw(path / "config.json", loaded.raw)
    rules = loaded.family.rules(loaded.config, raw)
    with monkeypatch.context() as patch:
        patch.setattr(compare, "variants", lambda config: [config.replace(sliding_window=17)])
        with pytest.raises(CheckpointError, match="computes something else"):
            compare.verified(raw, loaded.config, loaded.params, rules)
    for name, most, told in (
        ("MOST_TOKENS", 12, "over 12 tokens, to .* only more than 16 tokens tell"),
        ("MOST_PARAMETERS", 1000, "nothing was compared with .it has more than 1e.03 parameters"),
    ):
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match=f"a guess.*{told}"):
            patch.setattr(compare, name, most)
            load_pretrained(path)


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
