"""Messages between the HTTP process and the process that runs the engine.

A request crosses the pipe as it is (`inference.request.EngineRequest`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from eejax.data.tokenizer_files import TemplateSource
from eejax.data.tokenizers import Tokenizer
from eejax.helios.report import FleetReport
from eejax.inference.request import RequestOutput
from eejax.inference.scoring import TextScores
from eejax.models.config import ModelConfig


class AbortRequest(NamedTuple):
    """Message that aborts a request."""

    request_id: str


class ScoreRequest(NamedTuple):
    """Request for the `TextScores` of a text by the last loaded exit."""

    request_id: str
    tokens: tuple[int, ...]
    top_logprobs: bool


class ScoreReply(NamedTuple):
    """Scores of a `ScoreRequest`."""

    request_id: str
    scores: TextScores


class EngineLoad(NamedTuple):
    """Load of an engine.

    Attributes:
      running: requests with a slot.
      waiting: requests without a slot.
      num_cached_tokens: tokens in the slots' caches.
      capacity: maximum tokens in the slots' caches.
    """

    running: int
    waiting: int
    num_cached_tokens: int
    capacity: int


class EngineStarting(NamedTuple):
    """Progress of an engine until all its programs are compiled."""

    what: str


class EngineCompiled(NamedTuple):
    """Report that all programs of an engine that is ready are compiled.

    Attributes:
      seconds: time since its start.
    """

    seconds: float


class EngineReady(NamedTuple):
    """Report that the engine answers requests. An `EngineCompiled` follows.

    Attributes:
      config: configuration of the model; of a fleet, of the deepest model.
      tokenizer: the tokenizer.
      template: the chat template, if there is one.
      slots: number of slots.
      context: maximum tokens of a request.
      num_segments: number of loaded segments; of a fleet, those of the deepest model, whole.
      seconds: time since the start.
      models: configurations of a fleet's models by name, None for one model.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    template: TemplateSource | None
    slots: int
    context: int
    num_segments: int
    seconds: float
    models: Mapping[str, ModelConfig] | None = None

    @property
    def chooses(self) -> bool:
        """True if the server chooses the model and the exits."""
        return self.models is not None

    @property
    def exit_boundaries(self) -> list[int]:
        """Layers that a token may go through, of any model, ascending."""
        configs = [self.config] if self.models is None else self.models.values()
        return sorted({boundary for config in configs for boundary in config.exit_boundaries})


class RequestRefused(NamedTuple):
    """Report that the engine did not accept a request."""

    request_id: str
    why: str


class StepReport(NamedTuple):
    """Outputs of a step, and for a fleet the state of what serves."""

    outputs: tuple[RequestOutput, ...]
    load: EngineLoad
    report: FleetReport | None = None


class EngineFailed(NamedTuple):
    """Report that the engine's process ends, and why."""

    why: str


class BuiltEngine(NamedTuple):
    """Contents of an engine's process, built there by a function that can be pickled.

    Attributes:
      engine: the engine of one model, None for a fleet.
      config: configuration of the model; of a fleet, of the deepest model.
      tokenizer: the tokenizer.
      template: the chat template, if there is one.
      fleet: builds the `Fleet`, all programs compiled, for a number of steps between two reads of
        its pipe; None for one model.
      first: engine of the same weights and context with fewer slots, whose programs compile sooner.
        It answers requests until those of `engine` are compiled. None if there is none.
    """

    engine: Any
    config: ModelConfig
    tokenizer: Tokenizer
    template: TemplateSource | None = None
    fleet: Callable[[int], Any] | None = None
    first: Any = None


Build = Callable[[], BuiltEngine]
