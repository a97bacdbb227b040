"""A run out as a folder of the Hugging Face form, and in again; and a model trained elsewhere."""

import jax
import numpy as np
import pytest
from launchers import call

from eejax.checkpoint.model import load_run
from eejax.common.errors import CheckpointError, DataError
from eejax.train.runs import open_run


def moved(run, tmp_path, *arguments):
    call("eejax.experiments.export_hf", f"--workdir={run}", f"--output={tmp_path / 'out'}")
    call(
        "eejax.experiments.import_hf",
        f"--model={tmp_path / 'out'}",
        f"--workdir={tmp_path / 'in'}",
        *arguments,
    )
    return tmp_path / "in"


def test_a_run_comes_back_with_its_exits_and_its_tokenizer(small_run, tmp_path, capsys):
    workdir = moved(small_run, tmp_path)
    first, again = open_run(small_run).model, open_run(workdir).model
    assert "2 early exits" in capsys.readouterr().out
    assert again.config.exits == first.config.exits and again.step == 0
    jax.tree.map(np.testing.assert_array_equal, again.params, first.params)
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    with pytest.raises(CheckpointError, match="holds a run already"):
        call("eejax.experiments.import_hf", f"--model={tmp_path / 'out'}", f"--workdir={workdir}")
    with pytest.raises(CheckpointError, match="is there already"):
        call(
            "eejax.experiments.export_hf", f"--workdir={small_run}", f"--output={tmp_path / 'out'}"
        )


def test_a_model_of_bytes_that_was_trained_elsewhere(eejax_data, tmp_path, capsys):
    folder = eejax_data / "models" / "tinylm"
    arguments = [
        f"--model={folder}",
        f"--workdir={tmp_path / 'run'}",
        f"--source={eejax_data / 'tinyshakespeare' / 'train.txt'}",
    ]
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        call("eejax.experiments.import_hf", *arguments)
    tokenizer = eejax_data / "tokenizers" / "gpt2"
    with pytest.raises(DataError, match="the tokenizer has 50257 tokens, the model 256"):
        call("eejax.experiments.import_hf", *arguments, f"--tokenizer={tokenizer}")
    assert not (tmp_path / "run").exists()
    call("eejax.experiments.import_hf", *arguments, "--tokenizer=bytes")
    model = load_run(tmp_path / "run")
    assert model.tokenizer.vocab_size == 256 and model.tokenizer.eos_id == 2
    capsys.readouterr()
    call("eejax.experiments.evaluate", f"--workdir={tmp_path / 'run'}", "--batches=4")
    told = capsys.readouterr().out
    # It has seen most of this text: 1.73 nats a byte where it has not.
    loss = float(next(line for line in told.splitlines() if line.startswith("final")).split()[1])
    assert 1.0 < loss < 1.8
