"""Models of every family against what transformers made of them (recorded.npz; record.py)."""

import jax
import numpy as np
import pytest
from hf_models import LENGTH, MODELS, NEW, PROMPT, RECORDED, recorded, tokens

from eejax.checkpoint.hf import load_pretrained, save_pretrained
from eejax.inference import Generator
from eejax.models import exits, transformer


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text(name, tmp_path):
    recorded(name, tmp_path / "theirs")
    loaded = load_pretrained(tmp_path / "theirs")
    config = loaded.config

    @jax.jit
    def logits(tree, asked):
        states = transformer.exit_states(tree, config, asked)
        return exits.logits(exits.head(tree, config, 0), states[-1])

    got = np.asarray(logits(loaded.params, tokens(LENGTH).astype(np.int32)))
    want = RECORDED[f"{name}/logits"]
    assert np.abs(got[0, :, : config.vocab_size] - want).max() <= 1e-4
    made = Generator.make(loaded.params, config, "full").generate(tokens(PROMPT).tolist(), NEW)
    assert made.ids(0) == RECORDED[f"{name}/new"].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_costs_no_more_than_it_costs_transformers(name, tmp_path):
    recorded(name, tmp_path / "theirs")

    def logits(dtype):
        loaded = load_pretrained(tmp_path / "theirs", dtype=dtype)
        config = loaded.config

        @jax.jit
        def run(tree, asked):
            states = transformer.exit_states(tree, config, asked)
            return exits.logits(exits.head(tree, config, 0), states[-1])

        return np.asarray(run(loaded.params, RECORDED["texts"]))

    # Those in float32 are transformers' to 1e-4 (above).
    error = np.sqrt(np.mean((logits("bfloat16") - logits("float32")) ** 2))
    # Two ways of rounding; ours keeps norms, biases and statistics in float32.
    assert 0 < error <= RECORDED[f"{name}/bfloat16"]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_read_as_the_same(name, tmp_path):
    about = recorded(name, tmp_path / "theirs")
    loaded = load_pretrained(tmp_path / "theirs")
    kind = loaded.family.model_type
    assert save_pretrained(tmp_path / "ours", loaded.config, loaded.params, family=kind) == kind
    again = load_pretrained(tmp_path / "ours")
    assert again.config == loaded.config and again.raw["model_type"] == kind
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    assert about["config"]["model_type"] == kind
