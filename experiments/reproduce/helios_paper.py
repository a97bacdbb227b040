"""Values printed in HELIOS' paper (arXiv 2504.10724), by its own numbering."""

from __future__ import annotations

NEAR = 0.1  # of a share, within which it is the paper's
FITTED = "Thresholds are fitted so that the paper's share of tokens leaves before the last layer"

MODELS = {"small": "OPT-1.3B", "large": "OPT-6.7B"}
"""The paper's model that each of ours stands for."""

TABLE_1 = {"OPT-1.3B": (1.91, 1.47), "OPT-6.7B": (1.68, 1.49)}
"""Perplexity before and after evaluation."""

TABLE_2 = {"OPT-1.3B": (1.3e9, 24, (6, 12, 24)), "OPT-6.7B": (6.7e9, 32, (9, 17, 32))}
"""Parameters, layers, exits."""

TABLE_4 = {"OPT-1.3B": 4.6, "Llama-2-7B": 22.5, "Llama-2-13B": 37.8}
"""Memory saved on an A100, %, by loading 6, 9 and 15 layers. The table gives Llama2-13B 32 layers;
it has 40, and only with 40 does the saving come out."""

TABLE_5 = {
    "small only": (73.0, 4.70, 22.3, 0, 0, 0),
    "large only": (0, 0, 0, 73.6, 4.80, 21.6),
    "HELIOS, throughput": (70.19, 1.38, 6.78, 20.90, 0.14, 0.61),
    "HELIOS, response time": (49.3, 0.20, 0.90, 48.9, 0.10, 0.6),
    "HELIOS, accuracy": (52.3, 1.50, 7.30, 34.6, 0.70, 3.60),
    "HELIOS, energy": (74.3, 1.80, 7.90, 15.3, 0.10, 0.6),
}
"""% of tokens by exit: layers 6, 12, 24 of OPT-1.3B and 9, 17, 32 of OPT-6.7B."""

EXITS_1B3 = (74.0, 5.0, 21.0)
"""% of tokens by exit of OPT-1.3B, section 1 and Figure 11a."""

DEFAULTS = {"candidates": 2, "prompts": 5, "interval": 150, "breaches": 50, "window": 100}
"""Sections 3.3.1, 3.4, 3.4.1 and 3.4.2, by the fields of `ControllerOptions`."""

NOT_RUN = (
    (
        "Section 1",
        "Mistral-7B is as right as Llama-7B on TruthfulQA and costs less.",
        "0.90x latency, 0.85x energy",
    ),
    (
        "Figure 2",
        "Accuracy rises with parameters and operations, at a cost in latency.",
        "OpenBookQA 26.4 % to 35.2 % for 13x the parameters; HellaSwag 60 % to 61 % for 1.47x the "
        "latency",
    ),
    (
        "Figure 5",
        "The largest of ten models is not the best one for every task.",
        "Llama2-13B on gsm8k_cot: 37 % lower accuracy, 1.9x latency, 2x energy; on "
        "ethics_justice: 20 % higher accuracy, 1.4x latency, 1.6x energy",
    ),
    (
        "Figure 12",
        "Some models do well on most data sets, and others badly.",
        "Llama-3-8B, Llama-2-13B and Mistral-7B do well, GPT2-124M does badly",
    ),
)
"""(place, claim, value) of what ten published models show."""
