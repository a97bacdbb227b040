"""GGUF files made of Hugging Face folders, as llama.cpp's convert_hf_to_gguf.py makes them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

KINDS = {"gemma3_text": "gemma3", "mistral": "llama"}


def write_gguf(
    folder: pathlib.Path,
    path: pathlib.Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    more: Mapping[str, Any] = {},
    tokenizer: Mapping[str, Any] = {},
    factors: np.ndarray | None = None,
    without: Collection[str] = (),
) -> pathlib.Path:
    """Write the model of `folder`. `more` has further settings of the architecture, `factors`
    those of its rotary frequencies, matrices are of `kind`, and settings `without` are left out."""
    config = json.loads((folder / "config.json").read_text())
    name = KINDS.get(config["model_type"], config["model_type"])
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == name)
    heads = config["num_attention_heads"]
    kv = config.get("num_key_value_heads", heads)
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    writer.add_rope_dimension_count(size)
    writer.add_vocab_size(config["vocab_size"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.get("sliding_window") and name in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config["sliding_window"])
    if name == "gemma2":
        if "attn_logit_softcapping" not in without:
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    for key, value in more.items():
        add(writer, f"{name}.{key}", value)
    for key, value in tokenizer.items():
        add(writer, f"tokenizer.{key}", value)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    tied = config.get("tie_word_embeddings", name.startswith("gemma"))
    for theirs, a in load_file(folder / "model.safetensors").items():
        if theirs == "lm_head.weight" and tied:
            continue
        if name == "llama" and ("q_proj" in theirs or "k_proj" in theirs):
            a = permuted(a, heads if "q_proj" in theirs else kv)
        if name.startswith("gemma") and theirs.endswith("norm.weight"):
            a = a + 1
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert ours is not None, theirs
        if a.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(ours, a)
        else:
            writer.add_tensor(ours, gguf.quantize(a, kind), raw_dtype=kind)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def permuted(a: np.ndarray, heads: int) -> np.ndarray:
    """Rows of halves of heads as rows of rotary pairs."""
    return a.reshape(heads, 2, -1, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)


def bpe_metadata(definition: Mapping[str, Any], pre: str, **more: Any) -> dict[str, Any]:
    """Metadata of a tokenizer.json of a BPE."""
    vocabulary = {t: i for t, i in definition["model"]["vocab"].items()}
    added = {one["content"]: one for one in definition["added_tokens"]}
    vocabulary |= {name: one["id"] for name, one in added.items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = definition["model"]["merges"]
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [
            1 if t not in added else 3 if added[t]["special"] else 4 for t in tokens
        ],
        "ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
    } | {f"ggml.{name}": value for name, value in more.items()}


def pieces_metadata(model: bytes, **more: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece model."""
    from sentencepiece import sentencepiece_model_pb2 as messages

    read = messages.ModelProto.FromString(model)
    defined = messages.ModelProto.SentencePiece.USER_DEFINED
    unknown = messages.ModelProto.SentencePiece.UNKNOWN
    return {
        "ggml.model": "llama",
        "ggml.tokens": [
            p.piece.replace("\u2581", " ") if p.type == defined else p.piece for p in read.pieces
        ],
        "ggml.scores": [p.score for p in read.pieces],
        "ggml.token_type": [3 if p.type == unknown else int(p.type) for p in read.pieces],
    } | {f"ggml.{name}": value for name, value in more.items()}
