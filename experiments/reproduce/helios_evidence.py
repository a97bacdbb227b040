"""What tokens of two models show of HELIOS' two insights: tables of numbers, by a trace alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

BINS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0001)
LOW = 2  # bins that are called low


def threshold_for(trace, share: float) -> float:
    """One for all exits, by which so many of the tokens leave before the last layer."""
    surest = trace.confidences[..., :-1].max(-1)
    if not trace.prefill_exit:
        surest = surest[:, 1:]
    found = float(np.quantile(surest, 1 - share))
    return min(found, float(np.nextafter(np.float32(1), np.float32(0))))  # at 1 nobody leaves


def by_task(trace, thresholds: Mapping[str, float]) -> list[dict]:
    """Share of tokens by exit, of each model and task, all of them first."""
    rows = []
    kinds = np.array(trace.kinds)
    for name, model in trace.models.items():
        exits, _ = model.leaves(thresholds[name])
        e = np.arange(model.exits)
        for task in ("all", *dict.fromkeys(trace.kinds)):
            which = exits if task == "all" else exits[kinds == task]
            same = np.take_along_axis(model.same, exits[..., None], -1)[..., 0]
            same = same if task == "all" else same[kinds == task]
            rows.append({
                "model": name, "task": task, "stops": list(model.stops),
                "shares": (which[..., None] == e).mean((0, 1)).tolist(),
                "agreement": float(same.mean()),
            })  # fmt: skip
    return rows


def unchanged(trace, thresholds: Mapping[str, float]) -> list[dict]:
    """Of each early exit: how many of the tokens below its threshold are the full model's, of those
    that reach it; and of all, by confidence."""
    rows = []
    for name, model in trace.models.items():
        exits, _ = model.leaves(thresholds[name])
        for e in range(model.exits - 1):
            sure, same = model.confidences[..., e], model.same[..., e]
            below = exits > e
            bins = np.digitize(sure, BINS) - 1
            counts = [int((bins == i).sum()) for i in range(len(BINS) - 1)]
            shares = [float(same[bins == i].mean()) if n else None for i, n in enumerate(counts)]
            low = bins < LOW
            rows.append({
                "model": name, "layers": model.stops[e], "of": model.stops[-1],
                "below": float(below.mean()),
                "unchanged": float(same[below].mean()) if below.any() else None,
                "all": float(same.mean()), "counts": counts, "by_confidence": shares,
                "low": float(same[low].mean()) if low.any() else None,
            })  # fmt: skip
    return rows


def complementary(trace, along, thresholds: Mapping[str, float]) -> list[dict]:
    """Of the tokens that one model, the writer, takes to the end, how many another one that reads
    the same text lets go early; and how many go early on either. along: (reader, writer)."""
    rows = []
    for (reader, writer), other in along.items():
        own = trace.models[writer]
        early = own.leaves(thresholds[writer])[0] < own.exits - 1
        theirs = other.leaves(thresholds[reader])[0] < other.exits - 1
        late = ~early
        same = other.tokens[..., -1] == own.tokens[..., -1]
        rows.append({
            "writer": writer, "reader": reader, "early": float(early.mean()),
            "reader_early": float(theirs.mean()),
            "rescued": float(theirs[late].mean()) if late.any() else None,
            "either": float((early | theirs).mean()), "same_text": float(same.mean()),
            "late_early": float(theirs[early].mean()) if early.any() else None,
        })  # fmt: skip
    return rows


def prices(profiles: Mapping, trace, thresholds: Mapping[str, float | None]) -> dict:
    """Profiles, whose agreements, and operations that exits spare, are those of the trace at these
    thresholds."""
    import dataclasses

    from eejax.inference.batched_state import BatchOptions
    from eejax.serving.profiles import spared

    found = {}
    for name, model in trace.models.items():
        exits, same = model.leaves(thresholds[name])[0], model.same
        share = lambda e, which, same=same: float(
            same[..., e][which].mean() if which.any() else same[..., e].mean()
        )
        n = model.exits
        found[name] = dataclasses.replace(
            profiles[name], sure=tuple(share(e, exits == e) for e in range(n)),
            unsure=(*(share(e, exits > e) for e in range(n - 1)), 1.0),
            spared=spared(exits.tolist(), profiles[name].energy, BatchOptions.cap),
        )  # fmt: skip
    return found
