"""EE-LLM's 7B model (Chen et al., ICML 2024, sections 5.1 and 5.2): exits at 1/4 and 1/2 of depth.

    eejax train --config=configs/ee_llm_7b.py --workdir=runs/ee_llm_7b \\
        --config.data.source='/data/text/**/*.txt' --config.data.tokenizer=/data/tokenizer.json

The exits are minimalistic, an output embedding and no norm, and no two embeddings are tied. Loss
weights 0.1 and 0.2. One of the two models of the paper's inference experiments (section 5.2).
36,000 steps are the 150 billion tokens it was trained on; the authors' script goes on to
192,000 steps, 800 billion.
Settings as in configs/common.py. Without tensor or pipeline parallelism each device holds all of
the parameters: `eejax describe --config=configs/ee_llm_7b.py` gives the memory,
more than a GPU of 80 GB has. Not run by us: we have no figure of our own to expect.
"""

from ml_collections import ConfigDict

from eejax.configs import common


def get_config() -> ConfigDict:
    config = common.ee_llm()
    config.model.update(
        n_layers=32,
        d_model=4096,
        n_heads=32,
        d_ff=10_880,
        head="own",
        exits=(
            {"boundary": 8, "norm": False, "head": "own"},
            {"boundary": 16, "norm": False, "head": "own"},
        ),
    )
    config.exit_weights.update(weights=(0.1, 0.2))
    # 2 sequences at a time on each of 4 replicas
    config.train.update(steps=36_000, microbatches=256, remat="full")
    return config
