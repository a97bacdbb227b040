"""Token files that Megatron-LM prepared, read in place.

A data set is two little-endian files (`IndexedDataset` of Megatron-LM's core/datasets):

    PREFIX.bin   the tokens of all sequences, one after the other
    PREFIX.idx   "MMIDIDX", two zero bytes; uint64 version, 1; uint8 code of the tokens' dtype;
                 uint64 number of sequences; uint64 length of the last of these arrays:
                 int32 tokens of each sequence; int64 byte of PREFIX.bin where it begins;
                 int64 first sequence of each document, and at the end the number of sequences
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
from typing import Any

import numpy as np

from eejax.common.errors import DataError
from eejax.data import packing, places
from eejax.data.sources import name_hash
from eejax.data.tokenizers import Tokenizer, require_end

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<QBQQ")
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = {6: "float64", 7: "float32"}

_BLOCK = 1 << 22  # tokens that are read together


@dataclasses.dataclass(frozen=True, eq=False)
class MegatronDataset:
    """Megatron-LM's files, with the interface of a `PackedDataset`.

    `path` is the files' common beginning.
    """

    path: str
    fingerprint: str
    tokenizer: Tokenizer
    splits: dict[str, packing.Split]
    names: None = None  # documents have numbers only

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary; a model may have more rows, not fewer."""
        return self.tokenizer.vocab_size

    def split(self, name: str) -> packing.Split:
        """Return a split. Raises `DataError` if it does not exist or is empty."""
        return packing.choose(self.splits, name, self.path)


def open_megatron(
    prefix: str | os.PathLike,
    tokenizer: Tokenizer,
    *,
    validation_fraction: float = 0.05,
    seed: int = 0,
) -> MegatronDataset:
    """Open `prefix`.bin and .idx, whose tokens are those of `tokenizer`, and read them all once.

    Documents fall into splits by the hash of their number, as `pack` does it with names; those
    without tokens are left out. Tokens are taken as they are: whether an end token closes a
    document was decided when the files were made (Megatron-LM's --append-eod).

    Memory: about 40 bytes for each document and 12 for each sequence; tokens stay on disk.

    Raises:
      DataError: a file that is not there, damaged or of another kind, or tokens that are not of
        the tokenizer's vocabulary.
    """
    places.check_fraction(validation_fraction)
    require_end(tokenizer)
    prefix = os.path.expanduser(os.fspath(prefix))
    try:
        dtype, bounds = _index(f"{prefix}.idx")
        tokens = _tokens(f"{prefix}.bin", dtype, int(bounds[-1]))
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read: {error.strerror or error}. A Megatron data set is "
            "named by the common PREFIX of PREFIX.bin and PREFIX.idx."
        ) from error
    numbers = np.flatnonzero(np.diff(bounds))  # of the documents with tokens
    starts = np.append(bounds[numbers], bounds[-1])
    packing.check_enough(len(numbers), validation_fraction)
    hashes = np.fromiter((name_hash(str(n), seed) for n in numbers), np.uint64, len(numbers))
    (split,) = packing.assign(lambda: [hashes], validation_fraction)
    digest, sizes = _read_all(f"{prefix}.bin", tokens, starts, tokenizer)
    for array in (starts, split):
        digest.update(array)
    digest.update(tokenizer.fingerprint.encode())
    fingerprint = digest.hexdigest()[:16]
    splits = packing.part(
        numbers,
        starts,
        sizes,
        split,
        tokens,
        fingerprint=fingerprint,
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
    )
    return MegatronDataset(prefix, fingerprint, tokenizer, splits)


def _index(path: str) -> tuple[np.dtype, np.ndarray]:
    """Return the tokens' dtype, and where documents begin [documents + 1], in tokens."""
    with open(path, "rb") as file:
        head = file.read(len(_MAGIC) + _HEADER.size)
    size = os.path.getsize(path)
    magic, rest = head[: len(_MAGIC)], head[len(_MAGIC) :]
    if magic != _MAGIC:
        raise DataError(
            f"{path}: begins with {magic!r}, not {_MAGIC!r}: it is not an index of Megatron-LM's "
            "memory-mapped data sets (the older formats 'lazy' and 'cached' are not supported)."
        )
    if len(rest) < _HEADER.size:
        raise _short(path, size, len(_MAGIC) + _HEADER.size)
    version, code, n, documents = _HEADER.unpack(rest)
    if version != _VERSION:
        raise DataError(f"{path}: version {version}, but only {_VERSION} is known.")
    if code not in _DTYPES:
        known = ", ".join(f"{c} ({np.dtype(t).name})" for c, t in _DTYPES.items())
        raise DataError(
            f"{path}: dtype code {code} ({_FLOATS.get(code, 'unknown')}), but tokens are integers: "
            f"{known}."
        )
    expected = len(head) + 12 * n + 8 * documents
    if size < expected:
        raise _short(path, size, expected)
    if size > expected:
        raise DataError(
            f"{path}: {size} bytes where its header says {expected}: it is damaged, or has the "
            "modes of a multimodal data set, which is not supported."
        )
    if not n or not documents:
        raise DataError(f"{path}: number of sequences {n}, document index of {documents}: empty.")
    dtype = np.dtype(_DTYPES[code])
    lengths, pointers, first = (
        np.memmap(path, kind, "r", offset, (count,))
        for kind, offset, count in (
            ("<i4", len(head), n),
            ("<i8", len(head) + 4 * n, n),
            ("<i8", len(head) + 12 * n, documents),
        )
    )
    if (wrong := np.flatnonzero(lengths < 0)).size:
        raise DataError(f"{path}: length of sequence {wrong[0]} is {lengths[wrong[0]]}: damaged.")
    begins = np.zeros(n + 1, np.int64)
    np.cumsum(lengths, out=begins[1:])
    if (wrong := np.flatnonzero(pointers != begins[:-1] * dtype.itemsize)).size:
        i = wrong[0]
        raise DataError(
            f"{path}: pointer of sequence {i} is {pointers[i]}, but the sequences before it end "
            f"at byte {begins[i] * dtype.itemsize}: it is damaged, or was not written by "
            "Megatron-LM, whose sequences follow one another."
        )
    if first[0] != 0 or first[-1] != n or (np.diff(first) < 0).any():
        raise DataError(
            f"{path}: document index from {first[0]} to {first[-1]}, but it must ascend from 0 to "
            f"the number of sequences, {n}: it is damaged, or the last document was not ended."
        )
    return dtype, begins[first]


def _tokens(path: str, dtype: np.dtype, count: int) -> np.ndarray:
    size, expected = os.path.getsize(path), count * dtype.itemsize
    if size < expected:
        raise _short(path, size, expected)
    if size > expected:
        raise DataError(
            f"{path}: {size} bytes where its index says {expected} ({count} tokens of "
            f"{dtype.name}): the two files do not belong together."
        )
    return np.memmap(path, dtype, "r") if count else np.zeros(0, dtype)


def _read_all(
    path: str, tokens: np.ndarray, starts: np.ndarray, tokenizer: Tokenizer
) -> tuple[Any, np.ndarray]:
    """Return the SHA-256 of the stored tokens, and the UTF-8 bytes [n] of each document."""
    digest, sizes = hashlib.sha256(), np.zeros(len(starts) - 1, np.int64)
    table = tokenizer.byte_lengths
    for at in range(0, len(tokens), _BLOCK):
        block = np.asarray(tokens[at : at + _BLOCK])
        digest.update(block.data)
        if block.min() < 0 or block.max() >= tokenizer.vocab_size:
            i = np.flatnonzero((block < 0) | (block >= tokenizer.vocab_size))[0]
            raise DataError(
                f"{path}: token {at + i} is {block[i]}, but the ids of tokenizer "
                f"{tokenizer.fingerprint} are 0 to {tokenizer.vocab_size - 1}: give as tokenizer "
                "the one these tokens were made with."
            )
        # The documents of this block, the first of which may have begun before it.
        low = int(np.searchsorted(starts, at, side="right")) - 1
        high = int(np.searchsorted(starts, at + len(block), side="left"))
        edges = np.maximum(starts[low:high] - at, 0)
        sizes[low:high] += np.add.reduceat(table[block], edges)
    return digest, sizes


def _short(path: str, size: int, expected: int) -> DataError:
    return DataError(
        f"{path}: {size} bytes, but {expected} are needed: it was cut off, copy it again."
    )
