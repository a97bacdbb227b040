"""The known model families, one table each."""

from __future__ import annotations

from typing import Any

from eejax.checkpoint.hf.family import FAMILIES, Family, register_family
from eejax.checkpoint.hf.fields import REQUIRED
from eejax.checkpoint.hf.rope import read_rotary
from eejax.checkpoint.hf.settings import (
    falcon_more,
    falcon_written,
    gemma1_more,
    gemma2_more,
    gemma2_written,
    gemma3_more,
    gemma_written,
    gptj_more,
    granite_more,
    granite_written,
    llama_more,
    llama_written,
    mistral_more,
    mistral_written,
    neox_more,
    neox_written,
    opt_more,
    opt_written,
    phi3_more,
    phi3_written,
    phi_written,
    qwen_windows,
    qwen_written,
    smollm3_more,
    smollm3_written,
    stablelm_more,
    stablelm_written,
)
from eejax.checkpoint.hf.tensor_rules import (
    falcon_rules,
    gpt2_rules,
    gptj_rules,
    granite_rules,
    llama_rules,
    neox_rules,
    opt_rules,
    phi3_rules,
    phi_rules,
)

__all__ = ["FAMILIES", "Family", "register_family"]

SIZES = {
    "vocab_size": ("vocab_size", REQUIRED),
    "num_hidden_layers": ("n_layers", REQUIRED),
    "hidden_size": ("d_model", REQUIRED),
    "num_attention_heads": ("n_heads", REQUIRED),
    "max_position_embeddings": ("context_length", REQUIRED),
    "intermediate_size": ("d_ff", REQUIRED),
}
GROUPED = SIZES | {"num_key_value_heads": ("n_kv_heads", None), "head_dim": ("head_dim", None)}
RMS = GROUPED | {"rms_norm_eps": ("norm_eps", 1e-6)}
GPT = {
    "vocab_size": ("vocab_size", REQUIRED),
    "n_layer": ("n_layers", REQUIRED),
    "n_embd": ("d_model", REQUIRED),
    "n_head": ("n_heads", REQUIRED),
    "n_positions": ("context_length", REQUIRED),
    "n_inner": ("d_ff", None),
    "layer_norm_epsilon": ("norm_eps", 1e-5),
}
PLAIN_MLP = dict(norm="layernorm", mlp_gated=False, mlp_bias=True)


EPS = {"layer_norm_eps": ("norm_eps", 1e-5)}
LAYER_NORM = {name: value for name, value in GROUPED.items() if name != "head_dim"} | EPS
RMS5 = RMS | {"rms_norm_eps": ("norm_eps", 1e-5)}
GPT_ALIASES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


def rms(kv: int, head_dim: int | None = None) -> dict[str, tuple[str, Any]]:
    """Return the sizes of a family with a default number of key and value heads."""
    return RMS | {
        "num_key_value_heads": ("n_kv_heads", kv),
        "head_dim": ("head_dim", head_dim),
    }


NEOX = SIZES | EPS
GEMMA = dict(norm_plus_one=True)
CAUSAL = dict(use_bidirectional_attention=False)


for _family in (
    Family(
        "llama",
        "LlamaForCausalLM",
        RMS,
        llama_rules,
        more=llama_more,
        written=llama_written,
        whole_heads=True,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        rms(8),
        llama_rules,
        more=mistral_more,
        written=mistral_written,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        rms(32),
        llama_rules,
        dict(qkv_bias=True),
        more=lambda raw: dict(rotary=read_rotary(raw), sliding_window=qwen_windows(raw)),
        written=qwen_written,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        rms(32, 128),
        llama_rules,
        dict(qk_norm="head"),
        more=lambda raw: llama_more(raw) | dict(sliding_window=qwen_windows(raw)),
        written=lambda config: qwen_written(config) | dict(attention_bias=config.o_bias),
    ),
    Family(
        "gemma",
        "GemmaForCausalLM",
        rms(16, 256),
        llama_rules,
        GEMMA,
        ("hidden_act", "gelu_pytorch_tanh"),
        True,
        CAUSAL,
        more=gemma1_more,
        written=gemma_written,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        rms(4, 256),
        llama_rules,
        GEMMA | dict(norm_placement="pre_post"),
        ("hidden_activation", "gelu_pytorch_tanh"),
        True,
        CAUSAL,
        more=gemma2_more,
        written=gemma2_written,
        whole_heads=True,
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        rms(4, 256),
        llama_rules,
        GEMMA | dict(norm_placement="pre_post", qk_norm="head"),
        ("hidden_activation", "gelu_pytorch_tanh"),
        True,
        CAUSAL,
        more=gemma3_more,
        written=gemma2_written,
        whole_heads=True,
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        RMS5,
        llama_rules,
        dict(norm_placement="output", qk_norm="full"),
        more=llama_more,
        written=llama_written,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        rms(4),
        llama_rules,
        tied=True,
        more=smollm3_more,
        written=smollm3_written,
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        RMS,
        granite_rules,
        more=granite_more,
        written=granite_written,
    ),
    Family(
        "stablelm",
        "StableLmForCausalLM",
        LAYER_NORM | {"num_key_value_heads": ("n_kv_heads", 32)},
        llama_rules,
        dict(norm="layernorm"),
        plain=dict(qk_layernorm=False),
        more=stablelm_more,
        written=stablelm_written,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        RMS5,
        phi3_rules,
        more=phi3_more,
        written=phi3_written,
    ),
    Family(
        "phi",
        "PhiForCausalLM",
        GROUPED | EPS,
        phi_rules,
        PLAIN_MLP | dict(residual="parallel_one_norm", qkv_bias=True, o_bias=True, head_bias=True),
        ("hidden_act", "gelu_new"),
        plain=dict(qk_layernorm=False),
        more=lambda raw: dict(rotary=read_rotary(raw, fraction=0.5)),
        written=phi_written,
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        GPT,
        gpt2_rules,
        PLAIN_MLP | dict(position="learned", qkv_bias=True, o_bias=True),
        ("activation_function", "gelu_new"),
        True,
        dict(
            scale_attn_weights=True,
            scale_attn_by_inverse_layer_idx=False,
            add_cross_attention=False,
        ),
        prefix="transformer.",
        aliases=GPT_ALIASES,
    ),
    Family(
        "gptj",
        "GPTJForCausalLM",
        GPT,
        gptj_rules,
        PLAIN_MLP | dict(residual="parallel_one_norm"),
        ("activation_function", "gelu_new"),
        more=gptj_more,
        written=lambda config: dict(rotary_dim=config.rotary_dims),
        prefix="transformer.",
        aliases=GPT_ALIASES,
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        NEOX,
        neox_rules,
        PLAIN_MLP,
        ("hidden_act", "gelu"),
        more=neox_more,
        written=neox_written,
        prefix="gpt_neox.",
        whole_heads=True,
        renamed={"lm_head.weight": "embed_out.weight"},
        skipped=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
    ),
    Family(
        "falcon",
        "FalconForCausalLM",
        {k: v for k, v in NEOX.items() if v[0] not in ("d_ff", "context_length", "norm_eps")}
        | {"layer_norm_epsilon": ("norm_eps", 1e-5)},
        falcon_rules,
        PLAIN_MLP,
        ("activation", "gelu"),
        True,
        dict(alibi=False),
        more=falcon_more,
        written=falcon_written,
        prefix="transformer.",
    ),
    Family(
        "opt",
        "OPTForCausalLM",
        {k: v for k, v in SIZES.items() if k != "intermediate_size"}
        | {"ffn_dim": ("d_ff", REQUIRED)},
        opt_rules,
        PLAIN_MLP | dict(position="learned"),
        ("activation_function", "relu"),
        True,
        dict(layer_norm_elementwise_affine=True),
        more=opt_more,
        written=opt_written,
    ),
):
    register_family(_family)
