"""The config.json that a GGUF file's settings stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from eejax.checkpoint.hf.family import Values
from eejax.checkpoint.hf.gguf_file import GgufFile
from eejax.common.errors import CheckpointError
from eejax.data.gguf_tokenizer import special_ids
from eejax.models.positions import rotary_frequencies
from eejax.models.rotary_config import RotaryConfig

_NAMES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<EOT>", "_<EOT>"),
)
"""Names of tokens that end texts wherever they are in a vocabulary (llama-vocab.cpp)."""
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of Gemma's models of 27B parameters, whose attention is scaled by width over heads."""
_LLAMA3: dict[str, Any] = dict(low_frequency=1.0, high_frequency=4.0, original_context=8192)
"""Settings of all published models with llama3's rotary scaling, but for the factor."""


class _Settings:
    """Settings of a file's architecture; `unread` are those that were not asked for."""

    def __init__(self, file: GgufFile):
        self.file, self.prefix = file, f"{file.kind}."
        named = {n for n in file.metadata if n.startswith(self.prefix)}
        self.values = {n.removeprefix(self.prefix): file.metadata[n] for n in named}
        self.unread = set(self.values)

    def __call__(self, name: str, default: Any = None) -> Any:
        self.ignore(name)
        return self.values.get(name, default)

    def ignore(self, name: str) -> None:
        """Count a setting as read."""
        self.unread.discard(name)

    def refuse(self, name: str, why: str) -> CheckpointError:
        return self.file.refuse(self.prefix + name, self.values.get(name), why)


def config_json(file: GgufFile) -> Values:
    """Return the values of config.json. Raises CheckpointError for a setting that has none there.

    Names and defaults of the settings are those of llama.cpp (gguf-py/gguf/constants.py).
    """
    settings, shapes = _Settings(file), file.names()
    config: Values = {"model_type": file.architecture.family}
    for ours, theirs in _NAMES.items():
        if (value := settings(ours)) is not None:
            config[theirs] = value
    settings.ignore("vocab_size")  # the tokenizer's; the embedding may have rows of padding
    if (embedding := shapes.get("model.embed_tokens.weight")) is not None:
        config["vocab_size"] = embedding[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in shapes
    # llama.cpp's defaults, where those of a family are others.
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    config.setdefault("rope_theta", 10000.0)
    config |= _special_tokens(file)
    for name in ("expert_count", "expert_used_count"):
        if settings(name, 0):
            raise settings.refuse(name, "mixtures of experts are not read")
    config |= _heads(settings, config)
    config |= _rotary(settings, config)
    config |= _BY_ARCHITECTURE[file.kind](settings, config)
    for name in sorted(settings.unread):
        raise settings.refuse(name, "nothing reads this setting, which may change the model")
    return config


def _special_tokens(file: GgufFile) -> Values:
    """Return the ids that begin, end and pad texts; as in llama.cpp, some names end texts too."""
    fields, ids = file.metadata, special_ids(file.metadata)
    types = fields.get("tokenizer.ggml.token_type") or []
    tokens = fields.get("tokenizer.ggml.tokens") or []
    named = [i for i, name in enumerate(tokens) if name in _ENDS and types[i : i + 1] != [1]]
    found: Values = {f"{name}_token_id": ids[name] for name in ("bos", "pad") if name in ids}
    ends = [*(ids[name] for name in ("eos", "eot", "eom") if name in ids), *named]
    return found | ({"eos_token_id": list(dict.fromkeys(ends))} if ends else {})


def _heads(settings: _Settings, config: Values) -> Values:
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(settings(name), list):
            raise settings.refuse(name, "must be the same number for all layers")
    size, value = settings("attention.key_length"), settings("attention.value_length")
    if size != value:
        raise settings.refuse("attention.value_length", f"must be {size}, as key_length is")
    if size is None and config.get("num_attention_heads"):
        size = config.get("hidden_size", 0) // config["num_attention_heads"]
    return {"head_dim": size}


def _rotary(settings: _Settings, config: Values) -> Values:
    turned, size = settings("rope.dimension_count"), config["head_dim"]
    if turned not in (None, size) and settings.file.kind != "phi3":
        raise settings.refuse("rope.dimension_count", f"must be {size}, a whole head")
    kind, factor = settings("rope.scaling.type"), settings("rope.scaling.factor")
    original = settings("rope.scaling.original_context_length")
    scaled = factor not in (None, 0, 1)
    kind = ("linear" if scaled else "none") if kind is None else kind
    if (factors := settings.file.rope_factors()) is not None:
        if kind != "none":
            raise settings.refuse("rope.scaling.type", "must be 'none' beside rope_freqs")
        return {"rope_scaling": _llama3(settings, config, factors)}
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": factor}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _llama3(settings: _Settings, config: Values, factors: np.ndarray) -> Values:
    """Return llama3's scaling. The file has the factor of each pair, and not the settings."""
    factor, theta = round(float(factors.max()), 4), config.get("rope_theta", 10000.0)
    plain = RotaryConfig(theta=theta)
    scaled = RotaryConfig(theta=theta, scaling="llama3", factor=factor, **_LLAMA3)
    a, b = (np.asarray(rotary_frequencies(r, 2 * len(factors))[0]) for r in (plain, scaled))
    if not np.allclose(a / b, factors, rtol=1e-3):
        raise settings.file.refuse(
            "rope_freqs", factors.tolist(), f"must be those of llama3's scaling with {_LLAMA3}"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3["low_frequency"],
        "high_freq_factor": _LLAMA3["high_frequency"],
        "original_max_position_embeddings": _LLAMA3["original_context"],
    }


def _llama(settings: _Settings, config: Values) -> Values:
    shapes = settings.file.names()
    return {
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in shapes,
    }


def _gemma2(settings: _Settings, config: Values) -> Values:
    scalar = config["head_dim"]
    if config.get("num_hidden_layers") == _LARGEST[settings.file.kind]:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    base = settings("rope.freq_base_swa", config["rope_theta"])
    if settings.file.kind == "gemma2" and base != config["rope_theta"]:
        raise settings.refuse("rope.freq_base_swa", "must be rope.freq_base")
    given = {"sliding_window": settings("attention.sliding_window")}
    given |= {name: settings(name) for name in _SOFTCAPS}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        # What is missing has the family's default, which is llama.cpp's too.
        **{name: value for name, value in given.items() if value is not None},
    }


def _gemma3(settings: _Settings, config: Values) -> Values:
    local = settings("rope.freq_base_swa", 10000.0)
    return _gemma2(settings, config) | {"rope_local_base_freq": local}


def _phi3(settings: _Settings, config: Values) -> Values:
    if any("rope_factors" in name for name in settings.file.names()):
        raise settings.file.refuse(
            "rope_factors_long", "a tensor", "longrope, which scales a phi3, cannot be represented"
        )
    if settings("rope.scaling.attn_factor", 1.0) != 1:
        raise settings.refuse("rope.scaling.attn_factor", "must be 1 without longrope")
    turned = settings("rope.dimension_count")
    return {
        "sliding_window": settings("attention.sliding_window") or None,
        "partial_rotary_factor": 1.0 if turned is None else turned / config["head_dim"],
    }


def _none(settings: _Settings, config: Values) -> Values:
    return {}


_BY_ARCHITECTURE: dict[str, Callable[[_Settings, Values], Values]] = {
    "llama": _llama,
    "qwen2": _none,
    "qwen3": _none,
    "gemma": _none,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
