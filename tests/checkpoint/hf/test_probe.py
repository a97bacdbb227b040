"""Models of unknown types: recognised by their tensors, compared with transformers."""

import hf_models
import jax
import numpy as np
import pytest
from hf_models import LENGTH, RECORDED, UNKNOWN, recorded, saved, theirs, tokens

from eejax.checkpoint.hf import load_pretrained, probe
from eejax.common.errors import CheckpointError
from eejax.models import exits, transformer

# Of which all that matters can be read off their tensors and settings.
TOLD = [
    "gpt2", "opt", "falcon_7b", "phi", "phi3", "llama", "llama_tied", "llama3", "qwen2", "qwen3",
    "stablelm_parallel", "olmo2", "gpt_neox_sequential",
]  # fmt: skip


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


def test_what_is_compared_is_told(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    path = tmp_path / "ministral"  # windows of 16 tokens, of which 16 tokens show nothing
    saved("ministral", path)
    loaded = load_pretrained(path, dtype="bfloat16")  # rounds as much as a wrong model is off
    assert "computes what transformers does over 96 tokens" in loaded.guessed
    assert loaded.config.dtype == "bfloat16"
    with monkeypatch.context() as patch:
        patch.setattr(probe, "variants", lambda config: [config.replace(sliding_window=17)])
        with pytest.raises(CheckpointError, match="computes something else"):
            probe.verified(path, loaded.config, loaded.params)
    for name, most, told in (
        ("MOST_TOKENS", 12, "over 12 tokens, to .* only more than 16 tokens tell"),
        ("MOST_PARAMETERS", 1000, "nothing was compared with .it has more than 1e.03 parameters"),
    ):
        with monkeypatch.context() as patch, pytest.warns(UserWarning, match=f"a guess.*{told}"):
            patch.setattr(probe, name, most)
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
