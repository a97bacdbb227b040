"""From a configuration to the data set of a run."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import struct

import numpy as np
import pytest
import small_runs

from eejax import data
from eejax.common.errors import CheckpointError, ConfigError, DataError
from eejax.sharding import distributed
from eejax.train import inputs
from eejax.train.config import DataConfig, Experiment
from eejax.train.loop import fit
from eejax.train.runs import open_run

FOLDER = "tokenizer"


@pytest.fixture
def text(tmp_path) -> DataConfig:
    (tmp_path / "text").mkdir()
    small_runs.write_text(tmp_path / "text")
    return DataConfig(source=f"{tmp_path}/text/*.txt", validation_fraction=0.2)


def write_megatron(prefix: pathlib.Path, documents: list[list[int]]) -> None:
    """Each document one sequence of uint16."""
    lengths = [len(d) for d in documents]
    pointers = [0, *np.cumsum(lengths) * 2][:-1]
    n = len(documents)
    pathlib.Path(f"{prefix}.bin").write_bytes(
        b"".join(np.array(d, "<u2").tobytes() for d in documents)
    )
    pathlib.Path(f"{prefix}.idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, n, n + 1)
        + struct.pack(f"<{n}i", *lengths)
        + struct.pack(f"<{n}q", *pointers)
        + struct.pack(f"<{n + 1}q", *range(n + 1))
    )


@pytest.fixture
def megatron(tmp_path) -> DataConfig:
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(97, 123, 80).tolist(), 256] for _ in range(50)]
    write_megatron(tmp_path / "tokens", documents)
    return DataConfig(source=f"megatron:{tmp_path}/tokens", validation_fraction=0.2)


def test_several_workers_prepare_what_one_does_and_it_is_found(text, tmp_path):
    seen = []
    assert inputs.find(text, tmp_path / "a", FOLDER) is None
    one = inputs.prepare(text, 257, tmp_path / "a", FOLDER)
    two = inputs.prepare(text, 257, tmp_path / "b", FOLDER, workers=2, progress=seen.append)
    assert one.fingerprint == two.fingerprint and seen[-1].documents == 40
    assert seen[-1].bytes == seen[-1].total_bytes
    assert inputs.find(text, tmp_path / "a", FOLDER).path == one.path
    assert not (tmp_path / "c").exists() and inputs.find(text, tmp_path / "c", FOLDER) is None


def test_a_trained_tokenizer_is_needed_to_find(text, tmp_path):
    config = DataConfig(**{**vars(text), "tokenizer": "bpe"})
    assert inputs.find(config, tmp_path / "run", FOLDER) is None
    made = inputs.prepare(config, 300, tmp_path / "run", FOLDER)
    assert inputs.find(config, tmp_path / "run", FOLDER).fingerprint == made.fingerprint


def test_tokens_of_megatron_are_read_where_they_lie(megatron, tmp_path):
    made = inputs.prepare(megatron, 257, tmp_path / "run", FOLDER)
    assert isinstance(made, data.MegatronDataset)
    assert [p.name for p in (tmp_path / "run").iterdir()] == [FOLDER]
    assert sum(map(len, made.splits.values())) == 50 * 81
    assert inputs.find(megatron, tmp_path / "run", FOLDER).fingerprint == made.fingerprint
    other = DataConfig(**{**vars(megatron), "source": (megatron.source,), "split_seed": 1})
    assert inputs.prepare(other, 257, tmp_path / "run", FOLDER).fingerprint != made.fingerprint


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"tokenizer": "bpe"},
            "data.tokenizer = 'bpe': megatron:.* a tokenizer cannot be trained on it",
        ),
        ({"max_bytes": 5}, "data.max_bytes = 5: megatron:.* is read whole"),
        ({"source": ("megatron:a", "b.txt")}, "stand alone"),
        ({"source": "megatron:nowhere"}, "nowhere.idx cannot be read"),
    ],
)
def test_settings_that_tokens_cannot_follow_are_named(megatron, tmp_path, changes, message):
    config = DataConfig(**{**vars(megatron), **changes})
    with pytest.raises(DataError, match=message):
        inputs.prepare(config, 257, tmp_path / "run", FOLDER)


def test_another_tokenizer_or_a_smaller_model_is_refused(megatron, tmp_path):
    data.save_tokenizer(data.train_bpe(["a b"], 257), tmp_path / "bpe")
    inputs.prepare(megatron, 257, tmp_path / "run", FOLDER)
    other = DataConfig(**{**vars(megatron), "tokenizer": str(tmp_path / "bpe")})
    with pytest.raises(DataError, match="was begun with bytes-257"):
        inputs.prepare(other, 300, tmp_path / "run", FOLDER)
    with pytest.raises(DataError, match="model.vocab_size = 257"):
        inputs.prepare(megatron, 256, tmp_path / "new", FOLDER)


def test_a_run_trains_on_megatrons_tokens_and_goes_on(megatron, tmp_path):
    values = small_runs.config(tmp_path, steps=2, log_every=1, eval_every=0)
    values["data"] |= {"source": megatron.source}
    experiment = Experiment.from_dict(values)
    result = fit(experiment, tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.model.step == 2 and np.isfinite(result.evaluation.losses).all()
    dataset = run.dataset()
    assert dataset.fingerprint == run.model.metadata["data"]["dataset"]
    # 81 tokens a document, the end token without text.
    split = dataset.split("validation")
    assert split.nbytes == len(split) * 80 // 81


def mixture(folder, **changes):
    for name, letter in (("a", "a"), ("b", "b")):
        (folder / name).mkdir()
        for i in range(20):
            (folder / name / f"{i}.txt").write_text(letter * 400)
    sources = tuple(str(folder / name / "*.txt") for name in ("a", "b"))
    return DataConfig(
        source=sources, weights=(3.0, 1.0), length=16, validation_fraction=0.3, **changes
    )


def test_a_mixture_draws_and_evaluates_by_weight(tmp_path):
    config = mixture(tmp_path)
    values = small_runs.config(tmp_path, batch_size=8, microbatches=1)
    values["data"] = dataclasses.asdict(config)
    experiment = Experiment.from_dict(values)
    made = inputs.prepare(config, 257, tmp_path / "run", FOLDER)
    assert isinstance(made, data.Mixture) and len(made.datasets) == 2
    assert made.fingerprint == "+".join(d.fingerprint for d in made.datasets)
    again = inputs.find(config, tmp_path / "run", FOLDER)
    assert again.fingerprint == made.fingerprint
    loader = inputs.loader(experiment, made)
    rows = np.concatenate([loader.batch(i)["tokens"] for i in range(512)])  # one block of 4096
    assert np.isin(rows, [ord("a"), ord("b"), 256]).all()
    assert (rows == ord("a")).any(1).sum() == 3072 and (rows == ord("b")).any(1).sum() == 1024
    (heavy, first), (light, second) = inputs.held_out(config, made, 4, limit=8)
    assert (heavy, light) == (3.0, 1.0)
    first, second = ([b["tokens"] for b in part] for part in (first, second))
    assert (len(first), len(second)) == (6, 2)
    assert all((b == ord("a")).any() for b in first) and all((b == ord("b")).any() for b in second)
    with pytest.raises(DataError, match="mixture of 2 data sets"):
        made.split("train")


def test_a_run_on_a_mixture_resumes_and_knows_its_text(tmp_path, monkeypatch):
    config = mixture(tmp_path)
    values = small_runs.config(tmp_path)
    values["data"] = dataclasses.asdict(config)
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        small_runs.stop_at(patched, 6)
        assert fit(Experiment.from_dict(values), run).step == 7
    assert fit(Experiment.from_dict(values), run).step == small_runs.STEPS
    assert open_run(run).dataset().datasets[1].tokenizer.fingerprint == "bytes-257"
    values["data"]["weights"] = (1.0, 1.0)
    with pytest.raises(CheckpointError, match="data.weights"):
        fit(Experiment.from_dict(values), run)


@pytest.mark.parametrize(
    "changes",
    [{"weights": (1.0,)}, {"source": "a.txt", "weights": (1.0, 2.0)}, {"prefetch": -1}],
)
def test_mixtures_that_cannot_be(changes):
    field = "prefetch" if "prefetch" in changes else "weights"
    with pytest.raises(ConfigError, match=f"DataConfig.{field}"):
        DataConfig(**({"source": ("a.txt", "b.txt")} | changes))


def test_the_bpe_of_a_mixture_has_seen_all_of_it(tmp_path):
    config = dataclasses.replace(mixture(tmp_path), tokenizer="bpe", max_bytes=4000)
    tokenizer = inputs.prepare(config, 300, tmp_path / "run", FOLDER).tokenizer
    assert len(tokenizer.encode("a" * 64)) < 32 and len(tokenizer.encode("b" * 64)) < 32


def test_bpe_does_not_take_a_tokenizer_of_another_kind(text, tmp_path):
    inputs.prepare(text, 300, tmp_path / "run", FOLDER)
    with pytest.raises(DataError, match="'bpe'.*was begun with bytes-257"):
        inputs.prepare(dataclasses.replace(text, tokenizer="bpe"), 300, tmp_path / "run", FOLDER)


@pytest.mark.parametrize("kind", ["text", "megatron", "mixture", "both"])
def test_another_process_opens_what_the_first_has_made(text, megatron, tmp_path, monkeypatch, kind):
    config = {"text": text, "megatron": megatron}.get(kind) or mixture(tmp_path)
    if kind == "both":
        config = dataclasses.replace(config, source=(megatron.source, config.source[1]))
    config = dataclasses.replace(config, length=16)

    def prepare():
        return inputs.prepare(config, 257, tmp_path / "run", FOLDER)

    told = []
    with monkeypatch.context() as patched:
        patched.setattr(
            distributed, "broadcast_from_process_zero", lambda do: told.append(do()) or told[0]
        )
        made = prepare()
    monkeypatch.setattr(distributed, "broadcast_from_process_zero", lambda do: told[0])
    if kind != "megatron":  # whose tokens are the text
        for folder in ("text", "a", "b"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
    opened = prepare()
    assert opened is not made and opened.fingerprint == made.fingerprint
    values = small_runs.config(tmp_path, batch_size=8, microbatches=1)
    experiment = Experiment.from_dict(values | {"data": dataclasses.asdict(config)})
    whole, part = inputs.loader(experiment, made), inputs.loader(experiment, opened, (1, 4))
    for step in range(3):
        for name, rows in part.batch(step).items():
            np.testing.assert_array_equal(rows, whole.batch(step)[name][2:4])

    told[0] = (told[0][0], "another")
    with pytest.raises(DataError, match="those of process 0 another: give all hosts the same"):
        prepare()
    if kind in ("text", "mixture"):
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(DataError, match="must be a folder that all hosts share"):
            prepare()


def test_text_and_tokenizer_may_be_gone_once_they_were_used(text, tmp_path, caplog):
    trained = data.train_bpe(data.source(text.source).documents(), 300)
    trained.save(tmp_path / "given")
    settings = dataclasses.replace(text, tokenizer=str(tmp_path / "given"))
    first = inputs.prepare(settings, 300, tmp_path / "run", FOLDER)
    shutil.rmtree(tmp_path / "given")
    shutil.rmtree(tmp_path / "text")
    again = inputs.prepare(settings, 300, tmp_path / "run", FOLDER)
    assert again.fingerprint == first.fingerprint
    assert "The run's own copy of it is used" in caplog.text and "matches no file" in caplog.text
    with pytest.raises(DataError):
        inputs.prepare(settings, 300, tmp_path / "other", FOLDER)
