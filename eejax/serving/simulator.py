"""What serving by a policy would have been like: recorded prompts and measured seconds, no device.

Everything that is found here is SIMULATED. What is decided is not: the `Controller` is the one that
serves, told the time by a clock that the simulation moves; which request goes to which model, and
which models are loaded and freed, is `Dispatcher`'s, as in a `Fleet`. What tokens do is read off a
trace; who has a slot, when a model has grown and what that costs follows `PartialModel` and
`Scheduler`, which look at what a call of several steps brought while the next one runs. Seconds are
`Pace`'s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from eejax.common.errors import require, require_count
from eejax.serving.audits import Verdict
from eejax.serving.choices import Choice, Profile, stricter
from eejax.serving.dispatch import Dispatcher, Policy
from eejax.serving.objectives import Telemetry
from eejax.serving.pace import Pace
from eejax.serving.simulated import Event, Simulated
from eejax.serving.simulated_parts import Call, Part, Prompt
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
        # Of NaN neither is true, and sorting would leave it anywhere.
        ascends = a is None or all(0 <= s < math.inf for s in a) and list(a) == sorted(a)
        require(ascends, "arrivals", a, "must be seconds from 0 on, that ascend")
        require(0 <= self.audits <= 1, "audits", self.audits, "must lie in [0, 1]")

    def slots_of(self, profile: Profile) -> tuple[int, ...]:
        """By depth."""
        return profile.slots if max(profile.slots) > 1 else (self.slots,) * profile.exits

    def threshold(self, model: str) -> float | tuple[float, ...] | None:
        given = self.thresholds
        return given.get(model) if isinstance(given, Mapping) else given


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


class _Server(Dispatcher):
    """A fleet, its clients, and the time."""

    def __init__(self, trace, profiles, paces, make, setting):
        self.trace, self.setting, self.paces = trace, setting, paces
        none = lambda p: dict(load=(0.0,) * p.exits, rebuild=(0.0,) * p.exits)
        free = lambda p: dataclasses.replace(p, **none(p)) if setting.free else p
        self.now = self.device = 0.0  # of the host, and when the device will have done its work
        clock = lambda: self.now
        super().__init__(
            make(clock), {name: free(profiles[name]) for name in trace.models},
            share=setting.audits, seed=setting.seed, clock=clock,
        )  # fmt: skip
        self.parts: dict[str, Part]
        self.jobs: list[Prompt] = []  # that came
        self.timeline: list[Event] = []
        self._still = 0  # looks in a row at which there was nothing to do
        self._flops = self._byte_seconds = 0.0
        self._tables: dict[tuple[str, int, int], tuple[list, list]] = {}
        self._same = {name: m.same.tolist() for name, m in trace.models.items()}
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
            self._audit_next()
            if not busy:
                self._idle(arrivals)
            self._byte_seconds += self._loaded() * (self.now - before)
        for part in self.parts.values():
            self._flops += part.flops
        of = lambda name: np.array([getattr(job, name) for job in self.jobs])
        return Simulated(
            of("came"), of("heard"), self.ended, tuple(self.models), of("told"), of("agree"),
            self.below, {name: tuple(n) for name, n in self.exits.items()},
            self._flops / of("told").sum(), self._byte_seconds / max(self.now, 1e-12),
            tuple(self.controller.decisions), tuple(self.timeline),
        )  # fmt: skip

    def _loaded(self) -> float:
        """Bytes, with what is on its way."""
        loaded = sum(part.size for part in self.parts.values())
        if self._loading is not None:
            model, depth = self._loading.choice
            loaded += self._profiles[model].size(depth)
        return loaded

    def _come(self, time: float) -> None:
        number = len(self.jobs)
        self.jobs.append(Prompt(number=number, order=(0, number), came=time))
        self._wait(self.jobs[-1])

    def _idle(self, arrivals) -> None:
        """Until something happens, where nobody has anything to do. Raises RuntimeError where
        nothing will."""
        times = [part.ready for part in self.parts.values() if part.coming > part.depth]
        times += [self._loading.ready] if self._loading is not None else []
        if arrivals is not None and len(self.jobs) < len(self.trace):
            times.append(arrivals[len(self.jobs)])
        times = [t for t in times if t > self.now]
        # Once there may be none: what is wanted was made so, and prompts are given with the next.
        self._still = 0 if times else self._still + 1
        if self._still > 2:
            told = f"{self.controller.wanted} is wanted, and {self.controller.current} serves"
            raise RuntimeError(f"nothing will happen any more: {told}.")
        self.now = min(times, default=self.now)

    def _arrange(self) -> None:
        before = self.controller.current
        super()._arrange()
        if self.controller.current != before:
            self._happens("serve", self.controller.wanted.model)

    def _load(self, wanted: Choice) -> _Coming:
        seconds = sum(self._profiles[wanted.model].load[: wanted.depth])
        self.timeline.append(Event(self.now, "load", *wanted, seconds))
        return _Coming(self, wanted, self.now, self.now + seconds)

    def part(self, choice: Choice) -> Part:
        """A model, loaded."""
        name, profile, setting = choice.model, self._profiles[choice.model], self.setting
        return Part(
            self.trace.models[name], profile, self.paces[name], partial(self._leaving, name),
            depth=choice.depth, slots=setting.slots_of(profile), steps=setting.steps,
            cap=setting.cap,
        )  # fmt: skip

    def _arrived(self, loading: _Coming) -> None:
        pass

    def _grow(self, wanted: Choice) -> None:
        seconds = self.parts[wanted.model].grow(wanted.depth, self.now)
        self._happens("grow", wanted.model, seconds)

    def _stay(self, model: str) -> None:
        self.parts[model].stay()
        self._happens("stay", model)

    def _shrink(self, wanted: Choice) -> None:
        self.parts[wanted.model].shrink(wanted.depth)
        self._happens("shrink", wanted.model)

    def _freed(self, model: str, part: Part) -> None:
        self.timeline.append(Event(self.now, "free", model, part.coming))
        self._flops += part.flops

    def _in(self, model: str) -> list[Prompt]:
        return self.parts[model].every

    def _take(self, job: Prompt) -> bool:
        # What a call under way would have brought is lost.
        job.done, job.part = job.told, None
        return True

    @property
    def held(self) -> int:
        return sum(part.held for part in self.parts.values())

    def _begin(self, job: Prompt) -> None:
        job.part = self.parts[job.model]
        job.part.waiting.append(job)

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
                given = [stricter(float(t), strict) for t in limits]
            self._tables[key] = tuple(a.tolist() for a in model.leaves(given, depth))
        return self._tables[key]

    def _stepped(self, name: str, part: Part) -> int:
        """`Scheduler.step`; how many prompts ended."""
        if part.coming > part.depth and self.now >= part.ready:
            seconds = part.grown()
            self.now = self.device = max(self.device, self.now) + seconds  # the host waits for it
            self._happens("grown", name, seconds)
            self._changes_depth(name)
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
            self._hears(job)
            same = self._same[name][job.number]
            job.agree += sum(same[job.told + k][e] for k, e in enumerate(exits))
            job.told += len(exits)
            job.exits += exits
            job.below += below
            self.below[job.number] += sum(below)
            for e in exits:
                self.exits[name][e] += 1
            self.controller.tokens(name, below)
            if job.told == self.trace.new:
                ended += 1
                self._ended(name, part, job)
        return ended

    def _ended(self, name: str, part: Part, job: Prompt) -> None:
        self.ended[job.number], self.models[job.number] = self.now, name
        part.leave(job)
        self._finished(job)
        if self.setting.arrivals is None and len(self.jobs) < len(self.trace):
            self._come(self.now)

    def _telemetry(self, job: Prompt) -> Telemetry:
        return self._measured(job, len(job.part.jobs), agreement=job.agree / job.told)

    def _judge(self, job: Prompt) -> Verdict:
        part = self.parts[job.model]
        length = int(self.trace.models[job.model].prompts[job.number]) + job.told
        pace = part.pace
        seconds = length / pace.tokens * pace.reading([pace.tokens], len(pace.rows))
        self.now = self.device = max(self.now, self.device) + seconds
        return Verdict(np.arange(job.told) < job.agree, np.zeros(job.told))

    def _happens(self, what: str, model: str, seconds: float = 0.0) -> None:
        depth = self.parts[model].coming
        self.timeline.append(Event(self.now, what, model, depth, seconds))


@dataclasses.dataclass(frozen=True)
class _Coming:
    """A model on its way, which is there when it is `ready`."""

    server: _Server
    choice: Choice
    begin: float
    ready: float

    def done(self) -> bool:
        return self.server.now >= self.ready

    def result(self) -> Part:
        self.server.now = max(self.server.now, self.ready)  # the host waits
        return self.server.part(self.choice)
