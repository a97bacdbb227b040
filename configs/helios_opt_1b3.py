"""OPT-1.3B with early exits, one of the two models HELIOS serves (Kumar et al. 2025, Table 2).

    eejax train --config=configs/helios_opt_1b3.py --workdir=runs/helios_opt_1b3 \\
        --config.train.base=facebook/opt-1.3b --config.data.tokenizer=/data/tokenizer.json \\
        --config.data.source="('/data/redpajama/*.jsonl', '/data/pile/*.jsonl')"

Exits after layers 6 and 12 of 24, trained as in HELIOS' section 4.1 (`configs.common.opt`): a
weight of 1.0 for the loss of each exit, 50,000 iterations, text of RedPajama and the Pile.
train.base takes OPT's weights from a folder or a name, whose tokenizer the text has to have. Not
run by us: we have no result to expect.
"""

from ml_collections import ConfigDict

from eejax.configs import common


def get_config() -> ConfigDict:
    config = common.opt()
    config.model.update(
        n_layers=24,
        d_model=2048,
        n_heads=32,
        d_ff=8192,
        exits=({"boundary": 6}, {"boundary": 12}),
    )
    config.optimizer.update(learning_rate=2e-5)
    return config
