"""OPT-1.3B with early exits, one of the two models HELIOS serves (Kumar et al. 2025).

    python -m experiments.train --config=configs/helios_opt_1b3.py --workdir=runs/helios_opt_1b3 \\
        --config.data.source='/data/text/**/*.txt' --config.data.tokenizer=/data/tokenizer.json

OPT's architecture (Zhang et al. 2022, Table 1) with exits after layers 6 and 12 of 24. What HELIOS
(arXiv 2504.10724) trains them by is not published: exits with a norm and the tied embedding, their
loss weights, and all training settings are ours (configs/common.py), at a tenth of OPT's peak of
2e-4. They are meant for going on from OPT's weights. Not run by us: we have no result to expect.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    config = common.opt()
    config.model.update(
        n_layers=24,
        d_model=2048,
        n_heads=32,
        d_ff=8192,
        exits=({"boundary": 6}, {"boundary": 12}),
    )
    config.exit_weights.update(weights=(0.25, 0.5))
    config.optimizer.update(learning_rate=2e-5)
    config.train.update(microbatches=16)  # 4 sequences at a time on each of 8 devices
    return config
