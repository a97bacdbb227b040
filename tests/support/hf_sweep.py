"""Drawn configurations of every family: each key present, absent or odd; files of every form."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import zlib
from typing import Any, NamedTuple

import numpy as np
from hf_models import VOCAB, weights

LENGTH, PROMPT = 24, 8  # tokens of a text; of which greedy ones follow this many
CONTEXT = 48
ABSENT = object()
END = "eos_token_id"


@dataclasses.dataclass(frozen=True)
class Odd:
    """A value that may be refused, by a message that has one of `words`, or the key's name."""

    value: Any
    words: str = ""


SIZE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=CONTEXT,
    intermediate_size=40,
)
GPT = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT)
# Keys and the values that are drawn of them, the usual ones first; half of the draws are the first.
TIED = dict(tie_word_embeddings=[ABSENT, True, False])
EPS = [ABSENT, 1e-5, 1e-3]
ACT = ["silu", ABSENT, "gelu", "relu", "gelu_new", Odd("mish"), Odd("tanh")]
HEADS = dict(head_dim=[ABSENT, 8, 16, None], num_key_value_heads=[2, 4, 1, None])
BIAS = dict(attention_bias=[ABSENT, True, False])
LINEAR = {"type": "linear", "factor": 2.0}
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
OLD = dict(original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", factor=4.0)
# Of keys that are drawn together: a dict of them.
ROTARY = [
    {},
    dict(rope_theta=200.0),
    dict(rope_scaling=LINEAR, rope_theta=1e3),
    dict(rope_parameters=dict(rope_type="default", rope_theta=200)),
    dict(rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=3)),
    dict(rope_scaling=LLAMA3 | OLD, rope_theta=5e3),
    dict(rope_scaling=LLAMA3, rope_theta=5e3) | OLD,
    dict(rope_parameters=LLAMA3 | dict(rope_theta=5e3)),
    dict(rope_parameters=LLAMA3 | dict(rope_theta=5e3, original_max_position_embeddings=32)) | OLD,
    dict(rope_scaling=YARN | OLD),
    dict(rope_scaling=YARN) | OLD,
    dict(rope_scaling=YARN),
    dict(rope_parameters=YARN | OLD | dict(rope_theta=1e3, beta_fast=16, beta_slow=2)),
    dict(rope_parameters=YARN | OLD | dict(rope_theta=1e3, mscale=1.0, mscale_all_dim=0)),
    dict(rope_parameters=YARN | OLD | dict(rope_theta=1e3, attention_factor=1.138629436111989)),
    dict(rope_scaling=LINEAR, rope_parameters=dict(rope_type="default", rope_theta=50.0)),
    Odd(dict(rope_scaling=dict(type="dynamic", factor=2.0)), "rope_type"),
    Odd(dict(rope_scaling=YARN | OLD | dict(mscale=0.7, mscale_all_dim=0.5)), "mscale"),
    Odd(dict(rope_scaling=YARN | OLD | dict(attention_factor=0.9)), "attention_factor"),
    Odd(dict(rope_scaling=YARN | OLD | dict(truncate=False)), "truncate"),
    Odd(dict(rope_scaling=dict(rope_type="llama3", factor=4.0)), "low_freq_factor"),
    Odd(
        dict(
            rope_scaling=dict(
                rope_type="longrope",
                short_factor=[1.0] * 4,
                long_factor=[2.0] * 4,
                original_max_position_embeddings=16,
            )
        ),
        "rope_type",
    ),
    Odd(
        dict(
            rope_parameters=dict(
                full_attention=dict(rope_type="default", rope_theta=9.0),
                sliding_attention=dict(rope_type="default", rope_theta=7.0),
            )
        ),
        "rope_parameters",
    ),
]
WHOLE = [ABSENT, 1.0, Odd(0.5)]  # partial_rotary_factor of families that turn whole heads
LAYERS = [ABSENT, ["sliding_attention", "full_attention"], ["sliding_attention"] * 2, None]
COMMON = dict(ROPE=ROTARY, rms_norm_eps=EPS, hidden_act=ACT, partial_rotary_factor=WHOLE)
COMMON |= TIED | HEADS
QWEN = dict(
    use_sliding_window=[ABSENT, True, False],
    sliding_window=[6, ABSENT, None],
    max_window_layers=[1, 0, 28],
    layer_types=LAYERS,
)
GEMMA = (
    COMMON
    | BIAS
    | dict(
        hidden_activation=["gelu_pytorch_tanh", ABSENT, "gelu", Odd("mish")],
        head_dim=[8, 16],
        use_bidirectional_attention=[ABSENT, False, Odd(True)],
    )
)
GEMMA2 = GEMMA | dict(
    query_pre_attn_scalar=[16, 20, ABSENT],
    sliding_window=[6, 40, ABSENT],
    layer_types=LAYERS,
    attn_logit_softcapping=[ABSENT, 5.0, None],
    final_logit_softcapping=[ABSENT, 3.0, None],
)
PARTS = [ABSENT, 0.5, 1.0, 0.25]
GPT_COMMON = dict(
    activation_function=["gelu_new", ABSENT, "relu", "gelu", "quick_gelu", Odd("mish")],
    n_inner=[ABSENT, None, 40],
    layer_norm_epsilon=EPS,
    num_attention_heads=[ABSENT, 4, Odd(2)],
    scale_attn_weights=[ABSENT],
)
SPACE: dict[str, tuple[dict, dict]] = {
    "llama": (SIZE, COMMON | BIAS | dict(mlp_bias=[ABSENT, True], pretraining_tp=[ABSENT, 1])),
    "mistral": (
        SIZE,
        COMMON
        | dict(
            sliding_window=[ABSENT, 6, None, 40],
            layer_types=[ABSENT, ["sliding_attention"] * 2, Odd(LAYERS[1])],
        ),
    ),
    "qwen2": (SIZE, COMMON | QWEN),
    "qwen3": (SIZE, COMMON | QWEN | BIAS | dict(head_dim=[8, 16])),
    "gemma": (
        SIZE,
        {k: v for k, v in GEMMA.items() if k != "hidden_activation"}
        | dict(hidden_act=["gelu_pytorch_tanh", ABSENT, "gelu", "relu", Odd("mish")]),
    ),
    "gemma2": (SIZE, {k: v for k, v in GEMMA2.items() if k != "hidden_act"}),
    "gemma3_text": (
        SIZE,
        {k: v for k, v in GEMMA2.items() if k != "hidden_act"}
        | dict(
            sliding_window_pattern=[ABSENT, 2],
            ROPE=[
                {},
                dict(rope_theta=500.0, rope_local_base_freq=20.0),
                dict(rope_scaling=dict(rope_type="linear", factor=2.0), rope_theta=1e3),
                Odd(dict(rope_scaling=LINEAR), "rope_scaling.type"),
                ROTARY[-1].value,
                dict(rope_parameters=dict(full_attention=LLAMA3 | OLD | dict(rope_theta=5e3))),
                dict(rope_parameters=dict(full_attention=LLAMA3 | dict(rope_theta=5e3))) | OLD,
                dict(rope_scaling=YARN | OLD),
                Odd(dict(rope_parameters=dict(rope_type="default", rope_theta=9.0)), "rope_par"),
                Odd(dict(rope_parameters=dict(sliding_attention=LINEAR)), "rope_par"),
            ],
        ),
    ),
    "olmo2": (SIZE, COMMON | BIAS),
    "smollm3": (
        SIZE,
        COMMON
        | BIAS
        | dict(
            mlp_bias=[ABSENT, True],
            no_rope_layer_interval=[ABSENT, 2, 1],
            no_rope_layers=[ABSENT, [1, 0], [0, 1], None],
            use_sliding_window=[ABSENT, True],
            sliding_window=[ABSENT, 6, None],
            layer_types=LAYERS,
        ),
    ),
    "granite": (
        SIZE,
        COMMON
        | BIAS
        | dict(
            mlp_bias=[ABSENT, True],
            embedding_multiplier=[ABSENT, 3.0, 12],
            logits_scaling=[ABSENT, 2.0, 8],
            residual_multiplier=[ABSENT, 0.4],
            attention_multiplier=[0.25, ABSENT, 0.125],
        ),
    ),
    "stablelm": (
        SIZE,
        TIED
        | dict(
            ROPE=ROTARY,
            layer_norm_eps=EPS,
            hidden_act=ACT,
            num_key_value_heads=[2, 4, 1],
            partial_rotary_factor=PARTS,
            use_qkv_bias=[ABSENT, True],
            use_parallel_residual=[ABSENT, True],
            qk_layernorm=[ABSENT, False, Odd(True)],
            head_dim=[ABSENT, 8, Odd(16)],
        ),
    ),
    "phi3": (
        SIZE,
        {k: v for k, v in COMMON.items() if k != "ROPE"}
        | dict(
            ROPE=[
                {},
                dict(rope_theta=200.0),
                dict(rope_parameters=dict(rope_type="default")),
                Odd(ROTARY[2], "rope_type"),
                Odd(ROTARY[9], "rope_type"),
                ROTARY[-2],
            ],
            partial_rotary_factor=PARTS,
            sliding_window=[ABSENT, 6, None],
            original_max_position_embeddings=[ABSENT, 16],
        ),
    ),
    "phi": (
        SIZE,
        HEADS
        | TIED
        | dict(
            ROPE=ROTARY,
            layer_norm_eps=EPS,
            hidden_act=["gelu_new", ABSENT, "relu", Odd("mish")],
            partial_rotary_factor=PARTS,
            qk_layernorm=[ABSENT, False, Odd(True)],
        ),
    ),
    "gpt2": (
        GPT,
        GPT_COMMON
        | TIED
        | dict(
            scale_attn_weights=[ABSENT, True, Odd(False)],
            scale_attn_by_inverse_layer_idx=[ABSENT, False, Odd(True)],
            reorder_and_upcast_attn=[ABSENT, True],
            hidden_size=[ABSENT, 32],
        ),
    ),
    "gptj": (GPT, GPT_COMMON | TIED | dict(rotary_dim=[4, 8, 2, Odd(None), Odd(3)])),
    "gpt_neox": (
        SIZE,
        TIED
        | dict(
            ROPE=[
                {},
                dict(rotary_emb_base=200),
                dict(rotary_pct=0.5),
                dict(rope_theta=20.0),
                *ROTARY[2:],
            ],
            rotary_pct=PARTS,
            layer_norm_eps=EPS,
            hidden_act=["gelu", ABSENT, "relu", Odd("mish")],
            use_parallel_residual=[ABSENT, True, False],
            attention_bias=[ABSENT, True, False],
            head_dim=[ABSENT, 8, Odd(16)],
        ),
    ),
    "falcon": (
        {k: v for k, v in SIZE.items() if k != "intermediate_size"},
        TIED
        | dict(
            ROPE=ROTARY,
            multi_query=[ABSENT, False],
            parallel_attn=[ABSENT, True, False],
            new_decoder_architecture=[ABSENT, True],
            num_kv_heads=[ABSENT, None, 2],
            num_ln_in_parallel_attn=[ABSENT, 1, 2],
            bias=[ABSENT, True],
            alibi=[ABSENT, Odd(True)],
            ffn_hidden_size=[ABSENT, 40],
            activation=[ABSENT, "gelu", "relu", Odd("mish")],
            layer_norm_epsilon=EPS,
            partial_rotary_factor=WHOLE,
        ),
    ),
    "opt": (
        {k: v for k, v in SIZE.items() if k != "intermediate_size"} | dict(ffn_dim=40),
        TIED
        | dict(
            do_layer_norm_before=[ABSENT, True, False],
            enable_bias=[ABSENT, True, False],
            _remove_final_layer_norm=[ABSENT, True],
            word_embed_proj_dim=[ABSENT, 32, 16],
            activation_function=["relu", ABSENT, "gelu", Odd("mish")],
            layer_norm_elementwise_affine=[ABSENT, True, Odd(False)],
        ),
    ),
}
STORED = ("one", "one", "head", "both", "listed", "bin", "shards")
GENERATION = (
    None,
    {},
    {END: 5},
    {END: [5, 7, 11], "pad_token_id": 3},
    {END: [5, 7], "do_sample": True, "temperature": 0.7, "top_p": 0.9, "bos_token_id": 1},
    {"do_sample": True, "top_k": 20, "repetition_penalty": 1.1},
)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """config: a config.json; may: expressions of the reasons for which it may be refused; stored:
    how the weights lie; saved: whether config.json is as transformers saves it; generation: a
    generation_config.json, or None."""

    config: dict[str, Any]
    may: tuple[str, ...]
    stored: str
    saved: bool
    generation: dict[str, Any] | None


def draw(family: str, number: int) -> Drawn:
    """The same configuration for the same number, everywhere."""
    rng = np.random.default_rng(zlib.crc32(f"{family}/{number}".encode()))
    base, space = SPACE[family]
    config: dict[str, Any] = {"model_type": family} | base
    may: list[str] = []
    for key, values in space.items():
        usual = [v for v in values if not isinstance(v, Odd)]
        odd = [v for v in values if isinstance(v, Odd)]
        # Every second key has its first value: what is seldom seen is seen by itself too.
        pool = odd if odd and rng.random() < 0.06 else usual[: 1 + (rng.random() < 0.5) * 99]
        value = pool[rng.integers(len(pool))]
        if isinstance(value, Odd):
            may.append(value.words or key)
            value = value.value
        if key == "ROPE":
            config |= value
        elif value is not ABSENT:
            config[key] = value
    for name in ("bos_token_id", END, "pad_token_id"):  # the families' own lie outside
        config[name] = [None, 2, [5, 9]][rng.integers(3 if name == END else 2)]
    stored = STORED[rng.integers(len(STORED))]
    generation = GENERATION[rng.integers(len(GENERATION))]
    return Drawn(config, tuple(may), stored, bool(rng.random() < 0.4), generation)


def write(drawn: Drawn, path: pathlib.Path) -> None:
    """Writes the folder. What transformers raises for a configuration that it refuses comes out."""
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.set_num_threads(1)  # of so small models
    kind = transformers.CONFIG_MAPPING[drawn.config["model_type"]]
    model = transformers.AutoModelForCausalLM.from_config(
        kind.from_dict(json.loads(json.dumps(drawn.config))), attn_implementation="eager"
    )
    model.config.save_pretrained(path)
    if not drawn.saved:
        (path / "config.json").write_text(json.dumps(drawn.config))
    if drawn.generation is not None:
        (path / "generation_config.json").write_text(json.dumps(drawn.generation))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    made = weights(drawn.config["model_type"], shapes)
    tensors = {name: torch.from_numpy(a) for name, a in made.items()}
    head = "lm_head.weight"
    tokens = next(n for n in tensors if re.search(r"embed_tokens|embed_in|wte|word_embeddings", n))
    tied, stored = head not in tensors, drawn.stored
    if tied and stored in ("both", "bin"):
        tensors[head] = tensors[tokens] if stored == "bin" else tensors[tokens].clone()
    if tied and stored == "head":
        tensors[head] = tensors.pop(tokens)
    if stored == "bin":
        torch.save(tensors, path / "pytorch_model.bin")
    elif stored in ("listed", "shards"):
        names = sorted(tensors)
        cut = len(names) // 2 if stored == "shards" else len(names)
        where = {}
        for i, part in enumerate((names[:cut], names[cut:])):
            if part:
                file = f"model-{i}.safetensors"
                save_file({n: tensors[n] for n in part}, path / file, {"format": "pt"})
                where |= dict.fromkeys(part, file)
        if tied and stored == "listed":
            where[head] = "model-0.safetensors"
        index = {"metadata": {}, "weight_map": where}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})


class Theirs(NamedTuple):
    """text: [1, t] ids, which greedy ones end, or that was given; logits: [t, v]; generation: what
    transformers takes for the settings of generation."""

    text: np.ndarray
    logits: np.ndarray
    generation: dict[str, Any]


def theirs(path: pathlib.Path, text: np.ndarray | None = None) -> Theirs:
    """What transformers makes of a folder."""
    import torch
    from hf_models import opened

    model = opened(path)
    with torch.no_grad():
        if text is None:
            ids = torch.tensor(np.random.default_rng(7).integers(0, VOCAB, (1, PROMPT)))
            while ids.shape[1] < LENGTH:
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        else:
            ids = torch.tensor(text)
        logits = model(ids, use_cache=False).logits[0].numpy()
    settings = model.generation_config.to_diff_dict()
    # What it takes of config.json where there is no such file; of no text another one comes.
    own = ("transformers_version", "_from_model_config", "use_cache")
    settings = {k: v for k, v in settings.items() if not k.startswith("output_")}
    return Theirs(ids.numpy(), logits, {k: v for k, v in settings.items() if k not in own})
