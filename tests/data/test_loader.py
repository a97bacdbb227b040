"""Batches: each token once an epoch, a pure function of (seed, step), on any number of shards."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError, DataError
from eejax.data import IGNORE, Loader, Split, batches, even_windows
from eejax.data.loader import _mix, _permutation

EOS = 1_000_000


def split(lengths: list[int], fingerprint: str = "f", gap: int = 3) -> Split:
    """A split whose tokens are all different: 0, 1, 2, … but EOS + i ending document i.

    Every second document is followed in the file by `gap` tokens of the other split.
    """
    file, offsets, own = [], [], [0]
    runs: list[int] = []
    number = 0
    for i, n in enumerate(lengths):
        if i % 2 == 0:
            runs.append(own[-1])
            file += [-7] * gap
            offsets.append(len(file))
        file += [*range(number, number + n - 1), EOS + i]
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


def test_epochs_and_seeds_are_ordered_differently():
    n = 1000
    orders = [_permutation(n, seed, epoch) for seed in range(3) for epoch in range(3)]
    for i, a in enumerate(orders):
        assert sorted(a) == list(range(n))
        for b in [np.arange(n), *orders[:i]]:
            assert np.mean(a == b) < 0.01  # expected 1/n
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.15  # 4.7 standard deviations of 1/√n


def test_order_is_pinned():
    # A change here silently breaks resuming from every checkpoint made before it.
    assert _permutation(8, 0, 0).tolist() == [4, 0, 1, 7, 6, 2, 5, 3]
    assert _permutation(8, 7, 2).tolist() == [3, 0, 2, 1, 4, 7, 6, 5]
    # The first two numbers of the published SplitMix64 generator started at 0.
    start = np.asarray([0, 0x9E3779B97F4A7C15], np.uint64)
    with np.errstate(over="ignore"):
        assert [hex(x) for x in _mix(start)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


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


@settings(max_examples=40)
@given(LENGTHS, st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 4), (6, 3)]), st.booleans())
def test_shards_together_are_the_global_batch(lengths, sizes, masks):
    batch_size, count = sizes
    data = split([*lengths, 12])
    loader = Loader(data, batch_size, 2, seed=3, document_masks=masks)
    shards = [loader.shard(i, count) for i in range(count)]
    for _ in range(4):
        parts = [next(s) for s in shards]
        assert all(len(p["tokens"]) == batch_size // count for p in parts)
        equal(next(loader), joined(parts))
    one = Loader(data, batch_size, 2, seed=3, document_masks=masks)
    one.restore(shards[-1].state())  # a position of one shard is the position of all
    equal(next(one), next(loader))
    whole = list(batches(data, batch_size, 3, document_masks=masks))
    split_up = [
        list(batches(data, batch_size, 3, document_masks=masks, shard=(i, count)))
        for i in range(count)
    ]
    for i, batch in enumerate(whole):
        equal(batch, joined([s[i] for s in split_up]))


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


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 1},
        {"length": 3},
        {"seed": 1},
        {"document_masks": True},
        {"data": split([10, 10], fingerprint="other")},
    ],
)
def test_a_position_of_another_run_is_refused(change):
    base = {"data": split([10, 10]), "batch_size": 2, "length": 4, "seed": 0}
    state = Loader(base["data"], 2, 4, 0).state()
    masks = change.get("document_masks", False)
    data, batch_size, length, seed = ({**base, **change}[k] for k in base)
    other = Loader(data, batch_size, length, seed, document_masks=masks)
    field = {"data": "dataset"}.get(next(iter(change)), next(iter(change)))
    with pytest.raises(DataError, match=f"{field} was .*, is .*Resume with the settings"):
        other.restore(state)
    assert other.step == 0


def test_bad_positions_and_sizes():
    data = split([10, 10])
    loader = Loader(data, 2, 4)
    for step in (-1, None, "3"):
        with pytest.raises(DataError, match="step must be a count"):
            loader.restore({**loader.state(), "step": step})
    with pytest.raises(DataError, match="20 tokens, which is 0 windows of 32 . 1.*give more text"):
        Loader(data, 1, 32)
    with pytest.raises(ConfigError, match="batch_size = 0"):
        Loader(data, 0, 4)
    with pytest.raises(ConfigError, match="length = 0"):
        Loader(data, 1, 0)
    with pytest.raises(ConfigError, match=r"batch_size = 3: must be divisible by the 2 .*Use 2\."):
        Loader(data, 3, 4).shard(0, 2)
    with pytest.raises(ConfigError, match="divisible"):
        list(batches(data, 3, 4, shard=(0, 2)))
    with pytest.raises(ConfigError, match="index = 2"):
        loader.shard(2, 2)
    with pytest.raises(DataError, match="no token to predict"):
        list(batches(split([1]), 1, 4))
    with pytest.raises(ConfigError, match="most = 0"):
        even_windows(data, 4, 0)


def test_late_steps_cost_no_more_than_early_ones():
    loader = Loader(split([12] * 20), 4, 8)
    loader.restore({**loader.state(), "step": 10**9})
    late = next(loader)
    equal(late, loader.batch(10**9))


def test_ignored_label_is_the_losses_one():
    # Written twice so that reading data does not need jax.
    assert pytest.importorskip("eejax.losses.cross_entropy").IGNORE == IGNORE
    for file in (pathlib.Path(__file__).parents[2] / "eejax" / "data").glob("*.py"):
        assert "jax" not in file.read_text().replace("eejax", "")
