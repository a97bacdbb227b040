"""An engine without a model that emits scripted tokens, for tests of schedulers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from eejax.common.errors import require
from eejax.inference.options import EngineOptions
from eejax.inference.state import DecodeRecord, RequestRows
from eejax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ScriptedRow:
    """A request in a slot: its prompt, emitted tokens, tokens to emit, and those that end it."""

    prompt: tuple[int, ...]
    emitted: int
    remaining: int
    stop_token_ids: frozenset[int]


@dataclasses.dataclass(frozen=True)
class ScriptedEngine:
    """An `engine.Engine` whose i-th new token of a prompt is script(prompt, i) = (token, exit).

    A token counts the layers below its exit. States are tuples of rows, None where a slot is free.

    Attributes:
      script: returns token and exit of a prompt's i-th new token.
      config: the model whose exits it names.
    """

    script: Callable[[tuple[int, ...], int], tuple[int, int]]
    config: ModelConfig
    slots: int
    context: int

    resumes = True
    options = EngineOptions(logits_params=True)  # which it ignores

    @property
    def num_segments(self) -> int:
        return len(self.config.exit_boundaries)

    def start(self) -> tuple[ScriptedRow | None, ...]:
        return (None,) * self.slots

    def prefill(
        self, prompts: Sequence[Sequence[int]], request: RequestRows
    ) -> tuple[tuple[ScriptedRow, ...], DecodeRecord]:
        limits, stop_token_ids = np.asarray(request.limit), np.asarray(request.stop_token_ids)
        rows = []
        for i, prompt in enumerate(prompts):
            require(
                1 <= len(prompt) < self.context,
                f"prompts[{i}]",
                f"{len(prompt)} tokens",
                f"must have at least 1 token and fewer than the context ({self.context})",
            )
            ends = frozenset(stop_token_ids[i][stop_token_ids[i] >= 0].tolist())
            # Tokens after the prompt were emitted before.
            start = int(np.asarray(request.start)[i])
            emitted = len(prompt) - start
            limit = min(int(limits[i]), self.context - start) - emitted
            rows.append(ScriptedRow(tuple(prompt[:start]), emitted, limit, ends))
        return self._step(tuple(rows))

    def insert(self, state, rows, slots: Sequence[int]):
        new = list(state)
        for slot, row in zip(slots, rows, strict=True):
            require(0 <= slot < self.slots, "slots", slot, f"must be in 0..{self.slots - 1}")
            new[slot] = row
        return tuple(new)

    def generate(self, state, n: int):
        records = []
        for _ in range(n):
            state, record = self._step(state)
            records.append(record)
        return state, jax.tree.map(lambda *a: np.stack(a), *records)

    def free(self, state, slots: Sequence[int]):
        return tuple(None if i in slots else row for i, row in enumerate(state))

    def _step(self, rows):
        """Emit one token of every row that has some left."""
        boundaries = self.config.exit_boundaries
        said = [
            self.script(row.prompt, row.emitted) if row is not None and row.remaining else None
            for row in rows
        ]
        after = tuple(
            row
            if s is None
            else dataclasses.replace(
                row,
                emitted=row.emitted + 1,
                remaining=0 if s[0] in row.stop_token_ids else row.remaining - 1,
            )
            for row, s in zip(rows, said, strict=True)
        )

        def column(values, kind):
            return np.array(list(values), kind)

        return after, DecodeRecord(
            token=column((-1 if s is None else s[0] for s in said), np.int32),
            logprob=np.zeros(len(rows), np.float32),
            confidence=np.ones(len(rows), np.float32),
            exit=column((-1 if s is None else s[1] for s in said), np.int32),
            layers=column((0 if s is None else boundaries[s[1]] for s in said), np.int32),
            margin=np.full(len(rows), np.inf, np.float32),
            drafted=np.zeros(len(rows), np.int32),
            accepted=np.zeros(len(rows), np.int32),
        )
