"""Live parity with transformers: imported models compute what it does, and it opens exports."""

import json

import hf_models
import numpy as np
import pytest
from hf_models import MODELS, saved, theirs, tokens

from eejax.checkpoint.hf import load_pretrained, save_pretrained
from eejax.checkpoint.hf.families import FAMILIES
from eejax.models import exits, transformer

pytestmark = pytest.mark.slow


def logits(tree, config, asked):
    states = transformer.exit_states(tree, config, asked)
    table = exits.head(tree, config, config.n_exits)
    return np.asarray(exits.logits(table, states[-1]))[0, :, : config.vocab_size]


@pytest.mark.parametrize("name", MODELS)
def test_logits_both_ways(name, tmp_path):
    pytest.importorskip("transformers")
    saved(name, tmp_path / "theirs")
    want, _ = theirs(hf_models.opened(tmp_path / "theirs"))
    assert want.std() > 0.1
    loaded = load_pretrained(tmp_path / "theirs")
    got = logits(loaded.params, loaded.config, tokens(hf_models.LENGTH).astype(np.int32))
    assert np.abs(got - want).max() <= 1e-4
    family = loaded.family.model_type
    save_pretrained(tmp_path / "ours", loaded.config, loaded.params, family=family)
    back, _ = theirs(hf_models.opened(tmp_path / "ours"))
    assert np.abs(back - want).max() <= 1e-4


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_keys_of_a_family_are_those_recorded(kind):
    """`record.py` records them anew; test_families.py says which are read."""
    pytest.importorskip("transformers", reason="make bench-env installs transformers")
    recorded = json.loads(hf_models.FILE.with_name("config_keys.json").read_text())
    assert hf_models.config_keys(kind) == recorded[kind]
