"""Claims of EE-LLM (Chen et al., ICML 2024), in the order of the paper."""

from __future__ import annotations

from eejax.experiments.reproduce import claims_ee_llm_appendices
from eejax.experiments.reproduce.claims import Claim

PAPER = "EE-LLM"
CORPUS = "needs hundreds of billions of tokens of training"

CLAIMS = (
    Claim(
        "abstract-training",
        "Abstract",
        "Training with early exits costs hardly more than training the standard model.",
        "negligible overhead",
        repeats="table-1",
    ),
    Claim(
        "abstract-inference",
        "Abstract",
        "Early exits speed up generation without worse output.",
        "speedup at unchanged quality",
        repeats="figure-8",
    ),
    Claim(
        "largest-model",
        "Section 5.1",
        "An early-exit model can be as large as the standard model that the same devices train.",
        "30B on 64 A100-80GB",
    ),
    Claim(
        "figure-1",
        "Figure 1",
        "An exit turns the hidden states of any layer into logits by a layer of its own.",
        "architecture",
    ),
    Claim(
        "section-2",
        "Section 2",
        "Exits stand at any layer, may have an MLP or a Transformer layer, and tie the embedding "
        "or not.",
        "three choices, all combined",
    ),
    Claim(
        "eq-1",
        "Eq. (1)",
        "The training loss is the weighted sum of the losses of all exits.",
        "L = sum of w_i L_i",
    ),
    Claim(
        "eq-2",
        "Eq. (2)",
        "Stage i differentiates its own losses plus g_i x_i, where g_i comes from stage i + 1.",
        "auxiliary losses, from the last stage to the first",
    ),
    Claim(
        "figure-2",
        "Figure 2",
        "Backpropagation through stages sends the values that a standard model sends, and no "
        "others.",
        "one state up, one gradient down",
    ),
    Claim(
        "no-communication",
        "Section 3.1.1",
        "Auxiliary losses need no communication beside that of a standard model.",
        "none",
        repeats="figure-2",
    ),
    Claim(
        "proposition-3-1",
        "Proposition 3.1",
        "The gradient of a stage's auxiliary loss is that of the whole loss (Eq. 3).",
        "equal",
    ),
    Claim(
        "tied",
        "Section 3.1.2",
        "With tied parameters the sum of the gradients of all copies is the gradient.",
        "equal",
    ),
    Claim(
        "schedules",
        "Section 3.1.3",
        "Auxiliary losses work with any schedule of forward and backward steps.",
        "1F1B shown; GPipe and others named",
    ),
    Claim(
        "figure-3",
        "Figure 3",
        "Exits fill implicit bubbles of 1F1B (4 stages, 6 microbatches); deferring their forward "
        "pass changes only the order.",
        "a drawing",
    ),
    Claim(
        "time-overhead",
        "Section 3.2",
        "Exits on k middle stages add k (f_EE + b_EE) to an iteration, whatever the number of "
        "microbatches.",
        "k (f_EE + b_EE)",
    ),
    Claim(
        "logits-memory",
        "Section 3.2",
        "Deferred exits keep the logits of one microbatch in place of P - i + 1.",
        "s b V in place of s b V (P - i + 1)",
    ),
    Claim(
        "peak-memory",
        "Section 3.2",
        "The peak memory over all stages is that of the standard model, if the logits of one "
        "microbatch (s b V) take less than its activations on a stage and the first stage has no "
        "exit.",
        "unchanged",
    ),
    Claim(
        "figure-4",
        "Figure 4",
        "Partial passes of additional microbatches fill bubbles and do not lengthen an iteration.",
        "a drawing: 2 microbatches in each part",
    ),
    Claim(
        "kv-recomputation",
        "Section 4",
        "KV recomputation gains from the batching effect of a device, and has no gain in theory.",
        "no gain without a batching effect",
    ),
    Claim(
        "figure-5",
        "Figure 5",
        "While later stages finish a token, the first stage begins the next one.",
        "a drawing",
    ),
    Claim(
        "latency",
        "Section 4",
        "With pipelined inference a token takes the forward time up to its exit, and at least "
        "that of the first stage.",
        "equal, also in theory",
    ),
    Claim(
        "settings",
        "Section 5.1",
        "Adam with 0.9, 0.95 and 1e-8, a cosine schedule from 3e-4, batches of 2,048 sequences of "
        "2,048 tokens.",
        "settings of all experiments",
    ),
    Claim(
        "exit-settings",
        "Section 5.1",
        "The 1.3B model is tied, with exits at 1/4 and 1/2 and exit weights of 1/4 and 1/2; the "
        "7B model is untied, with exit weights of 0.1 and 0.2; no exit has a norm.",
        "settings of Figure 6",
    ),
    Claim(
        "hardware",
        "Section 5.1",
        "Models of 1.3B to 30B train on 64 A100-80GB, on a subset of Data-Juicer's data.",
        "300 and 150 billion tokens for 1.3B and 7B",
        cannot="needs these GPUs and data; the configurations are tested, not run",
    ),
    Claim(
        "figure-6",
        "Figure 6",
        "Training losses of all exits and of the standard model fall at a similar pace.",
        "1.3B and 7B; curves without numbers",
    ),
    Claim(
        "figure-6-early",
        "Figure 6",
        "The losses of early exits are slightly higher than the final exit's.",
        "1.3B and 7B; curves without numbers",
    ),
    Claim(
        "figure-6-final",
        "Figure 6",
        "The final exit's loss is close to the standard model's.",
        "1.3B and 7B; close to or slightly below",
    ),
    Claim(
        "spikes",
        "Section 5.1",
        "Loss curves of the 7B models have more spikes than those of the 1.3B models.",
        "more spikes at 7B",
        cannot=CORPUS + " of a 7B model",
    ),
    Claim(
        "figure-7",
        "Figure 7",
        "Time grows with the number of exits, more slowly on a pipeline.",
        "1.3B to 30B, measured; curves without numbers",
    ),
    Claim(
        "figure-7-whole",
        "Figure 7",
        "Without a pipeline peak memory grows with every exit.",
        "1.3B to 30B, measured; curves without numbers",
    ),
    Claim(
        "figure-7-memory",
        "Figure 7",
        "On a pipeline of 4 peak memory grows only with an exit on the first stage.",
        "1.3B to 30B, measured; curves without numbers",
    ),
    Claim(
        "figure-8",
        "Figure 8",
        "On six tasks early exits are often at least twice as fast at comparable or better scores.",
        "2 times or more in many cases",
    ),
    Claim(
        "figure-8-order",
        "Figure 8",
        "The speedup of each curve increases as the threshold falls.",
        "from left to right",
    ),
    Claim(
        "figure-8-standard",
        "Figure 8",
        "Scores at threshold 1 are compared with those of a standard 7B model that was trained "
        "in the same way.",
        "dotted lines, without numbers",
        cannot=CORPUS
        + " of 7B models with and without exits; losses of small ones are in Figure 6",
    ),
    Claim(
        "similar-methods",
        "Section 5.2",
        "The pipeline-based method and KV recomputation perform similarly (Appendix B.1).",
        "similarly",
    ),
    Claim(
        "threshold-1",
        "Section 5.2, footnote 2",
        "At threshold 1 exits are off and latency is that of the standard model.",
        "within 2 %",
    ),
    Claim(
        "confidence",
        "Section 5.2",
        "A token leaves by the first exit whose largest probability is above the threshold.",
        "the exit condition, with greedy decoding",
    ),
    Claim(
        "larger-models",
        "Section 5.2",
        "Larger models may gain more from early exits.",
        "a conjecture",
        cannot="needs several large models of the same training",
    ),
    *claims_ee_llm_appendices.CLAIMS,
)
