"""A request to an engine, and what comes back of it."""

from __future__ import annotations

import dataclasses
import enum
import numbers
from typing import NamedTuple

import jax

from eejax.common.errors import require, require_count
from eejax.inference.logits_params import LogitsParams
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a request ended.

    Attributes:
      STOP: a stop token or a stop string came.
      LENGTH: it has as many tokens as it may have.
      CONTEXT: the engine's context is full.
      CANCELLED: it was aborted.
      ERROR: its logits are not finite.
      DEADLINE: its time was over.
      LOST: the engine ended first.
    """

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    CANCELLED = "cancelled"
    ERROR = "error"
    DEADLINE = "deadline"
    LOST = "lost"


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """A request for up to `max_tokens` tokens behind a prompt.

    It is the same from the HTTP process to the scheduler of an engine's slots, and so is its id.

    Attributes:
      request_id: names it; no other request has this id while it runs.
      prompt: token ids.
      max_tokens: most tokens to emit.
      policy: exit rules of one request. None: no exit. The models of a fleet have their own.
      sampling: sampling of one request. None: greedy.
      logits_params: penalties and biases of one request, or None.
      stop_token_ids: tokens that end it.
      priority: requests of higher priority come first.
      objective: name of its own objective among those of a fleet; None: the fleet's.
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
        require(named, "request_id", self.request_id, "must be a string that is not empty")
        require_count("max_tokens", self.max_tokens, least=0)
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
            require(rows == {1}, name, f"{sorted(rows)} rows", "must be of one request")
        object.__setattr__(self, "prompt", tuple(self.prompt))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))


class Token(NamedTuple):
    """One emitted token.

    Attributes:
      exit: number of the emitting exit.
      layers: layers executed for it, as in `DecodeRecord`.
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
      finish: why it ended, None while it runs. Tokens whose logits are not finite are left out.
    """

    request_id: str
    tokens: tuple[Token, ...]
    finish: FinishReason | None = None
