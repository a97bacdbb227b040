"""Batches of token windows, each a pure function of (seed, step)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from eejax.common.errors import DataError, require
from eejax.data.packing import Split

IGNORE = -1  # as in eejax.losses: a label that is not counted

Batch = dict[str, np.ndarray]


class Loader:
    """An endless iterator of training batches over one split.

    The split is cut into windows of `length` tokens (and the label after the last). An epoch
    takes every window once in an order drawn from (seed, epoch); a batch may reach over the end
    of an epoch. A batch is a dict of int32 arrays [b, t]:

      tokens       the inputs
      labels       the next token of each; IGNORE where nothing is to be predicted
      segment_ids  0 everywhere, or with `document_masks` the document's number in the window
      positions    0..t-1, or with `document_masks` counted from the document's beginning

    With `document_masks` the first token of a document is never predicted from the document
    before. Iterating advances `step`; `batch(step)` does not.

    Raises:
      ConfigError: a size that is not positive.
      DataError: the split is too small for one batch.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        length: int,
        seed: int = 0,
        *,
        document_masks: bool = False,
    ):
        require(batch_size > 0, "batch_size", batch_size, "must be > 0")
        require(length > 0, "length", length, "must be > 0")
        self.split, self.batch_size, self.length, self.seed = split, batch_size, length, seed
        self.document_masks = document_masks
        self.step = 0
        self.windows = (len(split) - 1) // length
        if self.windows < batch_size:
            raise DataError(
                f"the {split.name} split has {len(split)} tokens, which is {self.windows} windows "
                f"of {length} + 1, fewer than batch_size {batch_size}: give more text, or lower "
                "batch_size or length."
            )
        self._rows = (0, batch_size)
        self._orders: dict[int, np.ndarray] = {}

    def shard(self, index: int, count: int) -> Loader:
        """The loader of process `index` of `count`: its rows of the same global batches.

        Raises `ConfigError` where `batch_size` is not divisible by `count`.
        """
        require(0 <= index < count, "index", index, f"must be in 0..{count - 1}")
        require(
            self.batch_size % count == 0,
            "batch_size",
            self.batch_size,
            f"must be divisible by the {count} data shards",
            f"Use {max(1, self.batch_size // count) * count}.",
        )
        rows = self.batch_size // count
        other = copy.copy(self)
        other._rows = (index * rows, (index + 1) * rows)
        return other

    def batch(self, step: int) -> Batch:
        """This shard's rows of the batch of `step`; its time does not depend on `step`."""
        first, stop = self._rows
        samples = range(step * self.batch_size + first, step * self.batch_size + stop)
        chosen = [int(self._order(s // self.windows)[s % self.windows]) for s in samples]
        return _windows(self.split, chosen, self.length, len(chosen), self.document_masks)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self.step)
        self.step += 1
        return batch

    def state(self) -> dict[str, Any]:
        """JSON from which `restore` continues, on any number of shards."""
        return {"step": self.step, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken.

        Raises:
          DataError: the state belongs to other data, or to batches drawn in another way.
        """
        wrong = [
            f"{k} was {state.get(k)!r}, is {v!r}"
            for k, v in self._identity().items()
            if state.get(k) != v
        ]
        step = state.get("step")
        if wrong or not isinstance(step, int) or step < 0:
            raise DataError(
                f"the saved data position (step {step!r}) does not fit this loader: "
                f"{'; '.join(wrong) or 'step must be a count'}. Resume with the settings and text "
                "of the saved run, or start a new run."
            )
        self.step = step

    def _identity(self) -> dict[str, Any]:
        return {
            "dataset": self.split.fingerprint,
            "split": self.split.name,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "length": self.length,
            "document_masks": self.document_masks,
        }

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            # A batch needs two neighbouring epochs at most.
            self._orders = {e: o for e, o in self._orders.items() if abs(e - epoch) == 1}
            self._orders[epoch] = _permutation(self.windows, self.seed, epoch)
        return self._orders[epoch]


def batches(
    split: Split,
    batch_size: int,
    length: int,
    *,
    document_masks: bool = False,
    limit: int | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """One pass over a split in its own order, for evaluation; batches as `Loader`'s.

    Every token but the split's first is a label once (with `document_masks`, every token but
    the documents' first). The last window and the last batch are filled up with token 0 and
    label IGNORE, so all batches have one shape. With `limit`, at most that many batches, of
    `even_windows(split, length, limit * batch_size)`. `shard` is (index, count) and takes this
    process's rows of each.
    """
    require(batch_size > 0, "batch_size", batch_size, "must be > 0")
    require(length > 0, "length", length, "must be > 0")
    index, count = shard
    require(0 <= index < count, "shard", shard, "must be (index, count) with index < count")
    require(
        batch_size % count == 0,
        "batch_size",
        batch_size,
        f"must be divisible by the {count} data shards",
    )
    rows = batch_size // count
    windows = even_windows(split, length, None if limit is None else limit * batch_size)
    for b in range(0, len(windows), batch_size):
        first = b + index * rows
        yield _windows(split, windows[first : first + rows], length, rows, document_masks)


def even_windows(split: Split, length: int, most: int | None = None) -> np.ndarray:
    """Numbers [n] of at most `most` windows of a split, evenly spaced and ascending; None: all.

    Window w has tokens w*length .. and the labels one further on, cut at the split's end; the
    last may be short. The choice depends on the arguments alone, so that however a sample is
    cut into batches, it is the same sample.

    Raises:
      ConfigError: `most` below 1.
      DataError: a split without a token to predict.
    """
    require(length > 0, "length", length, "must be > 0")
    require(most is None or most > 0, "most", most, "must be None or > 0")
    if len(split) < 2:
        raise DataError(f"the {split.name} split has no token to predict: give more text.")
    total = -(-(len(split) - 1) // length)
    n = total if most is None else min(most, total)
    return (2 * np.arange(n) + 1) * total // (2 * n)  # the middle of each of n equal parts


def _windows(split: Split, chosen: Any, length: int, rows: int, document_masks: bool) -> Batch:
    """The chosen windows as a batch of `rows` rows, those left over holding nothing."""
    tokens = np.zeros((rows, length), np.int32)
    labels = np.full((rows, length), IGNORE, np.int32)
    segments = np.zeros((rows, length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    for row, window in enumerate(chosen):
        start = int(window) * length
        ids = split.read(start, length + 1)
        n = len(ids) - 1
        tokens[row, :n], labels[row, :n] = ids[:n], ids[1:]
        if document_masks:
            # Documents that begin at start+1 .. start+n, relative to the window.
            low, high = np.searchsorted(split.starts, (start + 1, start + n), side="left")
            begins = split.starts[low : high + 1] - start
            begins = begins[begins <= n]
            labels[row, begins - 1] = IGNORE
            begins = begins[begins < n]
            segments[row, begins] = 1
            np.cumsum(segments[row], out=segments[row])
            edges = np.append(0, begins)
            positions[row] -= np.repeat(edges, np.diff(edges, append=length)).astype(np.int32)
    return {"tokens": tokens, "labels": labels, "segment_ids": segments, "positions": positions}


def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """[n] a permutation of 0..n-1, the same in every version of numpy.

    Sorts the numbers by a hash: SplitMix64 (Steele et al. 2014) of (seed, epoch, number).
    """
    with np.errstate(over="ignore"):
        key = _mix(_mix(np.uint64(seed & (2**64 - 1))) + np.uint64(epoch))
        return np.argsort(_mix(key + np.arange(n, dtype=np.uint64)), kind="stable")


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
