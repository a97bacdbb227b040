"""EE-LLM's 30B model (Chen et al., ICML 2024, Figure 7): exits at 1/4 and 1/2 of its depth.

    eejax plan --config=configs/ee_llm_30b.py \\
        --config.mesh.pipe=4 --config.mesh.model=4

As configs/ee_llm_7b.py in the size of the authors' script, which cuts each replica into 4 pipeline
stages of 4 tensor-parallel shards. One sequence at a time, as in section 5.1. The feed-forward
width is Megatron's 8/3 of d, rounded down to a multiple of 64. Not run by us: we have no figure of
our own to expect.
"""

from ml_collections import ConfigDict

from eejax.configs import ee_llm_7b


def get_config() -> ConfigDict:
    config = ee_llm_7b.get_config()
    config.model.update(
        n_layers=60,
        d_model=6656,
        n_heads=52,
        d_ff=17_728,
        exits=(
            {"boundary": 15, "norm": False, "head": "own"},
            {"boundary": 30, "norm": False, "head": "own"},
        ),
    )
    # 1 sequence at a time on each of 4 replicas
    config.train.update(microbatches=512)
    return config
