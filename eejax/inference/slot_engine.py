"""The engine that a scheduler drives: a fixed number of slots that requests join and leave."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from eejax.common.errors import require, require_count
from eejax.common.lengths import power_of_two
from eejax.inference.logits_params import LogitsParams
from eejax.inference.options import EngineOptions
from eejax.inference.policy import ExitPolicy
from eejax.inference.request import check_prompts
from eejax.inference.state import MAX_STOP_TOKENS, DecodeRecord, RequestRows
from eejax.models.config import ModelConfig

STEPS_PER_CALL = 8  # default steps of a call, after which a scheduler decides again


class Engine(Protocol):
    """Protocol of an engine: `prefill`, `insert` into a slot, `generate` repeatedly, then `free`.

    A state is used once: the state that a method returns replaces it. No method waits for the
    device, so an error in a computation raises nothing: a token whose log-probability is not finite
    came from logits that were not finite, and must be dropped.

    Attributes:
      config: the model that the engine decodes with (`options.engine_config`).
      options: its static options.
      slots: requests at a time.
      context: maximum tokens of a request, prompt included.
      num_segments: number of loaded segments.
      resumes: whether a prompt may contain tokens that were generated before, after the first
        `request.start`.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def options(self) -> EngineOptions: ...

    @property
    def slots(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def num_segments(self) -> int: ...

    @property
    def resumes(self) -> bool: ...

    def start(self) -> Any:
        """Return a state whose slots are all free."""
        ...

    def prefill(
        self, prompts: Sequence[Sequence[int]], request: RequestRows
    ) -> tuple[Any, DecodeRecord]:
        """Run prompts.

        If prompt and limit together exceed the context, the limit is lowered.

        Returns:
          (rows to insert, a record of the first token of each prompt). The record may have padding
          rows at the end. Its exit is -1 there, and where `generate` emits the first token.
        """
        ...

    def insert(self, state: Any, rows: Any, slots: Sequence[int]) -> Any:
        """Return the state with rows of `prefill` in slots, whose earlier content is lost."""
        ...

    def generate(self, state: Any, n: int) -> tuple[Any, DecodeRecord]:
        """Run n steps of all slots.

        Records are [size m, slots], for an engine that emits up to m tokens in a step and a size of
        n or more. The exit is -1 where no token was emitted.
        """
        ...

    def free(self, state: Any, slots: Sequence[int]) -> Any:
        """Return the state with these slots free."""
        ...


class PrefilledRows(NamedTuple):
    """Rows that `prefill` computed.

    Attributes:
      state: the rows' state, which may have padding rows at the end.
      prompts: number of prompts.
      context, options: those of the engine.
    """

    state: Any
    prompts: int
    context: int
    options: EngineOptions


class SlotEngineBase(abc.ABC):
    """Base class of engines that checks arguments and pads them to few shapes.

    Prompts are padded to the context, their number to a power of two, and the list of slots to free
    to the number of slots. A subclass implements the abstract methods.
    """

    config: ModelConfig
    options: EngineOptions
    slots: int
    context: int

    resumes = False

    @property
    @abc.abstractmethod
    def num_segments(self) -> int: ...

    @abc.abstractmethod
    def start(self) -> Any:
        """Return a state whose slots are all free."""

    @abc.abstractmethod
    def _prefill(
        self, tokens: np.ndarray, lengths: np.ndarray, request: RequestRows
    ) -> tuple[Any, DecodeRecord]:
        """Run padded prompts [m, context] of `lengths` [m] tokens: (state, record [m])."""

    @abc.abstractmethod
    def _insert(self, state: Any, rows: Any, slots: np.ndarray) -> Any:
        """Return the state with rows in slots [m]; rows whose slot does not exist are dropped."""

    @abc.abstractmethod
    def _decode(self, state: Any, n: int) -> tuple[Any, DecodeRecord]:
        """Run n steps, as `generate`."""

    @abc.abstractmethod
    def _free(self, state: Any, slots: np.ndarray) -> Any:
        """Return the state with slots [m] free, as far as they exist."""

    def prefill(
        self, prompts: Sequence[Sequence[int]], request: RequestRows
    ) -> tuple[PrefilledRows, DecodeRecord]:
        """Run prompts of at most `context` - 1 tokens; `request` has a row for each.

        Raises ConfigError for unknown token ids, and for a request that does not match the prompts.
        """
        state, record = self._prefill(*self._pad_prompts(prompts, request))
        return PrefilledRows(state, len(prompts), self.context, self.options), record

    def insert(self, state: Any, rows: PrefilledRows, slots: Sequence[int]) -> Any:
        return self._insert(state, rows.state, self._check_slots(slots, rows))

    def generate(self, state: Any, n: int) -> tuple[Any, DecodeRecord]:
        require_count("n", n)
        return self._decode(state, n)

    def free(self, state: Any, slots: Sequence[int]) -> Any:
        return self._free(state, self._numbered(slots, self.slots))

    def _pad_prompts(
        self, prompts: Sequence[Sequence[int]], request: RequestRows
    ) -> tuple[np.ndarray, np.ndarray, RequestRows]:
        """Check and pad prompts: (prompts [m, context], tokens of each [m], request).

        The request's limits are lowered to what fits, and padding rows request no token. Raises as
        `prefill`.
        """
        check_prompts(prompts, self.config, self.context)
        lengths, starts = [len(p) for p in prompts], np.asarray(request.start).tolist()
        fits = all(1 <= start <= n for start, n in zip(starts, lengths, strict=False))
        require(
            len(starts) == len(lengths) and fits if self.resumes else starts == lengths,
            "request.start",
            starts,
            f"must be the number of tokens of every prompt, {lengths}"
            + (", or fewer where some were generated before" if self.resumes else ""),
        )
        request = request.replace(policy=policy_for(request.policy, self))
        n, width = len(prompts), request.stop_token_ids.shape[1]
        require(
            width == MAX_STOP_TOKENS,
            "request.stop_token_ids",
            f"{width} a row",
            f"must be {MAX_STOP_TOKENS} a row",
        )
        request = request.replace(logits_params=logits_params_for(request.logits_params, self, n))
        rows = {len(a) for a in jax.tree.leaves(request)}
        require(rows == {n}, "request", f"{sorted(rows)} rows", f"must have {n}, one per prompt")
        which = np.minimum(np.arange(power_of_two(n)), n - 1)  # repeats the last prompt
        tokens = np.zeros((len(which), self.context), np.int32)
        for row, i in zip(tokens, which, strict=True):
            row[: lengths[i]] = prompts[i]
        request = jax.tree.map(lambda a: np.asarray(a)[which], request)
        limit = np.minimum(request.limit, self.context - request.start)
        limit = np.where(np.arange(len(which)) < n, limit, 0)
        return tokens, np.asarray(lengths, np.int32)[which], request.replace(limit=limit)

    def _check_slots(self, slots: Sequence[int], rows: PrefilledRows) -> np.ndarray:
        """Return the slot of each row; padding rows get one that does not exist."""
        n = rows.prompts
        for name in ("context", "options"):
            theirs, own = getattr(rows, name), getattr(self, name)
            require(theirs == own, f"rows.{name}", theirs, f"must be that of this engine, {own}")
        numbered = self._numbered(slots, power_of_two(n))
        require(
            len(slots) == n and len({*numbered[:n]}) == n,
            "slots",
            list(slots),
            f"must be {n} different ones, one per row",
        )
        return numbered

    def _numbered(self, slots: Sequence[int], n: int) -> np.ndarray:
        """Pad a list of slots to n or more with numbers that do not exist."""
        given = np.asarray(slots)
        whole = given.ndim == 1 and (given.dtype.kind in "iu" or not given.size)
        require(whole, "slots", slots, "must be a sequence of slot numbers")
        there = bool(np.all((given >= 0) & (given < self.slots)))
        require(there, "slots", given.tolist(), f"must be in 0..{self.slots - 1}")
        none = [self.slots] * (n - len(given))
        return np.array([*given, *none], np.int32)


def policy_for(policy: ExitPolicy | None, engine: Engine) -> ExitPolicy:
    """Return the exit policy by which an engine runs requests.

    With None, no early exit emits a token, and a request gets all drafts that the engine can make.
    Raises ConfigError if the policy has other exits than the engine's model.
    """
    config, options = engine.config, engine.options
    if policy is None:
        return ExitPolicy.make(config, 1, drafts=options.draft_rows)
    requests, exits = policy.thresholds.shape
    require(
        exits == config.n_exits,
        "policy",
        f"thresholds of {exits} exits",
        f"must be made of the engine's config, which has {config.n_exits}",
    )
    drafts = np.minimum(policy.drafts, options.draft_rows)
    if options.leaves_early:
        return policy.replace(drafts=drafts)
    return ExitPolicy.make(config, requests, drafts=drafts.tolist())


def logits_params_for(
    logits_params: LogitsParams | None, engine: Engine, rows: int
) -> LogitsParams | None:
    """Return an engine's logits_params for requests. Raises ConfigError if it takes none."""
    require(
        logits_params is None or engine.options.logits_params,
        "logits_params",
        type(logits_params).__name__,
        f"must be None with {type(engine).__name__}",
        "EngineOptions(logits_params=True) takes it.",
    )
    return (
        LogitsParams.blank(rows)
        if logits_params is None and engine.options.logits_params
        else logits_params
    )


def check_slots(config: ModelConfig, slots: int, context: int | None) -> int:
    """Return the context, by default the model's. Raises ConfigError if out of range."""
    context = config.context_length if context is None else context
    require_count("slots", slots)
    require_count("context", context)
    require(
        2 <= context <= config.context_length,
        "context",
        context,
        f"must be in 2..{config.context_length}, the model's context_length",
    )
    return context
