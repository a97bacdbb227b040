"""A byte-level early-exit model of 12 layers, trained on the standard library in a few minutes.

    eejax train --config=configs/demo.py --workdir=runs/demo

Wide enough that skipping layers saves memory traffic and not only instructions. Expected: a few
minutes on 2 cores; about 2.6, 2.4 and 2.3 bits per byte of held-out text at the exits after layers
3, 8 and 12 (README and docs/BENCHMARKS.md have the measured figures).
"""

from ml_collections import ConfigDict

from eejax.train.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model.update(
        vocab_size=257,
        n_layers=12,
        d_model=256,
        n_heads=4,
        mlp_gated=False,
        activation="gelu_tanh",
        context_length=256,
        head="tied",
        exits=({"boundary": 3}, {"boundary": 8}),
    )
    # Heavy: nothing is lost at the final exit, and more tokens leave early at equal agreement.
    config.exit_weights.update(weights=(1.0, 0.6))
    # Many small steps: at this size they teach more per second than fewer large ones.
    config.data.update(source="python-stdlib", tokenizer="bytes", length=128)
    config.optimizer.update(learning_rate=1.5e-3, warmup_steps=60, schedule="cosine")
    config.train.update(
        steps=1100,
        batch_size=4,
        seed=0,
        log_every=20,
        eval_every=200,
        eval_batches=8,
        checkpoint_every=400,
    )
    return config
