"""Prefetching changes nothing but the time: order, position, errors, an end without threads."""

from __future__ import annotations

import dataclasses
import gc
import json
import signal
import sys
import threading
import time

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError, DataError
from eejax.data import ByteTokenizer, Document, Loader, Prefetch, batches, pack, windows
from eejax.data.prefetch import _Ahead


class Texts:
    def __init__(self, word):
        self.word = word

    def documents(self):
        for i in range(40):
            yield Document(f"{i:02}", f"{self.word} {i * i} " * (1 + i % 7))

    def describe(self):
        return {"kind": self.word}


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    root = tmp_path_factory.mktemp("packed")
    return [pack(Texts(w), ByteTokenizer(), root).split("train") for w in ("exit", "layer")]


@pytest.fixture(autouse=True)
def no_thread_left():
    before = set(threading.enumerate())
    yield
    ended = time.monotonic() + 10
    while left := set(threading.enumerate()) - before:
        assert time.monotonic() < ended, f"still running: {left}"
        time.sleep(0.01)


def make(splits, size=6, **settings):
    return Loader(splits, size, 9, 3, weights=(2, 1), **settings)


def equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype
        np.testing.assert_array_equal(a[key], b[key], err_msg=key)


@dataclasses.dataclass
class Tokens:
    """A split's tokens, read slowly, or not at all while `broken`; counts the readers."""

    real: np.ndarray
    broken: bool = False
    seconds: float = 0.0
    reading: int = 0
    reads: int = 0
    threads: set = dataclasses.field(default_factory=set)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __getitem__(self, at):
        with self.lock:
            self.reading += 1
            self.reads += 1
            self.threads.add(threading.current_thread())
        try:
            time.sleep(self.seconds)
            if self.broken:
                raise OSError("the disk is gone")
            return self.real[at]
        finally:
            with self.lock:
                self.reading -= 1


@pytest.fixture
def watched(splits):
    """One split, and its tokens as `Tokens`."""
    tokens = Tokens(splits[0].tokens)
    return dataclasses.replace(splits[0], tokens=tokens), tokens


def test_the_same_batches_and_positions(splits):
    @settings(max_examples=15)
    @given(
        st.integers(1, 4),
        st.integers(0, 4),
        st.sampled_from([None, (2, 2, 20), (2, 4, 5)]),
        st.booleans(),
        st.integers(0, 10**6),
    )
    def check(threads, more, rampup, masks, start):
        loaders = [make(splits, document_masks=masks, rampup=rampup) for _ in range(2)]
        loader, plain = (one.shard(1, 2) for one in loaders)
        plain.restore({**plain.state(), "samples": start, "step": 5})
        with Prefetch(loader, threads, threads + more) as ahead:
            ahead.restore(plain.state())
            for _ in range(9):
                equal(next(ahead), next(plain))
                assert ahead.state() == plain.state()
                assert (ahead.samples, ahead.step) == (plain.samples, plain.step)

    check()


def test_a_position_counts_what_was_handed_out(splits):
    with Prefetch(make(splits), 2, 8) as ahead:
        for _ in range(3):
            next(ahead)
        state = json.loads(json.dumps(ahead.state()))
        later = [next(ahead) for _ in range(4)]
        ahead.restore(state)  # back, past what lies ready
        for batch in later:
            equal(next(ahead), batch)
        other = make(splits, 2)
        other.restore(state)
        with Prefetch(other, 3, 3) as smaller:
            for batch in later:
                cut = [next(smaller) for _ in range(3)]
                equal({k: np.concatenate([c[k] for c in cut]) for k in batch}, batch)
        # The loader's position is the same one: whoever moves it is followed.
        equal(next(ahead.loader), ahead.loader.batch(7))
        equal(next(ahead), ahead.loader.batch(8))


def test_batches_are_prepared_by_other_threads_before_they_are_asked_for(watched):
    split, tokens = watched
    with Prefetch(Loader(split, 4, 9), 2, 5) as ahead:
        next(ahead)
        ended = time.monotonic() + 10
        while tokens.reads < 4 * 6 and time.monotonic() < ended:
            time.sleep(0.01)
        time.sleep(0.05)
        assert tokens.reads == 4 * 6, "the one handed out, and the five of the buffer"
    assert 1 <= len(tokens.threads) <= 2 and threading.main_thread() not in tokens.threads


def test_an_error_reaches_the_caller_and_nothing_is_left_out(splits, watched):
    split, tokens = watched
    plain = Loader(splits[0], 4, 9)
    with Prefetch(Loader(split, 4, 9), 2, 2) as ahead:
        for _ in range(3):
            equal(next(ahead), next(plain))
        tokens.broken = True
        served = 0
        with pytest.raises(OSError, match="the disk is gone"):
            for _ in range(9):
                equal(next(ahead), next(plain))
                served += 1
        assert served <= 2, "what lay ready"
        with pytest.raises(OSError, match="the disk is gone"):
            next(ahead)
        assert ahead.state() == plain.state()
        tokens.broken = False
        for _ in range(5):
            equal(next(ahead), next(plain))


def test_an_interrupt_while_waiting_leaves_nothing_out(watched):
    split, tokens = watched
    plain = Loader(split, 4, 9)

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Prefetch(Loader(split, 4, 9), 1, 1) as ahead:
            equal(next(ahead), next(plain))
            tokens.seconds = 0.05
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                for _ in range(20):
                    batch = next(ahead)
                    equal(batch, plain.batch(ahead.step - 1))
            tokens.seconds = 0.0
            for step in range(ahead.step, ahead.step + 4):
                equal(next(ahead), plain.batch(step))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_closing_waits_for_the_batches_under_way(watched):
    split, tokens = watched
    ahead = Prefetch(Loader(split, 4, 9), 3, 6)
    next(ahead)
    tokens.seconds = 0.05
    next(ahead)
    ahead.close()
    reads = tokens.reads
    assert tokens.reading == 0 and not any(t.is_alive() for t in tokens.threads)
    ahead.close()
    time.sleep(0.1)
    assert tokens.reads == reads
    tokens.seconds = 0.0
    with ahead:
        equal(next(ahead), Loader(split, 4, 9).batch(2))
    Prefetch(Loader(split, 4, 9)).close()  # never begun


def test_no_batch_begins_once_closing_has(watched):
    split, tokens = watched
    source = _Ahead(Loader(split, 4, 9))
    equal(source[1], Loader(split, 4, 9).batch(1))
    reads = tokens.reads
    assert source.stop() == {threading.current_thread()}
    assert source[2] is None and tokens.reads == reads


def test_one_that_is_dropped_takes_its_threads_along(splits):
    ahead = Prefetch(make(splits))
    next(ahead)
    del ahead
    gc.collect()  # and no_thread_left looks


def test_bad_settings_and_a_missing_package(splits, monkeypatch):
    with pytest.raises(ConfigError, match="threads = 0"):
        Prefetch(make(splits), 0)
    with pytest.raises(ConfigError, match="buffer = 2: must be at least the 3 threads"):
        Prefetch(make(splits), 3, 2)
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(DataError, match=r"pip install 'eejax\[data\]'"):
        Prefetch(make(splits))


@pytest.mark.parametrize("masks", [False, True])
def test_windows_are_the_rows_of_the_split(splits, masks):
    source = windows(splits[0], 9, document_masks=masks)
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    rows = list(batches(splits[0], 1, 9, document_masks=masks))
    assert len(source) == (len(splits[0]) - 1) // 9 >= len(rows) - 1
    for i in range(len(source)):
        equal(source[np.int64(i)], {k: v[0] for k, v in rows[i].items()})
    for bad in (-1, len(source)):
        with pytest.raises(IndexError, match=f"window {bad} of {len(source)}"):
            source[bad]
    with pytest.raises(ConfigError, match="length = 0"):
        windows(splits[0], 0)
    assert len(windows(splits[0], 10**6)) == 0


def test_windows_in_a_loader_of_grain_that_resumes(splits):
    def data_loader(split, masks=False):
        source = windows(split, 9, document_masks=masks)
        sampler = grain.samplers.IndexSampler(
            len(source), grain.sharding.NoSharding(), shuffle=True, num_epochs=2, seed=1
        )
        return grain.DataLoader(
            data_source=source,
            sampler=sampler,
            operations=[grain.transforms.Batch(4, drop_remainder=True)],
        )

    whole = list(data_loader(splits[0]))
    assert whole[0]["tokens"].shape == (4, 9)
    tokens = np.concatenate([b["tokens"] for b in whole])
    n = (len(splits[0]) - 1) // 9
    order = splits[0].read(0, n * 9).reshape(n, 9)
    first = tokens[:n].tolist()
    assert sorted(first) == sorted(order.tolist()) and first != order.tolist()
    begun = iter(data_loader(splits[0]))
    for _ in range(3):
        next(begun)
    resumed = iter(data_loader(splits[0]))
    resumed.set_state(begun.get_state())
    equal(next(resumed), whole[3])
    with pytest.raises(ValueError, match="document_masks=True"):
        iter(data_loader(splits[0], True)).set_state(begun.get_state())


def test_windows_in_a_dataset_of_grain(splits):
    dataset = grain.MapDataset.source(windows(splits[0], 9)).seed(4).shuffle().batch(4)
    found = np.concatenate([b["labels"] for b in dataset])
    n = len(windows(splits[0], 9))
    wanted = splits[0].read(1, n * 9).reshape(n, 9)
    assert sorted(found.tolist()) == sorted(wanted.tolist())
