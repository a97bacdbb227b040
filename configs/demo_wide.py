"""The demo's model at twice the width, with exits after layers 3 and 6.

    eejax train --config=configs/demo_wide.py --workdir=runs/wide

What `eejax bench engines` and `bench batched` measure: a row more costs a wider model less on
a CPU, and its weights (38 million) do not fit a processor's cache. Expected: about 10 minutes on 2
cores.
"""

from ml_collections import ConfigDict

from eejax.configs import demo


def get_config() -> ConfigDict:
    config = demo.get_config()
    config.model.update(d_model=512, n_heads=8, exits=({"boundary": 3}, {"boundary": 6}))
    config.optimizer.learning_rate = 1e-3
    return config
