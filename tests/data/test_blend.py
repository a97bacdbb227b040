"""Blending: exact shares, every split's windows once in its own epochs, random access."""

from __future__ import annotations

import concurrent.futures
import fractions

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.data.blend import BLOCK, Blend, _mix, permutation, shares_of

WEIGHTS = st.lists(st.floats(0.5, 100.0), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**40)


@settings(max_examples=100)
@given(WEIGHTS)
def test_shares_are_the_largest_remainders(weights):
    shares = shares_of(weights)
    assert sum(shares) == BLOCK
    total = sum(map(fractions.Fraction, weights))
    over = [n - fractions.Fraction(w) * BLOCK / total for n, w in zip(shares, weights, strict=True)]
    assert all(-1 < o < 1 for o in over)
    # None was rounded down whose remainder is above that of one rounded up.
    up, down = [1 - o for o in over if o > 0], [-o for o in over if o <= 0]
    assert not up or not down or min(up) >= max(down)
    assert shares_of([w * 8 for w in weights]) == shares


def test_known_shares():
    assert shares_of([5]) == (4096,)
    assert shares_of([1, 1]) == (2048, 2048)
    assert shares_of([1, 1, 1]) == (1366, 1365, 1365)
    assert shares_of([0.7, 0.3]) == shares_of([7, 3]) == (2867, 1229)
    assert shares_of([1, 4095]) == (1, 4095)


@settings(max_examples=25)
@given(st.data(), WEIGHTS, SEEDS, st.integers(0, 10**6))
def test_ratios_hold_and_each_epoch_takes_every_window_once(data, weights, seed, first):
    shares = shares_of(weights)
    size = st.one_of(st.integers(1, 40), st.integers(1000, 9000))
    windows = data.draw(st.lists(size, min_size=len(weights), max_size=len(weights)))
    blend = Blend(windows, shares, seed)
    blocks = 3
    places = np.asarray(blend.places(range(first * BLOCK, (first + blocks) * BLOCK)))
    for block in places.reshape(blocks, BLOCK, 2):
        assert np.bincount(block[:, 0], minlength=len(shares)).tolist() == list(shares)
    for i, (n, share) in enumerate(zip(windows, shares, strict=True)):
        seen = places[places[:, 0] == i, 1]
        assert seen.min() >= 0 and seen.max() < n
        seen = seen[-first * share % n :]  # up to where the first whole epoch begins
        epochs = seen[: len(seen) // n * n].reshape(-1, n)
        assert (np.sort(epochs, axis=1) == np.arange(n)).all()
        rest = seen[len(epochs) * n :]
        assert len(set(rest.tolist())) == len(rest)


def test_a_block_is_well_mixed():
    shares = shares_of([8, 1, 1])
    blend = Blend([10_000] * 3, shares, seed=1)
    which = np.asarray(blend.places(range(20 * BLOCK)))[:, 0].reshape(20, BLOCK)
    for i, share in enumerate(shares):
        part = share / BLOCK
        ahead = np.cumsum((which == i) - part, axis=1)
        # A bridge's largest excursion, in its scale, is above 2.2 once in ten thousand.
        assert np.abs(ahead).max() < 2.2 * np.sqrt(part * (1 - part) * BLOCK)
    assert np.mean(which[0] == which[1]) == pytest.approx(0.66, abs=0.05)  # 0.8² + 2 · 0.1²


def test_one_split_goes_through_its_epochs_alone():
    # As drawn by the first version of the loader, which knew no blending.
    recorded = [3, 0, 2, 1, 4, 2, 0, 3, 4, 1, 2, 0, 3, 4, 1]
    assert Blend([5], [BLOCK], 3).places(range(15)) == [(0, w) for w in recorded]
    blend, n = Blend([977], [BLOCK], 12), 977
    samples = [*range(3 * n), *range(10**12, 10**12 + 2 * n)]
    wanted = {e: permutation(n, 12, e) for e in {s // n for s in samples}}
    assert [w for _, w in blend.places(samples)] == [wanted[s // n][s % n] for s in samples]


def test_equal_splits_are_ordered_differently():
    n = BLOCK // 2
    places = np.asarray(Blend([n, n], shares_of([1, 1]), 0).places(range(BLOCK)))
    one, two = (places[places[:, 0] == i, 1] for i in (0, 1))
    assert np.mean(one == two) < 0.01


def test_blending_is_pinned():
    # A change here silently breaks resuming from every checkpoint made before it.
    blend = Blend([6, 4, 9], shares_of([5, 2, 3]), 7)
    assert blend.places(range(8)) == [
        (0, 1),
        (1, 0),
        (1, 3),
        (0, 3),
        (0, 2),
        (2, 7),
        (0, 4),
        (0, 0),
    ]
    assert blend.places(range(10**9, 10**9 + 6)) == [(0, 4), (0, 3), (0, 2), (0, 1), (0, 0), (0, 5)]


@settings(max_examples=20)
@given(SEEDS, st.lists(st.integers(0, 10**13), min_size=1, max_size=20))
def test_a_sample_does_not_depend_on_those_before_it(seed, samples):
    def make():
        return Blend([7, 300, 5000], shares_of([1, 2, 3]), seed)

    one = make()
    assert one.places(samples) == [make().places([s])[0] for s in samples]
    assert one.places(reversed(samples)) == one.places(samples)[::-1]


def test_threads_see_the_same_places():
    def make():
        return Blend([3, 50], shares_of([1, 9]), 5)

    parts = [range(s, s + 700) for s in range(0, 3 * BLOCK, 700)]
    blend = make()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(blend.places, parts))
    assert found == [make().places(part) for part in parts]


def test_epochs_seeds_and_streams_are_ordered_differently():
    n = 1000
    orders = [permutation(n, s, e, i) for s in range(3) for e in range(3) for i in range(2)]
    for i, a in enumerate(orders):
        assert sorted(a) == list(range(n))
        for b in [np.arange(n), *orders[:i]]:
            assert np.mean(a == b) < 0.01  # expected 1/n
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.15  # 4.7 standard deviations of 1/√n


def test_order_is_pinned():
    # A change here silently breaks resuming from every checkpoint made before it.
    assert permutation(8, 0, 0).tolist() == [4, 0, 1, 7, 6, 2, 5, 3]
    assert permutation(8, 7, 2).tolist() == [3, 0, 2, 1, 4, 7, 6, 5]
    # The first two numbers of the published SplitMix64 generator started at 0.
    start = np.asarray([0, 0x9E3779B97F4A7C15], np.uint64)
    with np.errstate(over="ignore"):
        assert [hex(x) for x in _mix(start)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


def test_weights_that_cannot_be():
    for bad in ([1, 0], [1, -2], [1, float("nan")], [1, float("inf")]):
        with pytest.raises(ConfigError, match="weights = .*must be positive numbers"):
            shares_of(bad)
    with pytest.raises(ConfigError, match="gives number 1 none of 4096 samples.*leave that"):
        shares_of([1, 1e-4])
