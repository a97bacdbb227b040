"""Documents to one memory-mapped file of tokens, with an index and a split by document.

A packed folder is complete or absent: it is written beside its place and renamed.

    tokens.bin      every document's tokens, its end token last, uint16 or uint32
    starts.npy      [documents + 1] int64, where each document begins
    bytes.npy       [documents] int64, UTF-8 bytes of its text
    split.npy       [documents] uint8, index into SPLITS
    names.txt       one JSON string a line
    meta.json       what it was made from, counts, checksum, fingerprint
    tokenizer/      for `load_tokenizer`
"""

from __future__ import annotations

import array
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np

from eejax.common.errors import DataError, require
from eejax.data.sources import Source, name_hash
from eejax.data.tokenizers import Tokenizer, load_tokenizer

SPLITS = ("train", "validation")
FORMAT = 1

_STALE_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """The documents of one split, seen as one run of tokens 0..len-1.

    The split's documents lie in `runs` of neighbours in the file, so that reading a window
    takes one or two slices.
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

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start:start+count of the split as int32; fewer at its end."""
        stop = min(start + count, len(self))
        pieces = []
        run = int(np.searchsorted(self.runs, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self.runs[run + 1]))
            at = int(self.offsets[run]) + start - int(self.runs[run])
            pieces.append(self.tokens[at : at + end - start])
            start, run = end, run + 1
        return np.concatenate(pieces).astype(np.int32) if pieces else np.zeros(0, np.int32)

    def document(self, i: int) -> np.ndarray:
        """Tokens of the split's i-th document, its end token last."""
        return self.read(int(self.starts[i]), int(self.starts[i + 1] - self.starts[i]))


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
        """Of the tokenizer; a model may have more rows, not fewer."""
        return self.meta["vocab_size"]

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(os.path.join(self.path, "tokenizer"))

    @functools.cached_property
    def names(self) -> list[str]:
        with open(os.path.join(self.path, "names.txt"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def split(self, name: str) -> Split:
        """Raises `DataError` for a split that does not exist or is empty."""
        if name not in SPLITS or not self.meta["splits"][name]["documents"]:
            have = [s for s in SPLITS if self.meta["splits"][s]["documents"]]
            raise DataError(
                f"no split {name!r} in {self.path} (it has {', '.join(have)}): pack with "
                "validation_fraction > 0, or ask for one of these."
            )
        return self._splits[name]

    @functools.cached_property
    def _splits(self) -> dict[str, Split]:
        starts, sizes, split = (
            np.load(os.path.join(self.path, f"{n}.npy")) for n in ("starts", "bytes", "split")
        )
        tokens = np.memmap(os.path.join(self.path, "tokens.bin"), self.meta["dtype"], mode="r")
        result = {}
        for i, name in enumerate(SPLITS):
            chosen = np.flatnonzero(split == i)
            lengths = (starts[1:] - starts[:-1])[chosen]
            own = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            first = np.flatnonzero(np.diff(chosen, prepend=-2) != 1)
            result[name] = Split(
                name=name,
                fingerprint=self.fingerprint,
                eos_id=self.meta["eos_id"],
                vocab_size=self.vocab_size,
                nbytes=int(sizes[chosen].sum()),
                documents=chosen,
                starts=own,
                runs=np.append(own[first], own[-1]),
                offsets=starts[chosen[first]],
                tokens=tokens,
            )
        return result


def pack(
    source: Source,
    tokenizer: Tokenizer,
    root: str | os.PathLike,
    *,
    validation_fraction: float = 0.05,
    seed: int = 0,
) -> PackedDataset:
    """Tokenizes a source into a folder of its own under `root`, or opens it if it is there.

    A document goes to validation when the hash of its name and `seed` says so, whatever other
    documents there are; if a split would stay empty, the document nearest to it is moved. With
    `validation_fraction` 0 everything is for training. Memory: one document and 17 bytes for
    each document; the tokens go to disk as they come.

    Raises:
      DataError: unreadable or too little text, a tokenizer without an end token, a full disk.
    """
    ok = 0.0 <= validation_fraction < 1.0
    require(ok, "validation_fraction", validation_fraction, "must be at least 0 and below 1")
    if tokenizer.eos_id is None:
        raise DataError(
            f"tokenizer {tokenizer.fingerprint} has no token that ends a document: load it with "
            "eos= the name of one of its special tokens."
        )
    spec = {
        "format": FORMAT,
        "source": source.describe(),
        "tokenizer": tokenizer.fingerprint,
        "validation_fraction": validation_fraction,
        "seed": seed,
    }
    key = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    root = os.path.abspath(os.path.expanduser(os.fspath(root)))
    path = os.path.join(root, f"{spec['source']['kind']}-{key}")
    if os.path.isdir(path):
        return open_packed(path)
    try:
        os.makedirs(root, exist_ok=True)
        _remove_stale(root)
        # Not mkdtemp: the folder becomes the data set, and others may want to read that.
        folder = os.path.join(root, f".packing-{uuid.uuid4().hex}")
        os.mkdir(folder)
    except OSError as error:
        raise _unwritable(root, error) from error
    try:
        _write(folder, source, tokenizer, spec)
        try:
            os.rename(folder, path)
        except OSError as error:
            if not os.path.isdir(path):  # else another process was faster, with the same result
                raise _unwritable(path, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return open_packed(path)


def open_packed(path: str | os.PathLike) -> PackedDataset:
    """Opens a packed folder, after reading all of it once to see that it is as it was written.

    Raises:
      DataError: not a packed folder, or a damaged one.
    """
    path = os.fspath(path)
    fix = "delete the folder and pack the text again."
    try:
        with open(os.path.join(path, "meta.json"), encoding="utf-8") as file:
            meta = json.load(file)
        version, written, found = meta["format"], meta["fingerprint"], _fingerprint(path, meta)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path} holds no packed tokens ({error!r}): {fix}") from error
    if version != FORMAT:
        raise DataError(f"{path} has format {version}, not {FORMAT}: {fix}")
    if found != written:
        raise DataError(f"{path} is damaged: its tokens are not those that were written: {fix}")
    return PackedDataset(path, meta)


def _fingerprint(path: str, meta: dict[str, Any]) -> str:
    """Of the tokens, the documents they fall into, the split and the tokenizer."""
    with open(os.path.join(path, "tokens.bin"), "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    for name in ("starts", "split"):
        digest.update(np.load(os.path.join(path, f"{name}.npy")).tobytes())
    digest.update(meta["spec"]["tokenizer"].encode())
    return digest.hexdigest()[:16]


def _write(folder: str, source: Source, tokenizer: Tokenizer, spec: dict[str, Any]) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    starts, sizes, hashes = array.array("q", [0]), array.array("q"), array.array("Q")
    with _Output(os.path.join(folder, "tokens.bin")) as tokens:
        with _Output(os.path.join(folder, "names.txt")) as names:
            for document in source.documents():
                ids = np.append(tokenizer.encode(document.text), tokenizer.eos_id).astype(dtype)
                data = ids.tobytes()
                tokens.write(data)
                names.write(json.dumps(document.name).encode() + b"\n")
                starts.append(starts[-1] + len(ids))
                sizes.append(len(document.text.encode()))
                hashes.append(name_hash(document.name, spec["seed"]))
    if not sizes:
        raise DataError(
            "the source has no document with text: give more text, or a larger max_bytes."
        )
    split = _split(np.asarray(hashes, np.uint64), spec["validation_fraction"])
    starts, sizes = np.asarray(starts, np.int64), np.asarray(sizes, np.int64)
    lengths = np.diff(starts)
    meta = {
        "format": FORMAT,
        "spec": spec,
        "dtype": dtype.str,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "documents": len(sizes),
        "tokens": int(starts[-1]),
        "splits": {
            name: {
                "documents": int(np.sum(split == i)),
                "tokens": int(lengths[split == i].sum()),
                "bytes": int(sizes[split == i].sum()),
            }
            for i, name in enumerate(SPLITS)
        },
    }
    for name, value in (("starts", starts), ("bytes", sizes), ("split", split)):
        with _Output(os.path.join(folder, f"{name}.npy")) as file:
            np.save(file, value)
    meta["fingerprint"] = _fingerprint(folder, meta)
    try:
        tokenizer.save(os.path.join(folder, "tokenizer"))
    except OSError as error:
        raise _unwritable(folder, error) from error
    with _Output(os.path.join(folder, "meta.json")) as file:
        file.write(json.dumps(meta, indent=1).encode())


def _split(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """[documents] uint8: 1 for validation, where the hash as a number in [0, 1) is below."""
    unit = hashes.astype(np.float64) / 2.0**64
    split = (unit < fraction).astype(np.uint8)
    if fraction == 0.0:
        return split
    if len(split) == 1:
        raise DataError(
            "the text is a single document and cannot be split into train and validation: give "
            "more files, or set validation_fraction = 0 and hold nothing out. (In Python, a "
            "TextFiles with a separator makes several documents of one file.)"
        )
    if not split.any():
        split[np.argmin(unit)] = 1
    elif split.all():
        split[np.argmax(unit)] = 0
    return split


class _Output:
    """A file whose writing errors name it, and which is on disk when closed without one."""

    def __init__(self, path: str):
        self._path = path

    def __enter__(self) -> _Output:
        try:
            self._file = open(self._path, "wb")  # noqa: SIM115
        except OSError as error:
            raise _unwritable(self._path, error) from error
        return self

    def write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            if kind is None:
                raise _unwritable(self._path, error) from error


def _unwritable(path: str, error: OSError) -> DataError:
    return DataError(
        f"packed data cannot be written to {path}: {error.strerror or error}. Free some space or "
        "choose another folder; nothing half written is kept."
    )


def _remove_stale(root: str) -> None:
    """Folders of killed runs: a live one writes, and so is never an hour old."""
    for entry in os.scandir(root):
        if not entry.name.startswith(".packing-"):
            continue
        try:
            newest = max(os.path.getmtime(p) for p in _with_files(entry.path))
        except OSError:  # its owner is finishing
            continue
        if time.time() - newest > _STALE_SECONDS:
            shutil.rmtree(entry.path, ignore_errors=True)


def _with_files(folder: str) -> Iterator[str]:
    yield folder
    for entry in os.scandir(folder):
        yield entry.path
