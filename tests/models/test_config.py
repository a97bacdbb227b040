"""Configurations: what is refused, and that what is saved comes back."""

import json

import pytest

from eejax.common.errors import ConfigError
from eejax.models.config import ExitConfig, ModelConfig, RotaryConfig

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
        (dict(dtype="float16"), "dtype"),
        (dict(vocab_size=0), "vocab_size = 0"),
        (dict(logit_softcap=-3.0), "logit_softcap"),
        (dict(temperature=0.0), "temperature"),
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
        (lambda: RotaryConfig(scaling="llama3"), "original_context"),
        (lambda: ModelConfig.from_dict(BASE | {"n_layer": 3}), "n_layer = 3: no such field"),
        (lambda: ModelConfig.from_dict({"vocab_size": 3}), "missing n_layers"),
        (lambda: ModelConfig.from_dict(BASE | {"exits": [{"layer": 3}]}), "ExitConfig.layer"),
    ],
)
def test_invalid_parts_are_refused_by_name(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_json_round_trip():
    config = ModelConfig(
        **BASE, sliding_window=(None, 4, None, 4, None, 4), n_kv_heads=2,
        rotary=RotaryConfig(scaling="yarn", factor=2.0, original_context=32, local_theta=5.0),
        exits=(ExitConfig(0), ExitConfig(3, mlp=True, block=True, temperature=1.5, head="own")),
    )  # fmt: skip
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config)


def test_segments_cover_every_layer_once():
    config = ModelConfig(**BASE, exits=(ExitConfig(0), ExitConfig(2), ExitConfig(6)))
    assert config.stops == (0, 2, 6, 6)
    assert config.segments == ((0, 0), (0, 2), (2, 6), (6, 6))
    assert [i for a, b in config.segments for i in range(a, b)] == list(range(6))
