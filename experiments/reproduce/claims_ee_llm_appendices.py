"""Claims of EE-LLM's appendices (Chen et al., ICML 2024), in the order of the paper."""

from __future__ import annotations

from eejax.experiments.reproduce.claims import Claim

CLAIMS = (
    Claim(
        "appendix-a1",
        "Appendix A.1",
        "A middle stage with an exit has the size and time of the last stage, so the steady "
        "phase takes no longer.",
        "k (f_EE + b_EE) in all",
        repeats="time-overhead",
    ),
    Claim(
        "remark-a2",
        "Remark A.2",
        "If the forward passes of exits move into the bubbles of the cool-down phase, only their "
        "backward passes add time.",
        "k b_EE; not implemented in the paper",
    ),
    Claim(
        "rules-of-thumb",
        "Appendix A.2",
        "Exits cost less at the beginning of a stage than at the end of the one before.",
        "rule of thumb",
    ),
    Claim(
        "rule-few-exits",
        "Appendix A.2",
        "Many exits, such as one for each layer, cost much in training and inference.",
        "excessive overhead; the gain might be marginal",
    ),
    Claim(
        "rule-same-matrix",
        "Appendix A.2",
        "Exits of one stage may share an output matrix, and exits of the first or last stage may "
        "use the matrix that the stage has, which saves memory.",
        "rule of thumb",
    ),
    Claim(
        "remark-a3",
        "Remark A.3",
        "Larger exits and several of them on a stage cost more in training, and may in inference.",
        "a higher overhead",
    ),
    Claim(
        "larger-exits",
        "Remark A.3, footnote 4",
        "Whether larger or more exits speed inference up or slow it down has no clear answer.",
        "no clear correlation",
        cannot="needs a model trained with each kind and number of exits until its exits have high "
        "confidence",
    ),
    Claim(
        "figure-9",
        "Figure 9",
        "The last stage of a standard 7B model is the slowest, and exits on middle stages even out "
        "the load.",
        "7B, 4 stages, microbatch 2, batch 128; a picture",
    ),
    Claim(
        "figure-9-forward",
        "Figure 9",
        "The time of deferred exits is in the backward passes, and forward passes stay as they "
        "are.",
        "7B, 4 stages, microbatch 2, batch 128; a picture",
    ),
    Claim(
        "figure-9-memory",
        "Figure 9",
        "Earlier stages hold more memory, and with exits the peak stays on the first one.",
        "7B, 4 stages, microbatch 2, batch 128; a picture",
    ),
    Claim(
        "table-1-time",
        "Table 1",
        "Exits lengthen an iteration by about 1 %, and less with each optimization.",
        "standard, exits, (1), (2), (1&2): 1.3B 5.23, 5.31, 5.29, 5.28, 5.24 s; 7B 17.75, 17.93, "
        "17.91, 17.81, 17.79 s",
    ),
    Claim(
        "table-1-order",
        "Table 1",
        "From the slowest to the fastest, the rows are exits, (1), (2), (1&2), standard.",
        "the same order for 1.3B and 7B",
    ),
    Claim(
        "table-1-memory",
        "Table 1",
        "Exits raise the peak memory, but hardly with optimization 2.",
        "standard, exits, (1), (2), (1&2): 1.3B 19.85, 24.05, 22.56, 20.23, 19.85 GB; 7B 62.27, "
        "67.42, 65.79, 62.27, 62.27 GB",
    ),
    Claim(
        "table-1",
        "Table 1",
        "Both optimizations together bring time and memory next to those of the standard model.",
        "1.3B +0.19 %, 7B +0.23 %, no memory",
    ),
    Claim(
        "table-2",
        "Table 2",
        "Time and memory follow from those of input, backbone, early and final exit.",
        "notation: P, N_i, M, f, b, m",
    ),
    Claim(
        "iteration-time",
        "Appendix A.3.1",
        "An iteration takes at most the sum of the times of all stages but the last, and M times "
        "the slowest stage.",
        "an upper bound",
    ),
    Claim(
        "eq-4-6",
        "Eq. (4)-(6)",
        "A stage's memory is alpha times its parameters, P + 1 - i backbone activations and one "
        "of each exit.",
        "closed form",
    ),
    Claim(
        "same-output",
        "Appendix B.1",
        "Pipelined inference and KV recomputation generate the same output.",
        "same output",
    ),
    Claim(
        "figure-10",
        "Figure 10",
        "Below threshold 1 pipelined inference is faster than KV recomputation at TP = 1, and KV "
        "recomputation at TP = 4 is faster still.",
        "XSUM and CNN/DailyMail on 4 A100-40GB; curves without numbers",
    ),
    Claim(
        "table-3",
        "Table 3",
        "Generated texts change little or not at all as the threshold falls.",
        "example texts of the 7B model",
    ),
    Claim(
        "table-4",
        "Table 4",
        "Early exits predict easy tokens rightly and with high confidence.",
        "confidences of one text",
    ),
    Claim(
        "figure-11",
        "Figure 11",
        "Losses converge with exits that have a norm and an MLP, and with three tied exits at "
        "layers 4, 12 and 20.",
        "two 7B models; curves without numbers",
    ),
    Claim(
        "weights",
        "Appendix C.1",
        "Weights of early losses may warm up or cool down in the course of training.",
        "two options",
    ),
    Claim(
        "inserted",
        "Appendix C.2",
        "Each part of the bubbles takes floor((p - 1) b / (f + b)) more microbatches.",
        "floor((p - 1) / (f / b + 1))",
    ),
    Claim(
        "backward-stages",
        "Appendix C.2",
        "Microbatch i of part 2 goes back through floor(p - i (f / b + 1)) stages.",
        "floor(p - i (f / b + 1))",
    ),
    Claim(
        "part-1-stops",
        "Appendix C.2",
        "A microbatch of part 1 need not pass the last exit within its stages.",
        "up to the last stage with an exit",
    ),
    Claim(
        "part-1-memory",
        "Appendix C.2",
        "Microbatches in part 1 take memory for activations in early stages.",
        "remark (1)",
    ),
    Claim(
        "untied-filling",
        "Appendix C.2",
        "With parameters tied across stages gradients of partial passes might harm training.",
        "remark (1), in theory",
    ),
    Claim(
        "data-use",
        "Appendix C.2",
        "Partial passes use data less efficiently, which hardly matters in pre-training.",
        "remark (3)",
        cannot="the paper gives a judgment, without a measurement",
    ),
    Claim(
        "without-exits",
        "Appendix C.2",
        "Part 2 applies to models without early exits too.",
        "applicable",
    ),
    Claim(
        "replaced",
        "Appendix C.2",
        "With partial passes in place of whole ones an iteration takes less time.",
        "less time, as many microbatches",
    ),
    Claim(
        "figure-12",
        "Figure 12",
        "Part 1 passes the first stages, part 2 goes back through the last ones.",
        "a drawing: 4 stages, 1 microbatch in each part",
    ),
    Claim(
        "claim-c-1",
        "Claim C.1",
        "With the right factors the gradient of an iteration with inserted microbatches is "
        "unbiased and varies less.",
        "unbiased, reduced variance",
    ),
    Claim(
        "proposition-c-2",
        "Proposition C.2",
        "One more sample of a lowers the variance of the estimate of a* + b*.",
        "(var(a) + 2 cov(a, b)) / (N (N + 1))",
    ),
    Claim(
        "automatic",
        "Appendix D.2",
        "The number of inserted microbatches follows from the ratio of backward and forward time.",
        "automatic",
    ),
    Claim(
        "mid-stage",
        "Appendix D.3",
        "A token can be emitted in the middle of a stage, except on the first one.",
        "not delayed by the rest of the stage",
    ),
    Claim(
        "forced-pass",
        "Appendix D.3",
        "A full pass is forced once the maximum number of tokens waits for keys and values.",
        "a number set beforehand",
    ),
    Claim(
        "propagation",
        "Appendix F",
        "Copying the state of the exit to later layers deviates from the full model's keys.",
        "can harm the output",
    ),
    Claim(
        "skip-decode",
        "Appendix F",
        "With exits that are set beforehand (SkipDecode) no keys are missing, but exits cannot "
        "adapt to the token.",
        "the ability to adapt is lost",
        cannot="eejax has no engine whose exits are set beforehand; all engines choose them "
        "token by token",
    ),
    Claim(
        "contrastive",
        "Appendix F",
        "Early exits improve the outputs of the final one, and help to interpret layers.",
        "named as other uses",
        cannot="the paper only names it; better texts by contrastive decoding need a model of "
        "billions of parameters that writes well",
    ),
    Claim(
        "drafts",
        "Appendix F",
        "Early exits serve as draft models of speculative decoding.",
        "named as another use",
    ),
)
