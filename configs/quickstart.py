"""A byte-level early-exit model of 12 layers, trained on the standard library in a few minutes.

python -m experiments.train --config=configs/quickstart.py --workdir=runs/quickstart
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.model = {
        "vocab_size": 257,
        "n_layers": 12,
        "d_model": 256,
        "n_heads": 4,
        "context_length": 256,
        "head": "tied",
        "exits": ({"boundary": 3}, {"boundary": 6}),
    }
    config.exit_weights = {"weights": (0.3, 0.3)}
    config.data = {"source": "python-stdlib", "tokenizer": "bytes", "length": 256}
    config.optimizer = {"learning_rate": 2e-3, "warmup_steps": 40, "schedule": "cosine"}
    config.train = {
        "steps": 400,
        "batch_size": 8,
        "seed": 0,
        "log_every": 10,
        "eval_every": 100,
        "eval_batches": 8,
        "checkpoint_every": 200,
    }
    config.mesh = {"data": 1}
    return config
