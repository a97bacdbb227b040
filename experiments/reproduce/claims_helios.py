"""Claims of HELIOS (Kumar et al. 2025, arXiv 2504.10724), in the order of the paper."""

from __future__ import annotations

from eejax.experiments.reproduce.claims import Claim

PAPER = "HELIOS"
TEN_MODELS = "needs ten pretrained models of 124M to 13B parameters on public benchmarks"

CLAIMS = (
    Claim(
        "throughput",
        "Abstract",
        "Throughput is higher than with the baseline model.",
        "1.48x",
        repeats="figure-13",
    ),
    Claim(
        "energy",
        "Abstract",
        "Energy efficiency is higher than with the baseline model.",
        "1.10x",
        repeats="energy-per-prompt",
    ),
    Claim(
        "response-time",
        "Abstract",
        "Response time is lower than with the baseline model.",
        "1.39x",
        repeats="figure-14",
    ),
    Claim("batch-size", "Abstract", "Batches are larger than the baseline's.", "3.7x on average"),
    Claim(
        "mistral",
        "Section 1",
        "Mistral-7B is as right as Llama-7B on TruthfulQA and costs less.",
        "0.90x latency, 0.85x energy",
        cannot="needs both pretrained 7B models",
    ),
    Claim(
        "exit-shares",
        "Section 1",
        "Most tokens of a prompt mix leave OPT-1.3B early, and some need all layers.",
        "74 % after 6 of 24 layers, 5 % after 12, 21 % after 24",
        repeats="figure-11a",
    ),
    Claim(
        "low-confidence",
        "Section 1",
        "Tokens that a confidence of 0.2 keeps from leaving by OPT-6.7B's first exit stay the "
        "same.",
        "92.1 % (CNN/DailyMail)",
    ),
    Claim(
        "figure-1",
        "Figures 1 and 10, Algorithm 1",
        "Candidates are evaluated, the best is loaded in part, breaches load more or switch, and"
        " candidates are reassessed.",
        "drawn",
    ),
    Claim(
        "figure-2",
        "Figure 2",
        "Accuracy rises with parameters and operations, at a cost in latency.",
        "OpenBookQA 26.4 % to 35.2 % for 13x the parameters and 8x the operations",
        cannot=TEN_MODELS,
    ),
    Claim(
        "figure-3",
        "Figures 3 and 4",
        "A token leaves by the first exit whose confidence exceeds the threshold.",
        "drawn",
    ),
    Claim(
        "exits-gain",
        "Section 2.3",
        "Early exits improve throughput and latency without loss of accuracy.",
        "said, without a number",
    ),
    Claim(
        "figure-5-cost",
        "Figure 5",
        "The largest model takes more time and energy than the best one, or than the others.",
        "gsm8k_cot: 1.9x the latency, 2x the energy; ethics_justice: 1.4x, 1.6x",
        cannot=TEN_MODELS,
    ),
    Claim(
        "figure-5",
        "Figure 5",
        "The largest of ten models is not the best one for every task.",
        "Llama2-13B on gsm8k_cot: 37 % lower accuracy; on ethics_justice: 20 % higher",
        cannot=TEN_MODELS,
    ),
    Claim(
        "figure-6a",
        "Figure 6a",
        "An exit after 16 layers saves half of Llama-7B's operations and 60 % of 13B's.",
        "50 %, 60 %",
    ),
    Claim(
        "figure-6b",
        "Figure 6b",
        "Earlier exits access less memory, while the footprint stays the same.",
        "drawn, no numbers",
    ),
    Claim(
        "figure-7",
        "Figure 7",
        "Most tokens leave by the first exit, at about a quarter of the depth.",
        "over 70 % in both models; about 20 % take all layers",
    ),
    Claim(
        "figure-8",
        "Figure 8",
        "The token of the first exit is the final one, whatever the threshold.",
        "85 % at least, four data sets, OPT-6.7B",
    ),
    Claim(
        "figure-9",
        "Figure 9",
        "Tokens that need many layers in one model need fewer in the other.",
        "drawn, no numbers",
    ),
    Claim(
        "locality",
        "Section 3.1.3",
        "Successive prompts are alike, so exits of a few predict those of the next.",
        "an insight, without numbers",
        cannot=(
            "the paper states it without a measurement; our prompts are from benchmarks, and no "
            "user refined them"
        ),
    ),
    Claim(
        "defaults",
        "Sections 3.3.1 to 3.4.2",
        "Defaults: candidates, prompts of an evaluation, reassessment interval (RI), breaches "
        "(CBC) in a window.",
        "2, 5, 150, 50 of 100",
    ),
    Claim(
        "outputs-kept",
        "Section 3.4",
        "Tokens of evaluations are kept, and evaluations do not delay the first token.",
        "not impacted",
    ),
    Claim(
        "metrics",
        "Section 3.4",
        "Accuracy without ground truth is measured by perplexity, SUPERT, ROUGE-C or BLANC.",
        "perplexity is used",
        cannot=(
            "SUPERT and BLANC need pretrained models of their own; ROUGE-C needs none, but is "
            "not implemented; perplexity is in Table 1 and Figure 16"
        ),
    ),
    Claim(
        "table-1",
        "Table 1",
        "Evaluation on the task's prompts chooses another model than the benchmark.",
        "OPT-1.3B 1.91 to 1.47; OPT-6.7B 1.68 to 1.49",
    ),
    Claim(
        "figure-11a",
        "Figure 11a",
        "OPT-1.3B's tokens leave after 6, 12 and 24 layers (also section 1).",
        "74 % / 5 % / 21 %",
    ),
    Claim(
        "figure-11b",
        "Figure 11b",
        "Many of OPT-1.3B's tokens past the first exit leave by OPT-6.7B's first exit.",
        "57 %",
    ),
    Claim(
        "interval-by-cost",
        "Section 3.4.2",
        "The reassessment interval follows from the latency of the candidates and the cost of "
        "loading them.",
        "a simple algorithm",
    ),
    Claim(
        "overlap",
        "Section 3.4.2",
        "Loading another model overlaps with the tokens of the current one.",
        "on another server",
    ),
    Claim(
        "other-candidates",
        "Section 3.4.2",
        "Reassessments take the same candidates, and others of the repository (MR) if needed.",
        "the shortlisted ones by default",
    ),
    Claim(
        "figure-12",
        "Figure 12",
        "Some models do well on most data sets, and others badly.",
        "Llama-3-8B, Llama-2-13B and Mistral-7B do well, GPT2-124M badly",
        cannot=TEN_MODELS,
    ),
    Claim(
        "training",
        "Section 4.1",
        "Exits are trained with a weight of 1.0 each, for 50,000 iterations, on RedPajama and "
        "the Pile.",
        "OPT-1.3B and OPT-6.7B fine-tuned",
    ),
    Claim(
        "table-2",
        "Table 2",
        "The models have the layers and exits of the table.",
        "OPT-1.3B: 24 layers, exits 6, 12, 24; OPT-6.7B: 32 layers, exits 9, 17, 32",
    ),
    Claim(
        "setup",
        "Section 4.2",
        "All runs are on 4 A100-40GB of one server, with EE-LLM, TP = 1 and PP = 4.",
        "NVSwitch, 600 GB/s; AMD EPYC 7742",
        cannot="needs these GPUs and EE-LLM's code; our values are simulated from times on a CPU",
    ),
    Claim(
        "prompts",
        "Section 4.3",
        "Prompts are a mix of tasks, answered by 100 tokens each.",
        "CNN/DailyMail, TruthfulQA, OpenBookQA, GSM8K, code, sentence completion",
    ),
    Claim("throughput-formula", "Table 3", "Throughput is 1 / TPOT.", "1 / TPOT"),
    Claim(
        "latency-formula", "Table 3", "Latency is (TTFT + TPOT) x tokens.", "(TTFT + TPOT) x tokens"
    ),
    Claim(
        "figure-13",
        "Figure 13",
        "HELIOS raises throughput over either model alone (also the abstract).",
        "1.48x OPT-1.3B, 2.13x OPT-6.7B",
    ),
    Claim(
        "figure-13c",
        "Figure 13c",
        "More layers are loaded (LD), and models are switched (SW).",
        "both occur",
    ),
    Claim(
        "earliest-exits", "Section 5.1", "Nearly all tokens leave by the earliest exits.", "91 %"
    ),
    Claim("smaller-model", "Section 5.1", "Most of these tokens are the smaller model's.", "77 %"),
    Claim(
        "all-layers",
        "Section 5.1",
        "Few tokens take all layers.",
        "7.39 %, a third of either model alone",
    ),
    Claim(
        "throughput-energy",
        "Section 5.1",
        "The choice for throughput also saves energy.",
        "1.06x OPT-1.3B, 2.17x OPT-6.7B",
    ),
    Claim(
        "throughput-perplexity", "Section 5.1", "Perplexity stays that of OPT-1.3B.", "0.01 less"
    ),
    Claim(
        "no-synchronisation",
        "Section 5.2",
        "If only a part of a model is loaded, no token of a batch waits for a deeper one.",
        "no synchronisation",
    ),
    Claim(
        "table-4",
        "Table 4",
        "Loading a model up to its first exit alone saves memory.",
        "OPT-1.3B 4.6 %, Llama2-7B 22.5 %, Llama2-13B 37.8 %",
    ),
    Claim("figure-15", "Figure 15", "Llama2-13B has the largest gain in requests.", "6.05x"),
    Claim("figure-15-small", "Figure 15", "Smaller models gain little.", "drawn, no numbers"),
    Claim(
        "figure-14",
        "Figure 14",
        "HELIOS brings the first token sooner (also the abstract).",
        "1.39x sooner than OPT-1.3B, 2.23x than OPT-6.7B",
    ),
    Claim(
        "larger-ttft", "Section 5.3", "The larger model's first token takes longer.", "69 ms, 43 ms"
    ),
    Claim(
        "long-prompts",
        "Section 5.3",
        "The gain over the larger model is largest for long prompts.",
        "up to 30x (CNN/DailyMail, prompts 272 to 542)",
    ),
    Claim("figure-16", "Figure 16", "The larger model's perplexity is lower.", "0.97x"),
    Claim(
        "figure-16c",
        "Figure 16c",
        "For accuracy HELIOS switches to the larger model for long texts, and back.",
        "switches at marks 1 and 2",
    ),
    Claim(
        "reverts",
        "Section 5.4",
        "HELIOS reverts to OPT-1.3B where it is as accurate and takes less energy.",
        "mark 2 of Figure 16(c)",
    ),
    Claim(
        "energy-per-prompt",
        "Section 5.5",
        "HELIOS takes less energy a prompt (also the abstract, 1.10x).",
        "0.45 Wh of 0.50 (OPT-1.3B) and 1.01 (OPT-6.7B)",
    ),
    Claim(
        "partly-loaded", "Section 5.5", "Most prompts are served by partly loaded models.", "58.3 %"
    ),
    Claim(
        "switching-energy",
        "Section 5.5",
        "Switching costs a small share of the savings.",
        "0.05x of the savings",
    ),
    Claim(
        "table-5",
        "Table 5",
        "Each objective distributes tokens over models and exits in its own way.",
        "a row of shares for each objective",
    ),
    Claim(
        "energy-whole",
        "Section 5.6",
        "With the objective energy, whole models are used less than with one model alone.",
        "7.9 % and 0.6 %, alone 22.3 % and 21.6 %",
    ),
    Claim(
        "response-larger",
        "Section 5.6",
        "With the objective response time, the larger model serves more.",
        "49.6 % of the tokens, for throughput 21.7 %",
    ),
    Claim(
        "accuracy-larger",
        "Section 5.6",
        "With the objective accuracy, the larger model's first exit serves more than with energy.",
        "34.6 % of the tokens, 2.26x",
    ),
    Claim(
        "figure-17a",
        "Figure 17a",
        "Long reassessment intervals (RI) lower the throughput.",
        "lower from an RI of 200 on",
    ),
    Claim(
        "figure-17b",
        "Figure 17b",
        "Throughput falls as the confidence threshold (TH) rises.",
        "falls",
    ),
    Claim(
        "figure-17b-above",
        "Figure 17b",
        "HELIOS is faster than either model alone at every threshold.",
        "always",
    ),
    Claim(
        "speculative",
        "Section 6",
        "Speculative decoding takes more energy than a large model with two exits.",
        "1.49x (OPT-125M and OPT-6.7B, CNN/DailyMail)",
    ),
)
