"""One table a model family: its settings, and where its tensors lie.

`Family.read` and `Family.write` are each other's inverse: what a family cannot write, it would not
read as the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from eejax.checkpoint.hf import fields
from eejax.checkpoint.hf.fields import REQUIRED, Raw, read_rotary, write_rotary, write_windows
from eejax.checkpoint.hf.layouts import Rule
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
    projects,
)  # fmt: skip
from eejax.common.errors import ConfigError
from eejax.models.config import ModelConfig

Values = dict[str, Any]
WHOLE = {f.name for f in dataclasses.fields(ModelConfig) if f.type in ("int", "int | None")}


@dataclasses.dataclass(frozen=True)
class Family:
    """What a `model_type` is.

    sizes: name in config.json -> (name in ModelConfig, value where it is left out). fixed: what is
    so in all of the family. activation: the setting's name, and its value where it is left out;
    tied: whether the head is, where it is not said. plain: settings that only one value of can be
    represented. more, write: what else there is to be read of a config.json, and written to one.
    rules: where tensors lie. prefix: that of all names, which some files leave out; renamed: names
    that mean others; skipped: ends of names that hold no parameters.
    """

    model_type: str
    architecture: str
    sizes: Mapping[str, tuple[str, Any]]
    rules: Callable[[ModelConfig, Raw | None], list[Rule]]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    tied: bool = False
    plain: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    more: Callable[[Raw], Values] = lambda raw: {}
    written: Callable[[ModelConfig], Values] = lambda config: {}
    prefix: str = "model."
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    skipped: tuple[str, ...] = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")

    def read(self, raw: Raw) -> ModelConfig:
        """Raises CheckpointError for settings that are missing or cannot be represented."""
        for name, value in self.plain.items():
            raw.must_be(name, value, default=value)
        values = {
            ours: (raw.size if ours in WHOLE else raw)(name, default)
            for name, (ours, default) in self.sizes.items()
        }
        values["activation"] = raw.activation(*self.activation)
        values["head"] = "tied" if raw("tie_word_embeddings", self.tied) else "own"
        try:
            return ModelConfig(**values | dict(self.fixed) | self.more(raw))
        except ConfigError as error:
            raise raw.refuse("model_type", self.model_type, f"as {error}".rstrip(".")) from error

    def write(self, config: ModelConfig) -> Values:
        """config.json's values; of a model that the family cannot say they read as another one."""
        values = {name: getattr(config, ours) for name, (ours, _) in self.sizes.items()}
        values[self.activation[0]] = fields.NAMES[config.activation]
        values["tie_word_embeddings"] = config.head == "tied"
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **values, **self.plain, **self.written(config),
        }  # fmt: skip


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


def opt_more(raw: Raw) -> Values:
    before, bias = raw("do_layer_norm_before", True), raw("enable_bias", True)
    more = dict(
        norm_placement="pre" if before else "post",
        final_norm=before and not raw("_remove_final_layer_norm", False),
        qkv_bias=bias, o_bias=bias, mlp_bias=bias,
    )  # fmt: skip
    return more | (dict(head="own") if projects(raw) else {})


def opt_written(config: ModelConfig) -> Values:
    before = config.norm_placement == "pre"
    return dict(
        do_layer_norm_before=before, enable_bias=config.qkv_bias,
        _remove_final_layer_norm=before and not config.final_norm,
        word_embed_proj_dim=config.d_model, dropout=0.0,
    )  # fmt: skip


def gptj_more(raw: Raw) -> Values:
    heads = raw("n_embd") // raw("n_head")
    if heads == 0:
        raise raw.refuse("n_head", raw("n_head"), f"must divide n_embd ({raw('n_embd')})")
    fraction = raw("rotary_dim", 64) / heads
    return dict(rotary=fields.RotaryConfig(fraction=fraction, interleaved=True), head_bias=True)


def neox_more(raw: Raw) -> Values:
    bias, parallel = raw("attention_bias", True), raw("use_parallel_residual", True)
    return dict(
        qkv_bias=bias, o_bias=bias, rotary=read_rotary(raw, fraction=0.25),
        residual="parallel" if parallel else "sequential",
    )  # fmt: skip


def neox_written(config: ModelConfig) -> Values:
    return write_rotary(config, "rotary_pct") | dict(
        attention_bias=config.qkv_bias, use_parallel_residual=config.residual == "parallel",
        rotary_emb_base=config.rotary.theta,
    )  # fmt: skip


def falcon_more(raw: Raw) -> Values:
    new, bias, heads = (
        raw("new_decoder_architecture", False),
        raw("bias", False),
        "num_attention_heads",
    )
    kv = (
        raw.size("num_kv_heads", raw(heads))
        if new
        else 1
        if raw("multi_query", True)
        else raw(heads)
    )
    two = raw("num_ln_in_parallel_attn", 2 if new else 1) == 2
    parallel = "parallel" if new and two else "parallel_one_norm"
    return dict(
        n_kv_heads=kv, d_ff=raw.size("ffn_hidden_size", 4 * raw("hidden_size")),
        context_length=raw.size("max_position_embeddings", 2048),
        mlp_bias=bias, qkv_bias=bias, o_bias=bias,
        residual=parallel if new or raw("parallel_attn", True) else "sequential",
        rotary=read_rotary(raw),
    )  # fmt: skip


def falcon_written(config: ModelConfig) -> Values:
    grouped = config.n_kv_heads not in (1, config.n_heads)
    new = config.residual == "parallel" or (grouped and config.residual == "parallel_one_norm")
    more = dict(num_ln_in_parallel_attn=2 if config.residual == "parallel" else 1) if new else {}
    return write_rotary(config) | more | dict(
        new_decoder_architecture=new, num_kv_heads=config.n_kv_heads,
        multi_query=config.n_kv_heads == 1, parallel_attn=config.residual != "sequential",
        bias=config.mlp_bias, ffn_hidden_size=config.d_ff,
        max_position_embeddings=config.context_length,
    )  # fmt: skip


def llama_more(raw: Raw, bias: bool = False, theta: float = 10000.0) -> Values:
    bias = raw("attention_bias", bias)
    return dict(
        qkv_bias=bias, o_bias=bias, mlp_bias=raw("mlp_bias", False), rotary=read_rotary(raw, theta)
    )


def llama_written(config: ModelConfig) -> Values:
    return write_rotary(config) | dict(attention_bias=config.o_bias, mlp_bias=config.mlp_bias)


def mistral_more(raw: Raw) -> Values:
    return dict(rotary=read_rotary(raw), sliding_window=raw.windows(4096, lambda i: True))


def mistral_written(config: ModelConfig) -> Values:
    return write_rotary(config) | dict(sliding_window=config.sliding_window)


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
    """Every so-maniest layer has no rotary positions."""
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


def gemma_more(raw: Raw) -> Values:
    bias = raw("attention_bias", False)
    return dict(
        embedding_scale=math.sqrt(raw("hidden_size")), rotary=read_rotary(raw), qkv_bias=bias,
        o_bias=bias,
    )  # fmt: skip


def gemma1_more(raw: Raw) -> Values:
    """The first configurations say gelu and mean its tanh form, which the models were trained with
    (transformers' configuration_gemma.py reads them so; those of Gemma 2 and 3 it does not)."""
    legacy = raw("hidden_act", None) == "gelu"
    return gemma_more(raw) | (dict(activation="gelu_tanh") if legacy else {})


def gemma2_more(raw: Raw) -> Values:
    return gemma_more(raw) | dict(
        attention_scale=raw.positive("query_pre_attn_scalar", 256) ** -0.5,
        sliding_window=raw.windows(4096, lambda i: i % 2 == 0),
        # null is no cap; left out, it is the family's
        attention_softcap=raw.values.get("attn_logit_softcapping", 50.0),
        logit_softcap=raw.values.get("final_logit_softcapping", 30.0),
    )


def gemma3_more(raw: Raw) -> Values:
    pattern = raw.positive("sliding_window_pattern", 6)
    return gemma2_more(raw) | dict(
        sliding_window=raw.windows(4096, lambda i: (i + 1) % pattern != 0),
        attention_softcap=raw("attn_logit_softcapping", None),
        logit_softcap=raw("final_logit_softcapping", None),
        rotary=read_rotary(raw, theta=1e6, local=1e4),
    )


def gemma_written(config: ModelConfig) -> Values:
    return write_rotary(config) | dict(attention_bias=config.o_bias)


def gemma2_written(config: ModelConfig) -> Values:
    scale = config.attention_scale or config.head_dim**-0.5
    scalar = scale**-2
    near = round(scalar)
    return gemma_written(config) | write_windows(config) | dict(
        query_pre_attn_scalar=near if math.isclose(near, scalar) else scalar,
        attn_logit_softcapping=config.attention_softcap,
        final_logit_softcapping=config.logit_softcap,
    )  # fmt: skip


def stablelm_more(raw: Raw) -> Values:
    parallel = raw("use_parallel_residual", False)
    return dict(
        qkv_bias=raw("use_qkv_bias", False), rotary=read_rotary(raw, fraction=0.25),
        residual="parallel_one_norm" if parallel else "sequential",
    )  # fmt: skip


def stablelm_written(config: ModelConfig) -> Values:
    return write_rotary(config, "partial_rotary_factor") | dict(
        use_qkv_bias=config.qkv_bias, use_parallel_residual=config.residual != "sequential"
    )


def granite_more(raw: Raw) -> Values:
    return llama_more(raw) | dict(
        embedding_scale=raw("embedding_multiplier", 1.0), temperature=raw("logits_scaling", 1.0),
        attention_scale=raw("attention_multiplier", 1.0),
    )  # fmt: skip


def granite_written(config: ModelConfig) -> Values:
    return llama_written(config) | dict(
        embedding_multiplier=config.embedding_scale, logits_scaling=config.temperature,
        attention_multiplier=config.attention_scale or config.head_dim**-0.5,
        residual_multiplier=1.0,
    )  # fmt: skip


def phi3_more(raw: Raw) -> Values:
    rope = raw.table("rope_parameters") or raw.table("rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":  # "su" and "yarn" are old names of longrope here
        raise raw.refuse(
            "rope_scaling.rope_type", kind,
            "must be 'default': a phi3 is scaled by longrope alone, which cannot be represented",
        )  # fmt: skip
    return dict(rotary=read_rotary(raw), sliding_window=raw("sliding_window", None))


def phi_written(config: ModelConfig) -> Values:
    return write_rotary(config, "partial_rotary_factor")


EPS = {"layer_norm_eps": ("norm_eps", 1e-5)}
WITHOUT_HEAD_DIM = {name: value for name, value in RMS.items() if name != "head_dim"}
LAYER_NORM = {name: value for name, value in GROUPED.items() if name != "head_dim"} | EPS
NEOX = SIZES | EPS
GEMMA = dict(norm_plus_one=True)
CAUSAL = dict(use_bidirectional_attention=False)

FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Makes a family known to import and export, in place of another of its `model_type`."""
    FAMILIES[family.model_type] = family


for _family in (
    Family(
        "llama", "LlamaForCausalLM", RMS, llama_rules, more=llama_more, written=llama_written,
    ),
    Family(
        "mistral", "MistralForCausalLM", RMS, llama_rules,
        more=mistral_more, written=mistral_written,
    ),
    Family(
        "qwen2", "Qwen2ForCausalLM", WITHOUT_HEAD_DIM, llama_rules, dict(qkv_bias=True),
        more=lambda raw: dict(rotary=read_rotary(raw), sliding_window=qwen_windows(raw)),
        written=qwen_written,
    ),
    Family(
        "qwen3", "Qwen3ForCausalLM", RMS | {"head_dim": ("head_dim", 128)}, llama_rules,
        dict(qk_norm="head"),
        more=lambda raw: llama_more(raw) | dict(sliding_window=qwen_windows(raw)),
        written=lambda config: qwen_written(config) | dict(attention_bias=config.o_bias),
    ),
    Family(
        "gemma", "GemmaForCausalLM", RMS | {"head_dim": ("head_dim", 256)}, llama_rules, GEMMA,
        ("hidden_act", "gelu_pytorch_tanh"), True, CAUSAL,
        more=gemma1_more, written=gemma_written,
    ),
    Family(
        "gemma2", "Gemma2ForCausalLM", RMS | {"head_dim": ("head_dim", 256)}, llama_rules,
        GEMMA | dict(norm_placement="pre_post"), ("hidden_activation", "gelu_pytorch_tanh"), True,
        CAUSAL, more=gemma2_more, written=gemma2_written,
    ),
    Family(
        "gemma3_text", "Gemma3ForCausalLM", RMS | {"head_dim": ("head_dim", 256)}, llama_rules,
        GEMMA | dict(norm_placement="pre_post", qk_norm="head"),
        ("hidden_activation", "gelu_pytorch_tanh"), True,
        CAUSAL, more=gemma3_more, written=gemma2_written,
    ),
    Family(
        "olmo2", "Olmo2ForCausalLM", WITHOUT_HEAD_DIM | {"rms_norm_eps": ("norm_eps", 1e-5)},
        llama_rules, dict(norm_placement="output", qk_norm="full"),
        more=llama_more, written=llama_written,
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        WITHOUT_HEAD_DIM,
        llama_rules,
        tied=True,
        more=smollm3_more,
        written=smollm3_written,
    ),
    Family(
        "granite", "GraniteForCausalLM", WITHOUT_HEAD_DIM, granite_rules,
        more=granite_more, written=granite_written,
    ),
    Family(
        "stablelm", "StableLmForCausalLM", LAYER_NORM, llama_rules, dict(norm="layernorm"),
        plain=dict(qk_layernorm=False), more=stablelm_more, written=stablelm_written,
    ),
    Family(
        "phi3", "Phi3ForCausalLM", WITHOUT_HEAD_DIM | {"rms_norm_eps": ("norm_eps", 1e-5)},
        phi3_rules,
        more=phi3_more,
        written=lambda config: phi_written(config) | dict(
            sliding_window=config.sliding_window,
            original_max_position_embeddings=config.context_length,
        ),
    ),
    Family(
        "phi", "PhiForCausalLM", LAYER_NORM, phi_rules,
        PLAIN_MLP | dict(
            residual="parallel_one_norm", qkv_bias=True, o_bias=True, head_bias=True
        ),
        ("hidden_act", "gelu_new"), plain=dict(qk_layernorm=False),
        more=lambda raw: dict(rotary=read_rotary(raw, fraction=0.5)), written=phi_written,
    ),
    Family(
        "gpt2", "GPT2LMHeadModel", GPT, gpt2_rules,
        PLAIN_MLP | dict(position="learned", qkv_bias=True, o_bias=True),
        ("activation_function", "gelu_new"), True,
        dict(
            scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False,
            add_cross_attention=False,
        ),
        prefix="transformer.",
    ),
    Family(
        "gptj", "GPTJForCausalLM", GPT, gptj_rules, PLAIN_MLP | dict(residual="parallel_one_norm"),
        ("activation_function", "gelu_new"), more=gptj_more,
        written=lambda config: dict(rotary_dim=config.rotary_dims), prefix="transformer.",
    ),
    Family(
        "gpt_neox", "GPTNeoXForCausalLM", NEOX, neox_rules, PLAIN_MLP, ("hidden_act", "gelu"),
        more=neox_more, written=neox_written, prefix="gpt_neox.",
        renamed={"lm_head.weight": "embed_out.weight"},
        skipped=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
    ),
    Family(
        "falcon", "FalconForCausalLM",
        {k: v for k, v in NEOX.items() if v[0] not in ("d_ff", "context_length", "norm_eps")}
        | {"layer_norm_epsilon": ("norm_eps", 1e-5)},
        falcon_rules, PLAIN_MLP, ("activation", "gelu"), True, dict(alibi=False),
        more=falcon_more, written=falcon_written, prefix="transformer.",
    ),
    Family(
        "opt", "OPTForCausalLM",
        {k: v for k, v in SIZES.items() if k != "intermediate_size"}
        | {"ffn_dim": ("d_ff", REQUIRED)},
        opt_rules, PLAIN_MLP | dict(position="learned"), ("activation_function", "relu"), True,
        dict(layer_norm_elementwise_affine=True), more=opt_more, written=opt_written,
    ),
):  # fmt: skip
    register_family(_family)
