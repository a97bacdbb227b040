"""What a simulation of serving tells: when prompts were answered, by whom, and how well."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from eejax.common.errors import require
from eejax.serving.choices import Decision
from eejax.serving.objectives import Telemetry


class Event(NamedTuple):
    """What became of a model: "load", "grow" (both take `seconds`), "grown", "shrink", "free" or
    "serve"; depth: that it has then."""

    time: float
    what: str
    model: str
    depth: int
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Simulated:
    """SIMULATED. By prompt [p]: arrived, first, ended: seconds; models: that ended it; tokens, and
    how many of them agree with the full model's and were below their threshold. exits: tokens by
    exit, of each model. flops: multiplications and additions a token of decoding and rebuilding by
    layers, a proxy of what is spent; memory: mean bytes loaded.
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
    timeline: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        return float(self.ended.max() - self.arrived.min())

    @property
    def throughput(self) -> float:
        """Tokens a second."""
        return float(self.tokens.sum()) / max(self.seconds, 1e-12)

    @property
    def ttft(self) -> dict[str, float]:
        """Seconds to the first token from when a prompt came, waiting and loading included."""
        waits = self.first - self.arrived
        p50, p99 = np.quantile(waits, (0.5, 0.99))
        return {"mean": float(waits.mean()), "p50": float(p50), "p99": float(p99)}

    @property
    def agreement(self) -> float:
        """Share of tokens that are those of the model's own last exit."""
        return float(self.agree.sum() / self.tokens.sum())

    @property
    def below_share(self) -> float:
        return float(self.below.sum() / self.tokens.sum())

    @property
    def telemetry(self) -> Telemetry:
        each = (self.ended - self.first) / np.maximum(self.tokens - 1, 1)
        return Telemetry(
            self.throughput, self.ttft["mean"], self.ttft["p99"], float(each.mean()),
            self.agreement, self.memory, self.flops,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Live:
    """What a server did, measured. throughput: tokens a second; ttft: seconds, the mean."""

    throughput: float
    ttft: float

    def __post_init__(self):
        for name in ("throughput", "ttft"):
            value = getattr(self, name)
            require(value > 0, name, value, "must be more than 0")


def validate(simulated: Simulated, live: Live) -> dict[str, float]:
    """By how much the simulation is off, as a share of what was measured: above 0 where it says
    more."""
    return {
        "throughput": simulated.throughput / live.throughput - 1,
        "ttft": simulated.ttft["mean"] / live.ttft - 1,
    }


def show_errors(rows: Mapping[str, tuple[Simulated, Live]]) -> str:
    """Lines of simulated and measured numbers, and the relative error."""
    lines = []
    for name, (simulated, live) in rows.items():
        off = validate(simulated, live)
        lines.append(
            f"{name}: tokens/s {simulated.throughput:.0f} simulated, {live.throughput:.0f} live "
            f"({off['throughput']:+.0%}); first token {simulated.ttft['mean'] * 1e3:.0f} ms "
            f"simulated, {live.ttft * 1e3:.0f} ms live ({off['ttft']:+.0%})"
        )
    return "\n".join(lines)
