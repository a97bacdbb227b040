"""EE-LLM's 7B model with three exits and tied embeddings (Chen et al., ICML 2024, Appendix B.3).

    eejax train --config=configs/ee_llm_7b_three_exits.py \\
        --workdir=runs/ee_llm_7b_three_exits \\
        --config.data.source='/data/text/**/*.txt' --config.data.tokenizer=/data/tokenizer.json

Exits after 4, 12 and 20 of the 32 layers, each with a norm; loss weights 0.1, 0.2 and 0.3. All
exits read the input embedding. The paper does not say how many tokens Figure 11's models were
trained on: the steps are those of configs/ee_llm_7b.py, and so are the other settings. Not run by
us: we have no result to expect.
"""

from ml_collections import ConfigDict

from eejax.configs import ee_llm_7b


def get_config() -> ConfigDict:
    config = ee_llm_7b.get_config()
    config.model.update(
        head="tied",
        exits=(
            {"boundary": 4, "norm": True, "head": "tied"},
            {"boundary": 12, "norm": True, "head": "tied"},
            {"boundary": 20, "norm": True, "head": "tied"},
        ),
    )
    config.exit_weights.update(weights=(0.1, 0.2, 0.3))
    return config
