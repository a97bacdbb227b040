"""Places of the tensors of each family."""

from __future__ import annotations

import numpy as np

from eejax.checkpoint.hf.fields import Raw
from eejax.checkpoint.hf.layouts import (
    Rule,
    by_group,
    conv1d,
    fused,
    gate_and_up,
    linear,
    one_after_another,
    positions,
    scaled,
    vector,
    vocabulary,
)
from eejax.models.config import ModelConfig


def norm(config: ModelConfig, theirs: str, ours: str) -> list[Rule]:
    rules = [vector(f"{theirs}.weight", f"{ours}/scale")]
    if config.norm == "layernorm" and config.norm_bias:
        rules.append(vector(f"{theirs}.bias", f"{ours}/bias"))
    return rules


def product(theirs: str, ours: str, bias: bool, rule=linear) -> list[Rule]:
    rules = [rule(f"{theirs}.weight", ours)]
    return rules + [vector(f"{theirs}.bias", f"{ours}_bias")] * bias


def joined(theirs: str, ours: list[str], bias: bool, sizes, transposed: bool = True) -> list[Rule]:
    rules = [fused(f"{theirs}.weight", ours, sizes, transposed)]
    return rules + [fused(f"{theirs}.bias", [f"{o}_bias" for o in ours], sizes)] * bias


QKV = ["attn/q", "attn/k", "attn/v"]


def attention(config: ModelConfig, theirs: str, o: str = "o_proj") -> list[Rule]:
    rules = [r for x in "qkv" for r in product(f"{theirs}.{x}_proj", f"attn/{x}", config.qkv_bias)]
    rules += product(f"{theirs}.{o}", "attn/o", config.o_bias)
    if config.qk_norm != "none":
        rules += [vector(f"{theirs}.{x}_norm.weight", f"attn/{x}_norm/scale") for x in "qk"]
    return rules


def feed_forward(config: ModelConfig, theirs: str, up: str, down: str) -> list[Rule]:
    bias = config.mlp_bias
    return product(f"{theirs}{up}", "mlp/up", bias) + product(f"{theirs}{down}", "mlp/down", bias)


def gated(config: ModelConfig, theirs: str) -> list[Rule]:
    names = ("gate", "up", "down")
    return [r for n in names for r in product(f"{theirs}.{n}_proj", f"mlp/{n}", config.mlp_bias)]


def ends(config: ModelConfig, tokens: str, last: str, head: str = "lm_head") -> list[Rule]:
    """Return rules of embedding, final norm and head."""
    rules = [vocabulary(f"{tokens}.weight", "embed/tokens")]
    if config.final_norm:
        rules += norm(config, last, "final/norm")
    if config.head == "own":
        rules.append(vocabulary(f"{head}.weight", "final/head"))
    if config.head_bias:
        rules.append(vocabulary(f"{head}.bias", "final/head_bias"))
    return rules


def llama_rules(config: ModelConfig, raw: Raw | None = None) -> list[Rule]:
    layer = "model.layers.{i}"
    rules = ends(config, "model.embed_tokens", "model.norm")
    rules += attention(config, f"{layer}.self_attn") + gated(config, f"{layer}.mlp")
    norms = {
        "pre": {"input": "attn_norm", "post_attention": "mlp_norm"},
        "output": {"post_attention": "attn_out_norm", "post_feedforward": "mlp_out_norm"},
        "pre_post": {
            "input": "attn_norm",
            "post_attention": "attn_out_norm",
            "pre_feedforward": "mlp_norm",
            "post_feedforward": "mlp_out_norm",
        },
    }[config.norm_placement]
    if config.residual == "parallel_one_norm":
        del norms["post_attention"]
    for theirs, ours in norms.items():
        rules += norm(config, f"{layer}.{theirs}_layernorm", ours)
    return rules


def gpt2_rules(config: ModelConfig, raw: Raw | None = None) -> list[Rule]:
    layer = "transformer.h.{i}"
    return [
        *ends(config, "transformer.wte", "transformer.ln_f"),
        positions("transformer.wpe.weight", "embed/positions", 0),
        *norm(config, f"{layer}.ln_1", "attn_norm"),
        *norm(config, f"{layer}.ln_2", "mlp_norm"),
        *joined(f"{layer}.attn.c_attn", QKV, True, one_after_another, transposed=False),
        *product(f"{layer}.attn.c_proj", "attn/o", True, conv1d),
        *product(f"{layer}.mlp.c_fc", "mlp/up", True, conv1d),
        *product(f"{layer}.mlp.c_proj", "mlp/down", True, conv1d),
    ]


def gptj_rules(config: ModelConfig, raw: Raw | None = None) -> list[Rule]:
    layer = "transformer.h.{i}"
    return [
        *ends(config, "transformer.wte", "transformer.ln_f"),
        *norm(config, f"{layer}.ln_1", "attn_norm"),
        *attention(config, f"{layer}.attn", "out_proj"),
        *feed_forward(config, f"{layer}.mlp.", "fc_in", "fc_out"),
    ]


def neox_rules(config: ModelConfig, raw: Raw | None = None) -> list[Rule]:
    layer = "gpt_neox.layers.{i}"
    return [
        *ends(config, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
        *norm(config, f"{layer}.input_layernorm", "attn_norm"),
        *norm(config, f"{layer}.post_attention_layernorm", "mlp_norm"),
        *joined(f"{layer}.attention.query_key_value", QKV, config.qkv_bias, by_group),
        *product(f"{layer}.attention.dense", "attn/o", config.o_bias),
        *feed_forward(config, f"{layer}.mlp.", "dense_h_to_4h", "dense_4h_to_h"),
    ]


def falcon_rules(config: ModelConfig, raw: Raw | None = None) -> list[Rule]:
    layer = "transformer.h.{i}"
    names = {
        "sequential": {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"},
        "parallel": {"ln_attn": "attn_norm", "ln_mlp": "mlp_norm"},
        "parallel_one_norm": {"input_layernorm": "attn_norm"},
    }[config.residual]
    return [
        *ends(config, "transformer.word_embeddings", "transformer.ln_f"),
        *(r for n, ours in names.items() for r in norm(config, f"{layer}.{n}", ours)),
        *joined(f"{layer}.self_attention.query_key_value", QKV, config.qkv_bias, by_group),
        *product(f"{layer}.self_attention.dense", "attn/o", config.o_bias),
        *feed_forward(config, f"{layer}.mlp.", "dense_h_to_4h", "dense_4h_to_h"),
    ]


def phi_rules(config: ModelConfig, raw: Raw | None = None) -> list[Rule]:
    layer = "model.layers.{i}"
    return [
        *ends(config, "model.embed_tokens", "model.final_layernorm"),
        *norm(config, f"{layer}.input_layernorm", "attn_norm"),
        *attention(config, f"{layer}.self_attn", "dense"),
        *feed_forward(config, f"{layer}.mlp.", "fc1", "fc2"),
    ]


def phi3_rules(config: ModelConfig, raw: Raw | None = None) -> list[Rule]:
    layer = "model.layers.{i}"
    return [
        *ends(config, "model.embed_tokens", "model.norm"),
        *norm(config, f"{layer}.input_layernorm", "attn_norm"),
        *norm(config, f"{layer}.post_attention_layernorm", "mlp_norm"),
        *joined(f"{layer}.self_attn.qkv_proj", QKV, False, one_after_another),
        *product(f"{layer}.self_attn.o_proj", "attn/o", False),
        *joined(f"{layer}.mlp.gate_up_proj", ["mlp/gate", "mlp/up"], False, gate_and_up),
        *product(f"{layer}.mlp.down_proj", "mlp/down", False),
    ]


def granite_rules(config: ModelConfig, raw: Raw | None = None) -> list[Rule]:
    """Return rules that scale the output matrices of attention and MLP."""
    factor = 1.0 if raw is None else raw("residual_multiplier", 1.0)
    of = ("attn/o", "mlp/down", "attn/o_bias", "mlp/down_bias")
    return [
        scaled(rule, factor) if rule.ours[0] in of else rule for rule in llama_rules(config, raw)
    ]


def opt_rules(config: ModelConfig, raw: Raw | None = None) -> list[Rule]:
    layer, all_ = "model.decoder.layers.{i}", "model.decoder"
    before = config.norm_placement == "pre"
    rules = [
        *ends(config, f"{all_}.embed_tokens", f"{all_}.final_layer_norm"),
        positions(f"{all_}.embed_positions.weight", "embed/positions", 2),
        *norm(config, f"{layer}.self_attn_layer_norm", "attn_norm" if before else "attn_out_norm"),
        *norm(config, f"{layer}.final_layer_norm", "mlp_norm" if before else "mlp_out_norm"),
        *attention(config, f"{layer}.self_attn", "out_proj"),
        *feed_forward(config, f"{layer}.", "fc1", "fc2"),
    ]
    if raw is None or not projects(raw):
        return rules
    names = (
        f"{all_}.embed_tokens.weight",
        f"{all_}.project_in.weight",
        f"{all_}.project_out.weight",
    )
    head = () if raw("tie_word_embeddings", True) else ("lm_head.weight",)

    def read(config, tensors, shapes):
        tokens, into, out, *rest = (a.astype(np.float32) for a in tensors)
        pad = [(0, config.padded_vocab - len(tokens)), (0, 0)]
        head = rest[0] if rest else tokens
        return tuple(np.pad(a, pad) for a in (tokens @ into.T, head @ out))

    kept = [r for r in rules if r.ours[0] not in ("embed/tokens", "final/head")]
    return [Rule((*names, *head), ("embed/tokens", "final/head"), read), *kept]


def projects(raw: Raw) -> bool:
    """Return whether token embeddings are narrower than the model (OPT-350m).

    The two consecutive products are merged into one, which makes embedding and head separate
    matrices.
    """
    return raw("word_embed_proj_dim", raw("hidden_size")) != raw("hidden_size")
