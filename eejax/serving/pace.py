"""How long a step of a batch takes: a model of it by rows, for the simulator of serving.

A step takes, of each loaded segment that anybody goes through, a part that is the same however many
do, and a part for each row. Rows are the tokens that go through, and those of their own texts that
had left before the segment, whose keys and values are made up for then. `batch_simulator` takes the
engine's own decisions and is right to the row; here rows that would have fitted into a bucket are
not taken along before they have to go. In return a thousand prompts take a second, and nothing is
measured beyond the profiles that the controller has; what `batch_costs` measures can be used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from eejax.common.errors import require, require_count
from eejax.serving.choices import Profile

FIXED = 0.8  # of the time of a full step; by what a fleet of eight slots on a CPU took


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds of a model's steps. step: of one that runs nothing; rows [e][k]: of a segment with
    k + 1 rows, those beyond the last in proportion to it; chunk [e]: of a chunk of `tokens` tokens
    of prompts through a segment, however many there are."""

    step: float
    rows: tuple[tuple[float, ...], ...]
    chunk: tuple[float, ...]
    tokens: int = 64

    def __post_init__(self):
        require_count("tokens", self.tokens)
        numbers = [self.step, *self.chunk, *(s for row in self.rows for s in row)]
        good = all(np.isfinite(s) and s >= 0 for s in numbers) and all(map(len, self.rows))
        require(
            good and len(self.rows) == len(self.chunk) > 0, "pace", self,
            "must be seconds, of as many segments of rows as of chunks",
        )  # fmt: skip

    @classmethod
    def of(cls, profile: Profile, slots: int, fixed: float = FIXED, tokens: int = 64) -> Pace:
        """By a profile, whose seconds were measured with all `slots` taken and nobody leaving.
        fixed: share of such a step that takes as long for fewer. A prompt's tokens are rows as
        others are."""
        require_count("slots", slots)
        require(0 <= fixed <= 1, "fixed", fixed, "must lie in [0, 1]")
        seconds = lambda s, k: s * (slots * fixed + k * (1 - fixed))
        rows = tuple(
            tuple(seconds(s, k + 1) for k in range(slots)) for s in profile.seconds
        )  # fmt: skip
        return cls(0.0, rows, tuple(seconds(s, tokens) for s in profile.seconds), tokens)

    @classmethod
    def of_costs(cls, costs: Any, slots: int, buckets: Sequence[int], tokens: int) -> Pace:
        """By what `batch_costs.measure` found of an engine of all segments: so many rows run in the
        smallest bucket that holds them, or, one of each slot, in place."""
        total = sum(costs.depths)
        ways = [*zip(buckets, costs.layer[1:], costs.look[1:], strict=True)]

        def seconds(depth: int, k: int) -> float:
            # Packed rows are of so many spans: those of a text that had waited share one.
            span = costs.span * min(k, slots)
            found = [depth * (layer + span) + look for b, layer, look in ways if b >= k][:1]
            if k <= slots:
                found.append(depth * costs.layer[0] + costs.look[0])
            return min(found)

        most = max(slots, *buckets)
        rows = tuple(tuple(seconds(d, k + 1) for k in range(most)) for d in costs.depths)
        chunk = tuple((costs.chunk + costs.chunk_span) * d / total for d in costs.depths)
        return cls(costs.sweep, rows, chunk, tokens)

    def seconds(self, e: int, k: int) -> float:
        """Of segment e with k rows."""
        row = self.rows[e]
        if not k:
            return 0.0
        return row[k - 1] if k <= len(row) else row[-1] * k / len(row)
