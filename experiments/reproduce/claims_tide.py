"""Claims of TIDE (Jaber and Jaber 2026, arXiv 2603.21365), in the order of the paper."""

from __future__ import annotations

from eejax.experiments.reproduce.claims import Claim

PAPER = "TIDE"

CLAIMS = (
    Claim(
        "prefill-rate",
        "Abstract",
        "All tokens of a prompt find an exit.",
        "100 %, of them 5 % at layer 11",
        repeats="table-3",
    ),
    Claim(
        "prefill-latency",
        "Abstract",
        "Prefill takes less time, and throughput rises.",
        "-7.2 %; +6.6 % (batch 1), +8.1 % (Qwen3 8B, batch 8)",
        repeats="table-4",
    ),
    Claim("decoding", "Abstract", "Nearly all decoded tokens leave early.", "98 to 99 %"),
    Claim(
        "problem",
        "Abstract",
        "A mathematical problem is still solved.",
        "95 unique tokens",
        repeats="table-5",
    ),
    Claim("router-file", "Abstract", "The routers of a model are a file of about 4 MB.", "~4 MB"),
    Claim(
        "code-size",
        "Abstract",
        "The system is small.",
        "1,308 lines of Python, 1,081 of CUDA/C++, 74 tests",
        repeats="release",
    ),
    Claim(
        "router-size",
        "Section 1",
        "A router has d x 128 + 128 parameters.",
        "524,416 for d = 4,096",
    ),
    Claim(
        "learned-signal",
        "Section 1",
        "A router predicts which tokens may leave better than the softmax's entropy does.",
        "claimed, not measured",
    ),
    Claim(
        "adapter",
        "Section 1",
        "It works with any causal language model of the Hugging Face hub.",
        "17 attribute paths",
        repeats="component-paths",
    ),
    Claim(
        "table-1",
        "Table 1",
        "TIDE alone is for decoders, trained afterwards, per token, with kernels, and universal.",
        "a comparison of seven systems",
    ),
    Claim(
        "figure-1",
        "Figure 1",
        "Routers are calibrated once; inference runs all layers and then selects the exit.",
        "drawn",
        repeats="cache",
    ),
    Claim("placement", "Section 3.1", "Routers stand every c layers.", "layers c - 1, 2c - 1, ..."),
    Claim(
        "training",
        "Section 3.1",
        "Adam at 1e-3 for 100 epochs trains the routers.",
        "100 epochs, binary cross-entropy",
    ),
    Claim(
        "calibration-time",
        "Section 3.1",
        "Calibration takes under three minutes (also the abstract).",
        "170 s for 339,853 tokens of 2,000 texts, 8B parameters, A100",
    ),
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
        "component-paths",
        "Section 3.2",
        "One adapter reads models of many families, which users can extend.",
        "5 component types, register_adapter()",
    ),
    Claim(
        "cache",
        "Section 3.3",
        "All layers run, so keys and values are complete.",
        "no missing keys",
    ),
    Claim(
        "any-transformers",
        "Section 3.3",
        "Post-hoc generation works with any version of the transformers library.",
        "v5.3 and later too",
    ),
    Claim(
        "kernels",
        "Section 3.4",
        "Four fused kernels in three data types.",
        "norm and route, compact, scatter, project; float32, float16, bfloat16",
    ),
    Claim(
        "float32-sums",
        "Section 3.4",
        "Kernels add in float32, whatever the type of the states.",
        "float32",
    ),
    Claim(
        "router-weights",
        "Section 3.4",
        "The weights of routers stay in float32.",
        "float32, in the L2 cache",
    ),
    Claim(
        "algorithm-1",
        "Algorithm 1",
        "A batch takes the earliest exit from k_min on at which all its rows exceed the threshold.",
        "pseudocode",
    ),
    Claim(
        "table-2",
        "Table 2",
        "Kernels are specialised for eight pairs of dimensions.",
        "widths 2,048 to 8,192, bottlenecks 64, 128, 256",
    ),
    Claim(
        "gpus",
        "Section 4",
        "The GPU is detected, from V100 to Blackwell; without a compiler there are no kernels.",
        "sm_70 to sm_120",
    ),
    Claim(
        "no-compiler",
        "Section 4",
        "If kernels cannot be compiled, everything runs without them (also section 5.6).",
        "pure Python",
    ),
    Claim(
        "setup",
        "Section 5",
        "All runs are on an A100-SXM4-40GB in bfloat16, by 20 runs after 3 of warm-up, with c = 4, "
        "tau = 0.98 and 16 prompts.",
        "CUDA 12.4, PyTorch 2.10, transformers 5.3",
        cannot="needs this GPU and models of 8B; our values are those of a small model on a CPU",
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
        "third",
        "Section 5.1",
        "Some tokens leave after a third of the layers.",
        "5 % (16 of 322) at L11 of 32",
    ),
    Claim(
        "why-faster",
        "Section 5.2",
        "Exited tokens skip the final norm's path, and the fused kernel needs fewer launches.",
        "the reason given for Table 4",
        cannot="needs the kernels on a GPU, where launches cost time",
    ),
    Claim(
        "unique", "Section 5.3", "Exits hardly change the number of unique tokens.", "95 beside 99"
    ),
    Claim(
        "table-5",
        "Table 5",
        "Decoding exits early at every threshold and stays correct on a word problem.",
        "exit rates 98.4, 99.2, 99.6 % at 0.85, 0.70, 0.50, all at layer 31",
    ),
    Claim(
        "figure-2",
        "Figure 2",
        "Exits chosen by token save layers: three tokens at 8, 16 and 32 of 32.",
        "56 of 96 layers, 42 % less (an illustration)",
    ),
    Claim(
        "converged",
        "Section 5.5",
        "Every token converges (cosine 0.98) at the penultimate checkpoint.",
        "DeepSeek 339,853 at L31, Qwen3 314,530 at L35, GPT-2 78,843 at L11",
    ),
    Claim(
        "lower-tau",
        "Section 5.5",
        "A lower bound labels more tokens as converged at earlier layers.",
        "0.95 or 0.90, not measured",
    ),
    Claim(
        "lines",
        "Section 5.6",
        "The package has 3,097 lines, 708 of them tests.",
        "1,308 lines of Python, 1,081 of CUDA/C++, 708 of tests",
        cannot="these are facts of the authors' package, and nothing to reproduce",
    ),
    Claim(
        "release",
        "Section 5.6",
        "The package: lines, tests, and the GPUs that it detects (also the abstract).",
        "1,308 lines of Python, 1,081 of CUDA/C++, 74 tests, V100 to Blackwell",
        cannot="these are facts of the authors' package, and nothing to reproduce",
    ),
    Claim(
        "no-skipping",
        "Section 6",
        "Layers can actually be skipped once gaps in the cache are handled.",
        "future work, not tried",
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
        "Keeping states only at checkpoints would cost less than keeping all of them.",
        "future work",
    ),
)
