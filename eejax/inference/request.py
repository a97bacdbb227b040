"""A request to an engine, and its outputs."""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from eejax.common.errors import require, require_array, require_count
from eejax.inference.logits_params import LogitsParams
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import SamplingParams
from eejax.models.config import ModelConfig


class FinishReason(enum.StrEnum):
    """Why a request ended.

    Attributes:
      STOP: a stop token or a stop string came.
      LENGTH: it reached `max_tokens`.
      CONTEXT: the engine's context is full.
      ABORTED: `abort` ended it, or its client left.
      ERROR: its logits are not finite.
      DEADLINE: its deadline passed.
      LOST: the engine's process ended before the request did.
      REFUSED: the server or the engine did not take it.
    """

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    ABORTED = "aborted"
    ERROR = "error"
    DEADLINE = "deadline"
    LOST = "lost"
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True, eq=False)
class EngineRequest:
    """A request for up to `max_tokens` tokens after a prompt.

    It passes unchanged, under one id, from the HTTP server to the scheduler of an engine's slots.

    Attributes:
      request_id: unique among unfinished requests.
      prompt: token ids.
      max_tokens: maximum tokens to generate.
      policy: exit rules of one request. None: no early exit emits, and as many tokens are drafted
        as the engine can. The models of a fleet have their own.
      sampling: sampling of one request. None: greedy.
      logits_params: penalties and biases of one request, or None.
      stop_token_ids: tokens that end it.
      priority: requests of higher priority come first.
      objective: name of the request's own objective among those of a fleet; None for the fleet's.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    policy: ExitPolicy | None = None
    sampling: SamplingParams | None = None
    logits_params: LogitsParams | None = None
    stop_token_ids: tuple[int, ...] = ()
    priority: int = 0
    objective: str | None = None

    def __post_init__(self):
        named = isinstance(self.request_id, str) and bool(self.request_id)
        require(named, "request_id", self.request_id, "must be a nonempty string")
        require_count("max_tokens", self.max_tokens)
        whole = isinstance(self.priority, numbers.Integral) and not isinstance(self.priority, bool)
        require(whole, "priority", self.priority, "must be an integer")
        for name, kind in (
            ("policy", ExitPolicy),
            ("sampling", SamplingParams),
            ("logits_params", LogitsParams),
        ):
            part = getattr(self, name)
            ok = part is None or isinstance(part, kind)
            require(ok, name, part, f"must be made by {kind.__name__}.make, or None")
            rows = {len(a) for a in jax.tree.leaves(part)} or {1}
            require(rows == {1}, name, f"{sorted(rows)} rows", "must be for one request")
        for name in ("prompt", "stop_token_ids"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    allowed = "must be a sequence of token ids"
    ids = require_array(name, value, allowed)
    listed = ids.ndim == 1 and (not ids.size or ids.dtype.kind in "iu")
    require(listed, name, value, allowed, "A tokenizer encodes text.")
    return tuple(ids.tolist())


def require_new_id(request_id: str, taken: Container[str]) -> None:
    """Raise ConfigError if an unfinished request has the id."""
    allowed = "must not be the id of an unfinished request"
    require(request_id not in taken, "request_id", request_id, allowed)


class Token(NamedTuple):
    """One emitted token.

    Attributes:
      id: the token.
      exit: number of the emitting exit.
      logprob: its natural log-probability.
      confidence: confidence of the emitting exit's gate.
      layers: layers below the emitting exit.
      top_logprobs: (token, log-probability) of the most likely tokens, as many as were requested.
      model: name of the model that emitted it, where there are several.
    """

    id: int
    exit: int
    logprob: float
    confidence: float
    layers: int
    top_logprobs: tuple[tuple[int, float], ...] = ()
    model: str = ""


class RequestOutput(NamedTuple):
    """New tokens of a request.

    Attributes:
      request_id: the request's id.
      tokens: tokens that came since the last output, without those whose logits are not finite.
      finish: why the request ended; None while it runs.
    """

    request_id: str
    tokens: tuple[Token, ...]
    finish: FinishReason | None = None


def check_prompts(prompts: Sequence[Sequence[int]], config: ModelConfig, context: int) -> None:
    """Raise ConfigError unless prompts are sequences of token ids that leave room for a token."""

    def listed(a):
        return hasattr(a, "__len__") and not isinstance(a, str | bytes)

    require(
        listed(prompts) and len(prompts) > 0,
        "prompts",
        prompts,
        "must be a sequence of at least one prompt",
        "Encode text with the model's tokenizer.",
    )
    for i, p in enumerate(prompts):
        require(
            listed(p),
            f"prompts[{i}]",
            p,
            "must be a sequence of token ids",
            "Encode text with the model's tokenizer.",
        )
        require(
            1 <= len(p) < context,
            f"prompts[{i}]",
            f"{len(p)} tokens",
            f"must have at least 1 token and fewer than the context ({context})",
            "Shorten the prompt." if len(p) else "Start with an end-of-document token.",
        )
        try:
            ids = np.asarray(p)
        except ValueError:  # lists of unlike lengths
            ids = np.empty((0, 0))
        whole = ids.ndim == 1 and ids.dtype.kind in "iu"
        require(
            whole and 0 <= ids.min() and ids.max() < config.vocab_size,
            f"prompts[{i}]",
            f"ids {ids.min()}..{ids.max()}" if whole else p,
            f"must be integers in 0..{config.vocab_size - 1}",
            "Is it the model's tokenizer?",
        )
