"""The smallest run that uses everything: for tests, and to see that an installation works.

    python -m experiments.train --config=configs/tiny.py --workdir=runs/tiny

Expected: under a minute on 2 cores, most of it compilation; the final exit's validation loss falls
from 5.5 to below 3.5 nats per byte.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {
        "vocab_size": 257,
        "n_layers": 2,
        "d_model": 32,
        "n_heads": 2,
        "context_length": 64,
        "head": "tied",
        "exits": ({"boundary": 1},),
    }
    config.exit_weights = {"weights": (0.5,)}
    config.data = {"source": "python-stdlib", "max_bytes": 200_000, "length": 32}
    config.optimizer = {"learning_rate": 1e-2, "warmup_steps": 10}
    config.train = {
        "steps": 60,
        "batch_size": 8,
        "log_every": 5,
        "eval_every": 30,
        "eval_batches": 4,
        "checkpoint_every": 20,
    }
    config.mesh = {"data": 1}
    return config
