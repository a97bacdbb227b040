"""Interfaces between the parts of a fleet: its controller, its dispatcher and its pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from eejax.helios.choices import Assignment, ControllerOptions, Decision, ModelDepth
from eejax.helios.disagreement_bound import AnswerAudit, DisagreementBound
from eejax.helios.objectives import ServiceObjective, Telemetry


class ModelPolicy(Protocol):
    """The part that decides: a `Controller`, or an object with its interface."""

    @property
    def current(self) -> ModelDepth | None: ...
    @property
    def wanted(self) -> ModelDepth: ...
    @property
    def decisions(self) -> Sequence[Decision]: ...
    @property
    def options(self) -> ControllerOptions: ...
    @property
    def objective(self) -> ServiceObjective | None: ...
    def device_reported(self, depths: Mapping[str, int], num_cached_tokens: int) -> None: ...
    def prompt_arrived(self) -> Assignment: ...
    def best_loaded(self, weights: Mapping[str, float]) -> str | None: ...
    def model_loaded(self, choice: ModelDepth) -> None: ...
    def depth_limited(self, choice: ModelDepth) -> None: ...
    def tokens_emitted(self, model: str, below: Sequence[bool], own: bool = False) -> None: ...
    def first_token_emitted(self, model: str, seconds: float) -> None: ...
    def prompt_answered(
        self, model: str, telemetry: Telemetry, exits: Sequence[int], judged: bool = True
    ) -> None: ...
    def prompt_dropped(self, model: str, failed: bool = False) -> None: ...
    def answer_failed(self, model: str) -> None: ...
    def model_given_up(self, model: str, why: str) -> bool: ...
    def answers_audited(self, model: str, audit: DisagreementBound) -> None: ...
    def level(self, model: str, evaluated: bool = False) -> int: ...


class LoadedModel(Protocol):
    """A model with `depth` loaded segments, and `target_segments` once it has grown.

    room: whether a slot is free for another request.
    """

    @property
    def depth(self) -> int: ...
    @property
    def target_segments(self) -> int: ...
    @property
    def idle(self) -> bool: ...
    @property
    def room(self) -> bool: ...


class PendingModel(Protocol):
    """A model that is being loaded."""

    choice: ModelDepth

    def done(self) -> bool: ...


Pending = TypeVar("Pending", bound=PendingModel)


@dataclasses.dataclass(kw_only=True, eq=False)
class FleetRequest:
    """A request of a fleet.

    Attributes:
      order: order in which requests are assigned to models.
      came: time of arrival.
      objective: its own objective, if any.
      model: the model in which it runs.
      began, first: times at which that model got it, and emitted its first token for it.
      heard: time of the first token from any model.
      evaluated: whether it is part of an evaluation.
      moved: whether it ran in another model before.
      aborted: whether it is to end.
      strictness: number of exits that it may take, 0 if that changed, and the level of its
        thresholds.
      exits: exits by which its tokens left.
      below: for each token, whether it left below its threshold.
    """

    order: tuple[int, int]
    came: float
    objective: str | None = None
    model: str = ""
    began: float = 0.0
    first: float | None = None
    heard: float | None = None
    evaluated: bool = False
    moved: bool = False
    aborted: bool = False
    strictness: tuple[int, int] = (0, 0)
    telemetry: Telemetry | None = None
    exits: list[int] = dataclasses.field(default_factory=list)
    below: list[bool] = dataclasses.field(default_factory=list)


class AnswerCosts(NamedTuple):
    """Measurements of an answer by a pool.

    Attributes:
      beside: requests that its model runs beside it.
      agreement: share of tokens that agree with the whole model; None to use the profile's.
      energy: joules per token; None to use the profile's.
    """

    beside: int
    agreement: float | None = None
    energy: float | None = None


class ModelPool(Protocol[Pending]):
    """The models on the device, and the requests that run in them.

    Attributes:
      parts: loaded models by name.
      num_cached_tokens: tokens of the requests in slots, prompts included.
    """

    @property
    def parts(self) -> Mapping[str, LoadedModel]: ...
    @property
    def num_cached_tokens(self) -> int: ...

    def load(self, choice: ModelDepth) -> Pending:
        """Start to load a model."""
        ...

    def add(self, loading: Pending) -> None:
        """Wait for a model that is being loaded, and add it to `parts`."""

    def grow(self, choice: ModelDepth) -> str:
        """Start to load more segments of a model; return why that failed, or ""."""
        ...

    def cancel_growth(self, model: str) -> None:
        """Cancel the growth of a model."""

    def shrink(self, choice: ModelDepth) -> None:
        """Free segments of a model."""

    def free(self, model: str) -> None:
        """Remove a model from `parts`, and its requests."""

    def audit_bytes(self, depths: Mapping[str, int]) -> float:
        """Return the maximum bytes that an audit of any of these models takes beside them."""
        ...

    def start(self, job: Any) -> None:
        """Start a request in its model."""

    def costs(self, job: Any) -> AnswerCosts:
        """Return the measurements of an answer that just finished."""
        ...

    def judge(self, job: Any) -> AnswerAudit:
        """Judge an answer, by the reference or by the whole model that gave it."""
        ...
