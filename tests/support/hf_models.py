"""Tiny models of every family: what transformers computes is recorded, and compared live."""

from __future__ import annotations

SIZE = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
    max_position_embeddings=96, intermediate_size=48, bos_token_id=0, eos_token_id=0,
    pad_token_id=None,
)  # fmt: skip
GQA = SIZE | dict(num_key_value_heads=2)
GPT = dict(
    vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=96, bos_token_id=0, eos_token_id=0
)
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=24,
    low_freq_factor=1.0, high_freq_factor=4.0,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=24)

# name -> (configuration class, its values)
MODELS = {
    "gpt2": ("GPT2Config", GPT),
    "opt": ("OPTConfig", SIZE | dict(ffn_dim=48, word_embed_proj_dim=32)),
    "opt_350m": (
        "OPTConfig", SIZE | dict(ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False),
    ),
    "gpt_neox": ("GPTNeoXConfig", SIZE),
    "gpt_neox_sequential": (
        "GPTNeoXConfig", SIZE | dict(use_parallel_residual=False, attention_bias=False),
    ),
    "gptj": ("GPTJConfig", GPT | dict(rotary_dim=4)),
    "falcon_7b": ("FalconConfig", SIZE | dict(multi_query=True, parallel_attn=True)),
    "falcon_new": (
        "FalconConfig", SIZE | dict(new_decoder_architecture=True, num_kv_heads=2, bias=True),
    ),
    "falcon_11b": (
        "FalconConfig",
        SIZE | dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    ),
    "falcon_sequential": (
        "FalconConfig", SIZE | dict(multi_query=False, parallel_attn=False, bias=True),
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
        "Qwen2Config", GQA | dict(use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    "qwen3": ("Qwen3Config", GQA | dict(head_dim=16)),
    "gemma": ("GemmaConfig", GQA | dict(head_dim=16)),
    "gemma2": (
        "Gemma2Config",
        GQA | dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=20),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        GQA | dict(
            head_dim=16, sliding_window=6, query_pre_attn_scalar=20,
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
        GQA | dict(
            embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.4,
            attention_multiplier=0.2,
        ),
    ),
}  # fmt: skip


def make(name: str):
    """The model, with weights at random that make every part of it matter."""
    import torch
    import transformers

    kind, values = MODELS[name]
    torch.manual_seed(sorted(MODELS).index(name))
    config = getattr(transformers, kind)(**values, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            near = 1.0 if key.endswith("norm.weight") and "gemma" not in name else 0.0
            if p.ndim == 1:
                p.copy_(near + 0.3 * torch.randn(p.shape))
            else:
                p.copy_(torch.randn(p.shape) / p.shape[-1] ** 0.5)
    return model
