"""Claims of TIDE (Jaber and Jaber 2026, arXiv 2603.21365), in the order of the paper."""

from __future__ import annotations

from experiments.reproduce.claims import Claim

PAPER = "TIDE"

CLAIMS = (
    Claim(
        "prefill-rate",
        "Abstract",
        "All tokens of a prompt find an exit.",
        "100 %, of them 5 % at layer 11",
        repeats="table-3",
    ),
    Claim("prefill-latency", "Abstract", "Prefill takes less time.", "-7.2 %", repeats="table-4"),
    Claim(
        "throughput-1",
        "Abstract",
        "Throughput of a single request rises.",
        "+6.6 %",
        repeats="table-4",
    ),
    Claim(
        "throughput-8",
        "Abstract",
        "Throughput at batch size 8 rises (Qwen3 8B).",
        "+8.1 %",
        repeats="table-4",
    ),
    Claim(
        "decoding",
        "Abstract",
        "Nearly all decoded tokens exit early, and a mathematical problem is still solved.",
        "98-99 %, 95 unique tokens",
        repeats="table-5",
    ),
    Claim(
        "calibration-time",
        "Abstract",
        "Calibration takes minutes and leaves a small file.",
        "under 3 minutes, about 4 MB",
    ),
    Claim(
        "code-size",
        "Abstract",
        "The system is small.",
        "1,308 lines of Python, 1,081 of CUDA/C++, 74 tests",
    ),
    Claim(
        "router-size",
        "Section 1",
        "A router has few parameters.",
        "d x 128 + 128 = 524,416 for d = 4,096",
    ),
    Claim(
        "learned-signal",
        "Section 1",
        "A learned router tells converged tokens more reliably than the softmax' own confidence.",
        "stated, without numbers",
    ),
    Claim(
        "adapter",
        "Section 1",
        "Any causal language model of the Hugging Face hub is read by probing its structure.",
        "17 attribute paths",
    ),
    Claim(
        "table-1",
        "Table 1",
        "Of the systems compared TIDE alone has decoders, post-training, per-token exits, CUDA "
        "and any model.",
        "a comparison of features",
    ),
    Claim(
        "figure-1",
        "Figure 1",
        "Calibration collects states, labels and trains; inference runs all layers and then "
        "selects the exit.",
        "a drawing",
    ),
    Claim("placement", "Section 3.1", "Routers stand every c layers.", "layers c - 1, 2c - 1, ..."),
    Claim(
        "eq-1",
        "Eq. (1)",
        "A token has converged where the cosine of its state to the last layer's exceeds tau.",
        "tau = 0.98",
    ),
    Claim(
        "eq-2",
        "Eq. (2)",
        "A router is norm, down-projection, SiLU, up-projection and sigmoid.",
        "bottleneck 128",
    ),
    Claim(
        "training",
        "Section 3.1",
        "Routers learn by binary cross-entropy and Adam.",
        "lr 1e-3, 100 epochs; 339,853 tokens in 170 s",
    ),
    Claim(
        "component-paths",
        "Section 3.2",
        "Layers, norm, head, embedding and width are found by paths and fallbacks, or by a "
        "registered adapter.",
        "5 component types",
    ),
    Claim(
        "cache",
        "Section 3.3",
        "All layers run, so keys and values are complete.",
        "no missing keys",
    ),
    Claim(
        "kernels",
        "Section 3.4",
        "Four fused kernels: norm and router, compaction, scatter, projection of exited tokens.",
        "4 kernels",
    ),
    Claim(
        "dtypes",
        "Section 3.4",
        "Kernels take three types and add up in float32.",
        "float32, float16, bfloat16",
    ),
    Claim(
        "algorithm-1",
        "Algorithm 1",
        "The earliest exit from k_min on is taken at which all rows of the batch exceed the "
        "threshold.",
        "pseudocode",
    ),
    Claim(
        "table-2",
        "Table 2",
        "The router kernel is specialised for common widths and bottlenecks.",
        "8 pairs: widths 2,048 to 8,192, bottlenecks 64, 128, 256",
    ),
    Claim(
        "gpus",
        "Section 4",
        "The GPU is detected, from V100 to Blackwell; without a compiler there are no kernels.",
        "sm_70 to sm_120",
    ),
    Claim(
        "table-3",
        "Table 3",
        "Tokens of 16 prompts by exit.",
        "100 %; DeepSeek R1 8B: 16 of 322 at layer 11, the others at 31; Qwen3 8B at 0.5: 11, 5,"
        " 139 at 11, 23, 35",
    ),
    Claim(
        "table-4",
        "Table 4",
        "Prefill latency falls and throughput mostly rises.",
        "DeepSeek R1 8B: latency -5.5 and -7.2 %, throughput +6.6 (1) and -16.3 % (8); Qwen3 8B:"
        " -5.7 %, +5.0 and +8.1 %",
    ),
    Claim(
        "table-5",
        "Table 5",
        "Decoding exits early at every threshold and stays correct on a word problem.",
        "exit rates 98.4, 99.2, 99.6 % at 0.85, 0.70, 0.50, all at layer 31; 95 unique tokens "
        "beside 99",
    ),
    Claim(
        "figure-2",
        "Figure 2",
        "Tokens of a sentence leave at different depths.",
        "8 + 16 + 32 = 56 layers in place of 96",
    ),
    Claim(
        "section-5-5",
        "Section 5.5",
        "With tau = 0.98 all tokens converge at the last checkpoint, few before.",
        "DeepSeek 339,853 at L31, Qwen3 314,530 at L35, GPT-2 78,843 at L11",
    ),
    Claim(
        "lower-tau",
        "Section 5.5",
        "A lower tau labels more tokens as converged earlier.",
        "0.95 or 0.90",
    ),
    Claim(
        "release",
        "Section 5.6",
        "Tests cover adapters, calibration, kernels and the whole; without CUDA it falls back to"
        " Python.",
        "74 tests",
    ),
    Claim(
        "no-skipping",
        "Section 6",
        "Post-hoc selection skips no layer in wall-clock time; true skipping is future work.",
        "a limitation",
    ),
    Claim(
        "per-layer", "Section 6", "Thresholds by layer could unlock earlier exits.", "future work"
    ),
    Claim(
        "deeper",
        "Section 6",
        "Deeper models should exit earlier.",
        "70B and more, not tried",
        cannot="needs models of 70B parameters",
    ),
    Claim(
        "hidden-states",
        "Section 6",
        "Returning all hidden states costs time at large batches; keeping checkpoints alone "
        "would cost less.",
        "future work",
    ),
)
