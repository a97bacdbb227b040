"""What serving by a policy would have been like: recorded prompts and measured seconds, no device.

Everything that is found here is SIMULATED. What is decided is not: the `Controller` is the one that
serves, told the time by a clock that the simulation moves; what tokens do is read off a trace; who
has a slot, when a model grows and what that costs follows `Fleet`, `PartialModel` and `Scheduler`,
which look at what a call of several steps brought while the next one runs. Seconds are `Pace`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from eejax.common.errors import require, require_count
from eejax.serving.choices import Choice, Decision, Given, Profile
from eejax.serving.controller import ControllerOptions
from eejax.serving.objectives import Telemetry
from eejax.serving.pace import Pace
from eejax.serving.simulated import Event, Simulated
from eejax.serving.simulated_parts import Call, Job, Part
from eejax.serving.traces import Trace


@dataclasses.dataclass(frozen=True)
class Setting:
    """A server and its clients. slots: of each model, for those whose profile names none; steps:
    between two looks; cap: most tokens of a request that wait for deeper keys and values; clients:
    how many there are, each of which asks again when it was answered (default: as many as slots);
    arrivals: seconds, ascending, of every prompt, in place of clients; thresholds: of models, by
    default as recorded; audits: share of answers, beside those of evaluations, that are looked at
    again, which takes as long as to read them; free: whether loading takes no time."""

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
        require(a is None or list(a) == sorted(a), "arrivals", a, "must ascend")
        require(0 <= self.audits <= 1, "audits", self.audits, "must lie in [0, 1]")

    def slots_of(self, profile: Profile) -> tuple[int, ...]:
        """By depth."""
        return profile.slots if max(profile.slots) > 1 else (self.slots,) * profile.exits

    def threshold(self, model: str) -> float | tuple[float, ...] | None:
        given = self.thresholds
        return given.get(model) if isinstance(given, Mapping) else given


class Policy(Protocol):
    """What decides: a `Controller`, or what looks like one to a server."""

    current: Choice | None
    wanted: Choice | None
    decisions: list[Decision]
    options: ControllerOptions

    def holds(self, there: Mapping[str, int], held: int) -> None: ...
    def choose(self) -> Given: ...
    def loaded(self, choice: Choice) -> None: ...
    def tokens(self, model: str, below: Sequence[bool]) -> None: ...
    def answered(self, model: str, telemetry: Telemetry, exits: Sequence[int]) -> None: ...
    def dropped(self, model: str) -> None: ...
    def audited(self, model: str, low: float, high: float, best: float) -> None: ...
    def level(self, model: str) -> int: ...
    def threshold(self, model: str, value: float) -> float: ...


def simulate(
    trace: Trace, profiles: Mapping[str, Profile], paces: Mapping[str, Pace],
    make: Callable[[Callable[[], float]], Policy], setting: Setting | None = None,
) -> Simulated:  # fmt: skip
    """The prompts of a trace in order, by the policy that `make(clock)` makes.

    A text that goes on in another model goes on as that model's own. Raises ConfigError for
    profiles, paces or arrivals that are not those of the trace.
    """
    setting = setting or Setting()
    for name, table in (("profiles", profiles), ("paces", paces)):
        missing = [m for m in trace.models if m not in table]
        require(not missing, name, sorted(table), f"must have {', '.join(missing)} too")
    for name, model in trace.models.items():
        for field, n in (("profiles", profiles[name].exits), ("paces", len(paces[name].rows))):
            require(n == model.exits, f"{field}[{name!r}]", n, f"must be of {model.exits} exits")
    a = setting.arrivals
    require(a is None or len(a) == len(trace), "arrivals", a, f"must be {len(trace)} times")
    return _Server(trace, profiles, paces, make, setting).run()


class _Server:
    """`Fleet`, its clients, and the time."""

    def __init__(self, trace, profiles, paces, make, setting):
        self.trace, self.setting, self.paces = trace, setting, paces
        none = lambda p: dict(load=(0.0,) * p.exits, rebuild=(0.0,) * p.exits)
        free = lambda p: dataclasses.replace(p, **none(p)) if setting.free else p
        self.profiles = {name: free(profiles[name]) for name in trace.models}
        self.now = self.device = 0.0  # of the host, and when the device will have done its work
        self.policy: Policy = make(lambda: self.now)
        self.parts: dict[str, Part] = {}
        self.jobs: list[Job] = []  # that came
        self.queue: list[Job] = []
        self.timeline: list[Event] = []
        self._next: Given | None = None  # where the first of the queue goes
        self._still = 0  # looks in a row at which there was nothing to do
        self._flops = self._byte_seconds = 0.0
        self._tables: dict[tuple[str, int, int], tuple[list, list]] = {}
        self._same = {name: m.same.tolist() for name, m in trace.models.items()}
        self._to_audit: list[tuple[Job, str, Telemetry]] = []
        self._audits: dict = {}
        self._sampled = np.random.default_rng(setting.seed)
        self.below, self.ended = np.zeros(len(trace), int), np.zeros(len(trace))
        self.models = [""] * len(trace)
        self.exits = {name: [0] * m.exits for name, m in trace.models.items()}

    def run(self) -> Simulated:
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
            self._arrange()
            self._give()
            busy = any(not part.idle for part in self.parts.values()) or bool(self._to_audit)
            left -= sum(self._stepped(name, part) for name, part in [*self.parts.items()])
            if self._to_audit:
                self._audited(*self._to_audit.pop(0))
            if not busy:
                self._wait(arrivals)
            loaded = sum(part.size for part in self.parts.values())
            self._byte_seconds += loaded * (self.now - before)
        for part in self.parts.values():
            self._flops += part.flops
        of = lambda name: np.array([getattr(job, name) for job in self.jobs])
        return Simulated(
            of("arrived"), of("heard"), self.ended, tuple(self.models), of("told"), of("agree"),
            self.below, {name: tuple(n) for name, n in self.exits.items()},
            self._flops / of("told").sum(), self._byte_seconds / max(self.now, 1e-12),
            tuple(self.policy.decisions), tuple(self.timeline),
        )  # fmt: skip

    def _come(self, time: float) -> None:
        self.jobs.append(Job(len(self.jobs), time))
        self.queue.append(self.jobs[-1])

    def _wait(self, arrivals) -> None:
        """Until something happens, where nobody has anything to do. Raises RuntimeError where
        nothing will."""
        times = [part.ready for part in self.parts.values() if part.coming > part.depth]
        if arrivals is not None and len(self.jobs) < len(self.trace):
            times.append(arrivals[len(self.jobs)])
        times = [t for t in times if t > self.now]
        # Once there may be none: what is wanted was made so, and prompts are given with the next.
        self._still = 0 if times else self._still + 1
        if self._still > 2:
            told = f"{self.policy.wanted} is wanted, and {self.policy.current} serves"
            raise RuntimeError(f"nothing will happen any more: {told}.")
        self.now = min(times, default=self.now)

    def _arrange(self) -> None:
        """As `Fleet` does."""
        wanted = self.policy.wanted
        part = self.parts.get(wanted.model)
        if part is None:
            self._make_room(wanted)
            name, profile = wanted.model, self.profiles[wanted.model]
            part = self.parts[name] = Part(
                self.trace.models[name], profile, self.paces[name], partial(self._leaving, name),
                depth=wanted.depth, slots=self.setting.slots_of(profile),
                steps=self.setting.steps, cap=self.setting.cap,
            )  # fmt: skip
            seconds = sum(profile.load[: wanted.depth])
            self._happens("load", name, seconds)
            # The host waits; what the device was given before goes on.
            self.now += seconds
            self.device = max(self.device, self.now)
        elif part.coming < wanted.depth:
            self._make_room(wanted)
            self._happens("grow", wanted.model, part.grow(wanted.depth, self.now))
        elif part.depth > wanted.depth:
            part.shrink(wanted.depth)
            self._happens("shrink", wanted.model)
        if part.depth == wanted.depth and self.policy.current != wanted:
            self.policy.loaded(wanted)
            self._happens("serve", wanted.model)

    def _make_room(self, wanted: Choice) -> None:
        """Frees models until the budget holds what is wanted, as `Fleet` does."""
        serving, budget = self.policy.current, self.policy.options.budget
        last = lambda name: (not self.parts[name].idle, serving and name == serving.model)
        for name in sorted(self.parts.keys() - {wanted.model}, key=last):
            held = sum(part.size for n, part in self.parts.items() if n != wanted.model)
            if held + self.profiles[wanted.model].size(wanted.depth) <= budget:
                return
            self._free(name)

    def _free(self, name: str) -> None:
        for job in self.parts[name].every:
            # What a call under way would have brought is lost.
            if job.evaluated:
                self.policy.dropped(name)
            job.done, job.part, job.moved, job.evaluated = job.told, None, True, False
            self.queue.append(job)
        self.queue.sort(key=lambda job: job.number)
        if self._next is not None and self._next.choice.model == name:
            if self._next.evaluated:
                self.policy.dropped(name)
            self._next = None
        self._happens("free", name)
        self._flops += self.parts.pop(name).flops

    def _give(self) -> None:
        current = self.policy.current
        there = {name: part.depth for name, part in self.parts.items()}
        self.policy.holds(there, sum(part.held for part in self.parts.values()))
        while self.queue and current is not None and current.model in self.parts:
            if self._next is None:
                self._next = self.policy.choose()
            model, evaluated = self._next.choice.model, self._next.evaluated
            part = self.parts[model]
            if not part.room:
                return
            job, self._next = self.queue.pop(0), None
            job.part, job.evaluated, job.began, job.first = part, evaluated, self.now, 0.0
            job.strict = part.depth, self.policy.level(model)
            part.waiting.append(job)

    def _leaving(self, name: str, depth: int, strict: int) -> tuple[list, list]:
        """(exits, below) [p][n] of a model at a depth."""
        key = name, depth, strict
        if key not in self._tables:
            model = self.trace.models[name]
            given = self.setting.threshold(name)
            if strict:
                limits = np.broadcast_to(
                    np.asarray(model.thresholds if given is None else given), model.exits - 1
                )
                given = [self.policy.threshold(name, float(t)) for t in limits]
            self._tables[key] = tuple(a.tolist() for a in model.leaves(given, depth))
        return self._tables[key]

    def _stepped(self, name: str, part: Part) -> int:
        """`Scheduler.step`; how many prompts ended."""
        if part.coming > part.depth and self.now >= part.ready:
            seconds = part.grown()
            self.now = self.device = max(self.device, self.now) + seconds  # the host waits for it
            self._happens("grown", name, seconds)
        part.join()
        keep = bool(part.jobs)
        if part.jobs:
            call = part.call(max(self.device, self.now))
            self.device = call.end
            part.calls.append(call)
        ended = 0
        while len(part.calls) > keep:
            ended += self._told(name, part, part.calls.popleft())
        return ended

    def _told(self, name: str, part: Part, call: Call) -> int:
        """What a call brought; how many prompts that ends."""
        self.now = max(self.now, call.end)
        ended = 0
        for job, exits, below in call.brought:
            if not exits or job.part is not part:
                continue
            job.first = job.first or self.now
            job.heard = self.now if job.heard is None else job.heard
            same = self._same[name][job.number]
            job.agree += sum(same[job.told + k][e] for k, e in enumerate(exits))
            job.told += len(exits)
            job.exits += exits
            self.below[job.number] += sum(below)
            for e in exits:
                self.exits[name][e] += 1
            self.policy.tokens(name, below)
            if job.told == self.trace.new:
                ended += 1
                self._ended(name, part, job)
        return ended

    def _ended(self, name: str, part: Part, job: Job) -> None:
        self.ended[job.number], self.models[job.number] = self.now, name
        part.leave(job)
        if not job.moved:
            if job.evaluated or self._sampled.random() < self.setting.audits:
                self._to_audit.append((job, name, self._telemetry(part, job)))
        elif job.evaluated:
            self.policy.dropped(name)
        if self.setting.arrivals is None and len(self.jobs) < len(self.trace):
            self._come(self.now)

    def _telemetry(self, part: Part, job: Job) -> Telemetry:
        """As `Fleet` makes it, with what an audit finds."""
        seconds, energy = max(self.now - job.began, 1e-9), np.cumsum(part.profile.energy)
        each = (self.now - job.first) / max(job.told - 1, 1)
        return Telemetry(
            job.told / seconds * max(len(part.jobs), 1), job.first - job.began, each,
            job.agree / job.told, float(part.profile.size(part.depth)),
            float(np.mean(energy[job.exits])),
        )  # fmt: skip

    def _audited(self, job: Job, name: str, telemetry: Telemetry) -> None:
        part = self.parts.get(name)
        if part is None:
            if job.evaluated:
                self.policy.dropped(name)
            return
        length = int(self.trace.models[name].prompts[job.number]) + job.told
        seconds = length / part.pace.tokens * sum(part.pace.chunk)
        self.now = self.device = max(self.now, self.device) + seconds
        if job.evaluated:
            self.policy.answered(name, telemetry, job.exits)
        if job.strict == (part.depth, self.policy.level(name)):
            from eejax.serving.audits import Audit, Verdict  # with JAX, which nothing else needs

            audit = self._audits.setdefault((name, *job.strict), Audit())
            same = np.arange(job.told) < job.agree
            audit.add(Verdict(same, np.zeros(job.told)))
            known = len(self.policy.decisions)
            self.policy.audited(name, audit.low, audit.high, audit.best)
            if len(self.policy.decisions) > known:
                del self._audits[name, *job.strict]

    def _happens(self, what: str, model: str, seconds: float = 0.0) -> None:
        depth = self.parts[model].coming
        self.timeline.append(Event(self.now, what, model, depth, seconds))
