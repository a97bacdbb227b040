"""Rows of several slots, packed, attend as each slot's own would."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.models import attention
from eejax.models.attention import PackedRows
from eejax.models.config import ModelConfig

SLOTS, LENGTH, HEADS, GROUPS, SIZE = 5, 90, 2, 3, 8
CONFIG = ModelConfig(
    vocab_size=7,
    n_layers=1,
    d_model=48,
    n_heads=6,
    n_kv_heads=2,
    context_length=64,
    attention_softcap=5.0,
)


def reference(q, keys, values, window, slopes):
    """One slot's rows in float64: q [w, k, g, h] over keys [k, p + w, h], the last w its own."""
    w, behind = len(q), keys.shape[1]
    out = np.zeros(q.shape)
    for i in range(w):
        position = behind - w + i
        seen = [p for p in range(position + 1) if position - p < window]
        for head in range(HEADS):
            for group in range(GROUPS):
                scores = keys[head, seen] @ q[i, head, group] * SIZE**-0.5
                scores = 5.0 * np.tanh(scores / 5.0)
                scores -= slopes[head, group] * (position - np.array(seen))
                weights = np.exp(scores - scores.max())
                out[i, head, group] = weights / weights.sum() @ values[head, seen]
    return out


@pytest.mark.parametrize("way", ["_by_span", "_at_once"])
@settings(max_examples=15)
@given(
    counts=st.lists(st.integers(0, 6), min_size=SLOTS, max_size=SLOTS).filter(any),
    starts=st.lists(st.integers(0, 60), min_size=SLOTS, max_size=SLOTS),
    width=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_packed_rows_attend_as_their_slots_rows_would(way, counts, starts, width, seed):
    rng = np.random.default_rng(seed)
    order = [i for i in rng.permutation(SLOTS) if counts[i]]
    slot = np.concatenate([np.full(counts[i], i) for i in order])
    position = np.concatenate([starts[i] + np.arange(counts[i]) for i in order])
    first = np.flatnonzero((position - np.array(starts)[slot]) % width == 0)
    t = 32

    def pad(a, fill):
        return np.concatenate([a, np.full(t - len(a), fill)]).astype(np.int32)

    packed = PackedRows(
        jnp.asarray(pad(slot, SLOTS)),
        jnp.asarray(pad(position, 0)),
        jnp.asarray(pad(first, 0)),
        jnp.int32(len(first)),
        width,
        6,
    )
    q = rng.normal(size=(t, 1, HEADS, GROUPS, SIZE)).astype(np.float32)
    k, v = (rng.normal(size=(t, 1, HEADS, SIZE)).astype(np.float32) for _ in range(2))
    cache = [rng.normal(size=(SLOTS * HEADS, LENGTH, SIZE)).astype(np.float32) for _ in range(2)]
    slopes = rng.random((HEADS, GROUPS)).astype(np.float32) * 0.1
    distance = pad(position, 0)[:, None, None] - np.arange(LENGTH)[None, None]
    window = 40
    mask = (distance >= 0) & (distance < window)
    run = jax.jit(
        lambda *args: getattr(attention, way)(
            *args, slopes=jnp.asarray(slopes), config=CONFIG, packed=packed
        )
    )
    y, (keys, values) = run(q, k, v, mask, distance.astype(np.int32), *map(jnp.asarray, cache))
    assert y.shape == q.shape
    for i in order:
        own = slot == i
        n = starts[i] + counts[i]
        heads = slice(i * HEADS, (i + 1) * HEADS)
        for buffer, rows, old in ((keys, k, cache[0]), (values, v, cache[1])):
            got = np.asarray(buffer[heads])
            np.testing.assert_array_equal(got[:, : starts[i]], old[heads][:, : starts[i]])
            np.testing.assert_array_equal(
                got[:, starts[i] : n], rows[: len(slot)][own][:, 0].swapaxes(0, 1)
            )
        want = reference(
            q[: len(slot)][own][:, 0].astype(np.float64),
            np.asarray(keys[heads, :n], np.float64),
            np.asarray(values[heads, :n], np.float64),
            window,
            slopes,
        )
        np.testing.assert_allclose(np.asarray(y)[: len(slot)][own][:, 0], want, atol=2e-5)
    # Who has no rows keeps its keys and values, as far as anybody will see them.
    for i in set(range(SLOTS)) - set(order):
        heads = slice(i * HEADS, (i + 1) * HEADS)
        np.testing.assert_array_equal(np.asarray(keys[heads])[:, :66], cache[0][heads][:, :66])


def test_lengths_of_one_sequence_are_finer():
    assert attention.span_lengths(64) == [64]
    assert attention.span_lengths(272) == [128, 272]
    assert attention.span_lengths(4096) == [128, 256, 512, 1024, 2048, 4096]
    for length in range(1, 1500, 7):
        *shorter, last = attention.span_lengths(length)
        assert last == length and sorted({*shorter}) == shorter and all(n < last for n in shorter)
