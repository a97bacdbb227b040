"""Performance over prompts, with marks for the decisions of a fleet.

HELIOS (Kumar et al., 2025), Figures 13, 14 and 16: throughput, time to first token and perplexity,
plotted against the prompt's number, with vertical lines for reassessments, LD where more layers of
a model are loaded, and SW where another model takes over.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from eejax.helios.choices import Decision

EVENT_KINDS = {"evaluate": "reassessment", "grow": "LD", "tighten": "LD", "switch": "SW"}
WINDOW = 10  # answers over which a rate is computed


class DecisionMark(NamedTuple):
    """A mark of a decision, whose kind is a value of `EVENT_KINDS`."""

    kind: str
    why: str


def marks(decisions: Iterable[Decision]) -> tuple[DecisionMark, ...]:
    """Return the marks of those decisions that have one."""

    def describe(d):
        return f"{d.choice.model}, {d.choice.depth} exits: {d.why}"

    return tuple(
        DecisionMark(EVENT_KINDS[d.kind], describe(d)) for d in decisions if d.kind in EVENT_KINDS
    )


class TimelinePoint(NamedTuple):
    """An answer.

    Attributes:
      time: time of its end, in seconds.
      model, depth: the model of its last tokens, and the number of its loaded exits.
      tokens: number of tokens.
      ttft: seconds from the request's arrival to its first token.
      perplexity: exp(-mean log-probability) of its tokens under the model that emitted them, at
        their exits; None if unknown.
      marks: marks of the decisions since the previous answer.
    """

    time: float
    model: str
    depth: int
    tokens: int
    ttft: float
    perplexity: float | None
    marks: tuple[DecisionMark, ...] = ()


class AnswerTimeline:
    """The last answers, in order, with the decisions between them."""

    def __init__(self, kept: int):
        self._points: collections.deque[TimelinePoint] = collections.deque(maxlen=kept)
        self.count = 0  # answers so far

    def add(self, point: TimelinePoint) -> None:
        self._points.append(point)
        self.count += 1

    def since(self, number: int) -> tuple[TimelinePoint, ...]:
        """Return the answers from a number on, as far as they are kept."""
        new = min(self.count - number, len(self._points))
        return tuple(itertools.islice(self._points, len(self._points) - new, None))

    def curves(self) -> dict[str, Any]:
        """Return the timeline as JSON: lists over prompts, rates over the last `WINDOW` of them."""
        points = [*self._points]
        first = self.count - len(points) + 1
        return dict(
            prompt=[first + i for i in range(len(points))],
            model=[p.model for p in points],
            throughput=rates(points, [p.tokens for p in points]),
            requests=rates(points, [1] * len(points)),
            ttft=[p.ttft for p in points],
            perplexity=[p.perplexity for p in points],
            marks=[
                dict(prompt=prompt, kind=mark.kind, why=mark.why)
                for prompt, point in enumerate(points, first)
                for mark in point.marks
            ],
        )


def rates(points: Sequence[TimelinePoint], amounts: Sequence[float]) -> list[float | None]:
    """Return amounts per second over the last `WINDOW` answers.

    A rate is None for the first answer, and if no time passed.
    """
    found: list[float | None] = []
    for i, point in enumerate(points):
        begin = max(i - WINDOW, 0)
        seconds = point.time - points[begin].time
        found.append(sum(amounts[begin + 1 : i + 1]) / seconds if seconds > 0 else None)
    return found
