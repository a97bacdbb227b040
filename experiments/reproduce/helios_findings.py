"""Findings about every table, figure and quoted number of HELIOS' paper.

A gain (1.48x) holds if ours is at least half of it (1.24x). A share holds within `NEAR`, or above
it if more is better.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eejax.experiments.reproduce import helios_paper as paper
from eejax.experiments.reproduce import helios_served_findings as served
from eejax.experiments.reproduce.findings import Findings, gain, percent
from eejax.experiments.reproduce.helios_evidence import LIMITS, LOW
from eejax.experiments.reproduce.helios_paper import FITTED, NEAR
from eejax.experiments.reproduce.helios_simulated import of


def findings(result: Mapping[str, Any], lines: Mapping[str, Any], scale: str) -> list[dict]:
    """Return all findings, as dicts.

    Args:
      result: the result of `eejax reproduce helios`, by table and figure.
      lines: `PromptCurves` by the name of a row.
      scale: scale of everything that was run or simulated.
    """
    found = Findings("HELIOS", scale)
    _shapes(found, result)
    _exits(found, result)
    served.add_gains(found, result, lines)
    served.add_table_5(found, result)
    served.add_sensitivity(found, result)
    _settings(found, result)
    _gains_of_exits(found, result)
    _evaluations(found, result, lines)
    for place, claim, theirs in paper.NOT_RUN:
        found.add(
            place,
            claim,
            theirs,
            "not run",
            None,
            "It needs published models of 7B and more.",
            "no run",
        )
    return found.to_dicts()


def _shapes(found: Findings, result: Mapping[str, Any]) -> None:
    shapes, card = "the models' own shapes, bfloat16", "the models' own shapes, 40 GB"
    for row in result["table_2"]:
        parameters, layers, exits = paper.TABLE_2[row["model"]]
        found.add(
            "Table 2",
            f"{row['model']} has its parameters, layers and exits.",
            f"{parameters / 1e9:.1f} billion, {layers} layers, exits {exits}",
            f"{row['parameters'] / 1e9:.2f} billion, {row['layers']} layers, exits "
            f"{tuple(row['exits'])}",
            abs(row["parameters"] / parameters - 1) < 0.02
            and row["layers"] == layers
            and tuple(row["exits"]) == exits,
            "The configuration has another shape.",
            shapes,
        )
    for row in result["table_4"]:
        theirs = paper.TABLE_4[row["model"]] / 100
        note = " (of 40 layers; the table prints 32)" if row["layers"] == 40 else ""
        found.add(
            "Table 4",
            f"Loading {row['model']} up to layer {row['exit']} saves memory.",
            percent(theirs),
            percent(row["saved"]) + note,
            abs(row["saved"] - theirs) < 0.02,
            "The weights above the exit take another share of the card.",
            card,
        )
    saved = result["figure_6_savings"]
    found.add(
        "Figure 6a",
        "An exit after 16 layers saves half of Llama-7B's operations and 60 % of 13B's.",
        "50 %, 60 %",
        ", ".join(map(percent, saved.values())),
        all(abs(a - b) < 0.02 for a, b in zip(saved.values(), (0.5, 0.6), strict=True)),
        "Operations of layers are another share.",
        shapes,
    )
    ends = {row["model"]: row["gigabytes"] for row in result["figure_6"]}
    first = {row["model"]: row["gigabytes"] for row in reversed(result["figure_6"])}
    found.add(
        "Figure 6b",
        "Earlier exits access less memory, while the footprint stays the same.",
        "drawn, no numbers",
        "; ".join(f"{m}: {first[m]:.1f} GB up to layer 4, {ends[m]:.1f} GB in all" for m in ends),
        all(first[m] < ends[m] for m in ends),
        "An earlier exit needs no fewer weights.",
        shapes,
    )
    ratios = {row["model"]: row["ratio"] for row in result["figure_15"]}
    told = ", ".join(f"{m} {r:.2f}x" for m, r in ratios.items())
    most = ratios["Llama-2-13B"]
    found.add(
        "Figure 15",
        "Llama2-13B has the largest gain in requests.",
        "6.05x",
        told,
        gain(6.05, most) and most == max(ratios.values()),
        "Fewer requests fit beside the part.",
        card,
    )
    found.add(
        "Figure 15",
        "Smaller models gain little.",
        "drawn, no numbers",
        told,
        ratios["OPT-1.3B"] < 1.5,
        "The keys and values of the skipped layers are saved too, and a small model's requests "
        "take most of the card.",
        card,
    )
    mean = 1.0
    for ratio in ratios.values():
        mean *= ratio ** (1 / len(ratios))
    found.add(
        "Abstract",
        "Batches are larger than the baseline's.",
        "3.7x on average",
        f"{mean:.2f}x",
        gain(3.7, mean),
        "Fewer requests fit beside the part.",
        card,
    )


def _exits(found: Findings, result: Mapping[str, Any]) -> None:
    every = {r["model"]: r for r in result["figure_7"] if r["task"] == "all"}

    def shares(row):
        return " / ".join(map(percent, row["shares"]))

    firsts = [row["shares"][0] for row in every.values()]
    found.add(
        "Figure 7",
        "Most tokens leave by the first exit, at about a quarter of the depth.",
        "over 70 % in both models; about 20 % take all layers",
        "; ".join(f"{m} after {r['layers']}: {shares(r)}" for m, r in every.items()),
        None,
        f"{FITTED}; the share that leaves by the first exit, {percent(min(firsts))} at least, "
        "follows from that.",
    )
    found.add(
        "Figure 11a",
        "OPT-1.3B's tokens leave after 6, 12 and 24 layers (also section 1).",
        " / ".join(f"{v:.0f} %" for v in paper.EXITS_1B3),
        shares(every["small"]),
        None,
        f"{FITTED}.",
    )
    both = {row["writer"]: row for row in result["figure_9"]}
    beyond = both["small"]["past_first"][0]
    found.add(
        "Figure 11b",
        "Many of OPT-1.3B's tokens past the first exit leave by OPT-6.7B's first exit.",
        "57 %",
        f"{percent(beyond)} of the small model's tokens past the first exit",
        beyond > 0.57 - NEAR,
        f"{percent(both['small']['first'][0])} of the small model's other tokens leave there.",
    )
    told = "; ".join(
        f"{percent(1 - r['last'][-1])} of the tokens that take all layers of {m} leave "
        f"{r['reader']} early, and {percent(1 - r['first'][-1])} of those that leave {m} by its "
        "first exit"
        for m, r in both.items()
    )
    found.add(
        "Figure 9",
        "Tokens that need many layers in one model need fewer in the other.",
        "drawn, no numbers",
        f"{told} (needed: more than half of the former)",
        min(1 - r["last"][-1] for r in both.values()) > 0.5,
        "In at least one direction, most of these tokens take all layers of the other model too.",
    )
    rows = [r for r in result["figure_8"] if r["model"] == "large" and r["task"] != "all"]
    stays = {r["task"]: r["unchanged"][-1] for r in rows}
    least, limit, task = min(
        (share, limit, r["task"])
        for r in rows
        for limit, share in zip(LIMITS, r["unchanged"], strict=True)
        if share is not None
    )
    every_token = next(
        r["unchanged"][-1]
        for r in result["figure_8"]
        if (r["model"], r["task"]) == ("large", "all")
    )
    unsure = (
        f"At the larger model's first exit {percent(every_token)} of all tokens are final, "
        "whatever their confidence, so few of the tokens with low confidence can be."
    )
    found.add(
        "Figure 8",
        "The token of the first exit is the final one, whatever the threshold.",
        "85 % at least, four data sets, OPT-6.7B",
        "at threshold 1: "
        + ", ".join(f"{t} {percent(s)}" for t, s in stays.items())
        + f"; lowest: {percent(least)} ({task}, at {limit:g})",
        least >= 0.85,
        unsure,
    )
    row = next((r for r in rows if r["task"] == "summarization"), rows[0])
    low = row["unchanged"][LIMITS.index(LOW)]
    found.add(
        "Section 1",
        "Tokens that a confidence of 0.2 keeps from leaving by OPT-6.7B's first exit stay the "
        "same.",
        "92.1 % (CNN/DailyMail)",
        "no such token" if low is None else f"{percent(low)} ({row['task']})",
        None if low is None else low > 0.921 - NEAR,
        "No token is kept by so low a threshold." if low is None else unsure,
    )
    own = result["table_1_choices"]["own"]
    first = result["table_1"][0]
    names = paper.MODELS
    found.add(
        "Table 1",
        "Evaluation on the task's prompts chooses another model than the benchmark.",
        "; ".join(f"{m} {a} to {b}" for m, (a, b) in paper.TABLE_1.items()),
        "; ".join(
            f"{m} ({names[m]}) {first['before'][m]:.2f} to {first['after'][m]:.2f}" for m in names
        )
        + f", by each model's own probabilities on {first['task']}; another model for "
        f"{own['differ']} of {own['tasks']} tasks, the right one for {own['after_right']} "
        f"(benchmark: {own['before_right']})",
        own["differ"] > 0 and own["after_right"] > own["before_right"],
        f"Of {own['tasks']} tasks the evaluation finds the right model for {own['after_right']}, "
        f"the benchmark for {own['before_right']}.",
    )
    draft = result["section_6"]
    found.add(
        "Section 6",
        "Speculative decoding takes more energy than a large model with two exits.",
        "1.49x (OPT-125M and OPT-6.7B, CNN/DailyMail)",
        f"{draft['ratio']:.2f}x the operations ({draft['task']}, drafts of {draft['draft']}, "
        f"{percent(draft['accepted'])} accepted)",
        gain(1.49, draft["ratio"]),
        f"{percent(draft['accepted'])} of the drafts are accepted, each saves a pass of the model.",
    )


def _settings(found: Findings, result: Mapping[str, Any]) -> None:
    rows = result["simulated"]
    small, fast = of(rows, "small only"), of(rows, "HELIOS, throughput")
    found.add(
        "Table 3",
        "Throughput is 1 / TPOT.",
        "1 / TPOT",
        f"{small['decoding']:.0f} tokens/s by 1 / TPOT, {small['throughput']:.0f} over the whole "
        "time",
        abs(small["decoding"] / small["throughput"] - 1) < 0.1,
        "One value includes prefilling and queueing and the other does not; they are more than "
        "10 % apart.",
    )
    found.add(
        "Table 3",
        "Latency is (TTFT + TPOT) x tokens.",
        "(TTFT + TPOT) x tokens",
        f"{small['printed_latency']:.2f} s by the formula as printed, {small['latency']:.2f} s "
        "elapsed",
        abs(small["printed_latency"] / small["latency"] - 1) < 0.1,
        "The formula counts the first token's time for every token; the elapsed time is TTFT + "
        "TPOT x (tokens - 1).",
    )
    ours = result["defaults"]
    found.add(
        "Sections 3.3.1 to 3.4.2",
        "Defaults: candidates, prompts of an evaluation, reassessment "
        "interval (RI), breaches (CBC) in a window.",
        "2, 5, 150, 50 of 100",
        "{candidates}, {prompts}, {interval}, {breaches} of {window}".format(**ours),
        ours == paper.DEFAULTS,
        "The controller has other defaults.",
        "eejax's controller",
    )
    found.add(
        "Figures 1 and 10, Algorithm 1",
        "Candidates are evaluated, the best is loaded in part, breaches load more or switch, and "
        "candidates are reassessed.",
        "drawn",
        f"{fast['assessments']} evaluations of candidates, {percent(fast['partly_loaded'])} of "
        f"the prompts served by part of a model, {fast['loads']} LD, {fast['switches']} SW",
        fast["assessments"] > 1
        and fast["partly_loaded"] > 0
        and fast["loads"] + fast["switches"] > 0,
        "The controller never did one of these.",
    )
    found.add(
        "Figures 3 and 4",
        "A token leaves by the first exit whose confidence exceeds the threshold.",
        "drawn",
        ", ".join(f"{m}: threshold {t:.3f}" for m, t in result["thresholds"].items())
        + f", {percent(1 - small['exits']['small'][-1])} of small's tokens leave early. "
        f"{FITTED}.",
        small["exits"]["small"][-1] < 1,
        "No token leaves early.",
    )
    found.add(
        "Section 4.1",
        "Exits are trained with a weight of 1.0 each, for 50,000 iterations, on "
        "RedPajama and the Pile.",
        "OPT-1.3B and OPT-6.7B fine-tuned",
        "configs/helios_opt_1b3.py and helios_opt_6b7.py have these values; ours here: weight "
        f"1.0, {result['trained']} on text of the tasks",
        None,
        "Fine-tuning OPT needs GPUs; the configurations are tested, not run.",
    )
    found.add(
        "Section 4.3",
        "Prompts are a mix of tasks, answered by 100 tokens each.",
        "CNN/DailyMail, TruthfulQA, OpenBookQA, GSM8K, code, sentence completion",
        f"{result['prompts']} prompts of {len({*result['order']})} tasks, {result['new']} tokens",
        len({*result["order"]}) > 5 and result["new"] == 100,
        "Fewer prompts or tokens were asked.",
    )
    found.add(
        "Section 5.2",
        "If only a part of a model is loaded, no token of a batch waits for a deeper one.",
        "no synchronisation",
        f"{percent(fast['below'])} of the tokens left by the last loaded "
        "exit below their threshold",
        None,
        "The simulation serves one request at a time: no token can wait for another.",
    )


def _gains_of_exits(found: Findings, result: Mapping[str, Any]) -> None:
    """Judge each model alone, with and without early exits."""
    told, right = [], []
    for name in paper.MODELS:
        own, none = (of(result["simulated"], f"{name}{x}") for x in (" only", ", no early exits"))
        faster, sooner = own["throughput"] / none["throughput"], own["latency"] / none["latency"]
        told.append(
            f"{name}: {faster:.2f}x the throughput, {sooner:.2f}x the latency, "
            f"{percent(own['agreement'])} of the tokens equal those without exits"
        )
        right.append(faster > 1 > sooner and own["agreement"] >= 1 - NEAR)
    found.add(
        "Section 2.3",
        "Early exits improve throughput and latency without loss of accuracy.",
        "said, without a number",
        "; ".join(told) + f". {FITTED}.",
        all(right),
        f"At these thresholds more than {NEAR:.0%} of the tokens that exits emit would change in "
        "later layers, or no speed is gained.",
    )


def _evaluations(found: Findings, result: Mapping[str, Any], lines: Mapping[str, Any]) -> None:
    """Judge answers to the prompts of evaluations, and the switch back."""
    name = "HELIOS, throughput"
    row, line = of(result["simulated"], name), lines[name]
    right = of(result["simulated"], "HELIOS, accuracy")
    ttft = [of(result["simulated"], f"{m} only")["ttft"]["mean"] for m in paper.MODELS]
    slower = ttft[1] / ttft[0]
    each = result["defaults"]["prompts"]
    during = sorted({i for a in line.assessments for i in range(a, a + each)})
    during = [i for i in during if i < len(line.ttft)]
    alone = lines["small only"].ttft  # the same prompts, as long ones take longer anyway
    later = line.ttft[during].mean() / alone[during].mean() if during else None
    found.add(
        "Section 3.4",
        "Tokens of evaluations are kept, and evaluations do not delay the first token.",
        "not impacted",
        f"{row['answered']} of {result['prompts']} prompts are answered, "
        + (
            "and none is of an evaluation"
            if later is None
            else f"the first token of the {len(during)} prompts after the beginning of an "
            f"evaluation takes {later:.2f} times as long as with the smaller model alone (up "
            "to 1.1)"
        ),
        None if later is None else row["answered"] == result["prompts"] and later < 1.1,
        "no prompt is of an evaluation"
        if later is None
        else "A prompt of an evaluation waits for its whole candidate: the larger model's first "
        f"token takes {slower:.1f} times as long as the smaller one's.",
    )
    found.add(
        "Section 5.4",
        "HELIOS reverts to OPT-1.3B where it is as accurate and takes less energy.",
        "mark 2 of Figure 16(c)",
        f"{right['switches']} switches in {right['assessments']} evaluations; "
        f"{percent(sum(right['exits']['small']))} of the tokens by the small model",
        right["switches"] > 1,
        f"{served.by_judge(result)} So the larger model has no advantage and never serves, and "
        "there is nothing to revert from.",
    )
