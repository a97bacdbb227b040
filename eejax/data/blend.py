"""Mapping of samples to windows of splits, as a pure function of (seed, sample)."""

from __future__ import annotations

import fractions
import functools
import math
import threading
from collections.abc import Iterable, Sequence

import numpy as np

from eejax.common.errors import require

# Samples in which every split has its exact share. The order of a block is sorted and kept as a
# whole (0.3 ms, 64 KiB); the smallest possible share is about one sample of it.
BLOCK = 4096

_BLOCKS = 2**32 - 1  # the stream that orders the samples of a block; a split's is its number


class Blend:
    """Endless sequence of windows of several splits, each with its share of the samples.

    A block of `BLOCK` samples holds `shares[i]` windows of split i, in an order drawn from (seed,
    block). The k-th sample of split i is the k-th window of that split's own epochs, each of which
    takes every window once, ordered by (seed, i, epoch). Looking a sample up takes the same time
    wherever it is.

    Attributes:
      windows: number of windows of each split.
      shares: share of each split, as `shares_of` returns it.
    """

    def __init__(self, windows: Sequence[int], shares: Sequence[int], seed: int):
        self.windows, self.shares, self.seed = tuple(windows), tuple(shares), seed
        # Samples in flight need at most two neighbouring epochs and blocks. Concurrent threads
        # wait for one another, so that each does not sort the same long order.
        self._lock = threading.Lock()
        self._block = functools.lru_cache(2)(functools.partial(_block, self.shares, seed))
        self._orders = [
            functools.lru_cache(2)(functools.partial(permutation, n, seed, stream=i))
            for i, n in enumerate(self.windows)
        ]

    def places(self, samples: Iterable[int]) -> list[tuple[int, int]]:
        """Return (split, window) of each of the samples."""
        with self._lock:
            return [self._place(s) for s in samples]

    def _place(self, sample: int) -> tuple[int, int]:
        block, at = divmod(sample, BLOCK)
        which, ranks = self._block(block)
        split = int(which[at])
        k = block * self.shares[split] + int(ranks[at])
        epoch, at = divmod(k, self.windows[split])
        return split, int(self._orders[split](epoch)[at])


def shares_of(weights: Sequence[float], field: str = "weights") -> tuple[int, ...]:
    """Return how many of `BLOCK` samples each weight gets, rounded by largest remainder.

    Raises:
      ConfigError: naming `field`, a weight that is not positive and finite, or too small for one
        sample.
    """
    ok = all(0 < w < 1e30 for w in weights)
    require(ok, field, weights, "must be positive numbers")
    exact = [fractions.Fraction(float(w)) for w in weights]
    parts = [w * BLOCK / sum(exact) for w in exact]
    shares = [math.floor(p) for p in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: shares[i] - parts[i])
    for i in by_remainder[: BLOCK - sum(shares)]:
        shares[i] += 1
    starved = [i for i, n in enumerate(shares) if not n]
    require(
        not starved,
        field,
        weights,
        f"gives number {', '.join(map(str, starved))} none of {BLOCK} samples, so it would never "
        "be trained on",
        "Raise the weight, or leave that split out.",
    )
    return tuple(shares)


def permutation(n: int, seed: int, number: int, stream: int = 0) -> np.ndarray:
    """Return a permutation [n] of 0..n-1 that is the same in every version of numpy.

    It sorts the numbers by a hash: SplitMix64 (Steele et al. 2014) of (seed, stream, number, i).
    """
    with np.errstate(over="ignore"):
        drawn = np.uint64(((stream << 32) + number) & (2**64 - 1))
        key = _mix(_mix(np.uint64(seed & (2**64 - 1))) + drawn)
        return np.argsort(_mix(key + np.arange(n, dtype=np.uint64)), kind="stable")


def _block(shares: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the split [BLOCK] of every sample, and its number [BLOCK] within that split."""
    order = permutation(BLOCK, seed, block, _BLOCKS)
    which = np.repeat(np.arange(len(shares)), shares)[order]
    ranks = np.empty(BLOCK, np.int64)
    for split, share in enumerate(shares):
        ranks[which == split] = np.arange(share)
    return which, ranks


def _mix(x: np.ndarray | np.uint64) -> np.ndarray | np.uint64:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
