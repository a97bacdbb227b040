"""Prometheus metrics of a server."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from eejax.helios.report import FleetReport
from eejax.inference.request import FinishReason, Token
from eejax.serving.history import LoadHistory
from eejax.serving.messages import EngineLoad
from eejax.serving.service import DRAINING, READY

FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    """Metrics of all models of a server, with the model as the label `model`."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.histories: collections.defaultdict[str, LoadHistory] = collections.defaultdict(
            LoadHistory
        )

        def gauge(name, text):
            return Gauge(f"eejax_{name}", text, ("model",), registry=self.registry)

        def times(name, text, buckets):
            name, registry = f"eejax_{name}_seconds", self.registry
            return Histogram(name, text, ("model",), buckets=buckets, registry=registry)

        def count(name, text, *labels):
            return Counter(f"eejax_{name}", text, ("model", *labels), registry=self.registry)

        self.running = gauge("requests_running", "Requests in slots.")
        self.waiting = gauge("requests_waiting", "Requests without a slot.")
        self.cache = gauge("kv_cache_used_ratio", "Share of the slots' positions that are used.")
        self.up = gauge("engine_up", "1 while the engine answers, else 0.")
        self.depth = gauge("depth_loaded_layers", "Loaded layers of the serving model.")
        self.layers = Gauge(
            "eejax_fleet_layers",
            "Loaded layers of the fleet's serving member; 0 for the others.",
            ("model", "member"),
            registry=self.registry,
        )
        self.slots = gauge("fleet_slots", "Slots of the serving member.")
        self.below = gauge(
            "fleet_below_threshold_ratio", "Share of all tokens that left below their threshold."
        )
        self.shortfall = gauge(
            "fleet_quality_shortfall_ratio",
            "1 minus the mean quality of audited answers; NaN where none was audited.",
        )
        self.bound = gauge(
            "fleet_quality_shortfall_bound_ratio",
            "Upper bound of the quality shortfall, at 95 % confidence.",
        )
        self.perplexity = gauge(
            "fleet_perplexity", "Perplexity of audited answers under the model that judges them."
        )
        self.decisions = count("fleet_decisions", "Decisions of the controller.", "kind")
        self.first = times("time_to_first_token", "Time from a request to its first token.", FIRST)
        self.between = times("inter_token", "Time between tokens of a request.", BETWEEN)
        self.whole = times("request", "Time from a request to its end.", WHOLE)
        self.prompts = count("prompt_tokens", "Tokens of prompts.")
        self.tokens = count("generation_tokens", "Tokens generated.")
        self.exits = count(
            "exit_tokens",
            "Tokens by the layers below their exit, and by a fleet's member.",
            "member",
            "layer",
        )
        self.ends = count("requests", "Requests by finish reason.", "finish")
        self.restarts = count("engine_restarts", "Restarts of the engine.")

    def watch(self, model: str) -> Callable[[str, Any], None]:
        """Return the function to which a `Service` reports a model's events."""
        for gauge in (self.running, self.waiting, self.cache, self.up):
            gauge.labels(model).set(0)

        def report(name: str, value: Any) -> None:
            if name == "load":
                self.of_load(model, value)
            elif name == "report":
                self.of_report(model, value)
            elif name == "state":
                self.up.labels(model).set(value in (READY, DRAINING))
            elif name == "restart":
                self.restarts.labels(model).inc()

        return report

    def of_load(self, model: str, load: EngineLoad) -> None:
        """Record the load of a model's engine."""
        self.running.labels(model).set(load.running)
        self.waiting.labels(model).set(load.waiting)
        used = load.num_cached_tokens / max(load.capacity, 1)
        self.cache.labels(model).set(used)
        self.histories[model].load(load.running, load.waiting, used)

    def of_report(self, model: str, report: FleetReport) -> None:
        """Record which model of a fleet serves, and its quality."""
        history = self.histories[model]
        for member in {*history.members, report.model}:
            layers = report.layers if member == report.model else 0
            self.layers.labels(model, member).set(layers)
        nan = float("nan")
        for gauge, value in (
            (self.depth, report.layers),
            (self.slots, report.slots),
            (self.below, report.below),
            (self.shortfall, nan if report.shortfall is None else report.shortfall),
            (self.bound, nan if report.bound is None else report.bound),
            (self.perplexity, nan if report.perplexity is None else report.perplexity),
        ):
            gauge.labels(model).set(value)
        for decision in report.decisions:
            self.decisions.labels(model, decision.kind).inc()
        history.serves(report)

    def exposition(self) -> tuple[bytes, str]:
        """Return (page, content type) for a scraper."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class ChoiceMetrics:
    """Times and tokens of one choice."""

    def __init__(
        self,
        metrics: ServerMetrics,
        model: str,
        begin: float,
        prompt: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Begin to measure.

        Args:
          begin: arrival of its request, by the clock.
          prompt: prompt tokens, counted with the first choice.
        """
        self._metrics, self._model, self._clock = metrics, model, clock
        self._begin, self._last, self._prompt = begin, None, prompt

    def tokens(self, new: Sequence[Token]) -> None:
        """Record tokens that arrived together."""
        if not new:
            return
        metrics, now, first, between = self._metrics, self._clock(), None, []
        if self._last is None:
            first = now - self._begin
            metrics.prompts.labels(self._model).inc(self._prompt)
            metrics.first.labels(self._model).observe(first)
        else:  # tokens that arrive together count as evenly spaced
            between = [(now - self._last) / len(new)] * len(new)
            observed = metrics.between.labels(self._model)
            for seconds in between:
                observed.observe(seconds)
        self._last = now
        metrics.tokens.labels(self._model).inc(len(new))
        by_exit = collections.Counter((token.model, token.layers) for token in new)
        for (member, layers), count in by_exit.items():
            metrics.exits.labels(self._model, member, str(layers)).inc(count)
        layers = [token.layers for token in new]
        metrics.histories[self._model].tokens(layers, first, between)

    def end(self, finish: FinishReason) -> None:
        """Record how the choice ended."""
        if finish != FinishReason.REFUSED:
            self._metrics.whole.labels(self._model).observe(self._clock() - self._begin)
        self._metrics.ends.labels(self._model, finish).inc()
