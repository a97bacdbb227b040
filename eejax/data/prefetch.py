"""Batches prepared ahead by grain, and windows as a source for the user's own pipelines."""

from __future__ import annotations

import operator
import sys
import threading
from typing import Any, NamedTuple, SupportsIndex

from eejax.common.errors import DataError, require
from eejax.data.loader import Batch, Loader, windows_of
from eejax.data.packing import Split


def import_grain() -> Any:
    """Import the package grain. Raises `DataError` if it is not installed."""
    try:
        import grain
    except ImportError as error:
        raise DataError(
            "preparing batches ahead needs the package grain: pip install 'eejax[data]', or set "
            "data.prefetch = 0."
        ) from error
    return grain


class Prefetch:
    """Batches of a `Loader`, in its order, prepared ahead in the background.

    `threads` threads keep `buffer` batches ready. The position is the loader's own and moves when a
    batch is handed out, not when it is prepared: the loader's `state()` is this one's, and a loader
    that is moved is followed. An error while preparing a batch is raised where that batch would
    have been handed out; the next call tries again.

    `close`, or leaving the context, waits for the batches in preparation and drops what was
    prepared; the position stays, and iterating continues from there.

    Raises:
      ConfigError: fewer than one thread, or fewer batches than threads.
      DataError: grain is not installed.
    """

    def __init__(self, loader: Loader, threads: int = 2, buffer: int = 4):
        require(threads > 0, "threads", threads, "must be > 0")
        require(buffer >= threads, "buffer", buffer, f"must be at least the {threads} threads")
        grain = import_grain()
        self.loader = loader
        self._grain, self._options = grain, grain.ReadOptions(threads, buffer)
        self._running: _Running | None = None
        self._at: int | None = None  # samples before the batch that grain gives next, if known

    @property
    def samples(self) -> int:
        return self.loader.samples

    @property
    def step(self) -> int:
        return self.loader.step

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Batch:
        running = self._running
        if running is None or self._at != self.loader.samples:
            running = self._open()
        # grain goes on after a failed batch. Until this batch is handed out, any interruption (by
        # a signal's handler too) therefore restarts from the loader's position.
        self._at = None
        batch = next(running.iterator)
        self.loader.advance()
        self._at = self.loader.samples
        return batch

    def state(self) -> dict[str, Any]:
        """Return the state, as `Loader.state`."""
        return self.loader.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state, as `Loader.restore`."""
        self.loader.restore(state)

    def close(self) -> None:
        if self._running is not None:
            threads = self._running.source.stop()
            self._running.iterator.close()
            for thread in threads:  # grain does not wait for them
                thread.join()
        self._running = self._at = None

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _open(self) -> _Running:
        self.close()
        source = _Ahead(self.loader)
        dataset = self._grain.MapDataset.source(source)
        running = _Running(source, iter(dataset.to_iter_dataset(self._options)))
        self._running = running
        return running


class _Running(NamedTuple):
    """Batches in preparation: their source, and grain's iterator over them."""

    source: _Ahead
    iterator: Any


class _Ahead:
    """A loader's batches from its position on, by number, until `stop`."""

    def __init__(self, loader: Loader):
        self._loader, self._start = loader, loader.samples
        self._lock = threading.Lock()
        self._stopped = False
        self._threads: set[threading.Thread] = set()

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, i: int) -> Batch | None:
        with self._lock:
            if self._stopped:
                return None
            self._threads.add(threading.current_thread())
        return self._loader.batch_at(self._loader.samples_before(i, self._start))

    def stop(self) -> set[threading.Thread]:
        """Start no further batch; threads may still finish one."""
        with self._lock:
            self._stopped = True
        return self._threads


def windows(split: Split, length: int, *, document_masks: bool = False) -> TextWindows:
    """Return the windows of a split as a random-access source for grain's datasets and loaders.

    Element i is window i in the split's own order: a row [t] of each array of a `Loader`'s
    batch. Tokens after the last whole window are left out. Meant for threads: a worker process
    is sent the tokens.

    Raises:
      ConfigError: a length below 1.
      IndexError: an element that does not exist.
    """
    require(length > 0, "length", length, "must be > 0")
    return TextWindows(split, length, document_masks)


class TextWindows:
    """Windows of a split, built by `windows`."""

    def __init__(self, split: Split, length: int, document_masks: bool):
        self._split, self._length, self._masks = split, length, document_masks

    def __len__(self) -> int:
        return max(0, len(self._split) - 1) // self._length

    def __getitem__(self, i: SupportsIndex) -> Batch:
        i = operator.index(i)
        if not 0 <= i < len(self):
            raise IndexError(f"window {i} of {len(self)}")
        batch = windows_of([(self._split, i)], self._length, 1, self._masks)
        return {name: rows[0] for name, rows in batch.items()}

    def __repr__(self) -> str:
        # grain compares it to see whether a saved position belongs to this source.
        return (
            f"windows({self._split.name!r} of {self._split.fingerprint}, {self._length}, "
            f"document_masks={self._masks})"
        )
