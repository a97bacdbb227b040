"""A model without exits that judges what the two of `mixed_small.py` and `mixed_large.py` write.

    eejax train --config=configs/mixed_judge.py --workdir=runs/mixed_judge \\
        --config.data.tokenizer=runs/mixed_small/tokenizer

Of another depth and from other random numbers, on the same text. Expected: 4.88 nats a token, in 13
minutes on 2 cores.
"""

from ml_collections import ConfigDict

from eejax.configs import mixed_small


def get_config() -> ConfigDict:
    config = mixed_small.get_config()
    config.model.update(n_layers=10, exits=())
    config.exit_weights.update(weights=())
    config.train.update(seed=7, steps=1300)
    return config
