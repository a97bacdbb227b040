"""EE-LLM's 1.3B model (Chen et al., ICML 2024, section 5.1): exits at 1/4 and 1/2 of its depth.

    python -m experiments.train --config=configs/ee_llm_1b3.py --workdir=runs/ee_llm_1b3 \\
        --config.data.source='/data/text/**/*.txt' --config.data.tokenizer=/data/tokenizer.json

The exits are minimalistic, an output embedding and no norm, and all output embeddings are tied to
the input embedding. Loss weights 1/4 and 1/2. 72,000 steps are the paper's 300 billion tokens.
Settings as in configs/common.py; `python -m experiments.describe --config=configs/ee_llm_1b3.py`
tells parameters, floating-point operations and memory. The paper finds the final exit's loss close
to that of the same model without exits. Not run by us: we have no figure of our own to expect.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    config = common.ee_llm_1b3()
    config.model.update(
        exits=(
            {"boundary": 6, "norm": False, "head": "tied"},
            {"boundary": 12, "norm": False, "head": "tied"},
        ),
    )
    config.exit_weights.update(weights=(0.25, 0.5))
    return config
