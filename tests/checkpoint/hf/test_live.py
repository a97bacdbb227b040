"""Live parity with transformers: imported models compute what it computes, and it opens exports."""

import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import MODELS, make

from eejax.checkpoint.hf import load_pretrained, save_pretrained
from eejax.models import exits, transformer

pytestmark = pytest.mark.slow
LENGTH = 80


def ours(tree, config, tokens):
    states = transformer.exit_states(tree, config, jnp.asarray(tokens))
    return np.asarray(exits.logits(exits.head(tree, config, config.n_exits), states[-1]))


@pytest.mark.parametrize("name", MODELS)
def test_logits_both_ways(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = make(name)
    model.save_pretrained(tmp_path / "theirs")
    tokens = np.random.default_rng(1).integers(0, 61, (2, LENGTH))
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits.numpy()
    assert want.std() > 0.1
    loaded = load_pretrained(tmp_path / "theirs")
    got = ours(loaded.params, loaded.config, tokens)[..., :61]
    assert np.abs(got - want).max() <= 1e-4
    save_pretrained(
        tmp_path / "ours", loaded.config, loaded.params, family=loaded.family.model_type
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        back = again(torch.tensor(tokens)).logits.numpy()
    assert np.abs(back - want).max() <= 1e-4
