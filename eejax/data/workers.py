"""Tokenization of documents in several processes, in the documents' own order.

The worker processes run this module alone. They do not import the caller's main module, which may
lack a guard against being imported again, nor JAX, because only one process may use some devices.
They end with the process that started them, because their standard input does.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import traceback
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

import numpy as np

from eejax.common.children import block_signals
from eejax.common.errors import DataError
from eejax.data.sources import Document, FieldDocument, name_hash
from eejax.data.tokenizer_files import load_tokenizer
from eejax.data.tokenizers import Tokenizer, require_end

# A chunk is a fraction of a second's work, and small beside the processes that work on it.
CHUNK_CHARS = 1 << 18
CHUNK_DOCUMENTS = 4096

# The highest bit of a token that is read and not predicted, in files of 32 bits.
UNCOUNTED = np.uint32(1 << 31)

# What is kept of each document while packing.
RECORD = np.dtype([("tokens", "<i8"), ("bytes", "<i8"), ("hash", "<u8")])

_PROGRAM = """
import sys
sys.path[:] = {path!r}
from eejax.data import workers
workers.main({replies})
"""


class Chunk(NamedTuple):
    """Neighbouring documents; `digest` is that of all documents up to the last of them."""

    documents: list[Document | FieldDocument]
    digest: str


class Encoding(NamedTuple):
    """Settings that decide the ids of a document, beside the tokenizer itself."""

    tokenizer: str  # its fingerprint
    seed: int  # of the hash of names
    dtype: str


class Encoded(NamedTuple):
    """A chunk in the form that is written."""

    tokens: bytes
    records: bytes  # of RECORD
    names: bytes  # a JSON string a line
    digest: str


def encode(tokenizer: Tokenizer, encoding: Encoding, chunk: Chunk) -> Encoded:
    """Encode each document, with the end token, and collect its record and name."""
    dtype, pieces = np.dtype(encoding.dtype), []
    records = np.empty(len(chunk.documents), RECORD)
    for i, document in enumerate(chunk.documents):
        ids = _ids(tokenizer, document).astype(dtype)
        pieces.append(ids.tobytes())
        size = len(document.text.encode())
        records[i] = len(ids), size, name_hash(document.name, encoding.seed)
    names = "".join(json.dumps(document.name) + "\n" for document in chunk.documents).encode()
    return Encoded(b"".join(pieces), records.tobytes(), names, chunk.digest)


def _ids(tokenizer: Tokenizer, document: Document | FieldDocument) -> np.ndarray:
    """Return a document's ids and the end token, [t] uint32.

    Ids that are not to be predicted have the bit `UNCOUNTED`.
    """
    if isinstance(document, Document):
        return np.append(tokenizer.encode(document.text), require_end(tokenizer)).astype(np.uint32)
    # Here, because templates need Jinja.
    from eejax.data import supervised

    ids, counted = supervised.encode(tokenizer, document)
    return ids.astype(np.uint32) | np.where(counted, np.uint32(0), UNCOUNTED)


def encoded(
    chunks: Iterable[Chunk], tokenizer: Tokenizer, encoding: Encoding, workers: int, folder: str
) -> Generator[Encoded, None, None]:
    """Yield the encoded chunks in their order; at most 2 * `workers` of them are held.

    The tokenizer is saved in `folder`. With one worker this process does the work.

    Raises:
      DataError: for text that cannot be encoded, or a worker that died.
    """
    if workers == 1:
        yield from (encode(tokenizer, encoding, chunk) for chunk in chunks)
        return
    pool = _Pool(workers, encoding, folder)
    try:
        flight: collections.deque[concurrent.futures.Future[Encoded]] = collections.deque()
        for chunk in chunks:
            flight.append(pool.submit(chunk))
            if len(flight) == 2 * workers:
                yield flight.popleft().result()
        while flight:
            yield flight.popleft().result()
    finally:
        pool.close()


class _Pool:
    """Pool of worker processes with one thread for each; workers start when chunks need them."""

    def __init__(self, workers: int, encoding: Encoding, folder: str):
        self._setup = (folder, encoding)
        self._threads = concurrent.futures.ThreadPoolExecutor(workers, "packing")
        self._workers: list[_Worker] = []
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def submit(self, chunk: Chunk) -> concurrent.futures.Future[Encoded]:
        return self._threads.submit(self._call, chunk)

    def _call(self, chunk: Chunk) -> Encoded:
        try:
            worker = self._free.get_nowait()
        except queue.Empty:
            worker = _Worker()
            self._workers.append(worker)
            worker.send(self._setup)
        worker.send(chunk)
        reply = worker.receive()
        self._free.put(worker)
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def close(self) -> None:
        for worker in list(self._workers):
            worker.process.kill()  # releases its thread
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.close()


class _Worker:
    def __init__(self) -> None:
        # One thread each: the user sets the number of busy cores by the number of workers.
        alone = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        replies, theirs = os.pipe()
        self._replies = open(replies, "rb")  # noqa: SIM115
        try:
            with block_signals():
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM.format(path=sys.path, replies=theirs)],
                    stdin=subprocess.PIPE,
                    stdout=2,  # whatever a library prints
                    pass_fds=(theirs,),
                    env=os.environ | alone,
                )
        finally:
            os.close(theirs)
        assert self.process.stdin is not None  # a pipe
        self._chunks = self.process.stdin

    def send(self, value: Any) -> None:
        try:
            pickle.dump(value, self._chunks, pickle.HIGHEST_PROTOCOL)
            self._chunks.flush()
        except OSError as error:
            raise self._dead() from error

    def receive(self) -> Any:
        try:
            return pickle.load(self._replies)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._dead() from error

    def _dead(self) -> DataError:
        try:
            status = self.process.wait(10)
        except subprocess.TimeoutExpired:
            status = "unknown"  # alive, and still not answering
        return DataError(
            f"a worker process ended with status {status} while tokenizing: its error is above, or "
            "it was killed, as for lack of memory. Start again, with fewer workers if memory is "
            "short; finished work is kept."
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self._chunks, self._replies):
            try:
                pipe.close()
            except OSError:  # its buffered output has no reader
                pass


def main(replies: int) -> None:
    """Run a worker: chunks come from standard input, results go to the pipe `replies`."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all of a job
        signal.signal(number, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, os.fdopen(replies, "wb")
    tokenizer: Tokenizer | None = None
    try:
        folder, encoding = pickle.load(requests)
        while True:
            chunk = pickle.load(requests)
            try:
                tokenizer = tokenizer or _tokenizer(folder, encoding)
                answer: Any = encode(tokenizer, encoding, chunk)
            except DataError as error:
                answer = error
            except Exception:  # whatever it is, the parent raises it with its traceback
                answer = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        os._exit(0)  # the other side ended, perhaps in the middle of a chunk


def _tokenizer(folder: str, encoding: Encoding) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != encoding.tokenizer:
        raise DataError(
            f"the tokenizer {encoding.tokenizer} changes to {tokenizer.fingerprint} when it is "
            "saved and loaded, so it cannot be passed to other processes: use workers = 1."
        )
    return tokenizer
