"""The smallest run that uses everything: for tests, and to see that an installation works.

    eejax train --config=configs/tiny.py --workdir=runs/tiny

Expected: under a minute on 2 cores, most of it compilation; the final exit's validation loss falls
from 5.5 to below 3.5 nats per byte.
"""

from ml_collections import ConfigDict

from eejax.train.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model.update(
        vocab_size=257,
        vocab_multiple=8,  # so that mesh.model may cut it
        n_layers=2,
        d_model=32,
        n_heads=2,
        context_length=64,
        head="tied",
        exits=({"boundary": 1},),
    )
    config.exit_weights.update(weights=(0.5,))
    config.data.update(source="python-stdlib", max_bytes=200_000, length=32)
    config.optimizer.update(learning_rate=1e-2, warmup_steps=10)
    config.train.update(
        steps=60,
        batch_size=8,
        log_every=5,
        eval_every=30,
        eval_batches=4,
        checkpoint_every=20,
    )
    return config
