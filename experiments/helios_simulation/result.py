"""Outcome of a simulation of serving: when prompts were answered, by which model, and how well."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from eejax.common.errors import require
from eejax.helios.choices import Decision
from eejax.helios.objectives import Telemetry


class SimulatedEvent(NamedTuple):
    """A change of the simulated server.

    Attributes:
      time: seconds of the change.
      what: "load", "grow", "grown" (which take `seconds`), "stay", "shrink", "free" or "serve".
      model: the model.
      depth: the depth that the model has or will have; for "free", the one that it had.
      seconds: duration of the change.
    """

    time: float
    what: str
    model: str
    depth: int
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class SimulationResult:
    """Outcome of a simulation; all of it is SIMULATED.

    Attributes:
      arrived: [p] seconds of each prompt's arrival.
      first: [p] seconds of its first token.
      ended: [p] seconds of its end.
      models: [p] the model that ended it.
      tokens: [p] number of its tokens.
      agree: [p] number of tokens that agree with the full model's.
      below: [p] number of tokens below their threshold.
      exits: tokens by exit, of each model.
      flops: multiplications and additions per token of decoding and rebuilding by layers, a proxy
        of energy.
      memory: mean bytes loaded.
      decisions: the policy's decisions.
      timeline: the changes of the server.
    """

    arrived: np.ndarray
    first: np.ndarray
    ended: np.ndarray
    models: tuple[str, ...]
    tokens: np.ndarray
    agree: np.ndarray
    below: np.ndarray
    exits: Mapping[str, tuple[int, ...]]
    flops: float
    memory: float
    decisions: tuple[Decision, ...]
    timeline: tuple[SimulatedEvent, ...]

    @property
    def seconds(self) -> float:
        return float(self.ended.max() - self.arrived.min())

    @property
    def throughput(self) -> float:
        """Tokens a second."""
        return float(self.tokens.sum()) / max(self.seconds, 1e-12)

    @property
    def ttft(self) -> dict[str, float]:
        """Seconds from a prompt's arrival to its first token, waiting and loading included."""
        waits = self.first - self.arrived
        p50, p99 = np.quantile(waits, (0.5, 0.99))
        return {"mean": float(waits.mean()), "p50": float(p50), "p99": float(p99)}

    @property
    def agreement(self) -> float:
        """Share of tokens that agree with the model's own last exit."""
        return float(self.agree.sum() / self.tokens.sum())

    @property
    def below_share(self) -> float:
        return float(self.below.sum() / self.tokens.sum())

    @property
    def telemetry(self) -> Telemetry:
        each = (self.ended - self.first) / np.maximum(self.tokens - 1, 1)
        return Telemetry(
            self.throughput,
            self.ttft["mean"],
            self.ttft["p99"],
            float(each.mean()),
            self.agreement,
            self.memory,
            self.flops,
        )


@dataclasses.dataclass(frozen=True)
class MeasuredResult:
    """Measurements of a server.

    Attributes:
      throughput: tokens per second.
      ttft: mean seconds to the first token.
    """

    throughput: float
    ttft: float

    def __post_init__(self):
        for name in ("throughput", "ttft"):
            value = getattr(self, name)
            require(value > 0, name, value, "must be more than 0")


def validate(simulated: SimulationResult, live: MeasuredResult) -> dict[str, float]:
    """Return the relative error of the simulation, positive where it predicts too much."""
    return {
        "throughput": simulated.throughput / live.throughput - 1,
        "ttft": simulated.ttft["mean"] / live.ttft - 1,
    }


def show_errors(rows: Mapping[str, tuple[SimulationResult, MeasuredResult]]) -> str:
    """Return lines with simulated and measured numbers, and the relative error."""
    lines = []
    for name, (simulated, live) in rows.items():
        off = validate(simulated, live)
        lines.append(
            f"{name}: tokens/s {simulated.throughput:.0f} simulated, {live.throughput:.0f} live "
            f"({off['throughput']:+.0%}); first token {simulated.ttft['mean'] * 1e3:.0f} ms "
            f"simulated, {live.ttft * 1e3:.0f} ms live ({off['ttft']:+.0%})"
        )
    return "\n".join(lines)
