"""EE-LLM's 7B model with larger exits (Chen et al., ICML 2024, Appendix B.3): norm and MLP.

    eejax train --config=configs/ee_llm_7b_mlp.py --workdir=runs/ee_llm_7b_mlp \\
        --config.data.source='/data/text/**/*.txt' --config.data.tokenizer=/data/tokenizer.json

As configs/ee_llm_7b.py, but each exit has an MLP and a norm before its output embedding. Our MLP
reads the state above layer 8 (or 16) through a norm of its own; in the authors' code it stands
beside that layer's own MLP and reads what that one reads. The paper does not say how many tokens
Figure 11's models were trained on: the steps are those of configs/ee_llm_7b.py. Not run by us: we
have no result to expect.
"""

from ml_collections import ConfigDict

from eejax.configs import ee_llm_7b


def get_config() -> ConfigDict:
    config = ee_llm_7b.get_config()
    config.model.update(
        exits=(
            {"boundary": 8, "mlp": True, "norm": True, "head": "own"},
            {"boundary": 16, "mlp": True, "norm": True, "head": "own"},
        ),
    )
    return config
