"""OPT-6.7B with early exits, one of the two models HELIOS serves (Kumar et al. 2025).

    python -m experiments.train --config=configs/helios_opt_6b7.py --workdir=runs/helios_opt_6b7 \\
        --config.data.source='/data/text/**/*.txt' --config.data.tokenizer=/data/tokenizer.json

OPT's architecture (Zhang et al. 2022, Table 1) with exits after layers 9 and 17 of 32. What HELIOS
(arXiv 2504.10724) trains them by is not published: exits with a norm and the tied embedding, their
loss weights, and all training settings are ours (configs/common.py), at a tenth of OPT's peak of
1.2e-4. They are meant for going on from OPT's weights. Each device holds all of the state, more
than a GPU of 80 GB has (experiments.describe). Not run by us: we have no result to expect.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    config = common.opt()
    config.model.update(
        n_layers=32,
        d_model=4096,
        n_heads=32,
        d_ff=16_384,
        exits=({"boundary": 9}, {"boundary": 17}),
    )
    config.exit_weights.update(weights=(0.25, 0.5))
    config.optimizer.update(learning_rate=1.2e-5)
    config.train.update(microbatches=32, remat="full")  # 2 sequences at a time on each of 8 devices
    return config
