"""Settings that only one family has: read from a config.json (`*_more`), and written to one."""

from __future__ import annotations

import math
from typing import Any

from eejax.checkpoint.hf.family import Values
from eejax.checkpoint.hf.fields import Raw, write_windows
from eejax.checkpoint.hf.rope import read_rotary, write_rotary
from eejax.checkpoint.hf.tensor_rules import projects
from eejax.models.config import ModelConfig
from eejax.models.rotary_config import RotaryConfig


def opt_more(raw: Raw) -> Values:
    before, bias = raw("do_layer_norm_before", True), raw("enable_bias", True)
    more = dict(
        norm_placement="pre" if before else "post",
        final_norm=before and not raw("_remove_final_layer_norm", False),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )
    return more | (dict(head="own") if projects(raw) else {})


def opt_written(config: ModelConfig) -> Values:
    before = config.norm_placement == "pre"
    return dict(
        do_layer_norm_before=before,
        enable_bias=config.qkv_bias,
        _remove_final_layer_norm=before and not config.final_norm,
        word_embed_proj_dim=config.d_model,
        dropout=0.0,
    )


def gptj_more(raw: Raw) -> Values:
    head_dim, turned = raw.must_divide("n_head", "n_embd"), raw.stored("rotary_dim", 64)
    if type(turned) is not int or not 0 < turned <= head_dim or turned % 2:
        raise raw.refuse("rotary_dim", turned, f"must be an even number up to {head_dim}")
    rotary = RotaryConfig(fraction=turned / head_dim, interleaved=True)
    return dict(rotary=rotary, head_bias=True)


NEOX_ROTARY = ("rotary_emb_base", "rotary_pct")


def neox_more(raw: Raw) -> Values:
    bias, parallel = raw("attention_bias", True), raw("use_parallel_residual", True)
    return dict(
        qkv_bias=bias,
        o_bias=bias,
        rotary=read_rotary(raw, fraction=0.25, names=NEOX_ROTARY),
        residual="parallel" if parallel else "sequential",
    )


def neox_written(config: ModelConfig) -> Values:
    return write_rotary(config, "rotary_pct", "rotary_emb_base") | dict(
        attention_bias=config.qkv_bias, use_parallel_residual=config.residual == "parallel"
    )


def falcon_more(raw: Raw) -> Values:
    heads, d_model = raw("num_attention_heads"), raw("hidden_size")
    if raw("n_embed", d_model) != d_model:
        raise raw.refuse("n_embed", raw("n_embed"), f"must be {d_model}, as hidden_size is")
    new, bias = raw("new_decoder_architecture", False), raw("bias", False)
    old_kv = 1 if raw("multi_query", True) else heads
    parallel = new or raw("parallel_attn", True)
    two = new and raw("num_ln_in_parallel_attn", 2) == 2
    return dict(
        n_kv_heads=raw.size("num_kv_heads", heads) if new else old_kv,
        d_ff=raw.size("ffn_hidden_size", 4 * d_model),
        context_length=raw.size("max_position_embeddings", 2048),
        mlp_bias=bias,
        qkv_bias=bias,
        o_bias=bias,
        residual="sequential" if not parallel else "parallel" if two else "parallel_one_norm",
        rotary=read_rotary(raw),
    )


def falcon_written(config: ModelConfig) -> Values:
    grouped = config.n_kv_heads not in (1, config.n_heads)
    new = config.residual == "parallel" or (grouped and config.residual == "parallel_one_norm")
    more = dict(num_ln_in_parallel_attn=2 if config.residual == "parallel" else 1) if new else {}
    return (
        write_rotary(config)
        | more
        | dict(
            new_decoder_architecture=new,
            num_kv_heads=config.n_kv_heads,
            multi_query=config.n_kv_heads == 1,
            parallel_attn=config.residual != "sequential",
            bias=config.mlp_bias,
            ffn_hidden_size=config.d_ff,
            max_position_embeddings=config.context_length,
        )
    )


def llama_more(raw: Raw, bias: bool = False, theta: float = 10000.0) -> Values:
    bias = raw("attention_bias", bias)
    return dict(
        qkv_bias=bias, o_bias=bias, mlp_bias=raw("mlp_bias", False), rotary=read_rotary(raw, theta)
    )


def llama_written(config: ModelConfig) -> Values:
    return write_rotary(config) | dict(attention_bias=config.o_bias, mlp_bias=config.mlp_bias)


def mistral_more(raw: Raw) -> Values:
    return dict(rotary=read_rotary(raw), sliding_window=raw.windows(4096))


def mistral_written(config: ModelConfig) -> Values:
    return write_rotary(config) | write_windows(config, by_layer=False)


def qwen_windows(raw: Raw) -> Any:
    if not raw("use_sliding_window", False):
        return None
    return raw.windows(4096, lambda i: i >= raw("max_window_layers", 28))


def qwen_written(config: ModelConfig) -> Values:
    return (
        write_rotary(config)
        | write_windows(config)
        | dict(use_sliding_window=config.sliding_window is not None)
    )


def smollm3_more(raw: Raw) -> Values:
    """Read the layers without rotary positions, one in every interval."""
    every, n = raw.positive("no_rope_layer_interval", 4), raw("num_hidden_layers")
    turned = raw("no_rope_layers", [int((i + 1) % every != 0) for i in range(n)])
    if not isinstance(turned, list) or len(turned) != n or any(t not in (0, 1) for t in turned):
        raise raw.refuse("no_rope_layers", turned, f"must be 0 or 1 for each of the {n} layers")
    window = None
    if raw("use_sliding_window", False):
        window = raw.windows(None, lambda i: not turned[i])
    return llama_more(raw, theta=2e6) | dict(
        no_rope_layers=tuple(i for i, turns in enumerate(turned) if not turns),
        sliding_window=window,
    )


def smollm3_written(config: ModelConfig) -> Values:
    return (
        llama_written(config)
        | write_windows(config)
        | dict(
            no_rope_layers=[int(i not in config.no_rope_layers) for i in range(config.n_layers)],
            use_sliding_window=config.sliding_window is not None,
        )
    )


def gemma_more(raw: Raw, theta: float = 10000.0, local: float | None = None) -> Values:
    bias = raw("attention_bias", False)
    return dict(
        embedding_scale=math.sqrt(raw("hidden_size")),
        rotary=read_rotary(raw, theta, local=local),
        qkv_bias=bias,
        o_bias=bias,
    )


def gemma1_more(raw: Raw) -> Values:
    """Read Gemma's settings, with gelu as its tanh form.

    The first configurations say gelu and mean the tanh form that the models were trained with
    (transformers' configuration_gemma.py reads them so, but not those of Gemma 2 and 3).
    """
    legacy = raw("hidden_act", None) == "gelu"
    return gemma_more(raw) | (dict(activation="gelu_tanh") if legacy else {})


def gemma2_more(raw: Raw, theta: float = 10000.0, local: float | None = None) -> Values:
    return gemma_more(raw, theta, local) | dict(
        attention_scale=raw.positive("query_pre_attn_scalar", 256) ** -0.5,
        sliding_window=raw.windows(4096, lambda i: i % 2 == 0),
        # null means no cap; if it is missing, the family's cap applies
        attention_softcap=raw.stored("attn_logit_softcapping", 50.0),
        logit_softcap=raw.stored("final_logit_softcapping", 30.0),
    )


def gemma3_more(raw: Raw) -> Values:
    pattern = raw.positive("sliding_window_pattern", 6)
    return gemma2_more(raw, theta=1e6, local=1e4) | dict(
        sliding_window=raw.windows(4096, lambda i: (i + 1) % pattern != 0),
        attention_softcap=raw("attn_logit_softcapping", None),
        logit_softcap=raw("final_logit_softcapping", None),
    )


def gemma_written(config: ModelConfig) -> Values:
    return write_rotary(config) | dict(attention_bias=config.o_bias)


def gemma2_written(config: ModelConfig) -> Values:
    scale = config.attention_scale or config.head_dim**-0.5
    scalar = scale**-2
    near = round(scalar)
    # transformers makes a window's mask even for a model without one.
    windows = write_windows(config, empty=config.context_length)
    return (
        gemma_written(config)
        | windows
        | dict(
            query_pre_attn_scalar=near if math.isclose(near, scalar) else scalar,
            attn_logit_softcapping=config.attention_softcap,
            final_logit_softcapping=config.logit_softcap,
        )
    )


def stablelm_more(raw: Raw) -> Values:
    parallel = raw("use_parallel_residual", False)
    return dict(
        qkv_bias=raw("use_qkv_bias", False),
        rotary=read_rotary(raw, fraction=0.25),
        residual="parallel_one_norm" if parallel else "sequential",
    )


def stablelm_written(config: ModelConfig) -> Values:
    return write_rotary(config, "partial_rotary_factor") | dict(
        use_qkv_bias=config.qkv_bias, use_parallel_residual=config.residual != "sequential"
    )


def granite_more(raw: Raw) -> Values:
    raw("residual_multiplier", 1.0)  # a number: `granite_rules` reads it
    return llama_more(raw) | dict(
        embedding_scale=raw("embedding_multiplier", 1.0),
        temperature=raw("logits_scaling", 1.0),
        attention_scale=raw("attention_multiplier", 1.0),
    )


def granite_written(config: ModelConfig) -> Values:
    return llama_written(config) | dict(
        embedding_multiplier=config.embedding_scale,
        logits_scaling=config.temperature,
        attention_multiplier=config.attention_scale or config.head_dim**-0.5,
        residual_multiplier=1.0,
    )


def phi3_more(raw: Raw) -> Values:
    rope = raw.table("rope_scaling") or raw.table("rope_parameters")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":  # "su" and "yarn" are old names of longrope here
        raise raw.refuse(
            "rope_scaling.rope_type",
            kind,
            "must be 'default': a phi3 is scaled by longrope alone, which cannot be represented",
        )
    return dict(rotary=read_rotary(raw, fraction=1.0), sliding_window=raw.windows(None))


def phi3_written(config: ModelConfig) -> Values:
    return (
        phi_written(config)
        | write_windows(config, by_layer=False)
        | dict(original_max_position_embeddings=config.context_length)
    )


def phi_written(config: ModelConfig) -> Values:
    return write_rotary(config, "partial_rotary_factor")
