"""The smaller one of two models that are served together: 8 layers, text of many kinds.

    python -m experiments.task_text --output=runs/tasks.jsonl
    python -m experiments.train --config=configs/mixed_small.py --workdir=runs/mixed_small

What `experiments.bench_helios` chooses from, with `mixed_large.py`. The byte-pair tokenizer of
2,048 tokens is trained on the same text. Expected: 4.65, 4.52 and 4.47 nats a token of held-out
text at the exits, after 19 minutes on 2 busy cores.
"""

from ml_collections import ConfigDict

from eejax.train.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model.update(
        vocab_size=2048,
        n_layers=8,
        d_model=256,
        n_heads=4,
        mlp_gated=False,
        activation="gelu_tanh",
        context_length=512,
        head="tied",
        exits=({"boundary": 2}, {"boundary": 4}),
    )
    # Heavy, as in quickstart.py: exits are to be worth stopping at.
    config.exit_weights.update(weights=(1.0, 0.6))
    # Sequences as long as the context: prompts of all lengths are served.
    config.data.update(source="runs/tasks.jsonl", tokenizer="bpe", length=512)
    config.optimizer.update(learning_rate=1.5e-3, warmup_steps=60, schedule="cosine")
    config.train.update(
        steps=1600,
        batch_size=2,
        seed=0,
        log_every=50,
        eval_every=400,
        eval_batches=8,
        checkpoint_every=400,
    )
    return config
