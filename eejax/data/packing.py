"""Documents to one memory-mapped file of tokens, with an index and a split by document.

A packed folder is complete or absent: it is made beside its place (`writing`) and renamed.

    tokens.bin      every document's tokens, its end token last, uint16 or uint32; where some are
                    not to be predicted, uint32 with their highest bit set
    starts.npy      [documents + 1] int64, where each document begins
    bytes.npy       [documents] int64, UTF-8 bytes of its text
    split.npy       [documents] uint8, index into SPLITS
    names.txt       one JSON string a line
    meta.json       what it was made from, counts, fingerprint, checksum of the rest
    tokenizer/      for `load_tokenizer`
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from absl import logging

from eejax.common.errors import DataError, require
from eejax.data import workers as processes
from eejax.data import writing
from eejax.data.places import FORMAT, packed_before, place
from eejax.data.sources import Document, FieldDocument, Source, is_supervised
from eejax.data.tokenizer_files import load_tokenizer
from eejax.data.tokenizers import Tokenizer

SPLITS = ("train", "validation")


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Documents of one split, read as one sequence of tokens 0..len-1.

    The split's documents lie in `runs` of neighbours in the file, so that reading a window takes
    one or two slices.
    """

    name: str
    fingerprint: str
    eos_id: int
    vocab_size: int
    nbytes: int  # UTF-8 bytes of the text, end tokens not counted
    documents: np.ndarray  # [n] the documents' numbers in the file
    starts: np.ndarray  # [n + 1] where each document begins in this split
    runs: np.ndarray  # [r + 1] where each run begins in this split
    offsets: np.ndarray  # [r] where each run begins in the file
    tokens: np.ndarray  # the whole file
    bos_id: int | None = None  # with which every window begins, if any
    supervised: bool = False  # whether some tokens are not to be predicted

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Return tokens start:start+count of the split as int32, fewer at its end."""
        return self.counted(start, count)[0]

    def counted(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return `read`, and a mask of the tokens to be predicted; None if all are."""
        stop = min(start + count, len(self))
        pieces = []
        run = int(np.searchsorted(self.runs, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self.runs[run + 1]))
            at = int(self.offsets[run]) + start - int(self.runs[run])
            pieces.append(self.tokens[at : at + end - start])
            start, run = end, run + 1
        found = np.concatenate(pieces) if pieces else self.tokens[:0]
        if not self.supervised:
            return found.astype(np.int32), None
        return (found & ~processes.UNCOUNTED).astype(np.int32), (found & processes.UNCOUNTED) == 0


@dataclasses.dataclass(frozen=True, eq=False)
class PackedDataset:
    """A packed folder, opened by `pack` or `open_packed`."""

    path: str
    meta: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return self.meta["fingerprint"]

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary; a model may have more rows, not fewer."""
        return self.meta["vocab_size"]

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(os.path.join(self.path, "tokenizer"))

    @functools.cached_property
    def names(self) -> list[str]:
        with open(os.path.join(self.path, "names.txt"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def split(self, name: str) -> Split:
        """Return a split. Raises `DataError` if it does not exist or is empty."""
        return choose(self.splits, name, self.path)

    @functools.cached_property
    def splits(self) -> dict[str, Split]:
        """Splits that have documents, by name."""
        starts, sizes, split = (
            np.load(os.path.join(self.path, f"{n}.npy")) for n in ("starts", "bytes", "split")
        )
        tokens = np.memmap(os.path.join(self.path, "tokens.bin"), self.meta["dtype"], mode="r")
        return part(
            np.arange(len(split)),
            starts,
            sizes,
            split,
            tokens,
            fingerprint=self.fingerprint,
            eos_id=self.meta["eos_id"],
            vocab_size=self.vocab_size,
            bos_id=self.meta.get("bos_id"),
            supervised=self.meta.get("supervised", False),
        )


def part(
    numbers: np.ndarray,
    starts: np.ndarray,
    sizes: np.ndarray,
    split: np.ndarray,
    tokens: np.ndarray,
    **common: Any,
) -> dict[str, Split]:
    """Return the splits of consecutive documents in a file; only those with documents.

    Args:
      numbers: [n] numbers of the documents.
      starts: [n + 1] where they begin.
      sizes: [n] UTF-8 bytes.
      split: [n] index into SPLITS.
      common: the fields of `Split` that are the same for all.
    """
    result = {}
    for i, name in enumerate(SPLITS):
        chosen = np.flatnonzero(split == i)
        if not len(chosen):
            continue
        lengths = starts[chosen + 1] - starts[chosen]
        own = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        first = np.flatnonzero(np.diff(chosen, prepend=-2) != 1)
        result[name] = Split(
            name=name,
            nbytes=int(sizes[chosen].sum()),
            documents=numbers[chosen],
            starts=own,
            runs=np.append(own[first], own[-1]),
            offsets=starts[chosen[first]],
            tokens=tokens,
            **common,
        )
    return result


def choose(splits: dict[str, Split], name: str, path: str) -> Split:
    """Return a split. Raises `DataError` if it does not exist."""
    if name not in splits:
        raise DataError(
            f"no split {name!r} in {path} (it has {', '.join(splits)}): pack with "
            "validation_fraction > 0, or ask for one of these."
        )
    return splits[name]


@dataclasses.dataclass(frozen=True)
class PackProgress:
    """Progress of packing; `total_bytes` is an estimate by the source itself, or None."""

    documents: int
    bytes: int
    tokens: int
    total_bytes: int | None


def pack(
    source: Source,
    tokenizer: Tokenizer,
    root: str | os.PathLike,
    *,
    validation_fraction: float = 0.05,
    seed: int = 0,
    workers: int = 1,
    progress: Callable[[PackProgress], None] | None = None,
) -> PackedDataset:
    """Tokenize a source into a folder of its own under `root`, or open the folder if it exists.

    The hash of a document's name and `seed` decides whether it goes to validation, whatever other
    documents there are. If a split would stay empty, the document nearest to it is moved. With
    `validation_fraction` 0 all text is for training.

    `workers` processes tokenize (1: this one), with the same result. However this ends, by an
    error, a full disk or SIGKILL, the same call with the same text continues after the last commit,
    which is moments old. While another process packs the same data, this one waits. If the text
    itself is gone, a folder that was packed from it is opened, with a note. Memory: some chunks of
    2^18 characters for each worker, or of one longer document. `progress` is called after every
    chunk; an error that it raises ends packing.

    Raises:
      DataError: for unreadable or too little text, a tokenizer without an end token, or a full
        disk.
    """
    require(isinstance(workers, int) and workers > 0, "workers", workers, "must be an integer > 0")
    settings = (tokenizer, root, validation_fraction, seed)
    try:
        spec, path = place(source, *settings)
    except DataError as error:
        if (path := packed_before(source, *settings)) is None:
            raise
        logging.warning("%s Its packed tokens are complete and are still used: %s", error, path)
        return open_packed(path)
    root, name = os.path.split(path)
    if os.path.isdir(path):
        with contextlib.suppress(OSError):  # it may belong to others and be read-only
            writing.remove_stale(root)
        return open_packed(path)
    with writing.as_data_error(root):
        os.makedirs(root, exist_ok=True)
        writing.remove_stale(root)
    folder = os.path.join(root, writing.PREFIX + name)
    with writing.hold(folder, lambda: os.path.isdir(path)) as work:
        if work is not None:
            _tokenize(work, source, tokenizer, spec, workers, progress)
            _finish(work, tokenizer, spec)
            work.finish(path)
    return open_packed(path)


def find_packed(
    source: Source,
    tokenizer: Tokenizer,
    root: str | os.PathLike,
    *,
    validation_fraction: float = 0.05,
    seed: int = 0,
) -> PackedDataset | None:
    """Return the verified result of `pack` with the same arguments; None if there is none."""
    _, path = place(source, tokenizer, root, validation_fraction, seed)
    return open_packed(path) if os.path.isdir(path) else None


def open_packed(path: str | os.PathLike) -> PackedDataset:
    """Open a packed folder, and read it all once to verify that it is as it was written.

    Raises:
      DataError: not a packed folder, or a damaged one.
    """
    path = os.fspath(path)
    fix = "delete the folder and pack the text again."
    try:
        with open(os.path.join(path, "meta.json"), encoding="utf-8") as file:
            meta = json.load(file)
        version, written, found = meta["format"], meta["fingerprint"], _fingerprint(path, meta)
        whole = meta.get("rest") == _rest(path, meta)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} holds no packed tokens ({error!r}): {fix}") from error
    if version != FORMAT:
        raise DataError(f"{path} has format {version}, not {FORMAT}: {fix}")
    if found != written:
        raise DataError(f"{path} is damaged: its tokens are not those that were written: {fix}")
    if not whole:
        raise DataError(f"{path} is damaged: what describes its tokens has changed: {fix}")
    return PackedDataset(path, meta)


def _fingerprint(path: str, meta: dict[str, Any]) -> str:
    """Fingerprint the tokens, their documents, the split and the tokenizer."""
    with open(os.path.join(path, "tokens.bin"), "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    for name in ("starts", "split"):
        digest.update(np.load(os.path.join(path, f"{name}.npy"), mmap_mode="r"))
    digest.update(meta["spec"]["tokenizer"].encode())
    return digest.hexdigest()[:16]


def _rest(path: str, meta: dict[str, Any]) -> str:
    """Return a checksum of everything that `_fingerprint` leaves out, meta.json included."""
    described = {k: v for k, v in meta.items() if k != "rest"}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    tokenizer = sorted(os.listdir(os.path.join(path, "tokenizer")))
    for name in ("bytes.npy", "names.txt", *(f"tokenizer/{n}" for n in tokenizer)):
        digest.update(name.encode())
        with open(os.path.join(path, name), "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _tokenize(
    work: writing.PackingFolder,
    source: Source,
    tokenizer: Tokenizer,
    spec: dict[str, Any],
    workers: int,
    progress: Callable[[PackProgress], None] | None,
) -> None:
    """Tokenize all documents into the working folder; those already committed are only read."""
    saved = os.path.join(work.packed, "tokenizer")
    with writing.as_data_error(saved):
        tokenizer.save(saved)
    documents, digest = _behind(work, source)
    dtype = _dtype(tokenizer, spec).str
    encoding = processes.Encoding(tokenizer.fingerprint, spec["seed"], dtype)
    chunks = _chunks(documents, digest)

    def report():
        return progress(_progress(work.state, spec)) if progress else None

    report()
    with contextlib.closing(
        processes.encoded(chunks, tokenizer, encoding, workers, saved)
    ) as encoded:
        for chunk in encoded:
            work.append(chunk)
            report()
    most = spec["source"].get("max_bytes")
    used_up = most is not None and work.state.bytes > most - 4  # cut between characters
    try:
        check_enough(work.state.documents, spec["validation_fraction"], most if used_up else None)
    except DataError:
        work.begin_anew()  # resuming would fail in the same way
        raise
    work.commit()


def check_enough(documents: int, fraction: float, max_bytes: int | None = None) -> None:
    """Raise `DataError` for too few documents; `max_bytes` is the limit that cut the text."""
    if not documents:
        raise DataError(
            "the source has no document with text: give more text, or a larger max_bytes."
        )
    if documents == 1 and fraction > 0.0:
        cut = (
            "" if max_bytes is None else f"raise data.max_bytes = {max_bytes}, which cut the text, "
        )
        raise DataError(
            "the text is a single document and cannot be split into train and validation: "
            f"{cut}give more files, or set data.validation_fraction = 0 and hold nothing out. (In "
            "Python, a TextFiles with a separator makes several documents of one file.)"
        )


def _behind(
    work: writing.PackingFolder, source: Source
) -> tuple[Iterator[Document | FieldDocument], Any]:
    """Return the documents that are not committed yet, and the digest of those that are."""
    documents, digest = iter(source.documents()), hashlib.blake2b(digest_size=16)
    if not work.state.documents:
        return documents, digest
    logging.info("%s: resuming after document %d", work.folder, work.state.documents)
    for _, document in zip(range(work.state.documents), documents, strict=False):
        _update(digest, document)
    if digest.hexdigest() == work.state.digest:
        return documents, digest
    logging.warning(
        "%s: the text has changed since packing began, though its description has not: packing "
        "begins anew",
        work.folder,
    )
    work.begin_anew()
    return _behind(work, source)


def _chunks(
    documents: Iterator[Document | FieldDocument], digest: Any
) -> Iterator[processes.Chunk]:
    chunk, chars = [], 0
    for document in documents:
        _update(digest, document)
        chunk.append(document)
        chars += len(document.text)
        if chars >= processes.CHUNK_CHARS or len(chunk) == processes.CHUNK_DOCUMENTS:
            yield processes.Chunk(chunk, digest.hexdigest())
            chunk, chars = [], 0
    if chunk:
        yield processes.Chunk(chunk, digest.hexdigest())


def _update(digest: Any, document: Document | FieldDocument) -> None:
    # The tokenizer checks that the text is valid Unicode.
    for value in (document.name, document.text):
        data = value.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)


def _progress(state: writing.PackCommit, spec: dict[str, Any]) -> PackProgress:
    total, most = (spec["source"].get(k) for k in ("bytes", "max_bytes"))
    if total is not None and most is not None:
        total = min(total, most)
    return PackProgress(state.documents, state.bytes, state.tokens, total)


def _dtype(tokenizer: Tokenizer, spec: dict[str, Any]) -> np.dtype:
    large = tokenizer.vocab_size > 1 << 16 or is_supervised(spec["source"])
    return np.dtype("<u4" if large else "<u2")


def _finish(work: writing.PackingFolder, tokenizer: Tokenizer, spec: dict[str, Any]) -> None:
    """Write the files of a data set that need all of its documents."""
    n = work.state.documents

    def hashes():
        return (block["hash"] for block in work.records())

    def splits():
        return assign(hashes, spec["validation_fraction"])

    def starts() -> Iterator[np.ndarray]:
        end = np.zeros(1, np.int64)
        yield end
        for block in work.records():
            begins = end[-1] + np.cumsum(block["tokens"])
            yield begins
            end = begins[-1:]

    work.save("starts.npy", "<i8", n + 1, starts())
    work.save("bytes.npy", "<i8", n, (block["bytes"] for block in work.records()))
    work.save("split.npy", "|u1", n, splits())
    counts = np.zeros((len(SPLITS), 3), np.int64)
    for block, split in zip(work.records(), splits(), strict=True):
        for i in range(len(SPLITS)):
            own = block[split == i]
            counts[i] += len(own), own["tokens"].sum(), own["bytes"].sum()
    meta = {
        "format": FORMAT,
        "spec": spec,
        "dtype": _dtype(tokenizer, spec).str,
        **({"supervised": True} if is_supervised(spec["source"]) else {}),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "bos_id": tokenizer.bos_id if tokenizer.adds_bos else None,
        "documents": n,
        "tokens": work.state.tokens,
        "splits": {
            name: dict(zip(("documents", "tokens", "bytes"), map(int, row), strict=True))
            for name, row in zip(SPLITS, counts, strict=True)
        },
    }
    meta["fingerprint"] = _fingerprint(work.packed, meta)
    meta["rest"] = _rest(work.packed, meta)
    path = os.path.join(work.packed, "meta.json")
    with writing.as_data_error(path), open(path, "w", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)


def assign(hashes: Callable[[], Iterable[np.ndarray]], fraction: float) -> Iterator[np.ndarray]:
    """Yield the split of documents, uint8, for blocks of their hashes in [0, 1).

    It is 1, validation, for a hash below `fraction`. `hashes` returns the blocks, each time from
    the first on. If a split would stay empty, the document nearest to it is moved.
    """
    move = _to_move(hashes(), fraction) if fraction > 0.0 else None
    start = 0
    for block in hashes():
        split = (_unit(block) < fraction).astype(np.uint8)
        if move is not None and start <= move < start + len(block):
            split[move - start] ^= 1
        yield split
        start += len(block)


def _to_move(blocks: Iterable[np.ndarray], fraction: float) -> int | None:
    """Return the document that goes to the other split, so that none is empty."""
    count = held_out = 0
    low, high = (2.0, 0), (-1.0, 0)  # the ends, with the first document there
    for block in blocks:
        unit = _unit(block)
        i, j = int(np.argmin(unit)), int(np.argmax(unit))
        low = min(low, (unit[i], count + i), key=lambda end: end[0])
        high = max(high, (unit[j], count + j), key=lambda end: end[0])
        held_out += int(np.sum(unit < fraction))
        count += len(block)
    return low[1] if held_out == 0 else high[1] if held_out == count else None


def _unit(hashes: np.ndarray) -> np.ndarray:
    return hashes.astype(np.float64) / 2.0**64
