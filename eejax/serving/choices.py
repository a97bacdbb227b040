"""What a controller chooses from, and how it says what it chose: plain data, without any device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from eejax.common.errors import require, require_count
from eejax.serving.objectives import Telemetry

STRICTEST = 4  # steps of thresholds to 1, each half of the way that is left but for the last


@dataclasses.dataclass(frozen=True)
class ControllerOptions:
    """candidates: models that are evaluated; prompts: of an evaluation of one; interval: prompts
    between two reassessments; window: tokens that breaches are counted in; breaches: most of them
    in it, with any more something is decided; greedy: whether tokens may leave below their
    threshold at all; gain: by which share another choice has to be better, so that none is left
    for a whim; tokens: expected of an answer, until some were measured; budget: most bytes of a
    model and its requests.
    """

    candidates: int = 2
    prompts: int = 5
    interval: int = 150
    window: int = 100
    breaches: int = 50
    greedy: bool = True
    gain: float = 0.05
    tokens: int = 100
    budget: float = float("inf")

    def __post_init__(self):
        for name in ("candidates", "prompts", "interval", "window", "tokens"):
            require_count(name, getattr(self, name))
        require_count("breaches", self.breaches, least=0)
        require(self.breaches <= self.window, "breaches", self.breaches, "must fit the window")
        require(self.gain >= 0, "gain", self.gain, "must be at least 0")
        require(self.budget > 0, "budget", self.budget, "must be more than 0")


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was measured of a model, segment by segment; exit e reads the states behind segment e,
    the last one those behind all layers [exits].

    seconds: of a token in a segment, all requests that are served together; prefill: of a prompt by
    itself; load: to bring it to the device, compiled; rebuild: of the keys and values of a token
    that it has not seen; bytes: of its weights; energy: of a token in its layers; heads: in the
    head behind them. sure: share of the tokens that leave by an exit as they may that are the full
    model's; unsure: of those that leave below the threshold.

    By depth, not by segment: slots, requests that are served at a time, by which `seconds` were
    measured; state: bytes of what is kept for them. Where nobody asks for memory: none.

    saved: of the seconds that exits would save did a token take nothing above its own, the share
    that they do: keys and values above are made up for once another token goes there. spared: the
    same of the energy of layers.
    """

    seconds: tuple[float, ...]
    prefill: tuple[float, ...]
    load: tuple[float, ...]
    rebuild: tuple[float, ...]
    bytes: tuple[float, ...]
    energy: tuple[float, ...]
    sure: tuple[float, ...]
    unsure: tuple[float, ...]
    slots: tuple[int, ...] = ()
    state: tuple[float, ...] = ()
    heads: tuple[float, ...] = ()
    saved: float = 1.0
    spared: float = 1.0

    def __post_init__(self):
        n = len(self.seconds)
        require(n > 0, "seconds", self.seconds, "must have a number for each segment")
        for name, none in (("slots", (1,)), ("state", (0.0,)), ("heads", (0.0,))):
            object.__setattr__(self, name, tuple(getattr(self, name)) or none * n)
        for name in ("saved", "spared"):
            value = getattr(self, name)
            require(0 <= value <= 1, name, value, "must lie in [0, 1]")
        for field in dataclasses.fields(self)[:-2]:
            values = getattr(self, field.name)
            good = len(values) == n and all(v >= 0 for v in values)
            require(good, field.name, values, f"must be {n} numbers from 0 on")

    @property
    def exits(self) -> int:
        return len(self.seconds)

    def size(self, depth: int) -> float:
        """Bytes of the first `depth` segments, and of what is kept for requests in them."""
        return sum(self.bytes[:depth]) + self.state[depth - 1]

    def serving(self, shares: Sequence[float], depth: int) -> Telemetry:
        """With the first `depth` exits loaded, by the shares of tokens that would leave by each
        exit if all of them were: those above leave by the last that is loaded. First tokens come
        as they do to a request by itself."""
        seconds = max(_spent(self.seconds, shares, depth, self.saved), 1e-12)
        accuracy = sum(s * a for s, a in zip(shares[:depth], self.sure, strict=False))
        accuracy += breaches(shares, depth) * self.unsure[depth - 1]
        first = sum(self.prefill[:depth])
        return Telemetry(
            1 / seconds, first, first, seconds * self.slots[depth - 1], accuracy, self.size(depth),
            self.worked(shares, depth),
        )  # fmt: skip

    def worked(self, shares: Sequence[float], depth: int) -> float:
        """Energy of a token, as `serving`."""
        layers = _spent(self.energy, shares, depth, self.spared)
        return layers + _spent(self.heads, shares, depth)

    def benchmark(self) -> dict[int, Telemetry]:
        """By depth, of tokens that all leave by the last exit that is loaded."""
        last = lambda depth: tuple(float(e == depth - 1) for e in range(self.exits))
        return {depth: self.serving(last(depth), depth) for depth in range(1, self.exits + 1)}


def _spent(
    costs: Sequence[float], shares: Sequence[float], depth: int, spared: float = 1.0
) -> float:
    """By a token in the segments that it goes through, of which exits spare it a part."""
    most = sum(costs[:depth])
    least = sum(sum(shares[s:]) * costs[s] for s in range(depth))
    return most - spared * (most - least)


def breaches(shares: Sequence[float], depth: int) -> float:
    """Share of the tokens that leave below their threshold."""
    return sum(shares[depth:])


class Choice(NamedTuple):
    """A model, and how many of its exits are loaded."""

    model: str
    depth: int


class Given(NamedTuple):
    """Where a prompt goes, and whether it is one of an evaluation."""

    choice: Choice
    evaluated: bool


class Decision(NamedTuple):
    """kind: "evaluate", "grow", "switch" and "tighten", or "serve" where the model is the first, or
    stays; seconds: what it costs, as known when it was taken; told: what it is to bring."""

    time: float
    kind: str
    choice: Choice
    why: str
    seconds: float = 0.0
    told: Telemetry | None = None


@dataclasses.dataclass
class Seen:
    """An evaluation under way: of `left` prompts that are to be given, `open` to be answered."""

    model: str
    left: int
    open: int = 0
    failed: int = 0
    begin: float = 0.0
    answers: list[Telemetry] = dataclasses.field(default_factory=list)
    exits: list[int] = dataclasses.field(default_factory=list)


def stricter(threshold: float, level: int) -> float:
    """A threshold half as far from 1 with every level, and 1, at which no exit is taken, with
    `STRICTEST`."""
    if level == 0:
        return threshold  # and not what rounding makes of it
    return 1.0 if level >= STRICTEST else 1.0 - (1.0 - threshold) * 0.5**level
