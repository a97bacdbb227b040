"""OPT-6.7B with early exits, one of the two models HELIOS serves (Kumar et al. 2025, Table 2).

    eejax train --config=configs/helios_opt_6b7.py --workdir=runs/helios_opt_6b7 \\
        --config.train.base=facebook/opt-6.7b --config.data.tokenizer=/data/tokenizer.json \\
        --config.data.source="('/data/redpajama/*.jsonl', '/data/pile/*.jsonl')"

Exits after layers 9 and 17 of 32, trained as in HELIOS' section 4.1 (`configs.common.opt`): a
weight of 1.0 for the loss of each exit, 50,000 iterations, text of RedPajama and the Pile.
train.base takes OPT's weights from a folder or a name, whose tokenizer the text has to have. Each
device holds 77 GB (`eejax describe`), nearly all that a GPU of 80 GB has. Not run by us: we
have no result to expect.
"""

from ml_collections import ConfigDict

from eejax.configs import common


def get_config() -> ConfigDict:
    config = common.opt()
    config.model.update(
        n_layers=32,
        d_model=4096,
        n_heads=32,
        d_ff=16_384,
        exits=({"boundary": 9}, {"boundary": 17}),
    )
    config.optimizer.update(learning_rate=1.2e-5)
    config.train.update(remat="full")
    return config
