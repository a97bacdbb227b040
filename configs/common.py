"""Shared parts of the configurations after one paper; no experiment by itself."""

from ml_collections import ConfigDict

from eejax.train.config import default_config


def _begin() -> ConfigDict:
    """Text of 2048 tokens a sequence, Adam with 0.9 / 0.95 / 1e-8 on a cosine, 8 devices."""
    config = default_config()
    config.data.update(
        source="python-stdlib", tokenizer="bpe", length=2048, validation_fraction=0.01
    )
    config.optimizer.update(
        schedule="cosine", b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0
    )
    config.train.update(log_every=10, eval_batches=10)
    config.mesh.update(data=8)
    return config


def ee_llm() -> ConfigDict:
    """The transformer and the training of EE-LLM's GPTs (Chen et al., ICML 2024, section 5.1).

    The paper gives Adam's settings, the peak rate, the cosine, a batch of 2048 sequences of 2048
    tokens (4.2 million tokens a step), sequences in a microbatch (2 for 1.3B and 7B, 1 for 13B and
    30B), and 4 replicas, each cut into pipeline stages and tensor-parallel shards in several ways.
    Here a replica is one device; `mesh.pipe` and `mesh.model` cut it.

    The rest is that of the authors' scripts, examples/ee_training/ in github.com/pan-x-c/EE-LLM:
    RMSNorm, rotary positions, SwiGLU and no biases as in Llama, warm-up, final rate, weight decay,
    clipping, how often to save. The scripts name a SentencePiece model but not which; 32,000 tokens
    are Llama's. Megatron makes the feed-forward width 8/3 of d, rounded down to a multiple of 64.
    Initial values are ours: the scripts draw all matrices with a deviation of 0.01.
    """
    config = _begin()
    config.model.update(
        vocab_size=32_000,
        vocab_multiple=128,
        context_length=2048,
        norm="rmsnorm",
        position="rotary",
        mlp_gated=True,
        activation="silu",
        dtype="bfloat16",
    )
    config.optimizer.update(learning_rate=3e-4, final_fraction=0.1, warmup_steps=2000)
    config.train.update(batch_size=2048, eval_every=1200, checkpoint_every=2400)
    config.mesh.update(data=4)
    return config


def opt() -> ConfigDict:
    """OPT's transformer (Zhang et al. 2022), and how HELIOS trains exits into it (section 4.1).

    As in OPT: learned positions, LayerNorm before attention and MLP, ReLU, biases everywhere, one
    table for input and output. OPT's table of positions has 2050 rows of which the first two are
    never read; ours has the 2048 that are. Sizes are each file's own.

    HELIOS: two early exits, the first at about a quarter of the depth, a loss weight of 1.0 each,
    50,000 iterations on RedPajama and the Pile, starting from OPT's weights. The paper does not
    give the rest, which is ours: exits with a norm and the tied embedding, all weights trained at a
    tenth of OPT's own rate, batches of 16 sequences, and OPT's Adam, decay and clipping.
    """
    config = _begin()
    config.model.update(
        vocab_size=50_272,
        context_length=2048,
        norm="layernorm",
        position="learned",
        qkv_bias=True,
        o_bias=True,
        mlp_gated=False,
        mlp_bias=True,
        activation="relu",
        head="tied",
        dtype="bfloat16",
    )
    config.exit_weights.update(weights=(1.0, 1.0))
    config.optimizer.update(warmup_steps=500)
    config.train.update(steps=50_000, batch_size=16, eval_every=1000, checkpoint_every=2500)
    return config
