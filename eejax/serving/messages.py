"""What the process that answers requests and the one that runs the engine tell each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from eejax.data.tokenizers import Tokenizer
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import Sampling
from eejax.inference.scheduler import Output
from eejax.inference.scoring import Scores
from eejax.inference.shaping import Shaping
from eejax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request for up to `limit` tokens behind a prompt: what `Scheduler.submit` takes."""

    prompt: tuple[int, ...]
    limit: int
    policy: ExitPolicy | None = None
    sampling: Sampling | None = None
    shaping: Shaping | None = None
    stop_tokens: tuple[int, ...] = ()
    priority: int = 0


Template = tuple[str, dict[str, str]]
"""The source of a chat template, and the special tokens it speaks of (`chat.Template`)."""


class Submit(NamedTuple):
    number: int
    ask: Ask


class Cancel(NamedTuple):
    number: int


class Score(NamedTuple):
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


class Ready(NamedTuple):
    """The engine runs, and all its programs are compiled, which took so many seconds."""

    config: ModelConfig
    tokenizer: Tokenizer
    template: Template | None
    slots: int
    context: int
    depth: int
    seconds: float


class Refused(NamedTuple):
    """The engine would not take a request."""

    number: int
    why: str


class Progress(NamedTuple):
    """What a step brought, with the numbers that requests were submitted by."""

    outputs: tuple[Output, ...]
    load: Load


class Failed(NamedTuple):
    """The engine's process ends, for this reason."""

    why: str


class Built(NamedTuple):
    """What an engine's process runs; made in it, by a function that can be pickled."""

    engine: Any
    config: ModelConfig
    tokenizer: Tokenizer
    template: Template | None = None


Build = Callable[[], Built]
