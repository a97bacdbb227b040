"""Configurations: what is refused, and that what is saved comes back."""

import json

import pytest
from drawn_configs import configs
from hypothesis import given, settings

from eejax.common.errors import ConfigError
from eejax.models.config import ExitConfig, ModelConfig
from eejax.models.rotary_config import RotaryConfig

BASE = dict(vocab_size=50, n_layers=6, d_model=32, n_heads=4, context_length=64)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(exits=(ExitConfig(3), ExitConfig(2))), r"exits = \[3, 2\].*sorted.*\[2, 3\]"),
        (dict(exits=(ExitConfig(2), ExitConfig(2))), "must not repeat"),
        (dict(exits=(ExitConfig(7),)), r"exits = \[7\].*0\.\.6"),
        (dict(exits=(ExitConfig(-1),)), r"exits = \[-1\]"),
        (dict(n_heads=5), "n_heads = 5.*divide d_model"),
        (dict(n_kv_heads=3), "n_kv_heads = 3.*divide n_heads"),
        (dict(norm="batchnorm"), "'rmsnorm', 'layernorm'"),
        (dict(position="absolute"), "position = 'absolute'"),
        (dict(activation="tanh"), "activation"),
        (dict(dropout=1.0), "dropout = 1.0"),
        (dict(residual="parallel", norm_placement="post"), "norm_placement"),
        (dict(sliding_window=(4, None)), "one entry for each of the 6 layers"),
        (dict(sliding_window=0), "sliding_window = 0"),
        (dict(rotary=RotaryConfig(fraction=0.2)), "even number"),
        (dict(dtype="float64"), "dtype"),
        (dict(vocab_size=0), "vocab_size = 0"),
        (dict(logit_softcap=-3.0), "logit_softcap"),
        (dict(temperature=0.0), "temperature"),
        (dict(n_layers=True), "n_layers = True: must be a positive integer"),
        (dict(n_heads=4.0), "n_heads = 4.0: must be a positive integer"),
        (dict(n_kv_heads=2.0), "n_kv_heads = 2.0: must be a positive integer"),
        (dict(n_kv_heads=0), "n_kv_heads = 0: must be a positive integer"),
        (dict(n_kv_heads=True), "n_kv_heads = True"),
        (dict(head_dim=8.0), "head_dim = 8.0: must be a positive integer"),
        (dict(head_dim=True), "head_dim = True"),
        (dict(d_ff=128.0), "d_ff = 128.0: must be a positive integer"),
        (dict(d_ff=False), "d_ff = False"),
        (dict(vocab_size="50"), "vocab_size = '50'"),
        (dict(sliding_window=True), "sliding_window = True"),
        (dict(sliding_window=4.0), "sliding_window = 4.0"),
        (dict(norm_eps=float("inf")), "norm_eps = inf"),
        (dict(norm_eps="1e-5"), "norm_eps = '1e-5'"),
        (dict(dropout=float("nan")), "dropout = nan"),
        (dict(embedding_scale=float("nan")), "embedding_scale = nan"),
        (dict(qkv_bias="false"), "qkv_bias = 'false': must be True or False"),
        (dict(rotary={"theta": 5.0}), "rotary = .*RotaryConfig.*from_dict"),
        (dict(exits=({"boundary": 2},)), "exits = .*ExitConfig.*from_dict"),
        (dict(exits=3), "exits = 3: must be a sequence of ExitConfig"),
        (
            dict(exits=(ExitConfig(1, mlp=True, mlp_width=4), ExitConfig(2, mlp=True))),
            r"mlp_width = \[4, \d+\]: must be one width for all exits with an MLP. Give each",
        ),
        (
            dict(d_ff=8, exits=(ExitConfig(1, mlp=True, mlp_width=9),)),
            r"mlp_width = \[9\]: must be at most d_ff \(8\)",
        ),
        (
            dict(exits=(ExitConfig(1, head_rank=3), ExitConfig(2, head_rank=4))),
            r"head_rank = \[3, 4\]: must be the same for all exits that have one",
        ),
        (
            dict(d_model=16, exits=(ExitConfig(1, head_rank=16),)),
            r"head_rank = \[16\]: must be less than d_model \(16\), or 0 for all dimensions",
        ),
        (
            dict(head_dim=2, rotary=RotaryConfig(scaling="ntk", factor=2.0)),
            "scaling = 'ntk': needs more than 2 rotated dimensions",
        ),
    ],
)
def test_invalid_models_are_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**(BASE | changes))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ExitConfig(2, head="mine"), "head = 'mine'"),
        (lambda: ExitConfig(2.5), "boundary = 2.5"),
        (lambda: ExitConfig(2, temperature=-1), "temperature"),
        (lambda: ExitConfig(True), "boundary = True"),
        (lambda: ExitConfig(2, mlp=1), "mlp = 1: must be True or False"),
        (lambda: ExitConfig(2, mlp=True, mlp_width=-1), "mlp_width = -1: must be a positive width"),
        (lambda: ExitConfig(2, mlp=True, mlp_width=False), "mlp_width = False: must be a positive"),
        (lambda: ExitConfig(2, mlp=True, mlp_width=0.0), "mlp_width = 0.0: must be a positive"),
        (lambda: ExitConfig(2, router=False), "router = False: must be a positive"),
        (lambda: ExitConfig(2, head_rank=-1), "head_rank = -1: must be a positive number of dim"),
        (lambda: ExitConfig(2, head_rank=True), "head_rank = True: must be a positive number"),
        (lambda: ExitConfig(2, mlp_width=4), "mlp_width = 4: has no effect.*Set mlp = True"),
        (lambda: ExitConfig(2, temperature=True), "temperature = True"),
        (lambda: RotaryConfig(scaling="llama3"), "original_context"),
        (lambda: RotaryConfig(scaling="yarn", original_context=0), "original_context = 0"),
        (lambda: RotaryConfig(scaling="yarn", original_context=9, theta=1.0), "theta = 1.0"),
        (lambda: RotaryConfig(theta=float("inf")), "theta = inf"),
        (lambda: RotaryConfig(factor=2.0), "factor = 2.0: is not used with scaling 'none'"),
        (lambda: RotaryConfig(scaling="ntk", factor=0.5), "factor = 0.5"),
        (lambda: RotaryConfig(local_theta=0), "local_theta = 0"),
        (lambda: RotaryConfig(beta_fast=1.0), r"beta_fast = 1.0: .*above beta_slow \(1.0\)"),
        *[
            (
                lambda s=s: RotaryConfig(
                    scaling=s, factor=2.0 if s != "none" else 1.0, original_context=64
                ),
                f"original_context = 64: is not used with scaling '{s}'",
            )
            for s in ("none", "linear", "ntk")
        ],
        *[
            (
                lambda h=h: RotaryConfig(
                    scaling="llama3", original_context=64, low_frequency=4.0, high_frequency=h
                ),
                f"high_frequency = {h}: .*above low_frequency",
            )
            for h in (4.0, 3.0)
        ],
        (lambda: ModelConfig.from_dict(BASE | {"exits": 3}), "exits = 3"),
        (lambda: ModelConfig.from_dict(BASE | {"exits": [2]}), r"exits = \(2,\)"),
        (lambda: ModelConfig.from_dict(BASE | {"rotary": None}), "rotary = None"),
        (lambda: ModelConfig.from_dict(BASE | {"n_layer": 3}), "n_layer = 3: no such field"),
        (lambda: ModelConfig.from_dict({"vocab_size": 3}), "missing n_layers"),
        (lambda: ModelConfig.from_dict(BASE | {"exits": [{"layer": 3}]}), "ExitConfig.layer"),
    ],
)
def test_invalid_parts_are_refused_by_name(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@given(configs())
@settings(max_examples=100)
def test_dicts_are_plain_json_and_come_back(config):
    values = config.to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    again = ModelConfig.from_dict(values)
    assert again == config and hash(again) == hash(config) and again.to_dict() == values


def test_json_round_trip():
    config = ModelConfig(
        **BASE,
        sliding_window=(None, 4, None, 4, None, 4),
        n_kv_heads=2,
        rotary=RotaryConfig(scaling="yarn", factor=2.0, original_context=32, local_theta=5.0),
        exits=(ExitConfig(0), ExitConfig(3, mlp=True, block=True, temperature=1.5, head="own")),
    )
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config)


def test_segments_cover_every_layer_once():
    config = ModelConfig(**BASE, exits=(ExitConfig(0), ExitConfig(2), ExitConfig(6)))
    assert config.exit_boundaries == (0, 2, 6, 6)
    assert config.segments == ((0, 0), (0, 2), (2, 6), (6, 6))
    assert [i for a, b in config.segments for i in range(a, b)] == list(range(6))


def test_an_exit_blocks_window_is_that_of_the_layer_above():
    exits = (ExitConfig(0), ExitConfig(2), ExitConfig(6))
    config = ModelConfig(**BASE, exits=exits, sliding_window=(1, 2, None, 4, 5, 6))
    assert [config.exit_window(e) for e in range(3)] == [1, None, 6]
    assert config.replace(sliding_window=7).exit_window(1) == 7
    assert config.replace(sliding_window=None).exit_window(1) is None
