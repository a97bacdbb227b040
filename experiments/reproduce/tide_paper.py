"""Values that TIDE's paper prints (Jaber and Jaber, arXiv 2603.21365), by its own numbering."""

from __future__ import annotations

TABLE_1 = {
    "DeeBERT": "no, yes, yes, no, no",
    "CALM": "encoder-decoder, no, yes, no, no",
    "LayerSkip": "yes, no, yes, no, no",
    "EE-LLM": "yes, no, yes, no, no",
    "SkipDecode": "yes, yes, no, no, no",
    "MoD": "yes, no, yes, no, no",
    "TIDE": "yes, yes, yes, yes, yes",
}
"""Decoder, after training, per token, CUDA, universal."""

TABLE_2 = (
    (2048, 64),
    (2048, 128),
    (3072, 128),
    (4096, 128),
    (4096, 256),
    (5120, 128),
    (8192, 128),
    (8192, 256),
)
"""Hidden and bottleneck dimensions of compiled kernels."""

TABLE_3 = (
    ("DeepSeek R1 Distill 8B", 0.85, "100 % of 322 tokens: 16 at L11, 306 at L31"),
    ("DeepSeek R1 Distill 8B", 0.5, "100 % of 322 tokens: 16 at L11, 306 at L31"),
    ("Qwen3 8B", 0.85, "100 % of 155 tokens, at L35"),
    ("Qwen3 8B", 0.5, "100 % of 155 tokens: 11 at L11, 5 at L23, 139 at L35"),
)
"""Exits of a prompt's pass: model, threshold, tokens by layer."""

TABLE_4 = {
    ("latency", 0.85): "DeepSeek 39.08 to 36.94 ms (-5.5 %), Qwen3 46.82 to 44.14 ms (-5.7 %)",
    ("latency", 0.5): "DeepSeek 39.08 to 36.26 ms (-7.2 %)",
    ("throughput", 1): "DeepSeek 973 to 1,037 tok/s (+6.6 %), Qwen3 258 to 271 tok/s (+5.0 %)",
    (
        "throughput",
        8,
    ): "DeepSeek 8,668 to 7,252 tok/s (-16.3 %), Qwen3 1,781 to 1,926 tok/s (+8.1 %)",
}
"""A prompt's latency by threshold, and throughput by batch size, baseline to TIDE, on an A100."""

TABLE_5 = {
    1.0: "0 % early, 99 unique tokens, correct",
    0.85: "98.4 % early (L31), 95 unique tokens, correct",
    0.7: "99.2 % early (L31), 95 unique tokens, correct",
    0.5: "99.6 % early (L31), 95 unique tokens, correct",
}
"""Decoding of 256 tokens of `PROBLEM` by DeepSeek R1 Distill 8B, by threshold."""

PROBLEM = (
    "A store sells apples for $2 each and oranges for $3 each. If I buy 10 fruits and spend $24, "
    "how many of each did I buy?"
)
"""Section 5.3; 6 apples and 4 oranges."""

RECIPE = {"epochs": 100, "learning_rate": 1e-3, "schedule": "constant", "weight_decay": 0.0}
"""Section 3.1, as fields of `RouterOptions`: Adam for 100 epochs."""

FAMILIES = ("LLaMA", "Mistral", "Qwen", "GPT-2", "GPT-NeoX", "Phi", "Falcon", "OPT", "Gemma")
"""Section 3.2."""

CONVERGED = (
    "100 % at the penultimate checkpoint: DeepSeek R1 Distill 8B (339,853 tokens), Qwen3 8B "
    "(314,530), GPT-2 (78,843)"
)
"""Section 5.5."""
