"""Rotary frequencies and their context extensions: float64 formulas, and transformers' own."""

import jax.numpy as jnp
import numpy as np
import pytest
import reference_model

from eejax.models import positions
from eejax.models.rotary_config import RotaryConfig

CASES = {
    "none": RotaryConfig(),
    "linear": RotaryConfig(scaling="linear", factor=4.0),
    "ntk": RotaryConfig(scaling="ntk", factor=4.0),
    "llama3": RotaryConfig(theta=500000.0, scaling="llama3", factor=8.0, original_context=8192),
    "llama3_other": RotaryConfig(
        scaling="llama3", factor=3.0, low_frequency=2.0, high_frequency=9.0, original_context=512
    ),
    "yarn": RotaryConfig(scaling="yarn", factor=16.0, original_context=4096),
    "yarn_other": RotaryConfig(
        theta=500.0,
        scaling="yarn",
        factor=2.5,
        beta_fast=20.0,
        beta_slow=2.0,
        original_context=300,
    ),
}


@pytest.mark.parametrize("dims", [4, 32, 128])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_follow_their_formulas(name, dims):
    rotary = CASES[name]
    inv, factor = positions.rotary_frequencies(rotary, dims)
    want, want_factor = reference_model.frequencies(rotary, dims)
    # float32 computes theta^-x as exp(-x log theta): rounding of an exponent up to 13.
    np.testing.assert_allclose(inv, want, rtol=2e-6)
    assert factor == pytest.approx(want_factor, rel=1e-12)


@pytest.mark.parametrize("name", ["llama3", "llama3_other", "yarn", "yarn_other"])
def test_high_frequencies_stay_and_low_ones_are_divided(name):
    rotary = CASES[name]
    plain = positions.rotary_frequencies(RotaryConfig(theta=rotary.theta), 128)[0]
    ratio = np.asarray(plain / positions.rotary_frequencies(rotary, 128)[0])
    assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(rotary.factor)
    assert (np.diff(ratio) > -1e-5).all() and ((ratio > 1.01) & (ratio < 0.99 * ratio[-1])).any()


def test_tables_carry_the_attention_factor():
    rotary = CASES["yarn"]
    cos, sin = positions.rotary_tables(rotary, 32, jnp.arange(50)[None])
    np.testing.assert_allclose(cos**2 + sin**2, (1 + np.log(16) / 10) ** 2, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_transformers(name):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary, dims = CASES[name], 64
    kind = {"none": "default", "ntk": "dynamic"}.get(rotary.scaling, rotary.scaling)
    rope = {"rope_type": kind, "rope_theta": rotary.theta, "factor": rotary.factor}
    context = rotary.original_context or 1024
    if rotary.scaling == "llama3":
        rope |= {"low_freq_factor": rotary.low_frequency, "high_freq_factor": rotary.high_frequency}
    if rotary.scaling == "yarn":
        rope |= {"beta_fast": rotary.beta_fast, "beta_slow": rotary.beta_slow}
    if rotary.original_context:
        rope["original_max_position_embeddings"] = context
    longest = int(context * rotary.factor) if rotary.original_context else context
    config = transformers.LlamaConfig(
        hidden_size=4 * dims,
        num_attention_heads=4,
        head_dim=dims,
        max_position_embeddings=longest,
        rope_parameters=rope,
    )
    got, factor = positions.rotary_frequencies(rotary, dims)
    if kind == "default":
        module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        want, want_factor = module.inv_freq, module.attention_scaling
    else:
        extra = {}
        if kind == "dynamic":  # which raises the base by f l / c - (f - 1): by f at this length l
            extra["seq_len"] = context * (2 * rotary.factor - 1) / rotary.factor
        want, want_factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", **extra)
    np.testing.assert_allclose(got, want.numpy(), rtol=2e-6)
    assert factor == pytest.approx(want_factor)
