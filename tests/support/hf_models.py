"""Tiny models of every family: what transformers computes is recorded, and compared live."""

from __future__ import annotations

import json
import pathlib
import zlib

import numpy as np

VOCAB, LENGTH, PROMPT, NEW = 61, 40, 8, 64
FILE = pathlib.Path(__file__).parents[1] / "checkpoint" / "hf" / "recorded.npz"
RECORDED = np.load(FILE) if FILE.exists() else {}

SIZE = dict(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=96,
    intermediate_size=48,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=None,
)
GQA = SIZE | dict(num_key_value_heads=2)
GPT = dict(
    vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=96, bos_token_id=0, eos_token_id=0
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=24,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=24)

# name -> (configuration class, its values)
MODELS = {
    "gpt2": ("GPT2Config", GPT),
    "opt": ("OPTConfig", SIZE | dict(ffn_dim=48, word_embed_proj_dim=32)),
    "opt_350m": (
        "OPTConfig",
        SIZE | dict(ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False),
    ),
    "gpt_neox": ("GPTNeoXConfig", SIZE),
    "gpt_neox_sequential": (
        "GPTNeoXConfig",
        SIZE | dict(use_parallel_residual=False, attention_bias=False),
    ),
    "gptj": ("GPTJConfig", GPT | dict(rotary_dim=4)),
    "falcon_7b": ("FalconConfig", SIZE | dict(multi_query=True, parallel_attn=True)),
    "falcon_new": (
        "FalconConfig",
        SIZE | dict(new_decoder_architecture=True, num_kv_heads=2, bias=True),
    ),
    "falcon_11b": (
        "FalconConfig",
        SIZE | dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    ),
    "falcon_sequential": (
        "FalconConfig",
        SIZE | dict(multi_query=False, parallel_attn=False, bias=True),
    ),
    "phi": ("PhiConfig", GQA),
    "phi3": ("Phi3Config", GQA | dict(sliding_window=7)),
    "llama": ("LlamaConfig", GQA),
    "llama_tied": ("LlamaConfig", SIZE | dict(tie_word_embeddings=True, attention_bias=True)),
    "llama3": ("LlamaConfig", GQA | dict(rope_parameters=LLAMA3, head_dim=16)),
    "llama_yarn": ("LlamaConfig", GQA | dict(rope_parameters=YARN, mlp_bias=True)),
    "mistral": ("MistralConfig", GQA | dict(sliding_window=9)),
    "qwen2": ("Qwen2Config", GQA),
    "qwen2_windows": (
        "Qwen2Config",
        GQA | dict(use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    "qwen3": ("Qwen3Config", GQA | dict(head_dim=16)),
    "gemma": ("GemmaConfig", GQA | dict(head_dim=16)),
    "gemma2": (
        "Gemma2Config",
        GQA | dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=20),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        GQA
        | dict(
            head_dim=16,
            sliding_window=6,
            query_pre_attn_scalar=20,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
            },
        ),
    ),
    "stablelm": ("StableLmConfig", GQA | dict(use_qkv_bias=True)),
    "stablelm_parallel": ("StableLmConfig", GQA | dict(use_parallel_residual=True)),
    "olmo2": ("Olmo2Config", GQA),
    "smollm3": ("SmolLM3Config", GQA | dict(no_rope_layer_interval=2)),
    "granite": (
        "GraniteConfig",
        GQA
        | dict(
            embedding_multiplier=3.0,
            logits_scaling=2.0,
            residual_multiplier=0.4,
            attention_multiplier=0.2,
        ),
    ),
}


# Of families that nothing here knows.
UNKNOWN = {
    "starcoder2": ("Starcoder2Config", GQA | dict(sliding_window=None)),
    "arcee": ("ArceeConfig", GQA),
    "seed_oss": ("SeedOssConfig", GQA | dict(head_dim=16)),
    "helium": ("HeliumConfig", GQA | dict(head_dim=8)),
    "ministral": ("MinistralConfig", GQA | dict(head_dim=8, sliding_window=16)),
    "cwm": ("CwmConfig", GQA | dict(head_dim=8, sliding_window=128)),
    "glm": ("GlmConfig", GQA | dict(head_dim=8)),
}


# Of types that are refused, and the cause in the family's own words.
REFUSED = {
    "persimmon": ("PersimmonConfig", SIZE, "layernorm.bias, for which there is no place"),
    "olmo": ("OlmoConfig", GQA, "norms without weights"),
    "xglm": (
        "XGLMConfig",
        dict(
            vocab_size=61,
            max_position_embeddings=96,
            d_model=32,
            ffn_dim=48,
            num_layers=2,
            attention_heads=4,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=1,
        ),
        "neither a table of positions nor settings of rotary ones or ALiBi: others .sinusoidal",
    ),
    "cohere": (
        "CohereConfig",
        GQA | dict(logit_scale=0.25),
        "computes something else than transformers.*logit_scale = 0.25 .a scale.",
    ),
}


def weights(name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Numbers for tensors by name, the same everywhere, that make every part of a model matter."""
    made = {}
    for tensor, shape in shapes.items():
        rng = np.random.default_rng(zlib.crc32(f"{name}/{tensor}".encode()))
        a = rng.standard_normal(shape)
        if len(shape) == 1:
            scale = tensor.endswith(".weight") and not name.startswith("gemma")
            a = (0.3 if tensor.endswith(".weight") else 0.1) * a + scale
        else:
            a = 2 * a / shape[-1] ** 0.5
        made[tensor] = a.astype(np.float32)
    return made


def recorded(name: str, path: pathlib.Path, **changes) -> dict:
    """Writes the folder that transformers wrote when the model was recorded, with `changes` of its
    config.json; what was recorded of the model."""
    from safetensors.numpy import save_file

    about = json.loads(str(RECORDED[f"{name}/about"]))
    path.mkdir()
    (path / "config.json").write_text(json.dumps(about["config"] | changes))
    shapes = {key: tuple(shape) for key, shape in about["shapes"].items()}
    save_file(weights(name, shapes), path / "model.safetensors", metadata={"format": "pt"})
    return about


def saved(name: str, path: pathlib.Path) -> dict[str, np.ndarray]:
    """Writes a model's folder by transformers, with these weights; the weights."""
    import torch
    import transformers
    from safetensors import safe_open
    from safetensors.numpy import save_file

    kind, values, *_ = (MODELS | UNKNOWN | REFUSED)[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**values)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    with safe_open(path / "model.safetensors", "np") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    made = weights(name, shapes)
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    return made


def opened(path: pathlib.Path, dtype: str = "float32"):
    """transformers' model of a folder, computed in the open."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=getattr(torch, dtype)
    ).eval()


def tokens(length: int) -> np.ndarray:
    """[1, length] of the vocabulary."""
    return np.random.default_rng(7).integers(0, VOCAB, (1, length))


def theirs(model) -> tuple[np.ndarray, list[int]]:
    """Logits [t, v] of `tokens(LENGTH)`, and what follows `tokens(PROMPT)`, greedily."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor(tokens(LENGTH))).logits[0].numpy()
        ids = torch.tensor(tokens(PROMPT))
        for _ in range(NEW):  # each over all of the text, with no cache to go wrong
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return logits, ids[0, PROMPT:].tolist()


def config_keys(kind: str) -> list[str]:
    """Keys of config.json that transformers has for a family: fields of its configuration, and
    what the sources of its model and configuration read besides."""
    import dataclasses
    import inspect
    import re
    import sys

    import transformers

    config = transformers.CONFIG_MAPPING[kind]
    model = transformers.AutoModelForCausalLM._model_mapping[config]
    found = {f.name for f in dataclasses.fields(config)}
    for cls in (model, config):
        source = inspect.getsource(sys.modules[cls.__module__])
        found |= set(re.findall(r"\bconfig\.(\w+)", source))
        found |= set(re.findall(r"""getattr\((?:self\.)?config, "(\w+)\"""", source))
        found |= set(re.findall(r"""kwargs\.(?:get|pop|setdefault)\(\s*"(\w+)\"""", source))
    return sorted(key for key in found if not callable(getattr(config, key, None)))
