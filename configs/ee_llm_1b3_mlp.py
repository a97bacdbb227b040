"""EE-LLM's 1.3B model with larger exits (Chen et al., ICML 2024, Appendix B.3): norm and MLP.

    python -m experiments.train --config=configs/ee_llm_1b3_mlp.py --workdir=runs/ee_llm_1b3_mlp \\
        --config.data.source='/data/text/**/*.txt' --config.data.tokenizer=/data/tokenizer.json

As configs/ee_llm_1b3.py, but each exit has an MLP and a norm before the output embedding. Our MLP
reads the state above layer 6 (or 12) through a norm of its own; in the authors' code it stands
beside that layer's own MLP and reads what that one reads. Tied embeddings, loss weights and the
number of tokens are those of configs/ee_llm_1b3.py. Not run by us: we have no result to expect.
"""

from ml_collections import ConfigDict

from configs import common


def get_config() -> ConfigDict:
    config = common.ee_llm_1b3()
    config.model.update(
        exits=(
            {"boundary": 6, "mlp": True, "norm": True, "head": "tied"},
            {"boundary": 12, "mlp": True, "norm": True, "head": "tied"},
        ),
    )
    config.exit_weights.update(weights=(0.25, 0.5))
    return config
