"""Which model serves, and how much of it is loaded: decisions alone, by what the server tells.

HELIOS (Kumar et al., 2025), section 4. Where its Algorithm 1 and its text differ the text rules:
the counter of confidence breaches looks at a window of tokens. No clock, device or thread is
touched here, so that every decision can be replayed from a trace.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from eejax.common.errors import ConfigError, require, require_count
from eejax.serving.objectives import Objective, Telemetry
from eejax.serving.repository import Evaluation, Repository


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was measured of a model, segment by segment; exit e reads the states behind segment e,
    the last one those behind all layers [exits].

    seconds: of a token in a segment, at the batch that is served; prefill: of a prompt; load: to
    bring it to the device, compiling included; rebuild: of the keys and values of a token that it
    has not seen; bytes: of its weights; energy: of a token. sure: share of the tokens that leave by
    an exit as they may that are the full model's; unsure: of those that leave below the threshold.
    """

    seconds: tuple[float, ...]
    prefill: tuple[float, ...]
    load: tuple[float, ...]
    rebuild: tuple[float, ...]
    bytes: tuple[float, ...]
    energy: tuple[float, ...]
    sure: tuple[float, ...]
    unsure: tuple[float, ...]

    def __post_init__(self):
        n = len(self.seconds)
        require(n > 0, "seconds", self.seconds, "must have a number for each segment")
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            good = len(values) == n and all(v >= 0 for v in values)
            require(good, field.name, values, f"must be {n} numbers from 0 on")

    @property
    def exits(self) -> int:
        return len(self.seconds)

    def size(self, depth: int) -> float:
        """Bytes of the first `depth` segments."""
        return sum(self.bytes[:depth])

    def serving(self, shares: Sequence[float], depth: int) -> Telemetry:
        """With the first `depth` exits loaded, by the shares of tokens that would leave by each
        exit if all of them were: those above leave by the last that is loaded."""
        reach = [sum(shares[s:]) for s in range(depth)]
        over = lambda costs: sum(r * c for r, c in zip(reach, costs, strict=False))
        seconds = max(over(self.seconds), 1e-12)
        accuracy = sum(s * a for s, a in zip(shares[:depth], self.sure, strict=False))
        accuracy += breaches(shares, depth) * self.unsure[depth - 1]
        first = sum(self.prefill[:depth])
        return Telemetry(1 / seconds, first, seconds, accuracy, self.size(depth), over(self.energy))


def breaches(shares: Sequence[float], depth: int) -> float:
    """Share of the tokens that leave below their threshold."""
    return sum(shares[depth:])


class Choice(NamedTuple):
    """A model, and how many of its exits are loaded."""

    model: str
    depth: int


class Decision(NamedTuple):
    """kind: "evaluate", "grow" and "switch", or "serve" where the model is the first, or stays;
    seconds: what it costs, as known when it was taken; told: what it is expected to bring."""

    time: float
    kind: str
    choice: Choice
    why: str
    seconds: float = 0.0
    told: Telemetry | None = None


@dataclasses.dataclass(frozen=True)
class ControllerOptions:
    """candidates: models that are evaluated; prompts: of an evaluation of one; interval: prompts
    between two reassessments; window: tokens that breaches are counted in; breaches: most of them
    in it, with any more something is decided; greedy: whether tokens may leave below their
    threshold at all; gain: by which share another choice has to be better, so that none is left
    for a whim; tokens: expected of a prompt; budget: most bytes of weights.
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


@dataclasses.dataclass
class _Seen:
    """An evaluation under way: of `left` prompts that are to be given, `open` to be answered."""

    model: str
    left: int
    open: int = 0
    begin: float = 0.0
    answers: list[Telemetry] = dataclasses.field(default_factory=list)
    exits: list[int] = dataclasses.field(default_factory=list)


class Controller:
    """`choose` for every prompt; `tokens` and `answered` tell what became of them; `loaded` that
    what is wanted is there. `wanted` is what should be: the server loads and frees as it says, and
    until it has, prompts go where they went.

    Evaluations take whole models, one after the other where the budget does not hold all of them.
    """

    def __init__(
        self,
        profiles: Mapping[str, Profile],
        objective: Objective,
        repository: Repository,
        options: ControllerOptions | None = None,
        *,
        clock: Callable[[], float],
    ):
        self.profiles, self.objective = dict(profiles), objective
        self.repository, self.options = repository, options or ControllerOptions()
        self.decisions: list[Decision] = []
        self.current: Choice | None = None  # that serves
        self.wanted: Choice | None = None  # that is to serve, once it is loaded
        self.serving: str | None = None  # the model that was decided for last, but to evaluate it
        self.shares: dict[str, tuple[float, ...]] = {}
        self.below, self.emitted = 0, 0  # tokens below their threshold, and all
        self._clock = clock
        require(bool(profiles), "profiles", profiles, "must be of one model at least")
        for name, profile in self.profiles.items():
            size, budget = profile.size(profile.exits), self.options.budget
            if size > budget:
                raise ConfigError(
                    f"budget = {budget:g}: holds no whole {name!r}, which has {size:g} bytes and "
                    "has to be evaluated whole. Give more, or leave it out."
                )
        self._window: collections.deque[bool] = collections.deque(maxlen=self.options.window)
        self._since = 0  # prompts since the last decision
        self._plan: list[_Seen] = []
        self._evaluate("the server begins")

    @property
    def evaluating(self) -> bool:
        return bool(self._plan)

    @property
    def below_share(self) -> float:
        """Share of all tokens that left below their threshold."""
        return self.below / self.emitted if self.emitted else 0.0

    @property
    def beside(self) -> bool:
        """Whether what is wanted may be loaded while what serves is: else that is freed first."""
        if self.current is None or self.wanted.model == self.current.model:
            return True
        sizes = (self.profiles[c.model].size(c.depth) for c in (self.current, self.wanted))
        return sum(sizes) <= self.options.budget

    def choose(self) -> Choice:
        """Where the next prompt goes."""
        self._since += 1
        if self._plan:
            seen = self._plan[0]
            if self.wanted == self.current == self._whole(seen.model) and seen.left:
                seen.left -= 1
                seen.open += 1
                seen.begin = seen.begin or self._clock()
        elif self._since > self.options.interval and self.wanted == self.current:
            self._evaluate(f"{self.options.interval} prompts were served")
        return self.current or self.wanted

    def loaded(self, choice: Choice) -> None:
        """What was wanted is there, and serves from now on."""
        if choice == self.wanted != self.current:
            self.current = choice
            self._window.clear()

    def tokens(self, model: str, exits: Sequence[int], below: Sequence[bool]) -> None:
        """Of tokens, in the order in which they came: by which exit, and whether below the
        threshold. Of a model that does not serve any more nothing is decided."""
        self.below += sum(below)
        self.emitted += len(below)
        if self._plan and self._plan[0].model == model:
            self._plan[0].exits += exits
            return
        if self.current is None or self.current.model != model or self.wanted != self.current:
            return
        for one in below:
            self._window.append(one)
            if sum(self._window) > self.options.breaches:
                self._breached()
                return

    def answered(self, model: str, telemetry: Telemetry) -> None:
        """A prompt of a model was answered, as measured."""
        if not self._plan or self._plan[0].model != model or not self._plan[0].open:
            return
        seen = self._plan[0]
        seen.open -= 1
        seen.answers.append(telemetry)
        if not seen.left and not seen.open:
            self._evaluated(seen)

    def dropped(self, model: str) -> None:
        """A prompt of a model will not be answered: another one takes its place."""
        if self._plan and self._plan[0].model == model and self._plan[0].open:
            self._plan[0].open -= 1
            self._plan[0].left += 1

    def _whole(self, model: str) -> Choice:
        return Choice(model, self.profiles[model].exits)

    def _evaluate(self, why: str) -> None:
        o, known = self.options, [*self.profiles]
        names = self.repository.candidates(known, self.objective, o.candidates)
        if self.current is not None:  # last, so that it is there where it goes on serving
            names.sort(key=lambda name: name == self.serving)
        self._plan = [_Seen(name, o.prompts) for name in names]
        self._since = 0
        self._want("evaluate", self._whole(names[0]), why)

    def _evaluated(self, seen: _Seen) -> None:
        profile, n = self.profiles[seen.model], len(seen.answers)
        mean = lambda name: sum(getattr(a, name) for a in seen.answers) / n
        told = Telemetry(*(mean(field.name) for field in dataclasses.fields(Telemetry)))
        counts = [seen.exits.count(e) for e in range(profile.exits)]
        total = sum(counts)
        if total:  # else nothing is known that was not
            self.shares[seen.model] = tuple(count / total for count in counts)
        self.repository.add(Evaluation(
            seen.begin, seen.model, profile.exits, n, total, tuple(counts), told
        ))  # fmt: skip
        self._plan.pop(0)
        if self._plan:
            self._want("evaluate", self._whole(self._plan[0].model), "the next candidate")
            return
        self._serve()

    def _serve(self) -> None:
        """The best of the candidates, each up to the exit by which most tokens leave."""
        self._since = 0
        options = [Choice(model, self.greedy_depth(model)) for model in self.shares]
        best, told, seconds = self._best(options)
        self._want("serve", best, "it is best for the objective", seconds, told)

    def greedy_depth(self, model: str) -> int:
        """Exits up to the one by which most tokens leave, and further where limits, or the limit on
        breaches, ask for it."""
        shares, profile = self.shares[model], self.profiles[model]
        if not self.options.greedy:
            return profile.exits
        first = max(range(profile.exits), key=lambda e: (shares[e], -e)) + 1
        room = self.options.breaches / self.options.window
        depths = range(first, profile.exits + 1)
        calm = [d for d in depths if breaches(shares, d) <= room or d == profile.exits]
        least = min(self.objective.excess(profile.serving(shares, d)) for d in calm)
        fits = lambda d: self.objective.excess(profile.serving(shares, d)) <= least
        return next(d for d in calm if fits(d))

    def _best(self, options: Sequence[Choice]) -> tuple[Choice, Telemetry, float]:
        """(choice, what it is expected to bring, seconds that it costs); what serves stays unless
        another is better by the gain, costs included."""
        o, found = self.options, []
        for choice in options:
            profile = self.profiles[choice.model]
            seconds = self.cost(choice)
            told = profile.serving(self.shares[choice.model], choice.depth)
            energy = seconds * told.energy * told.throughput
            told = told.with_overhead(seconds, energy, o.interval, o.tokens)
            excess, score = self.objective.rank(told)
            stays = o.gain if choice.model == self.serving else 0.0
            found.append(((excess, score + stays), choice, told, seconds))
        _, choice, told, seconds = max(found, key=lambda row: row[0])
        return choice, told, seconds

    def cost(self, choice: Choice) -> float:
        """Seconds of loading what is not there, and of rebuilding keys and values of a prompt of
        the expected tokens in it."""
        profile, there = self.profiles[choice.model], 0
        if self.current is not None and self.current.model == choice.model:
            there = self.current.depth
        new = slice(there, choice.depth)
        return sum(profile.load[new]) + self.options.tokens * sum(profile.rebuild[new])

    def _breached(self) -> None:
        """More layers, or another model: whichever is better, by what it costs."""
        self._window.clear()
        model, depth = self.current
        profile = self.profiles[model]
        if depth == profile.exits:  # nothing is below its threshold but at the end
            return
        # Tokens above are as many as were counted, spread as they were when all was loaded.
        shares, seen = self.shares[model], self.options.breaches / self.options.window
        low, high = 1 - breaches(shares, depth), breaches(shares, depth)
        above = max(seen, high)
        part = lambda e: 1 / (profile.exits - depth) if high <= 0 else shares[e] / high
        self.shares[model] = tuple(
            (shares[e] / low * (1 - above) if low > 0 else 0.0) if e < depth else part(e) * above
            for e in range(profile.exits)
        )
        room = self.options.breaches / self.options.window
        calm = lambda c: breaches(self.shares[c.model], c.depth) <= room
        more = [Choice(model, d) for d in range(depth + 1, profile.exits + 1)]
        more = [c for c in more if calm(c)] or more[-1:]
        others = [Choice(m, self.greedy_depth(m)) for m in self.shares if m != model]
        best, told, seconds = self._best([*more, *others])
        kind = "grow" if best.model == model else "switch"
        self._since = 0
        self._want(kind, best, "too many tokens left below their threshold", seconds, told)

    def _want(
        self, kind: str, choice: Choice, why: str, seconds: float = 0.0,
        told: Telemetry | None = None,
    ) -> None:  # fmt: skip
        if kind == "serve" and self.serving not in (None, choice.model):
            kind = "switch"
        self.wanted = choice
        self.serving = self.serving if kind == "evaluate" else choice.model
        self._window.clear()
        self.decisions.append(Decision(self._clock(), kind, choice, why, seconds, told))
