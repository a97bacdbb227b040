"""Batches: each token once an epoch, a pure function of (seed, step), on any number of shards."""

from __future__ import annotations

import dataclasses
import fractions
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError, DataError
from eejax.data import IGNORE, Loader, Split, batches, even_windows

EOS = 1_000_000
OTHER = 2_000_000  # by which the tokens of another split are higher


def split(lengths: list[int], fingerprint: str = "f", gap: int = 3, base: int = 0) -> Split:
    """A split whose tokens are all different: 0, 1, 2, … but EOS + i ending document i.

    All are raised by `base`. Every second document is followed in the file by `gap` tokens of
    the other split.
    """
    file, offsets, own = [], [], [0]
    runs: list[int] = []
    number = 0
    for i, n in enumerate(lengths):
        if i % 2 == 0:
            runs.append(own[-1])
            file += [-7] * gap
            offsets.append(len(file))
        file += [*range(base + number, base + number + n - 1), base + EOS + i]
        number += n - 1
        own.append(own[-1] + n)
    return Split(
        name="train",
        fingerprint=fingerprint,
        eos_id=EOS,
        vocab_size=EOS + 1,
        nbytes=sum(lengths),
        documents=np.arange(len(lengths)),
        starts=np.asarray(own),
        runs=np.asarray([*runs, own[-1]]),
        offsets=np.asarray(offsets),
        tokens=np.asarray([*file, -7]),
    )


LENGTHS = st.lists(st.integers(1, 12), min_size=3, max_size=12)


def equal(a: dict, b: dict) -> None:
    assert a.keys() == b.keys() == {"tokens", "labels", "segment_ids", "positions"}
    for key in a:
        assert a[key].dtype == np.int32
        np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def joined(parts: list[dict]) -> dict:
    return {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**40))
def test_an_epoch_takes_every_token_once_with_its_successor(lengths, length, batch_size, seed):
    data = split(lengths)
    windows = (len(data) - 1) // length
    if windows < batch_size:
        with pytest.raises(DataError, match="fewer than batch_size"):
            Loader(data, batch_size, length, seed)
        return
    loader = Loader(data, batch_size, length, seed)
    stream = data.read(0, len(data))
    rows = joined([next(loader) for _ in range(-(-3 * windows // batch_size))])
    after = dict(zip(stream[:-1].tolist(), stream[1:].tolist(), strict=True))
    for epoch in range(3):
        tokens = rows["tokens"][epoch * windows : (epoch + 1) * windows]
        assert sorted(tokens.ravel().tolist()) == sorted(stream[: windows * length].tolist())
    np.testing.assert_array_equal(
        rows["labels"], np.vectorize(after.get)(rows["tokens"]).astype(np.int32)
    )
    assert not rows["segment_ids"].any()
    assert (rows["positions"] == np.arange(length)).all()


@settings(max_examples=60)
@given(LENGTHS, st.integers(2, 6), st.integers(1, 4), st.booleans())
def test_windows_begin_with_the_token_that_texts_begin_with(lengths, length, rows, masks):
    """And no token is a label twice, each under what comes before it."""
    plain = split(lengths)
    first = int(plain.read(0, 1)[0])  # occurs nowhere else
    data = dataclasses.replace(plain, bos_id=first)
    if len(data) < 2:
        return
    found = joined(list(batches(data, rows, length, document_masks=masks)))
    used = (found["labels"] != IGNORE).any(1)
    assert (found["tokens"][used, 0] == first).all()
    stream = data.read(0, len(data)).tolist()
    before = dict(zip(stream[1:], stream[:-1], strict=True))
    labels = found["labels"][found["labels"] != IGNORE].tolist()
    assert len(labels) == len(set(labels))
    starts = set(data.starts.tolist())
    missing = {t for i, t in enumerate(stream[:-1]) if i not in starts or not masks}
    # The first token, and one at the end of a window that begins with a text, are no labels.
    assert len(missing - set(labels)) <= 2 + (len(stream) <= length)
    for row in np.flatnonzero(used):
        own = found["labels"][row]
        for i in np.flatnonzero(own != IGNORE):
            token = int(found["tokens"][row, i])
            assert token == before[int(own[i])] or (i == 0 and token == first)


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 5), st.integers(0, 30), st.booleans(), st.integers(0, 9))
def test_restore_continues_as_if_uninterrupted(lengths, length, steps, masks, seed):
    data = split([*lengths, 12])
    whole = Loader(data, 1, length, seed, document_masks=masks)
    for _ in range(steps):
        next(whole)
    resumed = Loader(data, 1, length, seed, document_masks=masks)
    resumed.restore(json.loads(json.dumps(whole.state())))
    for _ in range(5):
        equal(next(whole), next(resumed))


RAMPUPS = st.sampled_from([None, (8, 8, 40), (16, 8, 10), (8, 16, 7)])


@settings(max_examples=40)
@given(st.data(), RAMPUPS, st.booleans(), st.integers(0, 9))
def test_shards_together_are_the_global_batch(data, rampup, masks, seed):
    many = data.draw(st.integers(1, 3))
    weights = data.draw(st.lists(st.floats(1, 9), min_size=many, max_size=many))
    splits = [split([*data.draw(LENGTHS), 60], f"f{i}", base=i * OTHER) for i in range(many)]

    def make():
        return Loader(splits, 24, 2, seed, weights=weights, document_masks=masks, rampup=rampup)

    whole = make()
    wanted = [next(whole) for _ in range(5)]
    for count in (1, 2, 4, 8):
        shards = [make().shard(i, count) for i in range(count)]
        for step, batch in enumerate(wanted):
            parts = [next(s) for s in shards]
            assert all(len(p["tokens"]) == len(batch["tokens"]) // count for p in parts)
            equal(batch, joined(parts))
            equal(batch, joined([s.batch(step) for s in shards]))
        one = make()
        one.restore(shards[-1].state())  # a position of one shard is the position of all
        equal(next(one), whole.batch_at(whole.samples))


@settings(max_examples=40)
@given(LENGTHS, st.lists(st.tuples(st.integers(1, 8), st.integers(0, 5)), max_size=5), RAMPUPS)
def test_other_batch_sizes_go_on_at_the_very_next_sample(lengths, legs, rampup):
    splits = [split([*lengths, 99]), split([80], "g", base=OTHER)]

    def make(size, ramp=None):
        return Loader(splits, size, 2, 5, weights=(2, 1), rampup=ramp)

    state, rows, steps = make(1).state(), [], 0
    for size, count in [*legs, (1, 1)]:
        loader = make(size)
        loader.restore(json.loads(json.dumps(state)))
        rows += [next(loader) for _ in range(count)]
        state, steps = loader.state(), steps + count
        assert loader.samples == sum(len(r["tokens"]) for r in rows) and loader.step == steps
    # And a ramp-up, which goes on where the samples taken so far say.
    loader = make(24, rampup)
    loader.restore(state)
    for _ in range(3):
        size = loader.size_at(loader.samples)
        assert size == slow_size(loader.samples, 24, rampup)
        rows.append(next(loader))
        assert len(rows[-1]["tokens"]) == size
    single = make(1)
    equal(joined(rows), joined([next(single) for _ in range(loader.samples)]))


def slow_size(samples: int, final: int, rampup: tuple[int, int, int] | None) -> int:
    """Megatron-LM's rule: so many whole increments as shares of the ramp-up were consumed."""
    if rampup is None:
        return final
    start, increment, total = rampup
    if samples > total:
        return final
    share = fractions.Fraction(total, (final - start) // increment)
    return start + int(samples / share) * increment


@settings(max_examples=100)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 8), st.integers(1, 400), st.data())
def test_rampup_against_a_walk_from_batch_to_batch(start, increment, stages, total, data):
    final, rampup = start + stages * increment, (start, increment, total)
    loader = Loader(split([200]), final, 1, rampup=rampup)
    assert loader.sizes == tuple(range(start, final + 1, increment))
    begin = data.draw(st.integers(0, 500))
    samples = [0, begin]
    for step in range(60):
        for i, first in enumerate((0, begin)):
            assert loader.samples_before(step, first) == samples[i]
            assert loader.size_at(samples[i]) == slow_size(samples[i], final, rampup)
            samples[i] += loader.size_at(samples[i])
    assert loader.samples_before(10**12) - loader.samples_before(10**12 - 1) == final


def test_rampup_of_a_known_run():
    # 256 to 1024 in increments of 128 over 60 thousand samples: one more for each 10 thousand.
    loader = Loader(split([1030]), 1024, 1, rampup=(256, 128, 60_000))
    assert loader.sizes == (256, 384, 512, 640, 768, 896, 1024)
    for samples, size in [(0, 256), (9_999, 256), (10_000, 384), (59_999, 896), (60_000, 1024)]:
        assert loader.size_at(samples) == size
    # 40 batches of 256 are the first 10,240; 26 of 384 lead to 20,224.
    assert [loader.samples_before(s) for s in (0, 1, 40, 41, 66, 67)] == [
        0,
        256,
        10_240,
        10_624,
        20_224,
        20_736,
    ]
    assert len(loader.batch(40)["tokens"]) == 384
    constant = Loader(split([1030]), 8, 1)
    assert constant.sizes == (8,) and constant.samples_before(7, 3) == 59


@settings(max_examples=10)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.booleans())
def test_blended_rows_come_from_their_splits_in_proportion(weights, masks):
    splits = [split([500], f"f{i}", base=i * OTHER) for i in range(len(weights))]
    loader = Loader(splits, 16, 4, 1, weights=weights, document_masks=masks)
    rows = joined([next(loader) for _ in range(4096 // 16)])
    which = rows["tokens"] // OTHER
    assert (which == which[:, :1]).all(), "a row is of one split"
    counts = np.bincount(which[:, 0], minlength=len(weights))
    assert np.abs(counts - 4096 * np.asarray(weights) / sum(weights)).max() < 1
    for i, data in enumerate(splits):
        mine = joined(list(batches(data, 1, 4, document_masks=masks)))
        row = {tuple(t): r for r, t in enumerate(mine["tokens"].tolist())}
        at = [row[tuple(t)] for t in rows["tokens"][which[:, 0] == i].tolist()]
        for key in mine:
            np.testing.assert_array_equal(rows[key][which[:, 0] == i], mine[key][at])
        n = (len(data) - 1) // 4  # the first epoch
        assert len(at) > n and sorted(at[:n]) == list(range(n))


def slow_masks(data: Split, start: int, length: int) -> tuple[list, list, list]:
    """labels, segments and positions of a window, token by token."""
    stream = data.read(start, length + 1).tolist()
    labels, segments, positions = [], [], []
    segment = position = 0
    for token, following in zip(stream[:-1], stream[1:], strict=True):
        ends = token >= EOS
        labels.append(IGNORE if ends else following)
        segments.append(segment)
        positions.append(position)
        segment, position = (segment + 1, 0) if ends else (segment, position + 1)
    return labels, segments, positions


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 9))
def test_document_masks_against_a_token_by_token_walk(lengths, length):
    data = split([*lengths, 12])
    for i, batch in enumerate(batches(data, 1, length, document_masks=True)):
        n = len(data.read(i * length, length + 1)) - 1
        wanted = slow_masks(data, i * length, length)
        for key, values in zip(("labels", "segment_ids", "positions"), wanted, strict=True):
            assert batch[key][0, :n].tolist() == values, key
        assert (batch["labels"][0, n:] == IGNORE).all()


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 9))
def test_evaluation_counts_every_label_once_in_order(lengths, batch_size, length):
    data = split(lengths)
    stream = data.read(0, len(data))
    found = list(batches(data, batch_size, length))
    assert len(found) == -(-(len(data) - 1) // (length * batch_size))
    assert all(b["tokens"].shape == (batch_size, length) for b in found)
    labels = joined(found)["labels"].ravel()
    np.testing.assert_array_equal(labels[labels != IGNORE], stream[1:])
    tokens = joined(found)["tokens"].ravel()
    np.testing.assert_array_equal(tokens[labels != IGNORE], stream[:-1])
    assert not tokens[labels == IGNORE].any()


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 5), st.integers(1, 40), st.sampled_from([1, 2, 4]), st.booleans())
def test_a_sample_is_even_and_the_same_however_it_is_cut(lengths, length, most, parts, masks):
    data = split(lengths)
    total = -(-(len(data) - 1) // length)
    windows = even_windows(data, length, most)
    assert len(windows) == min(most, total) and 0 <= windows[0] and windows[-1] < total
    gaps = np.diff([-1 - (total - 1 - windows[-1]), *windows])  # the ends' gaps taken together
    assert gaps.max() - gaps.min() <= 1 or len(windows) == 1
    np.testing.assert_array_equal(even_windows(data, length), np.arange(total))
    size = 4
    whole = joined(list(batches(data, size, length, document_masks=masks, limit=most)))
    cut = joined(
        list(batches(data, size // parts, length, document_masks=masks, limit=most * parts))
    )
    n = min(total, most * size)  # the rest is filling
    equal({k: v[:n] for k, v in whole.items()}, {k: v[:n] for k, v in cut.items()})
    assert (whole["labels"][n:] == IGNORE).all() and (cut["labels"][n:] == IGNORE).all()
    every = joined(list(batches(data, 1, length, document_masks=masks)))
    chosen = even_windows(data, length, most * size)
    equal({k: v[:n] for k, v in whole.items()}, {k: v[chosen] for k, v in every.items()})


BASE = {"splits": split([10, 10]), "batch_size": 2, "length": 4, "seed": 0}
TWO = {"splits": [split([10, 10]), split([10, 10], "g")], "weights": (3, 1)}


@pytest.mark.parametrize(
    "field, saved, change",
    [
        ("length", {}, {"length": 3}),
        ("seed", {}, {"seed": 1}),
        ("document_masks", {}, {"document_masks": True}),
        ("dataset", {}, {"splits": split([10, 10], "other")}),
        ("dataset", {}, TWO),
        ("dataset", TWO, {"splits": TWO["splits"][::-1]}),
        ("shares", TWO, {"weights": (1, 3)}),
    ],
)
def test_a_position_of_another_run_is_refused(field, saved, change):
    state = Loader(**BASE | saved).state()
    other = Loader(**BASE | saved | change)
    with pytest.raises(DataError, match=f"{field} was .*, is .*Resume with the settings"):
        other.restore(state)
    assert other.step == other.samples == 0


def test_a_position_fits_other_batch_sizes_and_equal_weights():
    state = Loader(**BASE | TWO | {"weights": (0.75, 0.25)}).state()
    for change in ({"batch_size": 4}, {"batch_size": 4, "rampup": (2, 1, 9)}, {"weights": (6, 2)}):
        Loader(**BASE | TWO | change).restore(json.loads(json.dumps(state)))


def test_bad_positions_and_sizes():
    data = split([10, 10])
    loader = Loader(data, 2, 4)
    for field in ("samples", "step"):
        for value in (-1, None, "3"):
            with pytest.raises(DataError, match=f"{field} must be a count, is {value!r}"):
                loader.restore({**loader.state(), field: value})
    with pytest.raises(DataError, match="20 tokens, which is 0 windows of 32 . 1.*give more text"):
        Loader(data, 1, 32)
    with pytest.raises(ConfigError, match="batch_size = 0"):
        Loader(data, 0, 4)
    with pytest.raises(ConfigError, match="length = 0"):
        Loader(data, 1, 0)
    with pytest.raises(ConfigError, match=r"batch_size = 3: must be divisible by the 2 .*Use 2\."):
        Loader(data, 3, 4).shard(0, 2)
    with pytest.raises(ConfigError, match=r"rampup = \[1, 3\]: .*divisible by the 2 data shards"):
        Loader(data, 4, 4, rampup=(1, 1, 9)).shard(0, 2)
    with pytest.raises(ConfigError, match="index = 2"):
        loader.shard(2, 2)
    with pytest.raises(DataError, match="no token to predict"):
        list(batches(split([1]), 1, 4))
    with pytest.raises(ConfigError, match="max_windows = 0"):
        even_windows(data, 4, 0)


def test_bad_blends_and_rampups():
    data = split([10, 10])
    with pytest.raises(ConfigError, match="splits = .*at least one"):
        Loader([], 2, 4)
    for weights in (None, (1,), (1, 2, 3)):
        with pytest.raises(ConfigError, match="weights = .*must be 2 numbers, one for each split"):
            Loader([data, data], 2, 4, weights=weights)
    with pytest.raises(ConfigError, match="none of 4096 samples"):
        Loader([data, data], 2, 4, weights=(1, 1e-5))
    small = split([6], "small")
    with pytest.raises(DataError, match=r"train split 1 has 6 tokens, which is 1 windows .* part"):
        Loader([data, small], 4, 4, weights=(1, 1))
    assert next(Loader([data, small], 4, 4, weights=(3, 1)))["tokens"].shape == (4, 4)
    other = dataclasses.replace(data, vocab_size=7)
    with pytest.raises(DataError, match="split 1 has vocab_size 7 .*one tokenizer"):
        Loader([data, other], 2, 4, weights=(1, 1))
    for rampup in ((1, 1), (0, 1, 9), (1, 0, 9), (1, 1, 0), (1, 1.0, 9)):
        with pytest.raises(ConfigError, match="rampup = .*three integers > 0"):
            Loader(data, 4, 4, rampup=rampup)
    for rampup in ((1, 2, 9), (4, 1, 9), (5, 1, 9)):
        with pytest.raises(ConfigError, match="to batch_size 4 in whole increments"):
            Loader(data, 4, 4, rampup=rampup)


def test_late_steps_cost_no_more_than_early_ones():
    splits = [split([12] * 20), split([12] * 30, "g")]
    loader = Loader(splits, 4, 8, weights=(1, 5), rampup=(2, 1, 1000))
    samples = loader.samples_before(10**9)
    assert samples > 10**9
    loader.restore({**loader.state(), "samples": samples})
    late = next(loader)
    equal(late, loader.batch(10**9))


def test_ignored_label_is_the_losses_one():
    # Written twice so that reading data does not need jax.
    assert pytest.importorskip("eejax.losses.cross_entropy").IGNORE == IGNORE
    for file in (pathlib.Path(__file__).parents[2] / "eejax" / "data").glob("*.py"):
        assert "jax" not in file.read_text().replace("eejax", "")
