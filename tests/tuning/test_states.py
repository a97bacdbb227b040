"""Stored states and predictions are those of the model; interrupted passes continue."""

from __future__ import annotations

import collections
import dataclasses
import shutil

import jax
import numpy as np
import pytest

from eejax.common.errors import CheckpointError, DataError
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.tuning import states

BOUNDARIES, WINDOWS, LENGTH, K = (0, 2), 5, 8, 3


@pytest.fixture(scope="module")
def model():
    # Its own exits, one with a block, do not matter.
    config = ModelConfig(
        vocab_size=23,
        n_layers=3,
        d_model=16,
        n_heads=2,
        context_length=LENGTH,
        vocab_multiple=8,
        logit_softcap=3.0,
        exits=(ExitConfig(1, block=True), ExitConfig(2, mlp=True)),
    )
    return params.init(config, jax.random.key(0)), config


def batches(size=2):
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 23, (WINDOWS, LENGTH)).astype(np.int32)
    labels = np.where(rng.random(tokens.shape) < 0.2, -1, np.roll(tokens, -1, 1)).astype(np.int32)
    tokens, labels = (np.concatenate([a, a[:1]]) for a in (tokens, labels))  # batches of one shape
    for i in range(0, len(tokens), size):
        yield {"tokens": tokens[i : i + size], "labels": labels[i : i + size]}


def collect(model, folder, windows=WINDOWS, given=None):
    given = batches() if given is None else given
    return states.collect(*model, BOUNDARIES, given, windows, folder, k=K, watch=lambda text: None)


def test_states_and_predictions_are_the_models(model, tmp_path):
    whole, config = model
    kept = collect(model, tmp_path)
    assert kept.windows == WINDOWS and kept.boundaries == BOUNDARIES
    given = list(batches())
    tokens, labels = (np.concatenate([b[k] for b in given])[:WINDOWS] for k in ("tokens", "labels"))
    assert np.array_equal(kept.labels, labels)
    own = config.replace(exits=tuple(ExitConfig(n) for n in BOUNDARIES))
    norms = params.init(own, jax.random.key(2))["exits"]
    reached = []
    last = transformer.exit_states(
        whole | {"exits": norms}, own, tokens, tap=lambda e, x: reached.append(x) or x
    )[-1]
    for mine, x in zip(kept.states, reached, strict=False):
        assert np.allclose(mine.astype(np.float32), x, rtol=2**-8, atol=1e-6)
    y = np.asarray(exits.logits(exits.head(whole, own, 2), last), np.float64)[..., :23]
    logp = y - np.log(np.exp(y).sum(-1, keepdims=True))
    best = np.sort(logp, -1)[..., ::-1][..., :K]
    assert np.allclose(kept.logprobs, best, atol=5e-3)
    assert np.allclose(np.take_along_axis(logp, kept.tokens, -1), best, atol=1e-5)


def test_an_interrupted_pass_continues_where_it_was(model, tmp_path):
    whole = collect(model, tmp_path / "whole")

    def ends():
        found = list(batches())
        yield from found[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(model, tmp_path / "part", given=ends())
    seen = collections.Counter()

    def counted():
        for i, batch in enumerate(batches()):
            seen[i] += 1
            # What is on disk is not computed again: other tokens there would change it.
            yield batch if i else batch | {"tokens": batch["tokens"] * 0}

    found = collect(model, tmp_path / "part", given=counted())
    for a, b in zip(dataclasses.astuple(whole)[1:], dataclasses.astuple(found)[1:], strict=True):
        assert all(map(np.array_equal, a, b)) if isinstance(a, tuple) else np.array_equal(a, b)


def test_disk_space_bounds_the_windows(model, tmp_path, monkeypatch):
    size = states.window_bytes(model[1], BOUNDARIES, LENGTH, K)
    free = collections.namedtuple("Usage", "free")(int(3.5 * size / states.FREE_SHARE))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    lines = []
    kept = states.collect(*model, BOUNDARIES, batches(), WINDOWS, tmp_path, k=K, watch=lines.append)
    assert kept.windows == 3 and f"{3 * LENGTH} of {WINDOWS * LENGTH} tokens" in lines[0]
    monkeypatch.undo()
    files = [f for f in tmp_path.glob("*.npy")]
    assert sum(np.load(f, mmap_mode="r").nbytes for f in files) == 3 * size
    assert collect(model, tmp_path).windows == 3  # the folder keeps its number


def test_bad_text_and_files(model, tmp_path):
    with pytest.raises(DataError, match="no window to tune on"):
        collect(model, tmp_path, given=[])
    collect(model, tmp_path)
    (tmp_path / "labels.npy").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match=r"labels\.npy: cannot be read"):
        collect(model, tmp_path)
    (tmp_path / states.PROGRESS_FILE).write_text("{}")
    with pytest.raises(CheckpointError, match=r"states\.json: cannot be read"):
        collect(model, tmp_path)
