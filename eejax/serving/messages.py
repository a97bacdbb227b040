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
    """Ends a request."""

    request_id: str


class ScoreRequest(NamedTuple):
    """Asks for the `TextScores` of a text by an exit; None: the final one."""

    request_id: str
    tokens: tuple[int, ...]
    exit: int | None
    top_logprobs: bool


class ScoreReply(NamedTuple):
    request_id: str
    scores: TextScores


class EngineLoad(NamedTuple):
    """Load of an engine.

    Attributes:
      running, waiting: requests with and without a slot.
      num_cached_tokens: tokens that slots hold.
      capacity: tokens that they could hold.
    """

    running: int
    waiting: int
    num_cached_tokens: int
    capacity: int


class EngineStarting(NamedTuple):
    """Activity of an engine that is not ready yet."""

    what: str


class EngineReady(NamedTuple):
    """The engine runs and all its programs are compiled, which took `seconds`.

    models: of a fleet, by name; `config` and `depth` are then those of the deepest, whole one.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    template: TemplateSource | None
    slots: int
    context: int
    depth: int
    seconds: float
    models: Mapping[str, ModelConfig] | None = None

    @property
    def chooses(self) -> bool:
        """The server chooses the model, and where tokens leave."""
        return self.models is not None

    @property
    def exit_boundaries(self) -> list[int]:
        """Layers that tokens may have gone through, of any model, ascending."""
        configs = [self.config] if self.models is None else self.models.values()
        return sorted({stop for config in configs for stop in config.exit_boundaries})


class RequestRefused(NamedTuple):
    """The engine did not accept a request."""

    request_id: str
    why: str


class StepReport(NamedTuple):
    """Outputs of a step; of a fleet also what serves."""

    outputs: tuple[RequestOutput, ...]
    load: EngineLoad
    report: FleetReport | None = None


class EngineFailed(NamedTuple):
    """The engine's process ends, for this reason."""

    why: str


class BuiltEngine(NamedTuple):
    """Contents of an engine's process, built there by a function that can be pickled.

    fleet: for several models, in place of an engine (None): builds a `Fleet` with so many steps
    between two looks at its pipe, all programs compiled; `config` is then that of the deepest
    model.
    """

    engine: Any
    config: ModelConfig
    tokenizer: Tokenizer
    template: TemplateSource | None = None
    fleet: Callable[[int], Any] | None = None


Build = Callable[[], BuiltEngine]
