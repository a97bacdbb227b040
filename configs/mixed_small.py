"""The smaller one of two models that are served together: 8 layers, text of many kinds.

    EEJAX_DATA=DATA eejax task-text --output=runs/tasks.jsonl
    eejax train --config=configs/mixed_small.py --workdir=runs/mixed_small

What `eejax bench helios` chooses from, with `mixed_large.py`. The byte-pair tokenizer of
2,048 tokens is trained on the same text. Expected: 4.62, 4.53 and 4.47 nats a token of held-out
text at the exits, after 13 minutes on 2 cores.
"""

from ml_collections import ConfigDict

from eejax.configs import demo


def get_config() -> ConfigDict:
    config = demo.get_config()
    exits = ({"boundary": 2}, {"boundary": 4})
    config.model.update(vocab_size=2048, n_layers=8, context_length=512, exits=exits)
    # Sequences as long as the context: prompts of all lengths are served.
    config.data.update(source="runs/tasks.jsonl", tokenizer="bpe", length=512)
    config.train.update(steps=1600, batch_size=2, log_every=50, eval_every=400)
    return config
