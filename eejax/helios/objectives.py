"""Service objectives, which say which of two ways to serve is better."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from eejax.common.errors import ConfigError, require

METRICS = (
    "throughput",
    "ttft",
    "ttft_p99",
    "tpot",
    "accuracy",
    "memory",
    "energy",
    "perplexity",
)
MORE = ("throughput", "accuracy")  # metrics of which more is better; of the others less is


@dataclasses.dataclass(frozen=True)
class Telemetry:
    """Performance of a model at a depth.

    Attributes:
      throughput: tokens per second.
      ttft, tpot: mean seconds to the first token, and for each further token.
      ttft_p99: 99th percentile of the seconds to the first token.
      accuracy: quality of the answers in [0, 1], on a scale that compares models
        (`quality.QualitySource`).
      memory: bytes.
      energy: joules per token, or operations in their place.
      perplexity: perplexity of the answers under the model that judges them; 1 without one.
    """

    throughput: float
    ttft: float
    ttft_p99: float
    tpot: float
    accuracy: float
    memory: float
    energy: float
    perplexity: float = 1.0

    def __post_init__(self):
        for name in METRICS:
            value = getattr(self, name)
            ok = isinstance(value, int | float) and math.isfinite(value) and value >= 0
            require(ok, name, value, "must be a number of at least 0")

    def with_overhead(
        self, seconds: float, energy: float, prompts: float, tokens: float
    ) -> Telemetry:
        """Return telemetry with `seconds` and `energy` spent once for `prompts` prompts.

        The prompts wait for it; their answers have `tokens` tokens each.
        """
        total = prompts * tokens
        whole = seconds + total / max(self.throughput, 1e-12)
        return dataclasses.replace(
            self,
            throughput=total / whole,
            ttft=self.ttft + seconds / prompts,
            energy=self.energy + energy / total,
        )


@dataclasses.dataclass(frozen=True)
class ServiceObjective:
    """Metrics that an operator weighs and limits.

    The score is the product of metrics to the power of their weights; metrics of which less is
    better divide. `ServiceObjective.of("throughput")` and the like weigh one metric; "goodput" is
    the most throughput that keeps all limits, which must include accuracy and ttft_p99.

    Attributes:
      weights: weights by metric, each above 0.
      limits: limits by metric, a minimum if more is better, else a maximum.
    """

    weights: Mapping[str, float]
    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        require(bool(self.weights), "weights", self.weights, "must weigh at least one metric")
        for name, table in (("weights", self.weights), ("limits", self.limits)):
            for metric, value in table.items():
                known = ", ".join(METRICS)
                require(metric in METRICS, name, metric, f"must be of {known}")
                ok = isinstance(value, int | float) and 0 < value < math.inf
                require(ok, f"{name}.{metric}", value, "must be a number above 0")
        perplexity = self.limits.get("perplexity", 1.0)
        require(perplexity >= 1, "limits.perplexity", perplexity, "must be at least 1")
        accuracy = self.limits.get("accuracy", 1.0)
        require(accuracy <= 1, "limits.accuracy", accuracy, "must be a share, at most 1")

    @classmethod
    def of(cls, name: str, /, **limits: float) -> ServiceObjective:
        """Make the objective of a name in `NAMED`; `limits` are its limits by metric."""
        if name not in NAMED:
            raise ConfigError(f"objective = {name!r}: must be of {', '.join(NAMED)}.")
        missing = [m for m in ("ttft_p99", "accuracy") if m not in limits]
        if missing and name == "goodput":
            raise ConfigError(
                f"objective = 'goodput': needs limits of {' and '.join(missing)}, "
                "as in ttft_p99=0.5,accuracy=0.9."
            )
        return cls(NAMED[name], limits)

    @property
    def reads_quality(self) -> bool:
        """True if the quality of answers is weighed or limited."""
        return bool({"accuracy", "perplexity"} & {*self.weights, *self.limits})

    def score(self, telemetry: Telemetry) -> float:
        """Return the log of the score; the difference of two scores is the log of a ratio."""

        def value(metric):
            return math.log(max(getattr(telemetry, metric), 1e-12))

        signed = {m: w if m in MORE else -w for m, w in self.weights.items()}
        return sum(w * value(m) for m, w in signed.items())

    def excess(self, telemetry: Telemetry) -> float:
        """Return by how much limits are missed, the log of the worst ratio; 0 if all are kept."""
        return max((0.0, *(self._over(metric, telemetry) for metric in self.limits)))

    def _over(self, metric: str, telemetry: Telemetry) -> float:
        """Return the log of the ratio by which a limit is missed; at most 0 if it is kept."""
        value = max(getattr(telemetry, metric), 1e-12)
        over = math.log(value) - math.log(self.limits[metric])
        return -over if metric in MORE else over

    def missed(self, telemetry: Telemetry | None) -> str:
        """Name the missed limits with value and limit; empty if all are kept or nothing is
        known."""
        if telemetry is None:
            return ""
        found = []
        for metric, limit in self.limits.items():
            if self._over(metric, telemetry) > 0:
                value, bound = getattr(telemetry, metric), "least" if metric in MORE else "most"
                shown = _format_beside(value, limit)
                found.append(f"{metric}: {shown} where at {bound} {limit} is allowed")
        return " and ".join(found)

    def reason(self, why: str, telemetry: Telemetry | None) -> str:
        """Add to the reason for a choice which limits it misses."""
        missed = self.missed(telemetry)
        return f"{why}; it misses {missed}" if missed else why

    def rank(self, telemetry: Telemetry) -> tuple[float, float]:
        """Return a rank, greater is better: first whether limits are kept, then the score."""
        return (-self.excess(telemetry), self.score(telemetry))


def _format_beside(value: float, limit: float) -> str:
    """Format a number with at least 3 digits, and as many as distinguish it from the limit."""
    for digits in range(3, 17):
        if (text := f"{value:.{digits}g}") != f"{limit:.{digits}g}":
            return text
    return repr(value)


# Among models of equal quality the faster one is preferred.
NAMED: dict[str, Mapping[str, float]] = {
    "throughput": {"throughput": 1.0},
    "response_time": {"ttft": 1.0, "tpot": 1.0},
    "accuracy": {"accuracy": 1.0, "throughput": 1e-3},
    "perplexity": {"perplexity": 1.0, "throughput": 1e-3},
    "energy": {"energy": 1.0},
    "goodput": {"throughput": 1.0},
}
