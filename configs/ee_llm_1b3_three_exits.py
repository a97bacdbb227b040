"""EE-LLM's 1.3B model with three exits (Chen et al., ICML 2024, Appendix B.3).

    python -m experiments.train --config=configs/ee_llm_1b3_three_exits.py \\
        --workdir=runs/ee_llm_1b3_three_exits \\
        --config.data.source='/data/text/**/*.txt' --config.data.tokenizer=/data/tokenizer.json

Exits after 4, 12 and 20 of 24 layers, each with a norm and the tied output embedding; loss weights
0.1, 0.2 and 0.3. The number of tokens is that of configs/ee_llm_1b3.py, and so are the settings.
Not run by us: we have no result to expect.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    config = common.ee_llm_1b3()
    config.model.update(
        exits=(
            {"boundary": 4, "norm": True, "head": "tied"},
            {"boundary": 12, "norm": True, "head": "tied"},
            {"boundary": 20, "norm": True, "head": "tied"},
        ),
    )
    config.exit_weights.update(weights=(0.1, 0.2, 0.3))
    return config
