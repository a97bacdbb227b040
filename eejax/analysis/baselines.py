"""Baselines for bits per byte: an interpolated trigram and a general-purpose compressor."""

from __future__ import annotations

import zlib

import numpy as np

from eejax.common.errors import DataError

DISCOUNTS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # tried for bigrams and for trigrams
TUNING_SHARE = 0.1


Counts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Counts by token: of the token, of its context, and of distinct tokens behind that context."""


class Trigram:
    """Interpolated Kneser-Ney trigram over token ids.

    Each order discounts its counts by a constant and gives the discounted mass to the order below.
    The orders below count contexts, not occurrences (Kneser & Ney 1995; interpolated as in Chen &
    Goodman 1998, section 2.7, which found it the strongest of the family). The two discounts are
    those of `DISCOUNTS` that predict the last tenth of the training text best; the counts are then
    those of all of it. Counting needs 12 · vocab_size³ bytes for a moment.

    Raises:
      DataError: for too little text, or a token outside 0..vocab_size-1.
    """

    def __init__(self, train: np.ndarray, vocab_size: int):
        if len(train) < 100:
            raise DataError(f"{len(train)} tokens are too few for a trigram: give at least 100.")
        self.vocab_size = vocab_size
        cut = int(len(train) * (1 - TUNING_SHARE))
        self._count(train[:cut])
        options = [(a, b) for a in DISCOUNTS for b in DISCOUNTS]
        counts = self._look_up(train[cut:])
        bits = [np.sum(_surprise(counts, *option)) for option in options]
        self.discounts = options[int(np.argmin(bits))]
        self._count(train)

    def bits(self, tokens: np.ndarray) -> np.ndarray:
        """Return [n - 2] bits of each token but the first two, given the two before it."""
        return _surprise(self._look_up(tokens), *self.discounts)

    def _count(self, tokens: np.ndarray) -> None:
        v = self.vocab_size
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < v:
            raise DataError(
                f"token ids reach from {tokens.min()} to {tokens.max()}, outside 0..{v - 1}."
            )
        index = (tokens[:-2].astype(np.int64) * v + tokens[1:-1]) * v + tokens[2:]
        counts = np.bincount(index, minlength=v**3).reshape(v, v, v)
        self.trigrams = counts.astype(np.int32)
        self.contexts = self.trigrams.sum(2)  # [v, v] occurrences as a context
        self.followers = np.count_nonzero(counts, 2)  # [v, v] distinct next tokens
        seen = np.count_nonzero(counts, 0)  # [v, v] contexts a bigram was seen in
        self.bigrams, self.bigram_total = seen, seen.sum(1)
        self.bigram_followers = np.count_nonzero(seen, 1)
        unigrams = np.count_nonzero(seen, 0) + 0.5
        self.unigram = unigrams / unigrams.sum()

    def _look_up(self, tokens: np.ndarray) -> tuple[Counts, Counts, np.ndarray]:
        """Return counts of every trigram of `tokens`, of its bigram, and its unigram's share."""
        a, b, c = tokens[:-2], tokens[1:-1], tokens[2:]
        high = self.trigrams[a, b, c], self.contexts[a, b], self.followers[a, b]
        low = self.bigrams[b, c], self.bigram_total[b], self.bigram_followers[b]
        return high, low, self.unigram[c]


def _surprise(
    found: tuple[Counts, Counts, np.ndarray], bigram_discount: float, trigram_discount: float
) -> np.ndarray:
    """Return [n] bits of the looked-up trigrams."""
    trigrams, bigrams, unigram = found
    lower = _discounted(bigrams, bigram_discount, unigram)
    return -np.log2(_discounted(trigrams, trigram_discount, lower))


def _discounted(counts: Counts, discount: float, lower: np.ndarray) -> np.ndarray:
    """Compute (max(count - D, 0) + D · followers · p_lower) / total; p_lower in a new context."""
    count, total, followers = counts
    kept = np.maximum(count - discount, 0.0) + discount * followers * lower
    return np.where(total > 0, kept / np.maximum(total, 1), lower)


def compression_bits_per_byte(text: bytes) -> float:
    """Compute 8 · compressed size / size, for zlib at its highest level."""
    return 8 * len(zlib.compress(text, 9)) / len(text)
