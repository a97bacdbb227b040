"""The model against the same model in float64 numpy, over the whole configuration space."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.models import exits, params, transformer
from eejax.models.config import ACTIVATIONS, ExitConfig, ModelConfig, RotaryConfig


@st.composite
def configs(draw):
    n_layers = draw(st.integers(1, 4))
    n_heads, n_kv = draw(st.sampled_from([(2, 1), (4, 2), (3, 3), (6, 2)]))
    head_dim = 8
    norm_placement = draw(st.sampled_from(["pre", "post", "pre_post", "output"]))
    residual = "sequential"
    if norm_placement == "pre":
        residual = draw(st.sampled_from(["sequential", "parallel", "parallel_one_norm"]))
    boundaries = sorted(draw(st.sets(st.integers(0, n_layers), max_size=3)))
    make_exit = lambda b: ExitConfig(
        b,
        mlp=draw(st.booleans()),
        block=draw(st.booleans()),
        norm=draw(st.booleans()),
        head=draw(st.sampled_from(["tied", "shared", "own"])),
        temperature=draw(st.sampled_from([1.0, 0.7, 1.9])),
    )
    window = draw(
        st.one_of(
            st.none(),
            st.just(3),
            st.tuples(*[st.sampled_from([None, 2, 5])] * n_layers),
        )
    )
    scaling = draw(st.sampled_from(["none", "linear", "ntk", "llama3"]))
    maybe = lambda *values: draw(st.sampled_from(values))
    return ModelConfig(
        vocab_size=23,
        n_layers=n_layers,
        d_model=24,
        n_heads=n_heads,
        n_kv_heads=n_kv,
        head_dim=head_dim,
        d_ff=20,
        context_length=16,
        vocab_multiple=maybe(1, 8),
        norm=maybe("rmsnorm", "layernorm"),
        norm_plus_one=maybe(True, False),
        norm_placement=norm_placement,
        final_norm=maybe(True, False),
        embedding_norm=maybe(True, False),
        residual=residual,
        position=maybe("learned", "rotary", "alibi", "none"),
        rotary=RotaryConfig(
            theta=100.0,
            fraction=maybe(1.0, 0.5),
            interleaved=maybe(True, False),
            scaling=scaling,
            factor=1.0 if scaling == "none" else 4.0,
            original_context=8,
            local_theta=maybe(None, 30.0),
        ),
        qkv_bias=maybe(True, False),
        o_bias=maybe(True, False),
        qk_norm=maybe("none", "head", "full"),
        sliding_window=window,
        attention_scale=maybe(None, 0.2),
        attention_softcap=maybe(None, 2.0),
        mlp_gated=maybe(True, False),
        mlp_bias=maybe(True, False),
        activation=maybe(*ACTIVATIONS),
        head=maybe("tied", "shared", "own"),
        head_bias=maybe(True, False),
        logit_softcap=maybe(None, 3.0),
        temperature=maybe(1.0, 1.3),
        embedding_scale=maybe(1.0, 4.0),
        exits=tuple(make_exit(b) for b in boundaries),
    )


def noisy(config, seed=0):
    """Parameters with every leaf random, so that no bias or norm is at its neutral value."""
    rng = np.random.default_rng(seed)

    def one(p):
        a = rng.standard_normal(p.shape, np.float32)
        return jnp.asarray(a * (p.std or 0.1) + p.fill)

    return params.map_params(one, params.abstract(config))


def all_logits(p, config, tokens, **kwargs):
    states = transformer.exit_states(p, config, tokens, **kwargs)
    return [
        exits.logits(exits.head(p, config, e), h)[..., : config.vocab_size]
        for e, h in enumerate(states)
    ]


@given(configs(), st.integers(0, 2**30))
@settings(max_examples=30)
def test_every_exit_equals_float64(config, seed):
    rng = np.random.default_rng(seed)
    p = noisy(config, seed % 1000)
    tokens = rng.integers(0, config.vocab_size, (2, 9))
    got = jax.jit(all_logits, static_argnums=1)(p, config, jnp.array(tokens))
    for row in range(2):
        want = reference_model.exit_logits(p, config, tokens[row])
        assert len(got) == len(want) == config.n_exits + 1
        for g, w in zip(got, want, strict=True):
            # fp32 rounding (6e-8) grows with depth and with post-norm's division by small norms.
            np.testing.assert_allclose(g[row], w, atol=3e-4 * max(1, np.abs(w).max()), rtol=0)


@pytest.mark.parametrize("position", ["learned", "rotary", "alibi"])
def test_documents_do_not_see_each_other(position):
    config = ModelConfig(
        vocab_size=23, n_layers=2, d_model=24, n_heads=3, context_length=16, position=position,
        exits=(ExitConfig(1, block=True),),
    )  # fmt: skip
    p = noisy(config)
    tokens = np.random.default_rng(0).integers(0, 23, 12)
    segments = np.array([0] * 5 + [1] * 7)
    positions = np.concatenate([np.arange(5), np.arange(7)])
    got = all_logits(
        p, config, jnp.array(tokens)[None],
        positions=jnp.array(positions)[None], segment_ids=jnp.array(segments)[None],
    )  # fmt: skip
    for part in (slice(0, 5), slice(5, 12)):
        want = reference_model.exit_logits(p, config, tokens[part])
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g[0, part], w, atol=2e-5)


def test_bf16_computes_in_bf16_and_reduces_in_fp32():
    config = ModelConfig(
        vocab_size=50, n_layers=3, d_model=64, n_heads=4, context_length=32, dtype="bfloat16",
        exits=(ExitConfig(1),),
    )  # fmt: skip
    p = params.init(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 20), 0, 50)
    half = all_logits(p, config, tokens)
    full = all_logits(p, config.replace(dtype="float32"), tokens)
    states = transformer.exit_states(p, config, tokens)
    for s, h, f in zip(states, half, full, strict=True):
        assert s.dtype == jnp.bfloat16 and h.dtype == jnp.float32
        # 8 bits of mantissa: relative rounding 2^-9 per operation, over some tens of operations.
        assert float(jnp.abs(h - f).max()) < 0.05 * float(jnp.abs(f).max())
        assert float(jnp.abs(h - f).max()) > 0
