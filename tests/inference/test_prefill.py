"""Prompts that run in chunks, against the uncached float64 model."""

import numpy as np
import pytest
import reference_model
from near_ties import TIE

from eejax.inference import EngineOptions, Generator
from eejax.inference.posthoc import PREFILL_CHUNKS

CHUNK = PREFILL_CHUNKS["cpu"]
BLOCK = 1  # the number of the exit with a block


@pytest.fixture(scope="module")
def model(subset):
    """(params, config) with windows, and an exit with a block."""
    p, config = subset((1, 2, 3))
    assert config.exits[BLOCK].block
    return p, config


@pytest.mark.parametrize(
    "context, lengths",
    [
        # Chunks of 80 positions, 160 in all.
        pytest.param(CHUNK + 32, [9, 80, 81, CHUNK + 28], id="two chunks"),
        # Four chunks of 512 positions, of which the last is skipped.
        pytest.param(600, [9, CHUNK, CHUNK + 1, 2 * CHUNK + 1], id="three of four chunks"),
        # The last chunk of 290 positions in three begins earlier.
        pytest.param(290, [100, 193, 194, 286], id="a chunk that repeats rows"),
    ],
)
@pytest.mark.parametrize("e", [0, BLOCK, 3])
def test_prompts_in_chunks_equal_float64(model, prompts, context, lengths, e):
    p, config = model
    config = config.replace(context_length=context)
    asked = prompts(3, lengths)
    rules = (
        dict(exits=[config.exits[e].boundary], threshold=0.0, prefill_exit=True) if e < 3 else {}
    )
    g = Generator.make(p, config, EngineOptions("posthoc", cap=4, buckets=(4,)))
    got = g.generate(asked, 2, **rules)
    for i, prompt in enumerate(asked):
        ids = got.ids(i)
        logits = reference_model.exit_logits(p, config, [*prompt, ids[0]])[e][-2:]
        top = logits.max(-1)
        total = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        for j, token in enumerate(ids):
            assert got.exits[i, j] == e
            assert logits[j, token] >= top[j] - TIE
            assert abs(got.logprobs[i, j] - (logits[j, token] - total[j])) < 1e-4
