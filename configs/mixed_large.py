"""The larger one of two models that are served together: 12 layers, one and a half times as wide.

    eejax train --config=configs/mixed_large.py --workdir=runs/mixed_large \\
        --config.data.tokenizer=runs/mixed_small/tokenizer

The text and the tokenizer are those of `mixed_small.py`, which is trained first. Expected: 4.48
nats a token at the last exit, no less than the smaller model's after as little text, in 33 minutes
on 2 cores.
"""

from ml_collections import ConfigDict

from eejax.configs import mixed_small


def get_config() -> ConfigDict:
    config = mixed_small.get_config()
    exits = tuple({"boundary": b} for b in (3, 6, 9))
    config.model.update(n_layers=12, d_model=384, n_heads=6, exits=exits)
    config.exit_weights.update(weights=(1.0, 0.6, 0.6))
    config.optimizer.learning_rate = 1e-3
    config.train.steps = 1500
    return config
