"""Generation that measures whether its exits pay, and turns them off while they do not."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import Mesh

from eejax.common.errors import require_one_of
from eejax.common.trees import Tree
from eejax.inference.generate import STREAM_CHUNK, Decoder, GenerationParams, Generator
from eejax.inference.options import EngineOptions, given_options
from eejax.inference.payoff import Payoff
from eejax.inference.result import GenerationResult
from eejax.inference.state import DecodeRecord, EngineState
from eejax.models.config import ModelConfig
from eejax.sharding.mesh import MeshConfig

SWITCHABLE = ("recompute", "speculative")  # without exits they emit the full model's tokens


@dataclasses.dataclass(frozen=True)
class AutoGenerator(Decoder):
    """A generator whose exits, or the drafts they make, `payoff` turns on and off.

    Calls of `chunk` steps are timed, with and without exits in turn, at first and then now and then
    (`Payoff`); the calls between them use the faster way. Both are the same program. Tokens of
    calls without exits are the full model's, so which tokens come from exits depends on the
    machine. Where texts must not depend on it, choose an engine. (Tokens of "speculative" are the
    full model's in any case.) `payoff` continues from request to request.

    Build it with `AutoGenerator.make`; `clock` returns seconds.
    """

    generator: Generator
    payoff: Payoff
    clock: Callable[[], float] = time.perf_counter
    compiled: set = dataclasses.field(default_factory=set)
    config: ModelConfig = dataclasses.field(init=False)
    options: EngineOptions = dataclasses.field(init=False)

    def __post_init__(self):
        for name in ("config", "options"):
            object.__setattr__(self, name, getattr(self.generator, name))

    @classmethod
    def make(
        cls,
        params: Tree,
        config: ModelConfig,
        options: EngineOptions | str = "recompute",
        payoff: Payoff | None = None,
        mesh: MeshConfig | Mesh | None = None,
    ) -> AutoGenerator:
        """Prepare a generator as `Generator.make`. Raises ConfigError also for another engine."""
        options = given_options(options)
        require_one_of("engine", options.engine, SWITCHABLE)
        return cls(Generator.make(params, config, options, mesh), payoff or Payoff())

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        chunk: int | None = STREAM_CHUNK,
        **params: Unpack[GenerationParams],
    ) -> GenerationResult:
        """Generate as `Generator.generate`, in calls of `chunk` steps."""
        *_, last = self.stream(prompts, max_new_tokens, chunk=chunk, **params)
        return last

    def _prefill(self, tokens, request, length) -> tuple[Any, DecodeRecord]:
        return self.generator._prefill(tokens, request, length)

    def _decode(self, state: EngineState, n: int) -> tuple[EngineState, DecodeRecord]:
        program = (n, *(a.shape for a in jax.tree.leaves(state)))
        policy = state.request.policy
        matters = bool(policy.can_leave.any())
        off = np.full(state.token.shape, not self.payoff.next(program))
        state = state.replace(request=state.request.replace(policy=policy.replace(paused=off)))
        jax.block_until_ready(state)
        begin = self.clock()
        state, record = jax.block_until_ready(self.generator._decode(state, n))
        seconds = self.clock() - begin
        first = program not in self.compiled
        self.compiled.add(program)
        tokens = int((np.asarray(record.exit) >= 0).sum())
        timed = not first and matters
        self.payoff.add(seconds if timed else None, tokens, program)
        return state, record
