"""Attention to a long cache of which only the beginning is written: rows at every reach.

Beside attention of the whole sequence with itself, which has no cache.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eejax.models import attention, layers, params
from eejax.models.config import ModelConfig

CASES = {
    "grouped": dict(n_kv_heads=2),
    "window": dict(sliding_window=37),
    "alibi": dict(position="alibi"),
}
LENGTH, T = 1100, 700
STARTS = [(0, 0), (3, 250), (254, 255), (255, 1), (256, 256), (40, 698), (698, 698)]


def setup(case):
    config = ModelConfig(
        vocab_size=7,
        n_layers=1,
        d_model=12,
        n_heads=4,
        head_dim=6,
        context_length=LENGTH,
        **CASES[case],
    )
    rng = np.random.default_rng(1)

    def draw(a):
        return jnp.asarray(rng.standard_normal(a.shape, np.float32) * (a.std or 0.3))

    return config, params.map_params(draw, params.layer(config)["attn"])


def test_lengths_end_with_the_whole_cache_and_none_is_near_it():
    assert attention.cache_lengths(64) == [64]
    assert attention.cache_lengths(512) == [512]
    assert attention.cache_lengths(513) == [256, 513]
    assert attention.cache_lengths(4096) == [256, 1024, 4096]
    for length in range(1, 9000, 37):
        *shorter, last = attention.cache_lengths(length)
        assert last == length and all(n < length / 2 for n in shorter)


@pytest.mark.parametrize("case", CASES)
def test_rows_beside_a_cache_equal_the_whole_sequence(case):
    config, p = setup(case)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, T, 12), np.float32))
    window = config.window(0)
    positions = jnp.arange(T, dtype=jnp.int32)[None]

    @jax.jit
    def all_rows(x):
        context = layers.make_context(config, positions)
        return layers.self_attention(p, x, config, context, window=window)

    whole, (k, v) = all_rows(x)

    def flat(a):
        return jnp.swapaxes(a, 1, 2).reshape(-1, T, a.shape[-1])

    rest = ((0, 0), (0, LENGTH - T), (0, 0))
    k, v = (jnp.pad(flat(a), rest, constant_values=1e9) for a in (k, v))

    @jax.jit
    def rows(start):
        at = start[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
        keys = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        context = layers.make_context(config, at, key_positions=keys, start=start)
        own = jnp.take_along_axis(x, at[..., None], 1)
        return layers.self_attention(p, own, config, context, window=window, cache=(k, v))[0], at

    for start in STARTS:
        got, at = rows(jnp.asarray(start, jnp.int32))
        want = jnp.take_along_axis(whole, at[..., None], 1)
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-5)


def test_a_short_reach_reads_only_the_first_positions():
    """Garbage beyond the first bucket is masked either way; NaN there is seen if it is read."""
    config, p = setup("grouped")
    shape = (2 * config.n_kv_heads, LENGTH, config.head_dim)
    cache = jnp.full(shape, jnp.nan).at[:, : attention.MIN_CACHE_LENGTH].set(0.5)

    @jax.jit
    def row(start):
        keys = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        context = layers.make_context(config, start[:, None], key_positions=keys, start=start)
        return layers.self_attention(
            p, jnp.ones((2, 1, 12)), config, context, cache=(cache, cache)
        )[0]

    def reads(*start):
        return bool(jnp.isnan(row(jnp.asarray(start, jnp.int32))).any())

    last = attention.MIN_CACHE_LENGTH - 1
    assert not reads(0, last)
    assert reads(0, last + 1)
