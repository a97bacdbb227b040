"""The folder in which a data set is being made: held by one process, and resumed after a kill.

    .packing-<name>/
      lock            held by the process at work
      records.bin     RECORD of each document
      commit.json     what is certain: counts, and size and checksum of each file
      packed/         the data set itself, which gets its name when it is whole
        tokens.bin, names.txt, tokenizer/, and at the end the rest

Files only grow, and bytes after the last commit are cut off on resuming.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from absl import logging
from filelock import FileLock, Timeout

from eejax.common.errors import DataError
from eejax.data.workers import RECORD, Encoded

PREFIX = ".packing-"
TOKENS, NAMES, RECORDS = "packed/tokens.bin", "packed/names.txt", "records.bin"

# A commit waits for the disk: they take at most one part in this many of the time.
COMMIT_SHARE = 20
STALE_SECONDS = 24 * 3600.0

_LOCK, _COMMIT, _REMOVED = "lock", "commit.json", f"{PREFIX}removed-"
_POLL_SECONDS, _SAY_SECONDS = 0.1, 2.0
_BLOCK = 1 << 16  # records at a time when finishing


@dataclasses.dataclass(frozen=True)
class PackCommit:
    """State that is safely on disk; `digest` is that of the names and texts of all `documents`."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    digest: str = ""
    files: dict[str, tuple[int, int]] = dataclasses.field(  # size, CRC-32
        default_factory=lambda: {name: (0, 0) for name in (TOKENS, NAMES, RECORDS)}
    )


@contextlib.contextmanager
def hold(folder: str, finished: Callable[[], bool]) -> Iterator[PackingFolder | None]:
    """Hold the working folder for this process alone; yield None if `finished` by then.

    It waits for another process that holds the folder. Commits stay when the block is left by an
    error.
    """
    with _wait(folder):
        if finished():
            _remove(folder)
            yield None
            return
        work = PackingFolder(folder)
        try:
            yield work
        finally:
            work.close()
            if finished() or not os.path.exists(work.path(_COMMIT)):
                _remove(folder)


class PackingFolder:
    """A working folder that this process holds, and its files, open at the last commit."""

    def __init__(self, folder: str):
        self.folder = folder
        self.packed = os.path.join(folder, "packed")
        self._files: dict[str, GrowingFile] = {}
        self._due = 0.0
        with as_data_error(self.packed):
            os.makedirs(self.packed, exist_ok=True)
        self._open(self._committed())

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def append(self, encoded: Encoded) -> PackCommit:
        """Write a chunk, commit if it is time, and return what would be committed now."""
        data = {TOKENS: encoded.tokens, NAMES: encoded.names, RECORDS: encoded.records}
        for name, value in data.items():
            self._files[name].write(value)
        records, last = np.frombuffer(encoded.records, RECORD), self.state
        self.state = PackCommit(
            last.documents + len(records),
            last.tokens + int(records["tokens"].sum()),
            last.bytes + int(records["bytes"].sum()),
            encoded.digest,
            {name: (file.size, file.crc) for name, file in self._files.items()},
        )
        if time.monotonic() >= self._due:
            self.commit()
        return self.state

    def commit(self) -> None:
        """Make `state` survive any end of this process and of the machine."""
        if self.state == self._last:
            return
        begin = time.monotonic()
        for file in self._files.values():
            file.sync()
        part, path = self.path(f"{_COMMIT}.part"), self.path(_COMMIT)
        with as_data_error(path):
            with open(part, "w", encoding="utf-8") as file:
                json.dump(dataclasses.asdict(self.state), file)
            for written in (part, self.packed):
                _sync(written)
            os.rename(part, path)
            _sync(self.folder)
        self._last, now = self.state, time.monotonic()
        self._due = now + COMMIT_SHARE * (now - begin)

    def begin_anew(self) -> None:
        """Forget all documents; a folder that stays so is removed."""
        self.close()
        with as_data_error(self.folder), contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(_COMMIT))
        self._open(PackCommit())

    def records(self) -> Iterator[np.ndarray]:
        """Yield RECORD of all committed documents, in blocks."""
        return self._records(self.state.documents)

    def _records(self, n: int) -> Iterator[np.ndarray]:
        with open(self.path(RECORDS), "rb") as file:
            for start in range(0, n, _BLOCK):
                yield np.fromfile(file, RECORD, min(_BLOCK, n - start))

    def save(self, name: str, dtype: str, count: int, blocks: Iterable[np.ndarray]) -> None:
        """Write packed/`name` as `np.save` would write an array [count] of these blocks.

        It is not written through a memory map, where a full disk ends the process by a signal.
        """
        path = os.path.join(self.packed, name)
        with as_data_error(path), open(path, "wb") as file:
            header = {"descr": dtype, "fortran_order": False, "shape": (count,)}
            np.lib.format.write_array_header_1_0(file, header)
            for block in blocks:
                file.write(block.astype(dtype).tobytes())

    def finish(self, path: str) -> None:
        """Give the data set its name, once all of its files are written."""
        self.close()
        with as_data_error(path):
            for folder, _, files in os.walk(self.packed):
                for name in (*files, "."):
                    _sync(os.path.join(folder, name))
            os.rename(self.packed, path)
            _sync(os.path.dirname(path))

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _open(self, state: PackCommit) -> None:
        self.state = self._last = state
        for name in PackCommit().files:
            self._files[name] = GrowingFile(self.path(name), *state.files[name])

    def _committed(self) -> PackCommit:
        """Return the last commit, if the files still agree with it."""
        path = self.path(_COMMIT)
        try:
            with open(path, encoding="utf-8") as file:
                state = PackCommit(**json.load(file))
            for name in PackCommit().files:
                size, crc = state.files[name]
                if _checksum(self.path(name), size) != crc:
                    raise ValueError(f"{name} was changed after it was written")
            sums = np.zeros(3, np.int64)
            for block in self._records(state.documents):
                sums += len(block), block["tokens"].sum(), block["bytes"].sum()
            if sums.tolist() != [state.documents, state.tokens, state.bytes]:
                raise ValueError("its counts do not fit its files")
        except FileNotFoundError as error:
            if not os.path.exists(path):
                return PackCommit()  # nothing was committed
            reason: Exception = error
        except (OSError, ValueError, LookupError, TypeError) as error:
            reason = error
        else:
            return state
        logging.warning("%s cannot be resumed (%s): packing begins anew", self.folder, reason)
        with as_data_error(path):
            os.unlink(path)
        return PackCommit()


class GrowingFile:
    """File that is extended from `size` bytes, whose checksum so far is `crc`."""

    def __init__(self, path: str, size: int, crc: int):
        self._path, self.size, self.crc = path, size, crc
        with as_data_error(path):
            self._file = open(path, "ab")  # noqa: SIM115
            self._file.truncate(size)

    def write(self, data: bytes) -> None:
        with as_data_error(self._path):
            self._file.write(data)
        self.size, self.crc = self.size + len(data), zlib.crc32(data, self.crc)

    def sync(self) -> None:
        with as_data_error(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # unsynced data does not count
            self._file.close()


@contextlib.contextmanager
def as_data_error(path: str) -> Iterator[None]:
    """Turn errors of writing into a `DataError` that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"packed data cannot be written to {path}: {error.strerror or error}. Free some space "
            "or choose another folder; finished work is kept, and the same call resumes."
        ) from error


def remove_stale(root: str) -> None:
    """Remove working folders under `root` that are finished or a day old."""
    for entry in os.scandir(root):
        if entry.name.startswith(_REMOVED):  # by a process that was killed over it
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name.startswith(PREFIX):
            with contextlib.suppress(OSError):  # its owner is at work, or finishing
                newest = max(map(os.path.getmtime, _with_files(entry.path)))
                done = os.path.isdir(os.path.join(root, entry.name.removeprefix(PREFIX)))
                if done or time.time() - newest > STALE_SECONDS:
                    with _lock(entry.path).acquire(0):
                        _remove(entry.path)


def _wait(folder: str) -> contextlib.AbstractContextManager[FileLock]:
    """Return the held lock of a working folder, which is made if it does not exist."""
    lock, seconds = _lock(folder), _SAY_SECONDS
    while True:
        with as_data_error(folder), contextlib.suppress(FileNotFoundError):  # removed this moment
            os.makedirs(folder, exist_ok=True)
            try:
                return lock.acquire(seconds, poll_interval=_POLL_SECONDS)
            except Timeout:
                logging.warning("another process is packing the same text in %s: waiting", folder)
                seconds = -1.0  # without a limit


def _lock(folder: str) -> FileLock:
    return FileLock(os.path.join(folder, _LOCK), fallback_to_soft=False)


def _remove(folder: str) -> None:
    """Remove a held folder; another process can make it again at once."""
    with contextlib.suppress(OSError):
        away = os.path.join(os.path.dirname(folder), f"{_REMOVED}{uuid.uuid4().hex}")
        os.rename(folder, away)
        shutil.rmtree(away, ignore_errors=True)


def _with_files(folder: str) -> Iterator[str]:
    yield folder
    for parent, folders, files in os.walk(folder):
        yield from (os.path.join(parent, name) for name in (*folders, *files))


def _checksum(path: str, size: int) -> int:
    """Return the CRC-32 of a file's first `size` bytes. Raises `ValueError` if it has fewer."""
    crc = 0
    with open(path, "rb") as file:
        while size:
            data = file.read(min(size, 1 << 20))
            if not data:
                raise ValueError(f"{path} is too short")
            size, crc = size - len(data), zlib.crc32(data, crc)
    return crc


def _sync(path: str) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    handle: Any = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
