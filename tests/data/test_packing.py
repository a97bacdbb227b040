"""Packed folders: what goes in comes out, complete or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import document

from eejax.common.errors import ConfigError, DataError
from eejax.data import ByteTokenizer, Document, open_packed, pack, source, train_bpe
from eejax.data.packing import SPLITS


@dataclasses.dataclass(frozen=True)
class Texts:
    """Documents given directly; `fail_after` documents, reading breaks."""

    texts: tuple[str, ...]
    fail_after: int | None = None
    error: type[BaseException] = KeyboardInterrupt

    def documents(self) -> Iterator[Document]:
        for i, text in enumerate(self.texts):
            if i == self.fail_after:
                raise self.error
            yield Document(f"doc{i}", text)

    def describe(self) -> dict[str, Any]:
        return {"kind": "texts", "texts": list(self.texts)}


def contents(dataset) -> dict[str, str]:
    """Document name to text, over both splits."""
    found = {}
    for name in SPLITS:
        if dataset.meta["splits"][name]["documents"]:
            split = dataset.split(name)
            for i, number in enumerate(split.documents):
                ids = document(split, i)
                assert ids[-1] == dataset.meta["eos_id"]
                found[dataset.names[number]] = dataset.tokenizer.decode(ids[:-1])
    return found


@settings(max_examples=40)
@given(
    st.lists(st.text("aé🙂\n", min_size=1, max_size=9), min_size=2, max_size=12),
    st.floats(0.0, 0.9),
    st.integers(0, 5),
)
def test_every_document_comes_back_from_exactly_one_split(texts, fraction, seed):
    with tempfile.TemporaryDirectory() as root:
        given_ = Texts(tuple(texts))
        dataset = pack(given_, ByteTokenizer(), root, validation_fraction=fraction, seed=seed)
        assert contents(dataset) == {d.name: d.text for d in given_.documents()}
        counts = [dataset.meta["splits"][s] for s in SPLITS]
        assert sum(c["documents"] for c in counts) == len(texts)
        assert counts[0]["documents"] > 0
        assert (counts[1]["documents"] > 0) == (fraction > 0)
        for name in SPLITS[: 1 + (fraction > 0)]:
            split = dataset.split(name)
            whole = split.read(0, len(split))
            for start in range(len(split)):
                np.testing.assert_array_equal(split.read(start, 5), whole[start : start + 5])
            assert split.nbytes == int(np.sum(whole < 256))


def test_split_depends_on_the_name_and_seed_alone(tmp_path):
    def validation(n: int, seed: int) -> set[str]:
        data = pack(
            Texts(tuple("x" * (i + 1) for i in range(n))),
            ByteTokenizer(),
            tmp_path,
            validation_fraction=0.25,
            seed=seed,
        )
        return {data.names[i] for i in data.split("validation").documents}

    first, more = validation(200, 0), validation(400, 0)
    assert first == {n for n in more if int(n[3:]) < 200}
    assert 0.15 < len(more) / 400 < 0.35  # 0.25 within 4.6 standard deviations
    assert validation(200, 1) != first


def test_wide_vocabularies_take_four_bytes(tmp_path):
    class Wide(ByteTokenizer):
        vocab_size = 70_000
        eos_id = 69_999
        fingerprint = "wide"

    narrow = pack(Texts(("ab", "cd")), ByteTokenizer(), tmp_path)
    wide = pack(Texts(("ab", "cd")), Wide(), tmp_path)
    assert (narrow.meta["dtype"], wide.meta["dtype"]) == ("<u2", "<u4")
    assert os.path.getsize(os.path.join(wide.path, "tokens.bin")) == 4 * 6
    assert document(wide.split("train"), 0)[-1] == 69_999


def test_the_same_spec_is_reused_and_another_is_not(tmp_path):
    first = pack(Texts(("ab", "cd")), ByteTokenizer(), tmp_path)
    # Reading would fail: it is not read again.
    assert pack(Texts(("ab", "cd"), 0), ByteTokenizer(), tmp_path).path == first.path
    others = [
        pack(Texts(("ab", "ce")), ByteTokenizer(), tmp_path),
        pack(Texts(("ab", "cd")), ByteTokenizer(), tmp_path, seed=1),
        pack(Texts(("ab", "cd")), ByteTokenizer(), tmp_path, validation_fraction=0.5),
        pack(Texts(("ab", "cd")), train_bpe(["ab"], 257), tmp_path),
    ]
    paths = {first.path, *(o.path for o in others)}
    assert len(paths) == 5
    assert others[0].fingerprint != first.fingerprint != others[3].fingerprint


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_before_anything_was_committed_leaves_nothing(tmp_path, error):
    with pytest.raises(error):
        pack(Texts(("ab", "cd", "ef"), 2, error), ByteTokenizer(), tmp_path)
    assert os.listdir(tmp_path) == []
    assert len(contents(pack(Texts(("ab", "cd", "ef")), ByteTokenizer(), tmp_path))) == 3


def test_full_disk_at_the_beginning_is_reported_and_leaves_nothing(tmp_path):
    # A limit on the size of files fails writes as a full disk does, in the middle of a file.
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    texts = Texts(("a" * 200_000, "b" * 200_000))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
        with pytest.raises(DataError, match=r"cannot be written to .*tokens.bin.*Free some space"):
            pack(texts, ByteTokenizer(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert os.listdir(tmp_path) == []
    pack(texts, ByteTokenizer(), tmp_path)


def test_a_killed_run_leaves_no_data_set_and_its_rest_is_cleared(tmp_path):
    program = f"""
import os, signal
from eejax.data import ByteTokenizer, Document, pack
class Killer:
    def documents(self):
        yield Document("a", "x" * 1_000_000)
        os.kill(os.getpid(), signal.SIGKILL)
    def describe(self):
        return {{"kind": "killer"}}
pack(Killer(), ByteTokenizer(), {str(tmp_path)!r})
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=120)
    assert done.returncode == -signal.SIGKILL
    (rest,) = tmp_path.iterdir()
    with pytest.raises(DataError, match="holds no packed tokens"):
        open_packed(rest)
    dataset = pack(Texts(("ab", "cd")), ByteTokenizer(), tmp_path)
    assert rest.exists()  # it might still be another process's
    for path in (*rest.rglob("*"), rest):
        os.utime(path, (0, 0))
    pack(Texts(("ab", "ce")), ByteTokenizer(), tmp_path)
    assert not rest.exists() and os.path.exists(dataset.path)


def test_damage_is_noticed(tmp_path):
    dataset = pack(Texts(("abcd", "efgh")), ByteTokenizer(), tmp_path)
    tokens = pathlib.Path(dataset.path, "tokens.bin")
    good = tokens.read_bytes()
    for bad in (good[:-1], good[:4] + b"\xff\xff" + good[6:]):
        tokens.write_bytes(bad)
        with pytest.raises(DataError, match="is damaged.*delete the folder"):
            pack(Texts(("abcd", "efgh")), ByteTokenizer(), tmp_path)
    tokens.write_bytes(good)
    starts = pathlib.Path(dataset.path, "starts.npy")
    whole = starts.read_bytes()
    for bad in (None, whole[:50]):
        starts.unlink() if bad is None else starts.write_bytes(bad)
        with pytest.raises(DataError, match="holds no packed tokens.*delete the folder"):
            open_packed(dataset.path)
    starts.write_bytes(whole)
    meta = pathlib.Path(dataset.path, "meta.json")
    meta.write_text(json.dumps({**dataset.meta, "format": 99}))
    with pytest.raises(DataError, match="format 99"):
        open_packed(dataset.path)
    for bad in ([1], {}):
        meta.write_text(json.dumps(bad))
        with pytest.raises(DataError, match="holds no packed tokens"):
            open_packed(dataset.path)


def test_what_cannot_be_packed(tmp_path):
    with pytest.raises(DataError, match="no document with text"):
        pack(Texts(()), ByteTokenizer(), tmp_path)
    with pytest.raises(DataError, match="validation: give .*data.validation_fraction = 0"):
        pack(Texts(("ab",)), ByteTokenizer(), tmp_path)
    assert os.listdir(tmp_path) == []
    (tmp_path / "a.txt").write_text("éé" * 50)
    few = source(str(tmp_path / "a.txt"), max_bytes=99)
    with pytest.raises(DataError, match="raise data.max_bytes = 99, which cut .*, give more files"):
        pack(few, ByteTokenizer(), tmp_path / "few")
    with pytest.raises(DataError, match="validation: give more files"):
        pack(dataclasses.replace(few, max_bytes=999), ByteTokenizer(), tmp_path / "all")
    with pytest.raises(ConfigError, match="workers = 0: must be an integer > 0"):
        pack(Texts(("ab", "cd")), ByteTokenizer(), tmp_path, workers=0)
    only = pack(Texts(("ab",)), ByteTokenizer(), tmp_path, validation_fraction=0.0)
    with pytest.raises(DataError, match="no split 'validation' .*it has train"):
        only.split("validation")
    with pytest.raises(DataError, match="no split 'test'"):
        only.split("test")
    with pytest.raises(ConfigError, match=r"validation_fraction = 1\.0"):
        pack(Texts(("ab", "cd")), ByteTokenizer(), tmp_path, validation_fraction=1.0)

    class Endless(ByteTokenizer):
        eos_id = None

    with pytest.raises(DataError, match="no token that ends a document"):
        pack(Texts(("ab", "cd")), Endless(), tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(DataError, match="cannot be written to"):
        pack(Texts(("ab", "cd")), ByteTokenizer(), blocked / "sub")


def test_memory_stays_far_below_the_text(tmp_path):
    text = ("some words on a line\n" * 500).encode()
    with open(tmp_path / "big.txt", "wb") as file:
        for _ in range(2000):  # 21 MB
            file.write(text)
    tracemalloc.start()
    try:
        dataset = pack(source(str(tmp_path / "big.txt")), ByteTokenizer(), tmp_path / "packed")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(dataset.meta["splits"][s]["bytes"] for s in SPLITS) == 2000 * len(text)
    assert peak < 8e6  # a document of 2^18 characters as text, bytes, int32 and uint16


def test_standard_library_packs_into_two_splits_of_text(tmp_path):
    dataset = pack(source("python-stdlib", max_bytes=1_000_000), ByteTokenizer(), tmp_path)
    train, validation = dataset.split("train"), dataset.split("validation")
    assert len(train) > 5 * len(validation) > 5000
    assert not set(train.documents) & set(validation.documents)
    assert 0.99 < train.nbytes / len(train) < 1.0


def write(folder, texts):
    folder.mkdir(exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)


@pytest.mark.parametrize("pattern", ["*.txt", "0.txt"])
def test_of_text_that_is_gone_what_was_packed_is_taken(pattern, tmp_path, caplog):
    write(tmp_path / "text", ["a" * 40, "b" * 40, "c" * 40])

    def made(**options):
        return pack(
            source(str(tmp_path / "text" / pattern), options.pop("max_bytes", None)),
            ByteTokenizer(),
            tmp_path / "packed",
            validation_fraction=0.0,
            **options,
        )

    first = made()
    for file in (tmp_path / "text").iterdir():
        file.unlink()
    again = made()
    assert again.path == first.path and again.fingerprint == first.fingerprint
    assert "are still used" in caplog.text and first.path in caplog.text
    for other in (dict(seed=1), dict(max_bytes=10)):  # of which nothing was packed
        with pytest.raises(DataError, match="matches no file|does not exist"):
            made(**other)
    tokens = pathlib.Path(first.path) / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[::-1])
    with pytest.raises(DataError, match="is damaged"):
        made()


def test_of_a_text_that_changed_and_is_gone_none_is_guessed(tmp_path):
    for texts in (["a" * 40], ["b" * 40, "c"]):
        write(tmp_path / "text", texts)
        patterns = source(str(tmp_path / "text" / "*.txt"))
        pack(patterns, ByteTokenizer(), tmp_path / "packed", validation_fraction=0.0)
    for file in (tmp_path / "text").iterdir():
        file.unlink()
    with pytest.raises(DataError, match="matches no file"):
        pack(patterns, ByteTokenizer(), tmp_path / "packed", validation_fraction=0.0)
