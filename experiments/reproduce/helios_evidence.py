"""Evidence for HELIOS' insights in the tokens of two models, from a recorded trace alone.

A trace holds the greedy text of each model with all its layers, and what every exit says of it, so
a token's probability at the exit that it leaves by is the confidence that was recorded there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

LIMITS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # thresholds of Figure 8
LOW = 0.2  # confidence that section 1 calls low
EVALUATED = 5  # prompts of an evaluation, section 3.4
DRAFTS = (1, 2, 3, 4, 6, 8)  # lengths of a draft in section 6's comparison
SMALLEST = 1e-12  # a probability, so that its logarithm is finite


def threshold_for(trace, share: float) -> float:
    """Return the threshold, one for all exits, at which `share` of the tokens leave early."""
    surest = trace.confidences[..., :-1].max(-1)
    if not trace.prefill_exit:
        surest = surest[:, 1:]
    found = float(np.quantile(surest, 1 - share))
    return min(found, float(np.nextafter(np.float32(1), np.float32(0))))  # at 1 nobody leaves


def tasks_of(trace) -> dict[str, np.ndarray]:
    """Return a mask of prompts [p] bool for every task, all prompts first."""
    kinds = np.array(trace.kinds)
    every = {"all": np.ones(len(kinds), bool)}
    return every | {task: kinds == task for task in dict.fromkeys(trace.kinds)}


def exit_shares(trace, thresholds: Mapping[str, float]) -> list[dict]:
    """Compute Figures 7 and 11a: share of tokens by exit, for each model and task."""
    rows = []
    for name, model in trace.models.items():
        exits, _ = model.leaves(thresholds[name])
        same = np.take_along_axis(model.same, exits[..., None], -1)[..., 0]
        for task, which in tasks_of(trace).items():
            e = np.arange(model.exits)
            rows.append(
                {
                    "model": name,
                    "task": task,
                    "layers": list(model.exit_boundaries),
                    "shares": (exits[which][..., None] == e).mean((0, 1)).tolist(),
                    "agreement": float(same[which].mean()),
                }
            )
    return rows


def unchanged(trace) -> list[dict]:
    """Compute Figure 8: the share of tokens below a threshold at the first exit that stay the same.

    Returns:
      for each model and task `unchanged`, one number for each of `LIMITS`, None where no token is
      below; and `below`, the share of tokens that are. At 1 these are all tokens.
    """
    rows = []
    for name, model in trace.models.items():
        sure, same = model.confidences[..., 0], model.same[..., 0]
        for task, which in tasks_of(trace).items():
            below = [
                sure[which] < limit if limit < 1 else np.ones_like(same[which]) for limit in LIMITS
            ]
            rows.append(
                {
                    "model": name,
                    "task": task,
                    "layer": model.exit_boundaries[0],
                    "of": model.exit_boundaries[-1],
                    "below": [float(b.mean()) for b in below],
                    "unchanged": [float(same[which][b].mean()) if b.any() else None for b in below],
                }
            )
    return rows


def complementary(trace, along, thresholds: Mapping[str, float]) -> list[dict]:
    """Compute Figures 9 and 11b: exits of one model's tokens in another that reads the same text.

    Args:
      along: the reader's exits on the writer's text, by (reader, writer).

    Returns:
      `past_first`: the reader's exit shares of the tokens that need more than the writer's first
      exit ("High-Exit Tokens", section 3.4.1); `first`: of the others; `last`: of those that need
      all of the writer's layers. `either`: share of tokens that leave early in at least one model.
    """
    rows = []
    for (reader, writer), other in along.items():
        own = trace.models[writer]
        leaves = own.leaves(thresholds[writer])[0]
        past_first, early = leaves > 0, leaves < own.exits - 1
        exits = other.leaves(thresholds[reader])[0]

        def shares(which, exits=exits, n=other.exits):
            return (
                np.bincount(exits[which], minlength=n) / which.sum() if which.any() else np.zeros(n)
            ).tolist()

        rows.append(
            {
                "writer": writer,
                "reader": reader,
                "layers": list(other.exit_boundaries),
                "writer_early": float(early.mean()),
                "past_first": shares(past_first),
                "first": shares(~past_first),
                "last": shares(~early),
                "either": float((early | (exits < other.exits - 1)).mean()),
            }
        )
    return rows


def perplexities(model, exits: np.ndarray) -> np.ndarray:
    """Return the perplexity [p] of prompts' tokens at the exits [p, n] that they leave by."""
    chosen = np.take_along_axis(model.confidences, exits[..., None], -1)[..., 0]
    return np.exp(-np.log(np.maximum(chosen, SMALLEST)).mean(1))


def mean_perplexity(each: np.ndarray) -> float:
    """Return the perplexity of texts of equal length, from that of each."""
    return float(np.exp(np.log(each).mean()))


def table_1(trace, judged: Mapping[str, Sequence[float]], thresholds) -> list[dict]:
    """Compute Table 1: perplexity over all prompts, and over a task's first prompts.

    Args:
      judged: mean log-probability of each prompt's text under a separate model, by writer.

    Returns:
      for each task and for two measures, "own" (each model of its own text, at the exits that
      tokens leave by) and "judge" (of the text of all layers): perplexity by model over all prompts
      (`before`), over the first `EVALUATED` of the task (`after`), and over all of the task
      (`task_mean`).
    """
    own = {
        name: np.log(perplexities(model, model.leaves(thresholds[name])[0]))
        for name, model in trace.models.items()
    }
    judge = {name: -np.asarray(judged[name]) for name in trace.models}
    rows = []
    for measure, nats in (("own", own), ("judge", judge)):

        def mean(which, nats=nats):
            return {name: float(np.exp(values[which].mean())) for name, values in nats.items()}

        tasks = tasks_of(trace)
        before = mean(tasks.pop("all"))
        for task, which in tasks.items():
            first = np.flatnonzero(which)[:EVALUATED]
            rows.append(
                {
                    "measure": measure,
                    "task": task,
                    "before": before,
                    "after": mean(first),
                    "task_mean": mean(which),
                }
            )
    return rows


def choices(rows: Sequence[dict], measure: str) -> dict[str, int]:
    """Count how often benchmark and evaluation name the model of least perplexity.

    `differ`: tasks for which the two name different models.
    """

    def best(table):
        return min(table, key=table.get)

    own = [row for row in rows if row["measure"] == measure]
    return {
        "tasks": len(own),
        "differ": sum(best(r["before"]) != best(r["after"]) for r in own),
        "before_right": sum(best(r["before"]) == best(r["task_mean"]) for r in own),
        "after_right": sum(best(r["after"]) == best(r["task_mean"]) for r in own),
    }


def speculative(trace, along, profiles, thresholds, task: str) -> dict:
    """Compute section 6: operations of drafting by the small model, over the large one's.

    The large one has two exits. Drafts of each of `DRAFTS` lengths are accepted as far as the small
    model, reading the large one's text, predicts the same; the length that takes least is given.
    Operations are of decoding.
    """
    small, large = trace.models
    which = tasks_of(trace).get(task, np.ones(len(trace), bool))

    def whole(name):
        return profiles[name].worked(
            (*(0.0,) * (profiles[name].exits - 1), 1.0), profiles[name].exits
        )

    exits = trace.models[large].leaves(thresholds[large])[0][which]
    n = profiles[large].exits
    shares = (exits[..., None] == np.arange(n)).mean((0, 1))
    with_exits = profiles[large].worked(shares.tolist(), n)
    accepted = (
        along[small, large].tokens[which][..., -1] == trace.models[large].tokens[which][..., -1]
    )
    found = {}
    for k in DRAFTS:
        rounds = sum(_rounds(row, k) for row in accepted.tolist())
        found[k] = rounds * (k * whole(small) + (k + 1) * whole(large)) / accepted.size
    best = min(found, key=lambda k: found[k])
    return {
        "task": task if which.sum() < len(trace) else "all",
        "draft": best,
        "accepted": float(accepted.mean()),
        "ratio": found[best] / with_exits,
        "over_whole": found[best] / whole(large),
    }


def _rounds(accepted: Sequence[bool], k: int) -> int:
    """Return the number of drafts of k tokens that a text takes.

    Each draft adds its accepted tokens, and one more.
    """
    position = rounds = 0
    while position < len(accepted):
        draft = accepted[position : position + k]
        right = next((i for i, same in enumerate(draft) if not same), len(draft))
        position, rounds = position + right + 1, rounds + 1
    return rounds


def prices(profiles: Mapping, trace, thresholds: Mapping[str, float]) -> dict:
    """Return profiles with the trace's agreements and operations saved, at thresholds."""
    from eejax.helios.profiles import spared
    from eejax.inference.options import EngineOptions

    found = {}
    for name, model in trace.models.items():
        exits, same = model.leaves(thresholds[name])[0], model.same

        def share(e, which, same=same):
            return float(same[..., e][which].mean() if which.any() else same[..., e].mean())

        n = model.exits
        found[name] = dataclasses.replace(
            profiles[name],
            sure=tuple(share(e, exits == e) for e in range(n)),
            unsure=(*(share(e, exits > e) for e in range(n - 1)), 1.0),
            spared=spared(exits.tolist(), profiles[name].energy, EngineOptions.cap),
        )
    return found
