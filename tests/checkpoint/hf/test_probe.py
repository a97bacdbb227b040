"""Models of unknown types: recognised by their tensors, compared with transformers."""

import hf_models
import jax
import numpy as np
import pytest
from hf_models import LENGTH, RECORDED, UNKNOWN, recorded, saved, theirs, tokens

from eejax.checkpoint.hf import load_pretrained
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


@pytest.mark.slow
@pytest.mark.parametrize("name", UNKNOWN)
def test_models_that_only_transformers_knows(name, tmp_path):
    pytest.importorskip("transformers")
    saved(name, tmp_path / name)
    want, _ = theirs(hf_models.opened(tmp_path / name))
    loaded = load_pretrained(tmp_path / name)
    assert "computes what transformers does" in loaded.guessed
    assert np.abs(logits(loaded) - want).max() <= 1e-4
