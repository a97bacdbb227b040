import types

import jax
import numpy as np
import pytest

from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.train.flops import exit_heads_flops_per_token, model_flops_per_token, peak_flops

PLAIN = ModelConfig(
    vocab_size=50,
    n_layers=3,
    d_model=8,
    n_heads=2,
    context_length=32,
    d_ff=24,
    mlp_gated=False,
    head="own",
)


def test_a_plain_model_counts_six_per_weight_and_twelve_per_score():
    layer = 4 * 8 * 8 + 2 * 8 * 24  # q, k, v, o and the two matrices of the MLP
    weights = 3 * layer + 50 * 8
    # A query sees itself and all before it: (1 + ... + 16) / 16 positions.
    attention = 12 * 3 * 8 * np.mean(np.arange(1, 17))
    assert model_flops_per_token(PLAIN, 16) == pytest.approx(6 * weights + attention)


def test_norms_biases_and_lookups_are_free_and_tied_heads_are_not():
    tied = PLAIN.replace(head="tied", norm="layernorm", qkv_bias=True, position="learned")
    assert model_flops_per_token(tied, 16) == model_flops_per_token(PLAIN, 16)


@pytest.mark.parametrize("head", ["tied", "own", "shared"])
def test_an_exit_costs_its_head_once_whoever_owns_it(head):
    exit_ = PLAIN.replace(exits=(ExitConfig(1, head=head),))
    extra = model_flops_per_token(exit_, 16) - model_flops_per_token(PLAIN, 16)
    assert extra == pytest.approx(6 * 50 * 8)


def test_heads_of_exits_cost_their_share_of_the_tokens():
    two = PLAIN.replace(exits=(ExitConfig(1), ExitConfig(2, head="own")))
    plain = model_flops_per_token(PLAIN, 16)
    assert exit_heads_flops_per_token(two) == 2 * 6 * 50 * 8
    for share in (0.25, 1.0):
        extra = model_flops_per_token(two, 16, share) - plain
        assert extra == pytest.approx(exit_heads_flops_per_token(two, share))
        assert extra == pytest.approx(share * 2 * 6 * 50 * 8)


def test_a_projection_costs_its_two_matrices_beside_the_head():
    narrow = PLAIN.replace(exits=(ExitConfig(1, head_rank=3),))
    assert exit_heads_flops_per_token(narrow) == 6 * (50 * 8 + 2 * 8 * 3)
    extra = model_flops_per_token(narrow, 16) - model_flops_per_token(PLAIN, 16)
    assert extra == pytest.approx(6 * (50 * 8 + 2 * 8 * 3))


def test_an_exit_block_costs_a_layer_more():
    block = PLAIN.replace(exits=(ExitConfig(1, block=True),))
    plain = PLAIN.replace(exits=(ExitConfig(1),))
    extra = model_flops_per_token(block, 16) - model_flops_per_token(plain, 16)
    assert extra == pytest.approx(6 * (4 * 64 + 2 * 8 * 24) + 12 * 8 * 8.5)


def test_a_window_limits_what_a_query_sees():
    seen = np.mean([min(i + 1, 4) for i in range(16)])
    full = np.mean(np.arange(1, 17))
    got = model_flops_per_token(PLAIN.replace(sliding_window=4), 16)
    want = model_flops_per_token(PLAIN, 16) - 12 * 3 * 8 * (full - seen)
    assert got == pytest.approx(want)


def test_an_exit_blocks_scores_count_in_its_own_window():
    windows = (None, 4, None)
    block = PLAIN.replace(sliding_window=windows, exits=(ExitConfig(1, block=True),))
    plain = block.replace(exits=(ExitConfig(1),))
    extra = model_flops_per_token(block, 16) - model_flops_per_token(plain, 16)
    seen = np.mean([min(i + 1, 4) for i in range(16)])
    assert extra == pytest.approx(6 * (4 * 64 + 2 * 8 * 24) + 12 * 8 * seen)


def test_large_models_come_near_six_times_their_parameters():
    gpt2 = ModelConfig(
        vocab_size=50257,
        n_layers=12,
        d_model=768,
        n_heads=12,
        context_length=1024,
        mlp_gated=False,
        head="tied",
        norm="layernorm",
        position="learned",
    )
    assert model_flops_per_token(gpt2, 1) == pytest.approx(6 * params.count(gpt2), rel=0.01)


def test_peaks_come_from_the_table_or_a_measurement():
    def fake(kind):
        return types.SimpleNamespace(device_kind=kind, platform="gpu")

    assert peak_flops([fake("NVIDIA H100 80GB HBM3")] * 4) == 4 * 989e12
    assert peak_flops([fake("NVIDIA A100-SXM4-40GB")]) == 312e12
    assert peak_flops([fake("GeForce of next year")]) is None
    assert 1e8 < peak_flops(jax.devices()[:1]) < 1e14
