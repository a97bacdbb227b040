"""Simulator of serving under a policy: recorded prompts and measured seconds, no device.

All of its results are SIMULATED. The decisions are real: the `Controller` is the one that serves,
with a clock that the simulation moves. `Dispatcher` assigns requests to models and decides which
models are loaded and freed, as in a `Fleet`. Tokens and exits are read from a trace. The use of
slots, and the time and cost of growth, follow `PartialModel` and `Scheduler`, which read the
outputs of a call of several steps while the next one runs. Seconds are those of `StepSeconds`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from eejax.common.errors import require, require_count
from eejax.experiments.helios_simulation.pace import StepSeconds
from eejax.experiments.helios_simulation.result import SimulatedEvent, SimulationResult
from eejax.experiments.helios_simulation.slots import (
    SimulatedCall,
    SimulatedModel,
    SimulatedRequest,
)
from eejax.experiments.helios_simulation.traces import PromptTrace
from eejax.helios.choices import ModelDepth, ModelProfile, stricter
from eejax.helios.disagreement_bound import AnswerAudit
from eejax.helios.dispatch import Dispatcher
from eejax.helios.interfaces import AnswerCosts, ModelPolicy


@dataclasses.dataclass(frozen=True)
class SimulationSetting:
    """A simulated server and its clients.

    Attributes:
      slots: slots of each model whose profile has none.
      steps: steps between two reads of outputs.
      cap: maximum tokens of a request that wait for deeper keys and values.
      clients: number of clients, each of which sends a prompt when its last one is answered; as
        many as slots by default.
      arrivals: ascending seconds of every prompt, in place of clients.
      thresholds: thresholds of models, by default as recorded.
      audits: share of answers, beside those of evaluations, that are audited; an audit takes as
        long as reading them.
      free: whether loading takes no time.
      seed: seed of the audits.
    """

    slots: int = 8
    steps: int = 4
    cap: int = 16
    clients: int | None = None
    arrivals: tuple[float, ...] | None = None
    thresholds: Mapping[str, float | tuple[float, ...]] | float | None = None
    audits: float = 0.0
    free: bool = False
    seed: int = 0

    def __post_init__(self):
        for name in ("slots", "steps", "cap"):
            require_count(name, getattr(self, name))
        if self.clients is not None:
            require_count("clients", self.clients)
        a = self.arrivals
        # Both comparisons are false for NaN, which sorting would not detect.
        ascends = a is None or all(0 <= s < math.inf for s in a) and list(a) == sorted(a)
        require(ascends, "arrivals", a, "must be seconds from 0 on, that ascend")
        require(0 <= self.audits <= 1, "audits", self.audits, "must lie in [0, 1]")

    def slots_of(self, profile: ModelProfile) -> tuple[int, ...]:
        """Return a model's slots by depth."""
        return profile.slots if max(profile.slots) > 1 else (self.slots,) * profile.exits

    def threshold(self, model: str) -> float | tuple[float, ...] | None:
        given = self.thresholds
        return given.get(model) if isinstance(given, Mapping) else given


def simulate(
    trace: PromptTrace,
    profiles: Mapping[str, ModelProfile],
    paces: Mapping[str, StepSeconds],
    make: Callable[[Callable[[], float]], ModelPolicy],
    setting: SimulationSetting | None = None,
) -> SimulationResult:
    """Simulate the prompts of a trace in order, with the policy that `make(clock)` makes.

    A text that continues in another model continues as that model's own.

    Raises:
      ConfigError: for profiles, paces or arrivals that do not match the trace.
    """
    setting = setting or SimulationSetting()
    for name, table in (("profiles", profiles), ("paces", paces)):
        missing = [m for m in trace.models if m not in table]
        require(not missing, name, sorted(table), f"must have {', '.join(missing)} too")
    for name, model in trace.models.items():
        for field, n in (("profiles", profiles[name].exits), ("paces", len(paces[name].rows))):
            require(n == model.exits, f"{field}[{name!r}]", n, f"must be of {model.exits} exits")
    a = setting.arrivals
    require(a is None or len(a) == len(trace), "arrivals", a, f"must be {len(trace)} times")
    return SimulatedServer(trace, profiles, paces, make, setting).run()


class SimulatedServer:
    """A pool of simulated models with its dispatcher, its clients, and the time."""

    def __init__(self, trace, profiles, paces, make, setting):
        self.trace, self.setting, self.paces = trace, setting, paces

        def none(p):
            return dict(load=(0.0,) * p.exits, rebuild=(0.0,) * p.exits)

        def free(p):
            return dataclasses.replace(p, **none(p)) if setting.free else p

        self.now = self.device = 0.0  # time of the host, and the end of the device's work

        def clock():
            return self.now

        self.controller = make(clock)
        self._profiles = {name: free(profiles[name]) for name in trace.models}
        self.dispatcher = Dispatcher(
            self.controller,
            self,
            self._profiles,
            share=setting.audits,
            seed=setting.seed,
            clock=clock,
        )
        self.parts: dict[str, SimulatedModel] = {}
        self.jobs: list[SimulatedRequest] = []  # requests that have arrived
        self.timeline: list[SimulatedEvent] = []
        self._still = 0  # consecutive turns without any work
        self._flops = self._byte_seconds = 0.0
        self._tables: dict[tuple[str, int, int], tuple[list, list]] = {}
        self._same = {name: m.same.tolist() for name, m in trace.models.items()}
        self.below, self.ended = np.zeros(len(trace), int), np.zeros(len(trace))
        self.models = [""] * len(trace)
        self.exits = {name: [0] * m.exits for name, m in trace.models.items()}

    def run(self) -> SimulationResult:
        p, arrivals = len(self.trace), self.setting.arrivals
        if arrivals is None:
            for _ in range(min(p, self.setting.clients or self.setting.slots)):
                self._come(0.0)
        left = p
        while left:
            if arrivals is not None:
                while len(self.jobs) < p and arrivals[len(self.jobs)] <= self.now:
                    self._come(arrivals[len(self.jobs)])
            before = self.now
            self._reconcile()
            self.dispatcher.assign()
            to_audit = bool(self.dispatcher.to_audit)
            busy = to_audit or any(not part.idle for part in self.parts.values())
            left -= sum(self._stepped(name, part) for name, part in [*self.parts.items()])
            self.dispatcher.audit_next()
            if not busy:
                self._idle(arrivals)
            self._byte_seconds += self._loaded() * (self.now - before)
        for part in self.parts.values():
            self._flops += part.flops

        def of(name):
            return np.array([getattr(job, name) for job in self.jobs])

        return SimulationResult(
            of("came"),
            of("heard"),
            self.ended,
            tuple(self.models),
            of("num_read"),
            of("agree"),
            self.below,
            {name: tuple(n) for name, n in self.exits.items()},
            self._flops / of("num_read").sum(),
            self._byte_seconds / max(self.now, 1e-12),
            tuple(self.controller.decisions),
            tuple(self.timeline),
        )

    def _loaded(self) -> float:
        """Return loaded bytes, with those on their way."""
        loaded = sum(part.size for part in self.parts.values())
        if self.dispatcher.loading is not None:
            model, depth = self.dispatcher.loading.choice
            loaded += self._profiles[model].size(depth)
        return loaded

    def _come(self, time: float) -> None:
        number = len(self.jobs)
        self.jobs.append(SimulatedRequest(number=number, order=(0, number), came=time))
        self.dispatcher.wait(self.jobs[-1])

    def _idle(self, arrivals) -> None:
        """Advance the clock to the next event, if no model has work.

        Raises:
          RuntimeError: if there is no next event.
        """
        times = [part.ready for part in self.parts.values() if part.target_segments > part.depth]
        loading = self.dispatcher.loading
        times += [loading.ready] if loading is not None else []
        if arrivals is not None and len(self.jobs) < len(self.trace):
            times.append(arrivals[len(self.jobs)])
        times = [t for t in times if t > self.now]
        # One turn without events is possible: prompts are assigned in the next one.
        self._still = 0 if times else self._still + 1
        if self._still > 2:
            state = f"{self.controller.wanted} is wanted, and {self.controller.current} serves"
            raise RuntimeError(f"nothing will happen any more: {state}.")
        self.now = min(times, default=self.now)

    def _reconcile(self) -> None:
        before = self.controller.current
        self.dispatcher.reconcile()
        if self.controller.current != before:
            self._happens("serve", self.controller.wanted.model)

    def load(self, wanted: ModelDepth) -> _Coming:
        seconds = sum(self._profiles[wanted.model].load[: wanted.depth])
        self.timeline.append(SimulatedEvent(self.now, "load", *wanted, seconds))
        return _Coming(self, wanted, self.now, self.now + seconds)

    def part(self, choice: ModelDepth) -> SimulatedModel:
        """Return a loaded model."""
        name, profile, setting = choice.model, self._profiles[choice.model], self.setting
        return SimulatedModel(
            self.trace.models[name],
            profile,
            self.paces[name],
            partial(self._leaving, name),
            depth=choice.depth,
            slots=setting.slots_of(profile),
            steps=setting.steps,
            cap=setting.cap,
        )

    def add(self, loading: _Coming) -> None:
        self.parts[loading.choice.model] = loading.result()

    def grow(self, wanted: ModelDepth) -> str:
        seconds = self.parts[wanted.model].grow(wanted.depth, self.now)
        self._happens("grow", wanted.model, seconds)
        return ""

    def cancel_growth(self, model: str) -> None:
        self.parts[model].cancel_growth()
        self._happens("stay", model)

    def shrink(self, wanted: ModelDepth) -> None:
        self.parts[wanted.model].shrink(wanted.depth)
        self._happens("shrink", wanted.model)

    def free(self, model: str) -> None:
        part = self.parts.pop(model)
        for job in part.every:
            # The outputs of a running call are lost.
            job.done, job.part = job.num_read, None
        self.timeline.append(SimulatedEvent(self.now, "free", model, part.target_segments))
        self._flops += part.flops

    def audit_bytes(self, depths: Mapping[str, int]) -> float:
        return 0.0

    @property
    def num_cached_tokens(self) -> int:
        return sum(part.num_cached_tokens for part in self.parts.values())

    def start(self, job: SimulatedRequest) -> None:
        job.part = self.parts[job.model]
        job.part.waiting.append(job)

    def _leaving(self, name: str, depth: int, strict: int) -> tuple[list, list]:
        """Return (exits, below) [p][n] of a model at a depth."""
        key = name, depth, strict
        if key not in self._tables:
            model = self.trace.models[name]
            given = self.setting.threshold(name)
            if strict:
                limits = np.broadcast_to(
                    np.asarray(model.thresholds if given is None else given), model.exits - 1
                )
                given = [stricter(float(t), strict) for t in limits]
            self._tables[key] = tuple(a.tolist() for a in model.leaves(given, depth))
        return self._tables[key]

    def _stepped(self, name: str, part: SimulatedModel) -> int:
        """Step a model as `Scheduler.step` does, and return how many prompts ended."""
        if part.target_segments > part.depth and self.now >= part.ready:
            seconds = part.grown()
            self.now = self.device = max(self.device, self.now) + seconds  # the host waits for it
            self._happens("grown", name, seconds)
            self.dispatcher.depth_changed(name)
        part.join()
        keep = bool(part.jobs)
        if part.jobs:
            call = part.call(max(self.device, self.now))
            self.device = call.end
            part.calls.append(call)
        ended = 0
        while len(part.calls) > keep:
            ended += self._read_call(name, part, part.calls.popleft())
        return ended

    def _read_call(self, name: str, part: SimulatedModel, call: SimulatedCall) -> int:
        """Read a call, and return how many prompts it ended."""
        self.now = max(self.now, call.end)
        ended = 0
        for job, exits, below in call.brought:
            if not exits or job.part is not part:
                continue
            self.dispatcher.record_tokens(job)
            same = self._same[name][job.number]
            job.agree += sum(same[job.num_read + k][e] for k, e in enumerate(exits))
            job.num_read += len(exits)
            job.exits += exits
            job.below += below
            self.below[job.number] += sum(below)
            for e in exits:
                self.exits[name][e] += 1
            self.controller.tokens_emitted(name, below)
            if job.num_read == self.trace.new:
                ended += 1
                self._ended(name, part, job)
        return ended

    def _ended(self, name: str, part: SimulatedModel, job: SimulatedRequest) -> None:
        self.ended[job.number], self.models[job.number] = self.now, name
        part.leave(job)
        self.dispatcher.finish(job)
        if self.setting.arrivals is None and len(self.jobs) < len(self.trace):
            self._come(self.now)

    def costs(self, job: SimulatedRequest) -> AnswerCosts:
        return AnswerCosts(len(job.part.jobs), agreement=job.agree / job.num_read)

    def judge(self, job: SimulatedRequest) -> AnswerAudit:
        part = self.parts[job.model]
        length = int(self.trace.models[job.model].prompts[job.number]) + job.num_read
        pace = part.pace
        seconds = length / pace.tokens * pace.reading([pace.tokens], len(pace.rows))
        self.now = self.device = max(self.now, self.device) + seconds
        return AnswerAudit(np.arange(job.num_read) < job.agree, np.zeros(job.num_read))

    def _happens(self, what: str, model: str, seconds: float = 0.0) -> None:
        depth = self.parts[model].target_segments
        self.timeline.append(SimulatedEvent(self.now, what, model, depth, seconds))


@dataclasses.dataclass(frozen=True)
class _Coming:
    """A model that is being loaded until it is `ready`."""

    server: SimulatedServer
    choice: ModelDepth
    begin: float
    ready: float

    def done(self) -> bool:
        return self.server.now >= self.ready

    def result(self) -> SimulatedModel:
        self.server.now = max(self.server.now, self.ready)  # the host waits
        return self.server.part(self.choice)
