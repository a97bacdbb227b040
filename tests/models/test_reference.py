"""The model against the same model in float64 numpy, over the whole configuration space."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
from drawn_configs import configs
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig


def noisy(config, seed=0):
    """Parameters with every leaf random, so that no bias or norm is at its neutral value."""
    rng = np.random.default_rng(seed)

    def one(p):
        a = rng.standard_normal(p.shape, np.float32)
        return jnp.asarray(a * (p.std or 0.1) + p.fill)

    return params.map_params(one, params.abstract(config))


@functools.partial(jax.jit, static_argnames="config")
def all_logits(p, config, tokens, **kwargs):
    states = transformer.exit_states(p, config, tokens, **kwargs)
    return [
        exits.logits(exits.head(p, config, e), h)[..., : config.vocab_size]
        for e, h in enumerate(states)
    ]


@given(configs(), st.integers(0, 2**30))
@settings(max_examples=12)
def test_every_exit_equals_float64(config, seed):
    rng = np.random.default_rng(seed)
    p = noisy(config, seed % 1000)
    tokens = rng.integers(0, config.vocab_size, (2, 9))
    got = all_logits(p, config, jnp.array(tokens))
    for row in range(2):
        want = reference_model.exit_logits(p, config, tokens[row])
        assert len(got) == len(want) == config.n_exits + 1
        for g, w in zip(got, want, strict=True):
            # fp32 rounding (6e-8) grows with depth and with post-norm's division by small norms.
            np.testing.assert_allclose(g[row], w, atol=3e-4 * max(1, np.abs(w).max()), rtol=0)


@pytest.mark.parametrize("position", ["learned", "rotary", "alibi"])
def test_documents_do_not_see_each_other(position):
    config = ModelConfig(
        vocab_size=23,
        n_layers=2,
        d_model=24,
        n_heads=3,
        context_length=16,
        position=position,
        exits=(ExitConfig(1, block=True),),
    )
    p = noisy(config)
    tokens = np.random.default_rng(0).integers(0, 23, 12)
    segments = np.array([0] * 5 + [1] * 7)
    positions = np.concatenate([np.arange(5), np.arange(7)])
    got = all_logits(
        p,
        config,
        jnp.array(tokens)[None],
        positions=jnp.array(positions)[None],
        segment_ids=jnp.array(segments)[None],
    )
    for part in (slice(0, 5), slice(5, 12)):
        want = reference_model.exit_logits(p, config, tokens[part])
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g[0, part], w, atol=2e-5)


def test_bf16_computes_in_bf16_and_reduces_in_fp32():
    config = ModelConfig(
        vocab_size=50,
        n_layers=3,
        d_model=64,
        n_heads=4,
        context_length=32,
        dtype="bfloat16",
        exits=(ExitConfig(1),),
    )
    p = params.init(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 20), 0, 50)
    half = all_logits(p, config, tokens)
    full = all_logits(p, config.replace(dtype="float32"), tokens)
    states = jax.eval_shape(lambda p: transformer.exit_states(p, config, tokens), p)
    for s, h, f in zip(states, half, full, strict=True):
        assert s.dtype == jnp.bfloat16 and h.dtype == jnp.float32
        # 8 bits of mantissa: relative rounding 2^-9 per operation, over some tens of operations.
        assert float(jnp.abs(h - f).max()) < 0.05 * float(jnp.abs(f).max())
        assert float(jnp.abs(h - f).max()) > 0
