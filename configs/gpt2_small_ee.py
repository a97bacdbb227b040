"""GPT-2 small's shape (Radford et al. 2019) with early exits at a quarter and half of its depth.

    eejax train --config=configs/gpt2_small_ee.py --workdir=runs/gpt2_small_ee \\
        --config.data.source='/data/text/**/*.txt' --config.data.tokenizer=/data/tokenizer.json

Exit weights and Adam's settings are those of EE-LLM (section 5.1): 1/4 and 1/2, 0.9 / 0.95 / 1e-8,
peak 3e-4 on a cosine. 124M parameters. Meant for a GPU; every step takes 0.5M tokens, so 20,000
steps are about 10B tokens and 1.3e19 floating-point operations, two fifths of them for the exits'
logits and attention: a day and a half at 1e14 a second. Not run to its end by us: we have no
result to expect.
"""

from ml_collections import ConfigDict

from eejax.train.config import default_config


def get_config() -> ConfigDict:
    config = default_config()
    config.model.update(
        vocab_size=50257,
        vocab_multiple=128,
        n_layers=12,
        d_model=768,
        n_heads=12,
        context_length=1024,
        norm="layernorm",
        position="learned",
        qkv_bias=True,
        o_bias=True,
        mlp_gated=False,
        mlp_bias=True,
        activation="gelu_tanh",
        head="tied",
        dtype="bfloat16",
        exits=({"boundary": 3}, {"boundary": 6}),
    )
    config.exit_weights.update(weights=(0.25, 0.5))
    config.data.update(
        source="python-stdlib",
        tokenizer="bpe",
        length=1024,
        document_masks=True,
    )
    config.optimizer.update(learning_rate=3e-4, warmup_steps=500, schedule="cosine")
    config.train.update(
        steps=20_000,
        batch_size=512,
        microbatches=16,
        log_every=10,
        eval_every=1000,
        eval_batches=50,
        checkpoint_every=1000,
    )
    return config
