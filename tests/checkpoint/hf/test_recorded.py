"""Models of every family against what transformers made of them (recorded.npz; record.py)."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hf_models import LENGTH, MODELS, NEW, PROMPT, RECORDED, recorded, tokens

from eejax.checkpoint.hf import Pretrained, load_pretrained, save_pretrained
from eejax.inference import Generator
from eejax.models import exits, transformer


class Read(NamedTuple):
    """A model that was recorded: its folder, what that says, and what is made of it."""

    name: str
    path: pathlib.Path
    about: dict
    loaded: Pretrained
    logits: np.ndarray  # of `asked`


def asked() -> np.ndarray:
    """[1 + texts, t]: the tokens whose logits were recorded, and the texts."""
    return np.concatenate([tokens(LENGTH), RECORDED["texts"]]).astype(np.int32)


def logits_of(loaded: Pretrained) -> np.ndarray:
    config = loaded.config

    @jax.jit
    def logits(tree, asked):
        states = transformer.exit_states(tree, config, asked)
        return exits.logits(exits.head(tree, config, 0), states[-1])

    return np.asarray(logits(loaded.params, asked()))


@pytest.fixture(scope="module", params=MODELS)
def read(request, tmp_path_factory) -> Read:
    path = tmp_path_factory.mktemp(request.param) / "theirs"
    about = recorded(request.param, path)
    loaded = load_pretrained(path)
    return Read(request.param, path, about, loaded, logits_of(loaded))


def test_logits(read):
    want = RECORDED[f"{read.name}/logits"]
    assert np.abs(read.logits[0, :, : read.loaded.config.vocab_size] - want).max() <= 1e-4


# Caches differ by windows, positions and groups of heads: one family of each here.
DECODED = ("gpt2", "falcon_7b", "gemma3", "llama3")


@pytest.mark.parametrize(
    "read",
    [pytest.param(m, marks=[] if m in DECODED else [pytest.mark.slow]) for m in MODELS],
    indirect=True,
)
def test_greedy_text(read):
    config = read.loaded.config
    made = Generator.make(read.loaded.params, config, "full").generate(tokens(PROMPT).tolist(), NEW)
    assert made.ids(0) == RECORDED[f"{read.name}/new"].tolist()


def test_bfloat16_costs_no_more_than_it_costs_transformers(read):
    half = logits_of(load_pretrained(read.path, dtype="bfloat16"))
    # Those in float32 are transformers' to 1e-4 (above).
    error = np.sqrt(np.mean((half[1:] - read.logits[1:]) ** 2))
    # Two ways of rounding; ours keeps norms, biases and statistics in float32.
    assert 0 < error <= RECORDED[f"{read.name}/bfloat16"]


def test_what_is_written_is_read_as_the_same(read, tmp_path):
    loaded, kind = read.loaded, read.loaded.family.model_type
    assert save_pretrained(tmp_path / "ours", loaded.config, loaded.params, family=kind) == kind
    again = load_pretrained(tmp_path / "ours")
    assert again.config == loaded.config and again.raw["model_type"] == kind
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    assert read.about["config"]["model_type"] == kind
