"""Exits for a trained model, which itself stays as it is (EE-Tuning).

    eejax tune --base=runs/demo --exits=2,5 --workdir=runs/tuned

Model and text are those of the base; this file says how its new exits are trained. Expected, on
the demo's model: 15 seconds of training on 2 cores; exits after layers 2 and 5 at about 2.9
and 2.5 bits per byte of held-out text, and exits 3, 8 and 12 as they were.
"""

from ml_collections import ConfigDict

from eejax.train.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    del config.model, config.data, config.tune  # the base's, and the launcher's flags
    # Pan et al. tune at a lower peak than training's, on a small part of its tokens.
    config.optimizer.update(learning_rate=1e-3, warmup_steps=20, schedule="cosine")
    config.train.update(steps=300, batch_size=8, eval_every=100, checkpoint_every=100)
    return config
