"""Choices and decisions of a controller: plain data, without any device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import numpy as np
from annotated_types import Interval

from eejax.common.errors import require
from eejax.common.fields import NonNegativeFloat, NonNegativeInt, PositiveInt, check_fields
from eejax.helios.objectives import Telemetry

AUTO: Final = "auto"
STRICTEST = 4  # steps of thresholds to 1; each but the last goes half of the remaining way


class FrozenMappings:
    """Base of frozen dataclasses that keep read-only copies of the dictionaries they are given."""

    def __post_init__(self):
        vars(self).update({name: _read_only(value) for name, value in vars(self).items()})

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields.

        `dataclasses.replace` takes several times as long, and the controller's state changes with
        every token.
        """
        if unknown := changes.keys() - vars(self).keys():
            raise TypeError(f"{type(self).__name__} has no fields {sorted(unknown)}")
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        vars(made).update({name: _read_only(value) for name, value in changes.items()})
        return made


def _read_only(value: Any) -> Any:
    return MappingProxyType(dict(value)) if isinstance(value, dict) else value


@dataclasses.dataclass(frozen=True)
class ControllerOptions:
    """Options of a controller.

    Attributes:
      candidates: models that are evaluated, the best by their benchmarks.
      prompts: prompts of the evaluation of one.
      interval: prompts between two reassessments, or auto: as many as it takes until they cost no
        more than a share `gain` of the time.
      window: tokens in which breaches are counted, those that leave below their threshold.
      breaches: maximum tokens of the window that may leave below their threshold before more layers
        or another model are considered.
      greedy: models may be loaded in part, so that tokens leave below their threshold.
      gain: share by which another choice must be better, so that noise changes nothing.
      tokens: expected tokens of an answer, until some were measured.
      budget: maximum bytes of a model and its requests.
    """

    candidates: PositiveInt = 2
    prompts: PositiveInt = 5
    interval: PositiveInt | Literal["auto"] = 150
    window: PositiveInt = 100
    breaches: NonNegativeInt = 50
    greedy: bool = True
    gain: NonNegativeFloat = 0.05
    tokens: PositiveInt = 100
    budget: Annotated[float, Interval(gt=0)] = float("inf")

    def __post_init__(self):
        check_fields(self)
        allowed = f"must be at most {self.window}, the window"
        require(self.breaches <= self.window, "ControllerOptions.breaches", self.breaches, allowed)


# Fields of a profile that have a number for each segment, or each depth.
SEGMENTWISE = (
    "seconds",
    "prefill",
    "load",
    "rebuild",
    "bytes",
    "energy",
    "sure",
    "unsure",
    "agrees",
    "slots",
    "state",
    "heads",
)


@dataclasses.dataclass(frozen=True)
class ModelProfile:
    """Measurements of a model, segment by segment.

    Exit e reads the states behind segment e, the last exit those behind all layers.

    Attributes:
      seconds: [exits] seconds per token in a segment, with all slots in use.
      prefill: [exits] seconds of a single prompt.
      load: [exits] seconds to bring a segment to the device, compiled.
      rebuild: [exits] seconds to compute a token's keys and values in a segment added later.
      bytes: [exits] bytes of the weights.
      energy: [exits] energy of a token in the layers.
      heads: [exits] energy of a token in the head behind them.
      sure: [exits] of the tokens above an exit's threshold, the share that equals the full model's.
      unsure: [exits] of the tokens below the threshold, the share that does.
      agrees: [exits] of all tokens, the share that would if all left by the exit; by default
        `sure`.
      slots: by depth, requests that are served at a time, with which `seconds` were measured.
      state: by depth, bytes of their state. Both are empty if memory does not matter.
      shares: shares of tokens by exit that are known before any request; empty if unknown.
      quality, perplexity: of answers, as (agreement, value) pairs over the share of tokens that
        agree with this model's own last exit, interpolated between pairs (`quality_at`,
        `perplexity_at`). The last pair is that of the whole model, at agreement 1.
      ceiling: the quality that deeper exits or another model cannot improve. It is 1 if one
        reference model judges each answer, and the whole model's quality if answers are compared
        with those of the whole model.
      saved: share of the seconds that exits could save that they do save. Some are lost because
        keys and values above an exit are computed later, once another token goes there.
      spared: the same share for the energy of layers.
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
    quality: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    perplexity: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    ceiling: float = 1.0
    shares: tuple[float, ...] = ()
    agrees: tuple[float, ...] = ()

    def __post_init__(self):
        n = len(self.seconds)
        require(n > 0, "seconds", self.seconds, "must have a number for each segment")
        for name, none in (("slots", (1,)), ("state", (0.0,)), ("heads", (0.0,))):
            object.__setattr__(self, name, tuple(getattr(self, name)) or none * n)
        object.__setattr__(self, "agrees", tuple(self.agrees) or tuple(self.sure))
        for name in ("quality", "perplexity"):  # pairs are lists in JSON
            object.__setattr__(self, name, tuple(map(tuple, getattr(self, name))))
        for name in ("saved", "spared", "ceiling"):
            value = getattr(self, name)
            require(0 <= value <= 1, name, value, "must lie in [0, 1]")
        for name in SEGMENTWISE:
            values = getattr(self, name)
            good = len(values) == n and all(0 <= v < math.inf for v in values)
            require(good, name, values, f"must be {n} finite numbers of at least 0")
        allowed = f"must be none or {n} shares, 1 together"
        whole = len(self.shares) == n and math.isclose(sum(self.shares), 1, rel_tol=1e-6)
        require(not self.shares or whole, "shares", self.shares, allowed)
        for name, least, most in (("quality", 0, 1), ("perplexity", 1, math.inf)):
            pairs = getattr(self, name)
            good = bool(pairs) and pairs[-1][0] == 1
            good = good and all(least <= v <= most and v < math.inf for _, v in pairs)
            shares = [share for share, _ in pairs]
            good &= all(0 <= a < b for a, b in zip(shares, shares[1:], strict=False))
            allowed = (
                f"must be (agreement, value) pairs up to agreement 1, values in {least}..{most}"
            )
            require(good, name, pairs, allowed)

    @property
    def exits(self) -> int:
        return len(self.seconds)

    def size(self, depth: int) -> float:
        """Return the bytes of the first `depth` segments, including the state of requests."""
        return sum(self.bytes[:depth]) + self.state[depth - 1]

    def quality_at(self, agreement: float) -> float:
        """Return the quality of answers with a share `agreement` of the whole model's tokens.

        Below the lowest measured agreement it falls in proportion.
        """
        points = dict([(0.0, 0.0), *self.quality])
        return float(np.interp(agreement, [*points], [*points.values()]))

    def perplexity_at(self, agreement: float) -> float:
        """Return the perplexity of such answers, with its logarithm interpolated."""
        shares, values = zip(*self.perplexity, strict=True)
        return math.exp(float(np.interp(agreement, shares, np.log(values))))

    def agreement(self, shares: Sequence[float], depth: int, hope: float = 0.0) -> float:
        """Return the share of tokens that agree with the whole model, plus `hope` of the others."""
        found = sum(s * a for s, a in zip(shares[:depth], self.sure, strict=False))
        found += breaches(shares, depth) * self.unsure[depth - 1]
        return found * (1 - hope) + hope

    def serving(self, shares: Sequence[float], depth: int, hope: float = 0.0) -> Telemetry:
        """Return telemetry with the first `depth` exits loaded.

        shares: shares of tokens that would leave by each exit if all were loaded; those above leave
        by the last loaded exit. Times to first token are those of a lone request. hope: as in
        `agreement`.
        """
        seconds = max(_spent(self.seconds, shares, depth, self.saved), 1e-12)
        agreement = self.agreement(shares, depth, hope)
        first = sum(self.prefill[:depth])
        return Telemetry(
            throughput=1 / seconds,
            ttft=first,
            ttft_p99=first,
            tpot=seconds * self.slots[depth - 1],
            accuracy=self.quality_at(agreement),
            memory=self.size(depth),
            energy=self.worked(shares, depth),
            perplexity=self.perplexity_at(agreement),
        )

    def worked(self, shares: Sequence[float], depth: int) -> float:
        """Return the energy of a token; arguments as `serving`."""
        layers = _spent(self.energy, shares, depth, self.spared)
        return layers + _spent(self.heads, shares, depth)

    def benchmark(self) -> dict[int, Telemetry]:
        """Return telemetry by depth if all tokens leave by the last loaded exit."""

        def last(depth):
            return tuple(float(e == depth - 1) for e in range(self.exits))

        every = dataclasses.replace(self, sure=self.agrees)
        return {depth: every.serving(last(depth), depth) for depth in range(1, self.exits + 1)}


def _spent(
    costs: Sequence[float], shares: Sequence[float], depth: int, spared: float = 1.0
) -> float:
    """Return the cost of a token in the segments that it runs, of which exits save a part."""
    most = sum(costs[:depth])
    least = sum(sum(shares[s:]) * costs[s] for s in range(depth))
    return most - spared * (most - least)


def breaches(shares: Sequence[float], depth: int) -> float:
    """Return the share of the tokens that leave below their threshold."""
    return sum(shares[depth:])


def apportioned(shares: Sequence[float], total: int) -> list[int]:
    """Return whole numbers in proportion to shares, with the sum `total`."""
    ends = np.rint(np.cumsum(shares) / sum(shares) * total).astype(int)
    return np.diff(ends, prepend=0).tolist()


class ModelDepth(NamedTuple):
    """A model, and how many of its exits are loaded."""

    model: str
    depth: int


class Assignment(NamedTuple):
    """The model that a prompt goes to, and whether it is part of an evaluation."""

    choice: ModelDepth
    evaluated: bool


class Decision(NamedTuple):
    """A decision of the controller.

    Attributes:
      kind: "evaluate", "grow", "switch" or "tighten"; "serve" if the model is the first, or stays.
      seconds: its cost, as known when it was taken.
      expected: expected telemetry.
    """

    time: float
    kind: str
    choice: ModelDepth
    why: str
    seconds: float = 0.0
    expected: Telemetry | None = None


def stricter(threshold: float, level: int) -> float:
    """Return a threshold raised by levels, each of which halves its distance to 1.

    At level `STRICTEST` it is 1, with which no exit is taken.
    """
    if level == 0:
        return threshold  # unchanged by rounding
    return 1.0 if level >= STRICTEST else 1.0 - (1.0 - threshold) * 0.5**level
