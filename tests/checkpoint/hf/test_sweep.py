"""Drawn configurations of every family, against transformers: logits, tokens and files both ways.

Slow, and of the environment that `make bench-env` makes.
"""

from __future__ import annotations

import pathlib
import re

import hf_sweep
import jax
import numpy as np
import pytest
from hf_sweep import PROMPT, SPACE, Drawn, draw

from eejax.checkpoint.hf import load_pretrained, save_pretrained
from eejax.checkpoint.hf.families import FAMILIES
from eejax.checkpoint.hf.fields import Raw
from eejax.common.errors import CheckpointError
from eejax.models import exits, transformer

pytestmark = pytest.mark.slow
EACH = 17
"""Configurations of a family that transformers runs and that are compared, or refused by name."""
NEEDS = "transformers and torch are not installed: make bench-env"


def logits(loaded, text: np.ndarray) -> np.ndarray:
    config = loaded.config

    @jax.jit
    def run(tree, text):
        states = transformer.exit_states(tree, config, text)
        return exits.logits(exits.head(tree, config, 0), states[-1])

    return np.asarray(run(loaded.params, text.astype(np.int32)))[0, :, : config.vocab_size]


def check(drawn: Drawn, path: pathlib.Path) -> str:
    """ "compared", "refused" by a key's name, or "theirs" where transformers refuses or fails."""
    family = drawn.config["model_type"]
    try:
        hf_sweep.write(drawn, path)
        text, want, generation = hf_sweep.theirs(path)
    except Exception:
        # Such a configuration need not be read; what is read of it ends in a word of ours.
        try:
            FAMILIES[family].read(Raw(path / "config.json", drawn.config))
        except CheckpointError:
            pass
        return "theirs"
    try:
        loaded = load_pretrained(path)
    except CheckpointError as error:
        assert any(re.search(word, str(error)) for word in drawn.may), error
        return "refused"
    # Logits of order 1; a rule that is wrong is off by as much.
    scale = 1e-4 * max(1.0, float(np.abs(want).max()))
    got = logits(loaded, text)
    np.testing.assert_allclose(got, want, rtol=0, atol=scale)
    assert got[PROMPT - 1 : -1].argmax(-1).tolist() == text[0, PROMPT:].tolist()

    out = path / "ours"
    kind = save_pretrained(
        out, loaded.config, loaded.params, family=family, generation=loaded.generation
    )
    back = hf_sweep.theirs(out, text)
    np.testing.assert_allclose(back.logits, want, rtol=0, atol=scale)
    assert back.generation == generation
    again = load_pretrained(out)
    assert kind == family and again.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    return "compared"


@pytest.mark.parametrize("family", SPACE)
def test_drawn_configurations(family, tmp_path, capsys):
    pytest.importorskip("torch", reason=NEEDS)
    pytest.importorskip("transformers", reason=NEEDS)
    found, wrong, number = {"compared": 0, "refused": 0, "theirs": 0}, [], 0
    while found["compared"] + found["refused"] + len(wrong) < EACH:
        drawn = draw(family, number)
        try:
            found[check(drawn, tmp_path / str(number))] += 1
        except Exception as error:  # all that are wrong are told together
            wrong.append(f"{number}: {drawn}\n    {type(error).__name__}: {str(error)[:600]}")
        number += 1
        assert number < 5 * EACH, f"transformers runs too few of them: {found}"
    with capsys.disabled():
        print(f"\n{family}: {found}, {len(wrong)} wrong", flush=True)
    assert not wrong, "\n".join(wrong)
