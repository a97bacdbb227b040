"""Batches of token windows, each a pure function of (seed, samples before it)."""

from __future__ import annotations

import bisect
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from eejax.common.errors import DataError, require, require_given
from eejax.data.blend import BLOCK, Blend, shares_of
from eejax.data.packing import Split

IGNORE = -1  # as in eejax.losses: a label that is not counted

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class BatchSchedule:
    """Growth of the batch over a run (Megatron-LM's --rampup-batch-size).

    Attributes:
      sizes: batch sizes, ascending.
      ends: consumed samples after which each size but the last ends.
    """

    sizes: tuple[int, ...]
    ends: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, batch_size: int, rampup: Sequence[int] | None, field: str = "rampup"
    ) -> BatchSchedule:
        """Build a schedule from a ramp-up (start, increment, samples), or None for one size.

        Raises:
          ConfigError: for an impossible ramp-up; the error names `field`.
        """
        if rampup is None:
            return cls((batch_size,))
        ok = len(rampup) == 3 and all(isinstance(n, int) and n > 0 for n in rampup)
        require(ok, field, rampup, "must be three integers > 0: (start, increment, samples)")
        start, increment, samples = rampup
        require(
            start < batch_size and (batch_size - start) % increment == 0,
            field,
            tuple(rampup),
            f"must lead from {start} to batch_size {batch_size} in whole increments of {increment}",
        )
        sizes = tuple(range(start, batch_size + 1, increment))
        n = len(sizes) - 1
        return cls(sizes, tuple(-(-(j + 1) * samples // n) for j in range(n)))

    def at(self, samples: int) -> int:
        """Return the samples in the batch that begins after `samples`."""
        return self.sizes[bisect.bisect_right(self.ends, samples)]

    def before(self, step: int, start: int = 0) -> int:
        """Return the samples before the `step`-th batch after the one that begins at `start`."""
        for size, end in zip(self.sizes, self.ends, strict=False):  # the last has no end
            taken = min(step, max(0, -(-(end - start) // size)))
            start, step = start + taken * size, step - taken
        return start + step * self.sizes[-1]


class Loader:
    """An endless iterator of training batches over one split or several.

    A split is cut into windows of `length` tokens (and the label after the last); one window is
    a sample. An epoch of a split takes each of its windows once, in an order drawn from (seed,
    split, epoch). Of several splits, each has its part of `weights` of the samples, exact in
    every 4096, and epochs of its own (see `Blend`). Sample s is the same whatever the batch size.

    A batch is a dict of int32 arrays [b, t] and may reach over the end of an epoch:

      tokens       the inputs
      labels       the next token of each; IGNORE where nothing is to be predicted, as in prompts
      segment_ids  0 everywhere, or with `document_masks` the document's number in the window
      positions    0..t-1, or with `document_masks` counted from the document's beginning

    With `document_masks` the first token of a document is never predicted from the document
    before.

    `rampup` = (start, increment, samples): batches begin with `start` samples and grow by
    `increment` in equal parts of the first `samples` samples, up to `batch_size` (the rule of
    Megatron-LM's --rampup-batch-size). The size of a batch depends on nothing but the samples
    before it; `sizes` holds all that can occur.

    The position is `samples`, the number taken so far, which iterating advances, and which
    a loader with another `batch_size` or `rampup` can `restore`: it goes on with the very next
    sample. `step` counts the batches handed out, through restores, and decides nothing.

    Raises:
      ConfigError: a size that is not positive; weights or a ramp-up that cannot be.
      DataError: a split too small for its part of one batch, or of another tokenizer.
    """

    def __init__(
        self,
        splits: Split | Sequence[Split],
        batch_size: int,
        length: int,
        seed: int = 0,
        *,
        weights: Sequence[float] | None = None,
        document_masks: bool = False,
        rampup: Sequence[int] | None = None,
    ):
        require(batch_size > 0, "batch_size", batch_size, "must be > 0")
        require(length > 0, "length", length, "must be > 0")
        self.splits = (splits,) if isinstance(splits, Split) else tuple(splits)
        require(len(self.splits) > 0, "splits", splits, "must be at least one")
        if weights is None and len(self.splits) == 1:
            weights = (1.0,)
        allowed = f"must be {len(self.splits)} numbers, one for each split"
        weights = require_given("weights", weights, allowed)
        require(len(weights) == len(self.splits), "weights", weights, allowed)
        self.batch_size, self.length, self.seed = batch_size, length, seed
        self.document_masks = document_masks
        self._sizes = BatchSchedule.of(batch_size, rampup)
        self.samples = self.step = 0
        windows = [(len(split) - 1) // length for split in self.splits]
        self._blend = Blend(windows, shares_of(weights), seed)
        self._check_splits()
        self._shard = (0, 1)

    def _check_splits(self) -> None:
        first = self.splits[0]
        for i, split in enumerate(self.splits):
            windows, share = self._blend.windows[i], self._blend.shares[i]
            if windows * BLOCK < self.batch_size * share:
                part = f"its part ({share} of {BLOCK}) of " if len(self.splits) > 1 else ""
                which = f" {i}" if len(self.splits) > 1 else ""
                raise DataError(
                    f"the {split.name} split{which} has {len(split)} tokens, which is {windows} "
                    f"windows of {self.length} + 1, fewer than {part}batch_size "
                    f"{self.batch_size}: give more text, or lower batch_size or length."
                )
            if (split.eos_id, split.vocab_size) != (first.eos_id, first.vocab_size):
                raise DataError(
                    f"split {i} has vocab_size {split.vocab_size} and eos_id {split.eos_id}, split "
                    f"0 has {first.vocab_size} and {first.eos_id}: pack both with one tokenizer."
                )

    def shard(self, index: int, count: int) -> Loader:
        """Return the loader of process `index` of `count`.

        It returns that process's rows of the same global batches.

        Raises:
          ConfigError: if one of `sizes` is not divisible by `count`.
        """
        require(0 <= index < count, "index", index, f"must be in 0..{count - 1}")
        require(
            self.batch_size % count == 0,
            "batch_size",
            self.batch_size,
            f"must be divisible by the {count} data shards",
            f"Use {max(1, self.batch_size // count) * count}.",
        )
        odd = [size for size in self.sizes if size % count]
        require(
            not odd,
            "rampup",
            odd,
            f"every batch size on the way must be divisible by the {count} data shards",
            f"Use multiples of {count} for start and increment.",
        )
        other = copy.copy(self)
        other._shard = (index, count)
        return other

    @property
    def sizes(self) -> tuple[int, ...]:
        """All possible batch sizes, ascending."""
        return self._sizes.sizes

    def size_at(self, samples: int) -> int:
        """Return the samples in the global batch that begins after `samples`."""
        return self._sizes.at(samples)

    def samples_before(self, step: int, start: int = 0) -> int:
        """Return the samples before the `step`-th batch after the one that begins at `start`."""
        return self._sizes.before(step, start)

    def batch_at(self, samples: int) -> Batch:
        """Return this shard's rows of the batch that begins after `samples`.

        It may be called from several threads; its time does not depend on `samples`.
        """
        index, count = self._shard
        rows = self.size_at(samples) // count
        first = samples + index * rows
        places = self._blend.places(range(first, first + rows))
        chosen = [(self.splits[split], window) for split, window in places]
        return windows_of(chosen, self.length, rows, self.document_masks)

    def batch(self, step: int) -> Batch:
        """Return the batch of step `step` in a run that had these sizes from its beginning."""
        return self.batch_at(self.samples_before(step))

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        batch = self.batch_at(self.samples)
        self.advance()
        return batch

    def advance(self) -> None:
        """Count the batch at the position as taken."""
        self.samples += self.size_at(self.samples)
        self.step += 1

    def state(self) -> dict[str, Any]:
        """Return JSON from which `restore` continues.

        Neither the number of shards nor the batch size has to stay the same.
        """
        return {"samples": self.samples, "step": self.step, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
          DataError: the state belongs to other data, or to samples drawn in another way.
        """
        wrong = [
            f"{k} was {state.get(k)!r}, is {v!r}"
            for k, v in self._identity().items()
            if state.get(k) != v
        ]
        counts = {k: state.get(k) for k in ("samples", "step")}
        for k, value in counts.items():
            if not isinstance(value, int) or value < 0:
                wrong.append(f"{k} must be a count, is {value!r}")
        if wrong:
            raise DataError(
                f"the saved data position (after {counts['samples']!r} samples) does not fit this "
                f"loader: {'; '.join(wrong)}. Resume with the settings and text of the saved run, "
                "or start a new run."
            )
        self.samples, self.step = state["samples"], state["step"]

    def _identity(self) -> dict[str, Any]:
        """Return the settings that decide which window a sample is."""
        return {
            "dataset": "+".join(split.fingerprint for split in self.splits),
            "split": "+".join(split.name for split in self.splits),
            "shares": list(self._blend.shares),
            "seed": self.seed,
            "length": self.length,
            "document_masks": self.document_masks,
        }


def batches(
    split: Split,
    batch_size: int,
    length: int,
    *,
    document_masks: bool = False,
    limit: int | None = None,
) -> Iterator[Batch]:
    """Yield one pass over a split in its own order, for evaluation, in batches like `Loader`'s.

    Every token except the split's first is a label once (with `document_masks`, every token except
    the documents' first). The last window and the last batch are filled up with token 0 and label
    IGNORE, so all batches have one shape. With `limit`, there are at most that many batches, of
    `even_windows(split, length, limit * batch_size)`.
    """
    require(batch_size > 0, "batch_size", batch_size, "must be > 0")
    require(length > 0, "length", length, "must be > 0")
    windows = even_windows(split, length, None if limit is None else limit * batch_size)
    for b in range(0, len(windows), batch_size):
        chosen = [(split, int(w)) for w in windows[b : b + batch_size]]
        yield windows_of(chosen, length, batch_size, document_masks)


def even_windows(split: Split, length: int, max_windows: int | None = None) -> np.ndarray:
    """Return the numbers [n] of windows of a split, evenly spaced and ascending.

    Window w has tokens w*length .. and the labels one further on, cut at the split's end; the last
    may be short. The choice depends on the arguments alone, so the sample is the same however it is
    cut into batches.

    Args:
      split: the split.
      length: tokens of a window.
      max_windows: maximum number of windows; None for all.

    Raises:
      ConfigError: `max_windows` below 1.
      DataError: a split without a token to predict.
    """
    require(length > 0, "length", length, "must be > 0")
    require(
        max_windows is None or max_windows > 0, "max_windows", max_windows, "must be None or > 0"
    )
    if len(split) < 2:
        raise DataError(f"the {split.name} split has no token to predict: give more text.")
    total = -(-(len(split) - 1) // length)
    n = total if max_windows is None else min(max_windows, total)
    return (2 * np.arange(n) + 1) * total // (2 * n)  # the middle of each of n equal parts


def windows_of(
    chosen: Sequence[tuple[Split, int]], length: int, rows: int, document_masks: bool
) -> Batch:
    """Return the chosen windows as a batch of `rows` rows, of which surplus rows are empty.

    If a tokenizer's texts begin with a token, windows that begin within a text begin with it too.
    It takes the place of the window's last token, which is the next window's first label.
    """
    tokens = np.zeros((rows, length), np.int32)
    labels = np.full((rows, length), IGNORE, np.int32)
    segments = np.zeros((rows, length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    for row, (split, window) in enumerate(chosen):
        start = window * length
        ids, counted = split.counted(start, length + 1)
        moved = 0
        if split.bos_id is not None:
            ids, moved = ids[:length], int(ids[0] != split.bos_id)
            ids = np.append(np.full(moved, split.bos_id, np.int32), ids)
        n = len(ids) - 1
        tokens[row, :n], labels[row, :n] = ids[:n], ids[1:]
        if counted is not None:
            labels[row, :n][~counted[1 - moved : n + 1 - moved]] = IGNORE
        if document_masks:
            # Documents that begin at start+1 .. start+n, relative to the window.
            low, high = np.searchsorted(split.starts, (start + 1, start + n), side="left")
            begins = split.starts[low : high + 1] - start + moved
            begins = begins[begins <= n]
            labels[row, begins - 1] = IGNORE
            begins = begins[begins < n]
            segments[row, begins] = 1
            np.cumsum(segments[row], out=segments[row])
            edges = np.append(0, begins)
            positions[row] -= np.repeat(edges, np.diff(edges, append=length)).astype(np.int32)
    return {"tokens": tokens, "labels": labels, "segment_ids": segments, "positions": positions}
