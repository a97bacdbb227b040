"""What the process that answers requests and the one that runs the engine tell each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from eejax.data.tokenizer_files import TemplateSource
from eejax.data.tokenizers import Tokenizer
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import Sampling
from eejax.inference.scheduler import Output
from eejax.inference.scoring import Scores
from eejax.inference.shaping import Shaping
from eejax.models.config import ModelConfig
from eejax.serving.choices import Decision
from eejax.serving.timeline import TimelinePoint

LOG = "eejax.serving"  # of what an engine does before it is ready, at level INFO
CHOOSES = "the server chooses the model, and where its tokens leave"


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request for up to `limit` tokens behind a prompt: what `Scheduler.submit` takes, and
    `Fleet.submit`. policy: of an engine's requests, as a fleet's models have their own; objective:
    of a fleet's, the name of one, where it is not the server's."""

    prompt: tuple[int, ...]
    limit: int
    policy: ExitPolicy | None = None
    sampling: Sampling | None = None
    shaping: Shaping | None = None
    stop_tokens: tuple[int, ...] = ()
    priority: int = 0
    objective: str | None = None


class Submit(NamedTuple):
    number: int
    ask: Ask


class Cancel(NamedTuple):
    number: int


class ScoreRequest(NamedTuple):
    """Asks for the `Scores` of a text, by the exit of a number; None: the final one."""

    number: int
    tokens: tuple[int, ...]
    exit: int | None
    likely: bool


class Scored(NamedTuple):
    number: int
    scores: Scores


class Load(NamedTuple):
    """How busy an engine is: requests in slots and without, tokens that slots hold and could."""

    running: int
    waiting: int
    held: int
    room: int


class FleetReport(NamedTuple):
    """State of a serving fleet.

    Attributes:
      model, depth, layers: the model, and how many of its exits and layers are loaded.
      slots: of the model.
      below: share of all tokens that left below their threshold.
      shortfall: what the mean quality of the model's audited answers lacks of 1; None where none
        was audited, as of the next two.
      bound: what that is below with confidence.
      perplexity: of those answers under their judge.
      counted: what stands for energy, joules by "nvml" or "rapl", or "operations".
      decisions, points: those since the last report, and the answers since then.
    """

    model: str
    depth: int
    layers: int
    slots: int
    below: float
    shortfall: float | None
    bound: float | None
    perplexity: float | None
    counted: str
    decisions: tuple[Decision, ...]
    points: tuple[TimelinePoint, ...] = ()


class Starting(NamedTuple):
    """What an engine that is not ready yet is doing."""

    what: str


class Ready(NamedTuple):
    """The engine runs, and all its programs are compiled, which took so many seconds.

    models: of a fleet, by name; `config` and `depth` are then those of the deepest of them, whole.
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
        """Whether the server chooses the model, and where tokens leave."""
        return self.models is not None

    @property
    def stops(self) -> list[int]:
        """Layers that tokens may have gone through, of whichever model, ascending."""
        configs = [self.config] if self.models is None else self.models.values()
        return sorted({stop for config in configs for stop in config.stops})


class Refused(NamedTuple):
    """The engine would not take a request."""

    number: int
    why: str


class Progress(NamedTuple):
    """What a step brought, with the numbers that requests were submitted by; of a fleet also what
    serves."""

    outputs: tuple[Output, ...]
    load: Load
    report: FleetReport | None = None


class Failed(NamedTuple):
    """The engine's process ends, for this reason."""

    why: str


class Built(NamedTuple):
    """What an engine's process runs; made in it, by a function that can be pickled.

    fleet: where it is several models, in place of an engine (None): makes a `Fleet` of so many
    steps between two looks at what comes, all its programs compiled; `config` is then that of the
    deepest model.
    """

    engine: Any
    config: ModelConfig
    tokenizer: Tokenizer
    template: TemplateSource | None = None
    fleet: Callable[[int], Any] | None = None


Build = Callable[[], Built]
