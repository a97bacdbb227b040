"""EE-LLM's 1.3B model (Chen et al., ICML 2024, section 5.1): exits at 1/4 and 1/2 of its depth.

    eejax train --config=configs/ee_llm_1b3.py --workdir=runs/ee_llm_1b3 \\
        --config.data.source='/data/text/**/*.txt' --config.data.tokenizer=/data/tokenizer.json

The exits are minimalistic, an output embedding and no norm, and all output embeddings are tied to
the input embedding. Loss weights 1/4 and 1/2. 72,000 steps are the 300 billion tokens that the
model, one of the two of section 5.2's inference experiments, was trained on. Settings as in
configs/common.py; `eejax describe --config=configs/ee_llm_1b3.py` gives parameters, floating-point
operations and memory. The paper finds the final exit's loss close to that of the same model without
exits. Not run by us: we have no figure of our own to expect.
"""

from ml_collections import ConfigDict

from eejax.configs import common


def get_config() -> ConfigDict:
    config = common.ee_llm()
    config.model.update(
        n_layers=24,
        d_model=2048,
        n_heads=32,
        d_ff=5440,
        head="tied",
        exits=(
            {"boundary": 6, "norm": False, "head": "tied"},
            {"boundary": 12, "norm": False, "head": "tied"},
        ),
    )
    config.exit_weights.update(weights=(0.25, 0.5))
    # 2 sequences at a time on each of 4 replicas
    config.train.update(steps=72_000, microbatches=256)
    return config
