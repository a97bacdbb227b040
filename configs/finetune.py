"""A run that begins with the weights of a trained model, all of which it trains.

    eejax train --config=configs/finetune.py --config.train.base=runs/demo \\
        --config.data.source='texts/*.txt' --workdir=runs/mine

The model and its tokenizer are the base's: a run, a Hugging Face folder or a name on the Hub. Exits
named in model.exits are added to its own (docs/PRETRAINED.md, "From a checkpoint").
"""

from ml_collections import ConfigDict

from eejax.train.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    # A tenth of a usual peak: what the weights have learned is to stay.
    config.optimizer.update(learning_rate=1e-4, warmup_steps=50, schedule="cosine")
    config.train.update(steps=1000, batch_size=8, eval_every=250, checkpoint_every=250)
    return config
