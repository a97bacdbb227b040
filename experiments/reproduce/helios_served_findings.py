"""Findings about serving, from the simulation: HELIOS' sections 5.1 to 5.7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eejax.experiments.reproduce import helios_paper as paper
from eejax.experiments.reproduce.findings import Findings, gain, percent
from eejax.experiments.reproduce.helios_paper import FITTED, NEAR
from eejax.experiments.reproduce.helios_simulated import of


def by_thresholds(result: Mapping[str, Any]) -> str:
    """Return a reason from both models at the thresholds: exits, layers and perplexity."""
    rows = result["simulated"]
    told = []
    for name, threshold in result["thresholds"].items():
        exits = of(rows, f"{name} only")["exits"][name]
        told.append(
            f"at a threshold of {threshold:.2f}, {percent(exits[0])} of {name}'s tokens leave by "
            f"its first exit and {percent(exits[-1])} take all layers"
        )
    small, large = (of(rows, f"{name} only")["perplexity"] for name in paper.MODELS)
    compared = f"The perplexity of large is {large / small:.2f} times that of small."
    return f"{sentence('; '.join(told))}. {compared}"


def by_judge(result: Mapping[str, Any]) -> str:
    """Return a reason from the judge's perplexities, which the objective of accuracy reads."""
    judged = next(row for row in result["table_1"] if row["measure"] == "judge")["before"]
    return (
        "The judge, which decides for accuracy, gives the smaller model's answers a perplexity "
        f"of {judged['small']:.1f}, and the larger model's {judged['large']:.1f}."
    )


def sentence(text: str) -> str:
    """Capitalize the first letter of a text; `str.capitalize` lowers all others."""
    return text[:1].upper() + text[1:]


def add_gains(found: Findings, result: Mapping[str, Any], lines: Mapping[str, Any]) -> None:
    rows = result["simulated"]
    reason = by_thresholds(result)
    small, large = of(rows, "small only"), of(rows, "large only")
    fast, first = of(rows, "HELIOS, throughput"), of(rows, "HELIOS, response time")
    right, spare = of(rows, "HELIOS, accuracy"), of(rows, "HELIOS, energy")
    times = [fast["throughput"] / r["throughput"] for r in (small, large)]
    decoding = [fast["decoding"] / r["decoding"] for r in (small, large)]
    found.add(
        "Figure 13",
        "HELIOS raises throughput over either model alone (also the abstract).",
        "1.48x OPT-1.3B, 2.13x OPT-6.7B",
        f"{times[0]:.2f}x small, {times[1]:.2f}x large, loading included; by 1/TPOT "
        f"{decoding[0]:.2f}x, {decoding[1]:.2f}x",
        gain(1.48, times[0]) and gain(2.13, times[1]),
        reason,
    )
    found.add(
        "Figure 13c",
        "More layers are loaded (LD), and models are switched (SW).",
        "both occur",
        f"{fast['loads']} LD, {fast['switches']} SW",
        fast["loads"] > 0 and fast["switches"] > 0,
        sentence(
            " and ".join(
                f"no {what}"
                for what, n in (("more layers", fast["loads"]), ("other model", fast["switches"]))
                if not n
            )
        )
        + f" in {fast['assessments']} evaluations of candidates.",
    )
    earliest = sum(own[0] for own in fast["exits"].values())
    found.add(
        "Section 5.1",
        "Nearly all tokens leave by the earliest exits.",
        "91 %",
        percent(earliest),
        earliest > 0.91 - NEAR,
        reason,
    )
    share = fast["exits"]["small"][0] / max(earliest, 1e-12)
    both = sum(fast["exits"]["large"]) > 0
    found.add(
        "Section 5.1",
        "Most of these tokens are the smaller model's.",
        "77 %",
        percent(share),
        share > 0.77 - NEAR if both else None,
        "The larger model serves no token, so there is nothing to compare."
        if not both
        else f"The larger model serves {percent(sum(fast['exits']['large']))} of all tokens.",
    )
    whole = sum(own[-1] for own in fast["exits"].values())
    least = min(small["exits"]["small"][-1], large["exits"]["large"][-1])
    found.add(
        "Section 5.1",
        "Few tokens take all layers.",
        "7.39 %, a third of either model alone",
        f"{percent(whole)}, {whole / max(least, 1e-12):.2f} of either model alone",
        whole < least / 2,
        reason,
    )
    work = [r["operations"] / fast["operations"] for r in (small, large)]
    found.add(
        "Section 5.1",
        "The choice for throughput also saves energy.",
        "1.06x OPT-1.3B, 2.17x OPT-6.7B",
        f"{work[0]:.2f}x, {work[1]:.2f}x the operations",
        gain(1.06, work[0]) and gain(2.17, work[1]),
        reason,
    )
    off = fast["perplexity"] - small["perplexity"]
    found.add(
        "Section 5.1",
        "Perplexity stays that of OPT-1.3B.",
        "0.01 less",
        f"{off:+.2f} of {small['perplexity']:.2f}, by own probabilities",
        off < 0.05 * small["perplexity"],
        f"{percent(fast['below'])} of the tokens left below their threshold.",
    )
    _first_tokens(found, result, lines, small, large, first)
    found.add(
        "Figure 16",
        "The larger model's perplexity is lower.",
        "0.97x",
        f"{large['perplexity'] / small['perplexity']:.2f}x, by own probabilities; "
        f"HELIOS for accuracy {right['perplexity'] / small['perplexity']:.2f}x",
        large["perplexity"] < small["perplexity"],
        reason,
    )
    found.add(
        "Figure 16c",
        "For accuracy HELIOS switches to the larger model for long texts, and back.",
        "switches at marks 1 and 2",
        f"{right['switches']} switches; {percent(sum(right['exits']['large']))} of the tokens by "
        "the larger model",
        right["switches"] > 1,
        by_judge(result),
    )
    saved = small["operations"] / spare["operations"]
    found.add(
        "Section 5.5",
        "HELIOS takes less energy a prompt (also the abstract, 1.10x).",
        "0.45 Wh of 0.50 (OPT-1.3B) and 1.01 (OPT-6.7B)",
        f"{spare['operations'] / 1e9:.2f} billion operations of {small['operations'] / 1e9:.2f} "
        f"and {large['operations'] / 1e9:.2f}: {saved:.2f}x less than small",
        gain(1.10, saved),
        reason,
    )
    found.add(
        "Section 5.5",
        "Most prompts are served by partly loaded models.",
        "58.3 %",
        percent(spare["partly_loaded"]),
        spare["partly_loaded"] > 0.583 - NEAR,
        f"Breaches loaded the other layers {spare['loads']} times, and these stay until the next "
        f"of {spare['assessments']} assessments.",
    )
    saving = small["seconds"] - spare["seconds"]
    over = spare["loading"] / saving if saving > 0 else None
    found.add(
        "Section 5.5",
        "Switching costs a small share of the savings.",
        "0.05x of the savings",
        f"{spare['loading']:.1f} s of loading, "
        + ("and no time is saved" if over is None else f"{over:.2f}x of {saving:.1f} s saved"),
        None,
        "Loading and decoding are seconds of a simulation here, not watt-hours.",
    )


def _first_tokens(found, result, lines, small, large, first) -> None:
    def ms(row):
        return 1e3 * row["ttft"]["mean"]

    times = [ms(row) / ms(first) for row in (small, large)]
    found.add(
        "Figure 14",
        "HELIOS brings the first token sooner (also the abstract).",
        "1.39x sooner than OPT-1.3B, 2.23x than OPT-6.7B",
        f"{times[0]:.2f}x small, {times[1]:.2f}x large, loading included",
        gain(1.39, times[0]) and gain(2.23, times[1]),
        f"{first['assessments']} evaluations and {first['loading']:.1f} s of loading are in it.",
    )
    found.add(
        "Section 5.3",
        "The larger model's first token takes longer.",
        "69 ms, 43 ms",
        f"{ms(large):.1f} ms, {ms(small):.1f} ms",
        ms(large) > ms(small),
        "The larger model is no slower.",
    )
    tasks = result["order"]
    long = [i for i, task in enumerate(tasks) if task == "summarization"]
    ratio = lines["large only"].ttft / lines["HELIOS, response time"].ttft
    at = int(ratio[long].argmax()) if long else 0
    most = float(ratio[long[at]]) if long else None
    found.add(
        "Section 5.3",
        "The gain over the larger model is largest for long prompts.",
        "up to 30x (CNN/DailyMail, prompts 272 to 542)",
        "no long prompts" if most is None else f"up to {most:.1f}x (summarization)",
        None if most is None else most > 15,
        "no long prompts"
        if most is None
        else "One request is served at a time, and none waits for another. So a gain is at most "
        "the ratio of two models' times for a prompt, "
        f"{1e3 * lines['large only'].ttft[long[at]]:.0f} and "
        f"{1e3 * lines['HELIOS, response time'].ttft[long[at]]:.0f} ms at the largest.",
    )


def add_table_5(found: Findings, result: Mapping[str, Any]) -> None:
    rows, reason = result["simulated"], by_thresholds(result)
    speeds = [of(rows, f"{m} only")["throughput"] for m in paper.MODELS]
    slower = (
        f"The whole larger model has {speeds[1]:.0f} tokens/s, the smaller one {speeds[0]:.0f}: "
        "the larger one has no advantage in speed and operations."
    )
    for name, theirs in paper.TABLE_5.items():
        row, helios = of(rows, name), name.startswith("HELIOS")
        ours = [100 * s for model in paper.MODELS for s in row["exits"][model]]
        (early, late, small), (least, most, theirs_small) = map(_split, (ours, theirs))
        found.add(
            "Table 5",
            f"Shares of tokens by exit: {name} (small is OPT-1.3B, large OPT-6.7B).",
            " / ".join(f"{v:g}" for v in theirs) + " %",
            " / ".join(f"{v:.1f}" for v in ours) + " %",
            early > least - 100 * NEAR
            and late < most + 100 * NEAR
            and abs(small - theirs_small) < 100 * NEAR
            if helios
            else None,
            f"{early:.1f} % by the first exits (theirs {least:.1f}), {late:.1f} % by all layers "
            f"({most:.1f}), {small:.1f} % by the small model ({theirs_small:.1f}). "
            + (by_judge(result) if name.endswith("accuracy") else slower)
            if helios
            else f"{FITTED}.",
        )

    def get(name):
        return of(rows, f"HELIOS, {name}")["exits"]

    energy, static = (
        get("energy"),
        [
            of(rows, "small only")["exits"]["small"][-1],
            of(rows, "large only")["exits"]["large"][-1],
        ],
    )
    found.add(
        "Section 5.6",
        "With the objective energy, whole models are used less than with one model alone.",
        "7.9 % and 0.6 %, alone 22.3 % and 21.6 %",
        f"{percent(energy['small'][-1])} and {percent(energy['large'][-1])}, alone "
        f"{percent(static[0])} and {percent(static[1])}",
        energy["small"][-1] + energy["large"][-1] < max(static),
        reason,
    )
    late = [sum(get(name)["large"]) for name in ("response time", "throughput")]
    ttft = [1e3 * of(rows, f"{name} only")["ttft"]["mean"] for name in paper.MODELS]
    found.add(
        "Section 5.6",
        "With the objective response time, the larger model serves more.",
        "49.6 % of the tokens, for throughput 21.7 %",
        f"{percent(late[0])}, {percent(late[1])}",
        late[0] > late[1],
        f"Without the other model, the smaller model's first token takes {ttft[0]:.0f} ms, and "
        f"the larger one's {ttft[1]:.0f} ms.",
    )
    first = [get(name)["large"][0] for name in ("accuracy", "energy")]
    found.add(
        "Section 5.6",
        "With the objective accuracy, the larger model's first exit serves more than with energy.",
        "34.6 % of the tokens, 2.26x",
        f"{percent(first[0])}, for energy {percent(first[1])}",
        first[0] > first[1],
        by_judge(result),
    )


def _split(shares: Sequence[float]) -> tuple[float, float, float]:
    """Return the shares of a row of Table 5 by first exits, all layers and the small model."""
    half = len(shares) // 2
    return shares[0] + shares[half], shares[half - 1] + shares[-1], sum(shares[:half])


def add_sensitivity(found: Findings, result: Mapping[str, Any]) -> None:
    over = result["figure_17"]
    by = {r["value"]: r["throughput"] for r in over["interval"]}
    told = ", ".join(f"{n}: {v:.0f}" for n, v in by.items())
    found.add(
        "Figure 17a",
        "Long reassessment intervals (RI) lower the throughput.",
        "lower from an RI of 200 on",
        f"tokens/s by RI: {told}",
        max(by[n] for n in by if n >= 200) < max(by[n] for n in by if n < 200),
        f"It is highest at an RI of {max(by, key=lambda n: by[n])}.",
    )
    rows = over["early"]
    best = [max(r["static"].values()) for r in rows]
    told = ", ".join(
        f"{r['thresholds']['small']:.3f}: {r['throughput']:.0f} (alone {b:.0f})"
        for r, b in zip(rows, best, strict=True)
    )
    falls = [r["throughput"] for r in rows]
    found.add(
        "Figure 17b",
        "Throughput falls as the confidence threshold (TH) rises.",
        "falls",
        f"tokens/s by threshold: {told}",
        falls[0] > falls[-1],
        by_thresholds(result),
    )
    found.add(
        "Figure 17b",
        "HELIOS is faster than either model alone at every threshold.",
        "always",
        f"tokens/s by threshold: {told}",
        all(r["throughput"] > b for r, b in zip(rows, best, strict=True)),
        sentence(
            "; ".join(
                f"at {r['thresholds']['small']:.3f} it has {r['throughput'] / b:.2f} times the "
                f"throughput of the better one alone, with {r['assessments']} evaluations"
                for r, b in zip(rows, best, strict=True)
                if r["throughput"] <= b
            )
        )
        + ".",
    )
