"""Megatron-LM's data sets, written here byte by byte from the format's description."""

from __future__ import annotations

import pathlib
import struct
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from splits import document

from eejax.common.errors import ConfigError, DataError
from eejax.data import ByteTokenizer, Document, Loader, batches, open_megatron, pack
from eejax.data.packing import SPLITS
from eejax.data.sources import name_hash

FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}  # dtype code to struct's letter

Documents = list[list[list[int]]]  # a document has sequences of tokens


class Wide(ByteTokenizer):
    """65,536 ids, the byte of each being its lowest; the last ends documents."""

    vocab_size = 65_536
    eos_id = 65_535
    fingerprint = "wide"

    @property
    def byte_lengths(self) -> np.ndarray:
        return np.append(np.arange(65_535) % 5, 0)


def write(prefix: pathlib.Path | str, documents: Documents, code: int = 8) -> None:
    letter = FORMATS[code]
    sequences = [s for d in documents for s in d]
    with open(f"{prefix}.bin", "wb") as file:
        for sequence in sequences:
            file.write(struct.pack(f"<{len(sequence)}{letter}", *sequence))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code))
        file.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1))
        for sequence in sequences:
            file.write(struct.pack("<i", len(sequence)))
        at = 0
        for sequence in sequences:
            file.write(struct.pack("<q", at))
            at += len(sequence) * struct.calcsize(f"<{letter}")
        first = 0
        for document in documents:
            file.write(struct.pack("<q", first))
            first += len(document)
        file.write(struct.pack("<q", first))


def contents(dataset) -> dict[int, list[int]]:
    """Document number to tokens, over both splits."""
    found = {}
    for split in dataset.splits.values():
        for i, number in enumerate(split.documents):
            assert number not in found
            found[int(number)] = document(split, i).tolist()
    return found


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 65_535), max_size=5), max_size=4), max_size=9),
    st.sampled_from([4, 5, 8]),
    st.sampled_from([0.0, 0.3, 0.9]),
    st.integers(0, 3),
)
def test_documents_come_back_whatever_their_sequences(documents, code, fraction, seed):
    full = {i: sum(d, []) for i, d in enumerate(documents) if sum(d, [])}
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/text_document"
        write(prefix, documents, code)
        options = {"validation_fraction": fraction, "seed": seed}
        if len(full) < 2:
            with pytest.raises(DataError, match="empty|no document with text|single document"):
                open_megatron(prefix, Wide(), **{**options, "validation_fraction": 0.5})
            return
        dataset = open_megatron(prefix, Wide(), **options)
        assert contents(dataset) == full
        assert set(dataset.splits) == set(SPLITS[: 1 + (fraction > 0)])
        lengths = Wide().byte_lengths
        for name, split in dataset.splits.items():
            assert split is dataset.split(name) and split.fingerprint == dataset.fingerprint
            own = [full[n] for n in split.documents]
            whole = sum(own, [])
            assert len(split) == len(whole) and split.nbytes == lengths[whole].sum()
            assert split.starts.tolist() == np.cumsum([0, *map(len, own)]).tolist()
            for start in range(len(whole)):
                assert split.read(start, 4).tolist() == whole[start : start + 4]
            assert split.read(0, 3).dtype == np.int32
        by_hash = {n for n in full if name_hash(str(n), seed) / 2**64 < fraction}
        if 0 < len(by_hash) < len(full):
            assert set(dataset.split("validation").documents.tolist()) == by_hash


@pytest.mark.parametrize("code", FORMATS)
def test_every_integer_type_is_read(tmp_path, code):
    high = min(65_535, 2 ** (8 * struct.calcsize(FORMATS[code]) - (code not in (1, 8))) - 1)
    documents = [[[0, high]], [[high - 1], [1, high]]]
    write(tmp_path / "x", documents, code)
    dataset = open_megatron(tmp_path / "x", Wide(), validation_fraction=0.0)
    assert contents(dataset) == {0: [0, high], 1: [high - 1, 1, high]}


def test_ids_above_32767_in_two_bytes_stay_what_they_are(tmp_path):
    ids = [0, 32_767, 32_768, 40_000, 50_256, 65_535]
    write(tmp_path / "x", [[ids], [ids[::-1]]])
    split = open_megatron(tmp_path / "x", Wide(), validation_fraction=0.0).split("train")
    (batch,) = batches(split, 1, len(split) - 1)
    assert batch["tokens"][0].tolist() == [*ids, *ids[::-1]][:-1]
    assert batch["labels"][0].tolist() == [*ids, *ids[::-1]][1:]


def test_the_loader_takes_it_as_it_takes_what_is_packed(tmp_path):
    class Texts:
        texts = [f"number {i}: é" * (i % 5 + 1) for i in range(40)]

        def documents(self):
            return (Document(str(i), text) for i, text in enumerate(self.texts))

        def describe(self):
            return {"kind": "texts"}

    packed = pack(Texts(), ByteTokenizer(), tmp_path / "packed", validation_fraction=0.3)
    documents = [[[*text.encode(), 256]] for text in Texts.texts]
    write(tmp_path / "mine", documents)
    mine = open_megatron(tmp_path / "mine", ByteTokenizer(), validation_fraction=0.3)
    # The names packed above are the numbers here, so that everything is the same.
    assert mine.fingerprint == packed.fingerprint and mine.vocab_size == packed.vocab_size
    assert mine.names is None and mine.tokenizer.fingerprint == "bytes-257"
    for name in SPLITS:
        one, other = packed.split(name), mine.split(name)
        assert one.nbytes == other.nbytes
        a, b = (Loader(s, 3, 16, seed=4, document_masks=True) for s in (one, other))
        a.restore(b.state())
        for step in range(12):
            for key, value in a.batch(step).items():
                np.testing.assert_array_equal(value, b.batch(step)[key])


def test_the_fingerprint_is_that_of_tokens_documents_split_and_tokenizer(tmp_path):
    class Other(ByteTokenizer):
        fingerprint = "other"

    one = [[[1, 2]], [[3, 4], [5]], [[6]]]
    variants = [one, [[[1, 2]], [[3, 4], [9]], [[6]]], [[[1, 2]], [[3, 4]], [[5], [6]]]]
    found = []
    for i, documents in enumerate(variants):
        write(tmp_path / str(i), documents)
        found.append(open_megatron(tmp_path / str(i), ByteTokenizer()).fingerprint)
    found.append(open_megatron(tmp_path / "0", Other()).fingerprint)
    opened = [
        open_megatron(tmp_path / "0", ByteTokenizer(), validation_fraction=0.5, seed=s)
        for s in range(4)
    ]
    splits = {tuple(d.split("validation").documents): d.fingerprint for d in opened}
    assert len(splits) > 1
    found += splits.values()
    assert len(set(found)) == len(found) - (found[0] in splits.values())
    write(tmp_path / "0", [[[1], [2]], [[3, 4, 5]], [[6]]])  # sequences do not matter
    assert open_megatron(tmp_path / "0", ByteTokenizer()).fingerprint == found[0]


def patched(path: pathlib.Path, at: int, data: bytes) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + data + whole[at + len(data) :])


HEAD = 34
LENGTHS, POINTERS, INDEX = HEAD, HEAD + 4 * 3, HEAD + 12 * 3  # with three sequences


@pytest.mark.parametrize(
    "at, data, message",
    [
        (0, b"TNTIDX\x00\x00\x00", r"x.idx: begins with b'TNTIDX"),
        (9, struct.pack("<Q", 2), r"x.idx: version 2, but only 1 is known"),
        (17, b"\x06", r"x.idx: dtype code 6 \(float64\), but tokens are integers: 1 \(uint8\)"),
        (17, b"\x09", r"x.idx: dtype code 9 \(unknown\)"),
        (17, b"\x04", r"x.idx: pointer of sequence 1 is 4, but.*end at byte 8"),
        (18, struct.pack("<Q", 4), r"x.idx: 94 bytes, but 106 are needed: it was cut off"),
        (18, struct.pack("<Q", 2**60), r"x.idx: 94 bytes, but \d+ are needed"),
        (26, struct.pack("<Q", 2), r"x.idx: 94 bytes where its header says 86"),
        (LENGTHS + 4, struct.pack("<i", -1), r"x.idx: length of sequence 1 is -1"),
        (POINTERS + 8, struct.pack("<q", 3), r"x.idx: pointer of sequence 1 is 3, but.*byte 4"),
        (INDEX, struct.pack("<q", 1), r"x.idx: document index from 1 to 3"),
        (INDEX + 8, struct.pack("<q", 9), r"x.idx: document index from 0 to 3, but it must ascend"),
        (INDEX + 16, struct.pack("<q", 2), r"x.idx: document index from 0 to 2.*not ended"),
        (LENGTHS + 8, struct.pack("<i", 9), r"x.bin: 12 bytes, but 26 are needed: it was cut off"),
        (LENGTHS + 8, struct.pack("<i", 0), r"x.bin: 12 bytes where its index says 8 \(4 tok"),
    ],
)
def test_what_is_wrong_with_an_index_is_named(tmp_path, at, data, message):
    write(tmp_path / "x", [[[1, 2], [3, 4]], [[5, 6]]])
    open_megatron(tmp_path / "x", ByteTokenizer())
    patched(tmp_path / "x.idx", at, data)
    with pytest.raises(DataError, match=message):
        open_megatron(tmp_path / "x", ByteTokenizer())


@pytest.mark.parametrize(
    "suffix, size", [("idx", 0), ("idx", 20), ("idx", 93), ("bin", 0), ("bin", 11)]
)
def test_truncated_files_are_refused(tmp_path, suffix, size):
    write(tmp_path / "x", [[[1, 2], [3, 4]], [[5, 6]]])
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=f"x.{suffix}: (begins with b''|{size} bytes, but)"):
        open_megatron(tmp_path / "x", ByteTokenizer())


@pytest.mark.parametrize(
    "code, value, shown",
    [(8, 257, 257), (8, 65_535, 65_535), (4, -1, -1), (2, -5, -5), (5, 2**40, 2**40)],
)
def test_ids_outside_the_vocabulary_are_refused(tmp_path, code, value, shown):
    write(tmp_path / "x", [[[1, 2], [3, 100]], [[value, 6]]], code)
    with pytest.raises(DataError, match=rf"x.bin: token 4 is {shown}, but.*bytes-257 are 0 to 256"):
        open_megatron(tmp_path / "x", ByteTokenizer())


def test_what_else_cannot_be_opened(tmp_path):
    with pytest.raises(DataError, match=r"x.idx cannot be read: No such file.*PREFIX.bin"):
        open_megatron(tmp_path / "x", ByteTokenizer())
    write(tmp_path / "x", [[[1, 2]], [[3]]])
    (tmp_path / "x.bin").unlink()
    with pytest.raises(DataError, match=r"x.bin cannot be read"):
        open_megatron(tmp_path / "x", ByteTokenizer())
    write(tmp_path / "x", [])
    with pytest.raises(DataError, match="number of sequences 0.*empty"):
        open_megatron(tmp_path / "x", ByteTokenizer())
    write(tmp_path / "x", [[[1, 2]], [[3]]])
    with pytest.raises(ConfigError, match=r"validation_fraction = 1\.0"):
        open_megatron(tmp_path / "x", ByteTokenizer(), validation_fraction=1.0)
    with pytest.raises(DataError, match="no split 'validation' .*it has train"):
        open_megatron(tmp_path / "x", ByteTokenizer(), validation_fraction=0.0).split("validation")


def test_blocks_cut_documents_anywhere(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    documents = [[rng.integers(0, 257, n).tolist()] for n in rng.integers(1, 30, 60)]
    write(tmp_path / "x", documents)
    whole = open_megatron(tmp_path / "x", ByteTokenizer(), validation_fraction=0.4)
    for block in (1, 7, 64):
        monkeypatch.setattr("eejax.data.megatron._BLOCK", block)
        cut = open_megatron(tmp_path / "x", ByteTokenizer(), validation_fraction=0.4)
        assert cut.fingerprint == whole.fingerprint
        assert [s.nbytes for s in cut.splits.values()] == [s.nbytes for s in whole.splits.values()]
    expected = sum(int(np.sum(np.array(d[0]) < 256)) for d in documents)
    assert sum(s.nbytes for s in whole.splits.values()) == expected
