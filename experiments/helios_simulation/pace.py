"""Seconds of a batch's steps by their rows, for the simulator of serving.

Each loaded segment that a token runs takes a constant time, a time for each row, and one for each
span of a text's rows, which attend together. Rows are the tokens that run the segment, and those of
the same texts that left before it, whose keys and values are then caught up. The schedule is that
of `batch_simulator`, which makes the engine's own decisions, except for rows that only join where
all slots run in place, and for drafts, of which there are none. This makes a simulation of a
thousand prompts a matter of seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from eejax.common.errors import require, require_count
from eejax.inference.engine_step import PROMPT_SPAN, SPAN


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """Seconds of a model's steps.

    Attributes:
      step: a step that runs nothing.
      rows: `[e][k]` segment e with k + 1 rows. More rows occur only of one text alone, and take
        time in proportion to the last entry.
      chunk: [e] a chunk of `tokens` prompt tokens through a segment, whatever their number.
      tokens: prompt tokens of a chunk.
      spans: [e] up to SPAN rows of a text, in addition.
      chunk_spans: [e] up to PROMPT_SPAN rows of a prompt, in addition.
      in_place: [e] one row of each text, where they need not be packed.
    """

    step: float
    rows: tuple[tuple[float, ...], ...]
    chunk: tuple[float, ...]
    tokens: int = 64
    spans: tuple[float, ...] = ()
    chunk_spans: tuple[float, ...] = ()
    in_place: tuple[float, ...] = ()

    def __post_init__(self):
        require_count("tokens", self.tokens)
        n = len(self.rows)
        more = [self.spans, self.chunk_spans, self.in_place]
        numbers = [self.step, *(s for part in (self.chunk, *self.rows, *more) for s in part)]
        good = all(np.isfinite(s) and s >= 0 for s in numbers) and all(map(len, self.rows))
        require(
            good and len(self.chunk) == n > 0 and {*map(len, more)} <= {0, n},
            "pace",
            self,
            "must be seconds, of as many segments of rows as of anything else",
        )

    @property
    def max_rows(self) -> int:
        """Maximum rows that run a segment in a step."""
        return len(self.rows[0])

    @classmethod
    def of(cls, costs: Any, buckets: Sequence[int], tokens: int) -> StepSeconds:
        """Build it from the results of `batch_costs.measure` for an engine with all segments.

        Rows run in the smallest bucket that holds them or, with one of each slot, in place.
        """
        total = sum(costs.depths)
        ways = [*zip(buckets, costs.layer[1:], costs.exit_check[1:], strict=True)]

        def packed(depth: int, k: int) -> float:
            return next(depth * layer + look for bucket, layer, look in ways if bucket >= k)

        def shared(seconds):
            return tuple(seconds * d / total for d in costs.depths)

        return cls(
            costs.step,
            tuple(tuple(packed(d, k + 1) for k in range(buckets[-1])) for d in costs.depths),
            shared(costs.chunk),
            tokens,
            spans=tuple(d * costs.span for d in costs.depths),
            chunk_spans=shared(costs.chunk_span),
            in_place=tuple(d * costs.layer[0] + costs.exit_check[0] for d in costs.depths),
        )

    def seconds(self, e: int, counts: Sequence[int], slots: int) -> float:
        """Return the seconds of segment e, given the number of rows of each text.

        A row of the only slot runs in place, as in the engine (`schedule.select_batch`).
        """
        k, row = sum(counts), self.rows[e]
        if not k:
            return 0.0
        found = row[k - 1] if k <= len(row) else row[-1] * k / len(row)
        if self.spans:
            found += self.spans[e] * sum(-(-count // SPAN) for count in counts)
        if self.in_place and max(counts) == 1:
            found = self.in_place[e] if slots == 1 else min(found, self.in_place[e])
        return found

    def reading(self, counts: Sequence[int], depth: int) -> float:
        """Return the seconds of a chunk in `depth` segments, given the tokens of each prompt."""
        spans = sum(-(-count // PROMPT_SPAN) for count in counts)
        return sum(self.chunk[:depth]) + spans * sum(self.chunk_spans[:depth])
