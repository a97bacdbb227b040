"""Speeds of engines: timed in interleaved pairs, and simulated from the times of layers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

MAX_PROBABILITY = "max_probability"
CHECKED = 2  # prompts that the real `pipelined` continues
TIE = 1e-4  # the oracle's margin below which rounding may decide


class TimedDecoding:
    """Timing of decoding alone: `start` runs a prompt up to its first token, `finish` the rest."""

    def __init__(self, generator, prompts, new: int, **kwargs):
        self.generator, self.prompts, self.new, self.kwargs = generator, prompts, new, kwargs
        self.stream, self.results = None, []

    def start(self) -> None:
        prompt = self.prompts[len(self.results) % len(self.prompts)]
        self.stream = self.generator.stream([prompt], self.new + 1, chunk=self.new, **self.kwargs)
        next(self.stream)

    def finish(self) -> None:
        *_, result = self.stream
        self.results.append(result)


def program(config, ids: Sequence[int], new: int) -> tuple[int, int]:
    """Return the lengths of prompt and cache that a generator's programs are compiled for."""
    from eejax.inference import EngineOptions
    from eejax.inference.generate import program_lengths

    n = len(ids)
    return program_lengths(n, n + new, config.context_length, EngineOptions())


def with_layers_of(one, other):
    """Return the other generator, reading the same arrays of layers as `one`.

    Copies elsewhere in memory are read at speeds that differ by some percent.
    """
    layers = iter([layer for segment in one.weights.segments for layer in segment])
    segments = tuple(tuple(next(layers) for _ in segment) for segment in other.weights.segments)
    return dataclasses.replace(other, weights=other.weights.replace(segments=segments))


def measure(
    model, thresholds: Sequence[float], prompts: list, new: int, pairs: int, gate=MAX_PROBABILITY
):
    """Time `full`, then `recompute` at each threshold of a gate.

    Returns seconds [1 + thresholds, pairs], and for each the list of results, one for each prompt.
    """
    from eejax.analysis import interleave
    from eejax.inference import Generator

    def make(engine):
        return Generator.make(model.params, model.config, engine)

    full, recompute = make("full"), make("recompute")
    timed = [TimedDecoding(full, prompts, new)]
    timed += [TimedDecoding(recompute, prompts, new, threshold=t, gate=gate) for t in thresholds]
    seconds = interleave(
        [lambda _, t=t: t.finish() for t in timed],
        pairs,
        time.perf_counter,
        before=lambda r: timed[r].start(),
    )
    return seconds, [t.results[: len(prompts)] for t in timed]


def measured(seconds: np.ndarray) -> list[dict]:
    """Return speeds of every threshold, from seconds [1 + thresholds, pairs].

    They are relative to `full`, to threshold 1, and to the threshold above.
    """
    from eejax.analysis import median_ratio

    full, *rest = seconds

    def over(a, b):
        return dict(zip(("ratio", "low", "high"), median_ratio(a, b), strict=True))

    return [
        {"speed": over(full, s), "over_first": over(rest[0], s), "over_above": over(above, s)}
        for above, s in zip([rest[0], *rest], rest, strict=False)
    ]


def simulate(
    traces: Sequence[Sequence[int]],
    config,
    stages: int,
    times,
    factors: dict[int, float],
    threshold: float,
    cap: int,
) -> dict[str, float]:
    """Return the speed relative to `full` of texts whose tokens left by these exits."""
    from eejax.experiments import latency
    from eejax.pipeline.partition import EVEN, partition

    if threshold == 1:  # exits that cannot fire are not evaluated
        exits = (*(0.0 for _ in config.exits), times.exits[-1])
        times = dataclasses.replace(times, exits=exits)

    def rows(n: int) -> float:
        return next(f for w, f in factors.items() if w >= n)

    cut = partition(config, stages, EVEN, "earlier")
    full = sum(map(len, traces)) * (sum(times.layers) + times.exits[-1])
    ends = {
        "recompute": [latency.recompute(t, config, times, cap=cap, rows=rows) for t in traces],
        "pipelined": [latency.pipelined(t, cut, times, cap=cap) for t in traces],
    }
    return {name: full / sum(float(e[-1]) for e in emitted) for name, emitted in ends.items()}


def compared(model, stages: int, prompts: list, results, thresholds: Sequence[float]) -> dict:
    """Compare texts of the real `pipelined` with `recompute`'s at every threshold.

    The result has differ, the number of tokens that do not have the same value and exit; near_ties,
    texts that differ where rounding may have decided, as the oracle's own margin is below `TIE` at
    the first token that differs from it; and others, the rest.
    """
    from eejax.inference import Generator, PipelinedGenerator
    from eejax.sharding.mesh import MeshConfig

    engine = PipelinedGenerator.make(model.params, model.config, MeshConfig(pipe=stages))
    oracle = Generator.make(model.params, model.config, "posthoc")
    found = dict(tokens=0, differ=0, near_ties=0, others=0)
    for threshold, texts in zip(thresholds, results, strict=True):
        for prompt, one in list(zip(prompts, texts, strict=False))[:CHECKED]:
            n = one.exits.shape[1]
            other = engine.generate([prompt], n, threshold=threshold)
            differ = unlike(one, other)
            found["tokens"] += n
            found["differ"] += int(differ.sum())
            if differ.any():
                right = oracle.generate([prompt], n, threshold=threshold)
                first = int((unlike(one, right) | unlike(other, right)).argmax())
                tied = right.margins[0, first] < TIE
                found["near_ties" if tied else "others"] += 1
    return found


def unlike(one, other) -> np.ndarray:
    """Return [n], the tokens of two results' first requests that differ, or left by other exits."""
    return (one.tokens[0] != other.tokens[0]) | (one.exits[0] != other.exits[0])
