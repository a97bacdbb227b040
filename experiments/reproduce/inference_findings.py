"""What `experiments.reproduce.inference` finds of EE-LLM's Figures 8 and 10 and Tables 3 and 4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.reproduce import exit_tables
from experiments.reproduce.catalogue import finding
from experiments.reproduce.claims import Finding
from experiments.reproduce.inference_tasks import MEANINGFUL, TASKS

SMALL = "the model is small and trained for minutes: it is rarely sure of a token"
WIDE = 0.3  # of a score or a perplexity: so wide an interval tells no threshold from another
NOISY = "the interval of the full model's score is too wide to tell what is as good"
ALL_REDUCE, HOP = 15e-6, 10e-6  # seconds, of a token's state between A100s of one server
BANDWIDTH = 1.555e12  # bytes a second of an A100-40GB
LAUNCHES = (0.0, 2e-4)  # seconds of a layer that no parallelism divides


def findings(summary: Mapping[str, Any], table3, table4, config, scale: str) -> list[dict]:
    """All findings, as dicts.

    Args:
      summary: what the reproduction measured; "tasks" by name, "thresholds" from 1 down.
      table3, table4: of `exit_tables`.
      config: the model's.
      scale: of everything that was measured.
    """
    found = [
        *figure_8(summary, scale),
        *figure_10(summary, scale),
        *tables(table3, table4, scale),
    ]
    return [one.to_dict() for one in found]


def judged(key: str, holds: bool | None, ours: str, scale: str, why: str) -> Finding:
    return finding("EE-LLM", key, ours, scale, None if holds is None else bool(holds), why)


def figure_8(summary: Mapping[str, Any], scale: str) -> Iterator[Finding]:
    """A finding for each task, and for the scores that a small model has."""
    simulated = f"{scale}; speed simulated, {summary['stages']} stages"
    for name, rows in summary["tasks"].items():
        task, full = TASKS[name], rows[0]["score"]
        fastest = _comparable(rows)
        low = rows[-1]
        ours = (
            f"{task.title}, {task.metric}: {full['score']:.3f} "
            f"({full['low']:.3f}-{full['high']:.3f}) at threshold 1; as good down to "
            f"{fastest['threshold']:g}, {fastest['speed']['pipelined']:.2f} times as fast; "
            f"{low['score']['score']:.3f} at {low['threshold']:g}, "
            f"{low['speed']['pipelined']:.2f} times"
        )
        able = full["score"] >= MEANINGFUL
        wide = full["high"] - full["low"] > WIDE
        holds = fastest["speed"]["pipelined"] >= 2 if able and not wide else None
        why = "the full model itself hardly scores: there is nothing to lose"
        if able:
            why = NOISY if wide else SMALL
        yield judged("figure-8", holds, ours, simulated, why)
    rows, full = summary["thresholds"], summary["full"]
    interval = full["perplexity"]
    wide = interval["high"] / interval["low"] > 1 + WIDE
    kept = [r for r in rows if full["perplexity"]["low"] <= r["perplexity"]]
    kept = [r for r in kept if r["perplexity"] <= full["perplexity"]["high"]] or rows[:1]
    best = max(kept, key=lambda r: r["simulated"]["pipelined"])
    yield judged(
        "figure-8",
        None if wide else best["simulated"]["pipelined"] >= 2,
        f"perplexity of held-out text: {full['perplexity']['score']:.2f} by the full model, "
        f"{best['perplexity']:.2f} at {best['threshold']:g}, {best['agreement']:.1%} of the tokens "
        f"the same; {best['speed']['ratio']:.2f} times as fast by KV recomputation (measured), "
        f"{best['simulated']['pipelined']:.2f} times on stages (simulated)",
        scale,
        NOISY if wide else SMALL,
    )
    yield judged(
        "figure-8",
        None,
        "NaturalQuestions open-book and XSUM: not run",
        "no run",
        "neither data set is at hand",
    )
    speed = rows[0]["speed"]
    apart = speed["low"] > 1.02 or speed["high"] < 0.98
    near = abs(speed["ratio"] - 1) <= 0.02
    yield judged(
        "threshold-1",
        False if apart else near or None,
        f"KV recomputation at threshold 1 is {speed['ratio']:.3f} "
        f"({speed['low']:.3f}-{speed['high']:.3f}) times as fast as without exits",
        scale,
        "more than 2 % apart" if apart else "these runs cannot be timed to 2 % here",
    )


def _comparable(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The fastest threshold whose score is no lower than the full model's interval."""
    least = rows[0]["score"]["low"]
    fine = [r for r in rows if r["score"]["score"] >= least]
    return max(fine, key=lambda r: r["speed"]["pipelined"])


def figure_10(summary: Mapping[str, Any], scale: str) -> Iterator[Finding]:
    rows = [r for r in summary["thresholds"] if r["threshold"] < 1]
    ratios = [r["simulated"]["pipelined"] / r["simulated"]["recompute"] for r in rows]
    yield judged(
        "figure-10",
        min(ratios) > 1,
        f"pipelined over KV recomputation at TP = 1, thresholds {rows[0]['threshold']:g} to "
        f"{rows[-1]['threshold']:g}: {min(ratios):.2f} to {max(ratios):.2f} times as fast",
        f"{scale}; simulated from its exits and measured times, {summary['stages']} stages",
        "few tokens leave early at the highest thresholds",
    )
    told, faster = [], []
    for launch, curve in summary["tensor_parallel"].items():
        over = [row["recompute_tp"] / row["pipelined"] for row in curve if row["threshold"] < 1]
        gain = curve[0]["recompute_tp"] / curve[0]["recompute"]
        faster.append(min(over) > 1)
        told.append(
            f"with {1e6 * float(launch):.0f} us a layer that no device shares: {min(over):.2f} to "
            f"{max(over):.2f} times as fast as pipelined, {gain:.2f} times TP = 1 at threshold 1"
        )
    yield judged(
        "figure-10",
        all(faster),
        f"KV recomputation at TP = 4: {'; '.join(told)}",
        f"simulated: this model's exits, layers of the 7B model on A100-40GB, all-reduces of "
        f"{1e6 * ALL_REDUCE:.0f} us twice a layer, hops of {1e6 * HOP:.0f} us",
        "tokens that leave on the first stages gain more by stages than by shares of a layer, "
        "where launches are most of a layer's time",
    )
    if check := summary["pipelined_engine"]:
        yield judged(
            "same-output",
            check["others"] == 0,
            f"{check['tokens'] - check['differ']} of {check['tokens']} tokens have the same exit; "
            f"the others follow {check['near_ties']} near-ties in rounding",
            f"{scale}, {summary['stages']} fake devices",
            "tokens differ without a near-tie",
        )


def tensor_parallel(
    traces_by_threshold: Mapping[float, Sequence[Sequence[int]]], config, stages: int
) -> dict[str, list[dict[str, float]]]:
    """Figure 10's three curves for layers of the 7B model on A100s.

    A layer takes the time to read its weights, divided by the devices that share it, two
    all-reduces if there are several, and what launches take, which is not divided; rows cost
    nothing. Exits are read likewise.

    Args:
      traces_by_threshold: exits of each text's tokens, by threshold.
      config: the model whose exits these are; its depth stands for all 32 layers.
      stages: of the pipeline, and devices that share a layer.

    Returns:
      By the seconds of launches: rows of speeds over a full pass on one device, by threshold.
    """
    from eejax.inference import latency
    from eejax.inference.latency import ForwardTimes
    from eejax.pipeline.partition import EVEN, partition

    width, vocab, layers = 4096, 32_000, 32
    one_layer = 2 * 12 * width**2 / BANDWIDTH * layers / config.n_layers
    head = 2 * width * vocab / BANDWIDTH
    cut = partition(config, stages, EVEN, "earlier")
    found = {}
    for launch in LAUNCHES:
        own = launch * layers / config.n_layers
        shared = 2 * ALL_REDUCE * layers / config.n_layers
        times = {
            n: ForwardTimes(
                (one_layer / n + own + (shared if n > 1 else 0),) * config.n_layers,
                (head / n + (ALL_REDUCE if n > 1 else 0),) * (config.n_exits + 1),
            )
            for n in (1, stages)
        }
        rows = []
        for threshold, traces in traces_by_threshold.items():
            mine = times
            if threshold == 1:  # exits that cannot fire are not asked
                mine = {
                    n: ForwardTimes(t.layers, (*(0.0,) * config.n_exits, t.exits[-1]))
                    for n, t in times.items()
                }
            end = lambda emitted: float(emitted[-1])
            full = sum(times[1].layers) + head
            total = sum(len(t) for t in traces) * full
            took = {
                "recompute": sum(end(latency.recompute(t, config, mine[1])) for t in traces),
                "recompute_tp": sum(
                    end(latency.recompute(t, config, mine[stages])) for t in traces
                ),
                "pipelined": sum(end(latency.pipelined(t, cut, mine[1], hop=HOP)) for t in traces),
            }
            rows.append({"threshold": threshold} | {k: total / s for k, s in took.items()})
        found[str(launch)] = rows
    return found


def tables(table3, table4, scale: str) -> Iterator[Finding]:
    """Texts by threshold, and confidences of exits."""
    same: dict[float, list[float]] = {}
    for text in table3:
        first, *others = text["texts"]
        for other in others:
            n = min(len(first["ids"]), len(other["ids"]))
            equal = np.array(first["ids"][:n]) == np.array(other["ids"][:n])
            same.setdefault(other["threshold"], []).append(float(equal.mean()))
    means = {threshold: float(np.mean(shares)) for threshold, shares in same.items()}
    told = ", ".join(f"{share:.0%} at {threshold:g}" for threshold, share in means.items())
    yield judged(
        "table-3",
        means[min(means)] >= 0.9 if means else None,  # the lowest threshold, which is the fastest
        f"tokens that are those of the text at threshold 1, place by place: {told or 'none asked'} "
        f"({len(table3)} texts; one other token may change all behind it); judged "
        "at the lowest threshold",
        scale,
        SMALL if means else "texts at one threshold alone",
    )
    rows = [r for r in exit_tables.agreeing(table4) if None not in (r["agreeing"], r["others"])]
    told = "; ".join(
        f"exit {r['boundary']}: {r['agreement']:.0%} as the final one, mean confidence "
        f"{r['agreeing']:.2f} there, {r['others']:.2f} elsewhere"
        for r in rows
    )
    yield judged(
        "table-4",
        bool(rows) and all(r["agreeing"] > r["others"] for r in rows),
        told or "every exit predicts all tokens as the final one does",
        scale,
        "confidence does not tell the tokens that an exit predicts rightly",
    )
