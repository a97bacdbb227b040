"""The trigram against a slow one written from its definition, and against its own axioms."""

import itertools
import zlib
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.analysis import Trigram, compression_bits_per_byte
from eejax.analysis.baselines import DISCOUNTS
from eejax.common.errors import DataError


def by_definition(train, d2, d3, v):
    """p(c | a, b) of interpolated Kneser-Ney, from dictionaries of n-grams."""
    three = Counter(zip(train, train[1:], train[2:], strict=False))
    before = defaultdict(set)  # (b, c) -> the a's it was seen after
    after, after2 = defaultdict(set), defaultdict(set)
    for a, b, c in three:
        before[b, c].add(a)
        after[a, b].add(c)
        after2[b].add(c)
    unigram = np.array([len({b for b, x in before if x == c}) + 0.5 for c in range(v)])
    unigram /= unigram.sum()

    def p(a, b, c):
        n2 = sum(len(before[b, x]) for x in after2[b]) if b in after2 else 0
        low = unigram[c]
        if n2:
            low = (max(len(before.get((b, c), ())) - d2, 0) + d2 * len(after2[b]) * low) / n2
        n3 = sum(three[a, b, x] for x in after.get((a, b), ()))
        if not n3:
            return low
        return (max(three.get((a, b, c), 0) - d3, 0) + d3 * len(after[a, b]) * low) / n3

    return p


@settings(max_examples=15)
@given(st.integers(0, 2**31))
def test_against_the_definition(seed):
    rng = np.random.default_rng(seed)
    v = 6
    train = rng.choice(v, 160, p=rng.dirichlet(np.full(v, 0.5))).astype(np.int32)
    test = rng.integers(0, v, 40, dtype=np.int32)
    model = Trigram(train, v)
    p = by_definition(train.tolist(), *model.discounts, v)
    triples = zip(test.tolist(), test.tolist()[1:], test.tolist()[2:], strict=False)
    want = [-np.log2(p(*t)) for t in triples]
    np.testing.assert_allclose(model.bits(test), want, rtol=1e-9)


def test_probabilities_sum_to_one_in_seen_and_unseen_contexts():
    v = 5
    model = Trigram(np.random.default_rng(0).integers(0, 4, 300, dtype=np.int32), v)
    for a, b in [(0, 1), (4, 1), (1, 4), (4, 4)]:  # token 4 was never seen
        rows = np.array([[a, b, c] for c in range(v)], np.int32)
        total = sum(2.0 ** -model.bits(row)[0] for row in rows)
        assert total == pytest.approx(1.0)


def test_discounts_are_those_that_predict_the_end_of_the_training_text_best():
    text = np.frombuffer((b"abcabdabeabc" * 8 + b"xyz") * 6, np.uint8).astype(np.int32)
    model = Trigram(text, 128)
    cut = int(len(text) * 0.9)
    chosen = model.discounts
    model._count(text[:cut])
    bits = {}
    for option in itertools.product(DISCOUNTS, DISCOUNTS):
        model.discounts = option
        # The first two tokens of the held-out part are context, as everywhere.
        bits[option] = model.bits(text[cut:]).sum()
    assert bits[chosen] == min(bits.values()) < max(bits.values())


def test_context_helps():
    text = np.tile(np.array([0, 1, 2, 1, 0, 3], np.int32), 200)  # each pair decides the next
    assert Trigram(text, 4).bits(text).mean() < 0.05


def test_refusals():
    with pytest.raises(DataError, match="too few"):
        Trigram(np.zeros(10, np.int32), 4)
    with pytest.raises(DataError, match="outside 0..3"):
        Trigram(np.full(200, 7, np.int32), 4)


def test_compression():
    text = b"to be or not to be " * 50
    assert compression_bits_per_byte(text) == 8 * len(zlib.compress(text, 9)) / len(text) < 1
