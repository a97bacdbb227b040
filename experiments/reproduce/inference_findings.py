"""What `experiments.reproduce.inference` finds of EE-LLM's Figures 8 and 10 and Tables 3 and 4."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.reproduce import exit_tables
from experiments.reproduce.catalogue import finding
from experiments.reproduce.claims import Finding
from experiments.reproduce.inference_tasks import MEANINGFUL, TASKS

COMPARABLE = 0.1  # of the full model's score or perplexity: so much worse is comparable
SIMILAR = 1.25  # times as fast: so far two methods may be apart
FAST = 2  # times the full model's speed
NOISY = (
    "the paired differences are too uncertain to tell whether what is twice as fast is comparable"
)
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
        margin = COMPARABLE * full["score"]
        points = [
            (r["threshold"], r["speed"]["pipelined"], r["change"]["low"], r["change"]["high"])
            for r in rows
        ]
        fastest = fastest_comparable(points, margin)
        low, change = rows[-1], rows[-1]["change"]
        ours = (
            f"{task.title}, {task.metric}: {full['score']:.3f} "
            f"({full['low']:.3f}-{full['high']:.3f}) at threshold 1; comparable (at most "
            f"{margin:.3f} less, record by record) down to {fastest[0]:g}, {fastest[1]:.2f} times "
            "as fast; "
            f"{change['score']:+.3f} ({change['low']:+.3f} to {change['high']:+.3f}) at "
            f"{low['threshold']:g}, {low['speed']['pipelined']:.2f} times"
        )
        if full["score"] < MEANINGFUL:
            why = "the full model itself hardly scores: there is nothing to lose"
            yield judged("figure-8", None, ours, simulated, why)
        else:
            yield judged("figure-8", *fast_and_comparable(points, margin, ours, simulated))
    rows, full = summary["thresholds"], summary["full"]
    more = lambda r: r["more_than_full"]["perplexity"]
    points = [
        (r["threshold"], r["simulated"]["pipelined"], -more(r)["high"], -more(r)["low"])
        for r in rows
    ]
    threshold, *_ = fastest_comparable(points, COMPARABLE)
    best = next(r for r in rows if r["threshold"] == threshold)
    ours = (
        f"perplexity of held-out text: {full['perplexity']['score']:.2f} by the full model, "
        f"{best['perplexity']:.2f} at {threshold:g} ({more(best)['score']:+.1%}, "
        f"{more(best)['low']:+.1%} to {more(best)['high']:+.1%}, text by text), "
        f"{best['agreement']:.1%} of the tokens the same; {best['speed']['ratio']:.2f} times as "
        f"fast by KV recomputation (measured), {best['simulated']['pipelined']:.2f} times on "
        "stages (simulated)"
    )
    yield judged("figure-8", *fast_and_comparable(points, COMPARABLE, ours, simulated))
    yield judged(
        "figure-8",
        None,
        "open-book NaturalQuestions and XSUM: not run",
        "no run",
        "neither data set is at hand",
    )
    curves = summary["tasks"] | {"held-out text": [r | {"speed": r["simulated"]} for r in rows]}
    slower = {
        name: f"{a['threshold']:g} to {b['threshold']:g}"
        for name, curve in curves.items()
        for a, b in itertools.pairwise(curve)
        if b["speed"]["pipelined"] < a["speed"]["pipelined"] - 1e-9
    }
    yield judged(
        "figure-8-order",
        not slower,
        f"{len(curves) - len(slower)} of {len(curves)} curves are the faster the lower the "
        f"threshold, from {rows[0]['threshold']:g} to {rows[-1]['threshold']:g}",
        simulated,
        "slower: " + ", ".join(f"{name} from {where}" for name, where in slower.items()),
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


Point = tuple[float, float, float, float]
"""A threshold, its speed over the full model's, and the interval of the score's paired change."""


def fastest_comparable(points: Sequence[Point], margin: float) -> Point:
    """Find the fastest point whose score is surely at most `margin` lower; else the first."""
    fine = [p for p in points if p[2] >= -margin]
    return max(fine, key=lambda p: p[1], default=points[0])


def fast_and_comparable(
    points: Sequence[Point], margin: float, ours: str, scale: str
) -> tuple[bool | None, str, str, str]:
    """Judge whether a point is `FAST` times as fast and comparable; arguments of `judged`."""
    fast = [p for p in points if p[1] >= FAST]
    holds = any(p[2] >= -margin for p in fast)
    unsure = not holds and any(p[3] >= -margin for p in fast)
    best = max(p[1] for p in points)
    why = (
        NOISY
        if unsure
        else f"no threshold is {FAST} times as fast, {best:.2f} times at most"
        if not fast
        else f"from {max(p[0] for p in fast):g} down, where it is, more than {margin:.3f} is lost"
    )
    return (None if unsure else holds), ours, scale, why


def figure_10(summary: Mapping[str, Any], scale: str) -> Iterator[Finding]:
    rows = [r for r in summary["thresholds"] if r["threshold"] < 1]
    ratios = [r["simulated"]["pipelined"] / r["simulated"]["recompute"] for r in rows]
    yield judged(
        "figure-10",
        min(ratios) > 1,
        f"pipelined over KV recomputation at TP = 1, thresholds {rows[0]['threshold']:g} to "
        f"{rows[-1]['threshold']:g}: {min(ratios):.2f} to {max(ratios):.2f} times as fast",
        f"{scale}; simulated from its exits and measured times, {summary['stages']} stages",
        "it is no faster at "
        + ", ".join(f"{r['threshold']:g}" for r, x in zip(rows, ratios, strict=True) if x <= 1),
    )
    yield judged(
        "similar-methods",
        max(*ratios, *(1 / x for x in ratios)) <= SIMILAR,
        f"pipelined over KV recomputation at TP = 1: {min(ratios):.2f} to {max(ratios):.2f} times "
        f"as fast below threshold 1 (similar: up to {SIMILAR:g} times apart)",
        f"{scale}; simulated from its exits and measured times, {summary['stages']} stages",
        "they are further apart at "
        + ", ".join(
            f"{r['threshold']:g}"
            for r, x in zip(rows, ratios, strict=True)
            if max(x, 1 / x) > SIMILAR
        ),
    )
    told, slower = [], {}
    for launch, curve in summary["tensor_parallel"].items():
        over = [row["recompute_tp"] / row["pipelined"] for row in curve if row["threshold"] < 1]
        gain = curve[0]["recompute_tp"] / curve[0]["recompute"]
        slow = [r for r in curve if r["threshold"] < 1 and r["recompute_tp"] <= r["pipelined"]]
        if slow:
            slower[launch] = slow
        told.append(
            f"with {1e6 * float(launch):.0f} us a layer that no device shares: {min(over):.2f} to "
            f"{max(over):.2f} times as fast as pipelined, {gain:.2f} times TP = 1 at threshold 1"
        )
    yield judged(
        "figure-10",
        not slower,
        f"KV recomputation at TP = 4: {'; '.join(told)}",
        f"simulated: this model's exits, layers of the 7B model on A100-40GB, all-reduces of "
        f"{1e6 * ALL_REDUCE:.0f} us twice a layer, hops of {1e6 * HOP:.0f} us",
        "; ".join(
            f"with {1e6 * float(launch):.0f} us a layer it is slower at "
            + ", ".join(f"{r['threshold']:g}" for r in slow)
            for launch, slow in slower.items()
        ),
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
        f"{1 - means[min(means)]:.0%} of the tokens are others at {min(means):g}"
        if means
        else "texts at one threshold alone",
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
