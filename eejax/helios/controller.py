"""The controller: which model serves, and how much of it is loaded.

HELIOS (Kumar et al., 2025), section 3. Where its Algorithm 1 and its text differ, the text rules:
the counter of confidence breaches looks at a window of tokens. The controller touches no clock,
device or thread, so that every decision can be replayed from a trace.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence

from eejax.common.errors import DataError
from eejax.helios import breach_window, evaluations, forecast, selection, strictness
from eejax.helios.breach_window import BreachWindow
from eejax.helios.choices import (
    AUTO,
    STRICTEST,
    Assignment,
    ControllerOptions,
    Decision,
    ModelDepth,
    ModelProfile,
)
from eejax.helios.disagreement_bound import DisagreementBound
from eejax.helios.evaluations import RunningEvaluation
from eejax.helios.expectations import Expectations
from eejax.helios.forecast import DeviceState
from eejax.helios.objectives import ServiceObjective, Telemetry
from eejax.helios.repository import Repository, StoredEvaluation
from eejax.helios.strictness import Strictness


class Controller:
    """Decides which model serves, and up to which exit it is loaded.

    The server asks `choose` for every prompt, reports what became of it with `tokens` and
    `answered`, and calls `loaded` when what is wanted is there. `wanted` is what should serve: the
    server loads and frees accordingly, and until it has, prompts go where they went.

    The model that serves is evaluated as it is. Others are evaluated whole, one after the other,
    and only if they may be better; hope for a model grows with the assessments since its last
    evaluation (`_may_be_better`). `profiles` may be changed when models are measured anew.
    """

    def __init__(
        self,
        profiles: Mapping[str, ModelProfile],
        objective: ServiceObjective,
        repository: Repository,
        options: ControllerOptions | None = None,
        *,
        known: Mapping[str, StoredEvaluation] | None = None,
        clock: Callable[[], float],
    ):
        """Start with the evaluations `known` from before that still hold, by model."""
        self.profiles, self.objective = dict(profiles), objective
        self.repository, self.options = repository, options or ControllerOptions()
        self.counted = "operations"  # what energy is measured by, as the server says
        self.decisions: list[Decision] = []
        self.current: ModelDepth | None = None  # that serves
        self.wanted: ModelDepth | None = None  # that is to serve, once it is loaded
        self.serving: str | None = None  # the model that was decided for last, but to evaluate it
        self._age: dict[str, float] = dict.fromkeys(profiles, 0)  # assessments since evaluated
        self.strictness = dict.fromkeys(profiles, Strictness())  # as audits ask for it
        self.off: set[str] = set()  # models whose exits a limit forbids
        self.failing: set[str] = set()  # models that were given up
        self._expected = Expectations(self.profiles, float(self.options.tokens))
        self._bounds: dict[str, float] = {}
        self._compared: set[str] = set()  # models with better ones, as audits asked for it
        self.below, self.emitted = 0, 0  # tokens below their threshold, and all
        self._clock = clock
        self._begun = 0.0  # when what serves was there
        self._there, self._held = {}, self.options.tokens  # as `holds` is told
        selection.check_models(self.profiles, self.options.budget)
        self._window = BreachWindow(self.options.window, self.options.breaches)
        self._interval: int | None = None  # as it was found last, if it is to be found
        # Prompts, and answers that ended in errors, since the last decision or the last change.
        self._since = self._errors = 0
        self._broken: collections.Counter[ModelDepth] = (
            collections.Counter()
        )  # times that was breached
        self._lasted: ModelDepth | None = None  # what served for a whole interval
        self._plan: list[RunningEvaluation] = []
        self._start(known or {})

    def _start(self, known: Mapping[str, StoredEvaluation]) -> None:
        """Serve the best of the candidates, by their earlier evaluations or else by their profiles.

        Candidates of which neither says where tokens leave are evaluated first.
        """
        names = self._candidates()
        for name in names:
            if name in known:
                self._expected.learn(known[name])
            elif self.profiles[name].shares:
                self.shares[name] = self.profiles[name].shares
                self._age[name] = 1  # as if it were assessed once since
        new = [name for name in names if name not in known]
        if missing := [name for name in new if name not in self.shares]:
            self._evaluate("the server begins", missing)
            return
        self._serve(
            "it is best by its profile" if new else "it was the best when it was evaluated before"
        )
        others = [name for name in new if name != self.serving and self._may_be_better(name)]
        if names := [*([self.serving] if self.serving in new else []), *others]:
            self._evaluate("the server begins", names)

    @property
    def interval(self) -> int:
        """Prompts between two reassessments.

        HELIOS §3.4.2 derives it from the latency of the candidates and the cost of loading them.
        "auto" is the number of prompts for which evaluating all other candidates whole takes a
        share `gain` of the time
        in which they are served: it costs no more than what a change must bring.
        """
        if self.options.interval != AUTO:
            return self.options.interval
        if self._interval is None:
            least = 10 * self.options.prompts
            now = self.current or self.wanted
            if now is None or now.model not in self.shares:
                return least  # nothing is known yet of what serves; found anew when it is
            others = [m for m in self.shares if m != self.serving]
            seconds = sum(self._evaluation_cost(model) for model in others)
            each = self._expected.length / self._expected_of(now)[0].throughput
            self._interval = forecast.interval(seconds, each, self.options.gain, least)
        return self._interval

    @property
    def shares(self) -> dict[str, tuple[float, ...]]:
        """Shares of tokens by the exit that they would leave by if all were loaded, by model."""
        return self._expected.shares

    @property
    def evaluating(self) -> bool:
        return bool(self._plan)

    @property
    def below_share(self) -> float:
        """Share of all tokens that left below their threshold."""
        return self.below / self.emitted if self.emitted else 0.0

    def holds(self, there: Mapping[str, int], held: int) -> None:
        """Note exits by model and tokens on the device: until then, what serves and one prompt."""
        self._there, self._held = dict(there), held

    def choose(self) -> Assignment:
        """Return where the next prompt goes: while another is evaluated, to what served before."""
        self._since += 1
        if self._plan:
            seen = self._plan[0]
            if self.wanted == self.current == seen.choice and seen.left:
                self._plan[0] = evaluations.assign_prompt(seen, self._clock())
                return Assignment(self.current, True)
            if self.serving in self._there:
                return Assignment(ModelDepth(self.serving, self._there[self.serving]), False)
        elif self._since > self.interval and self.wanted == self.current:
            self._assess()
        return Assignment(self.current or self.wanted, False)

    def loaded(self, choice: ModelDepth) -> None:
        """Record that what was wanted is loaded, and serves from now on."""
        if choice == self.wanted != self.current:
            self.current, self._begun = choice, self._clock()
            self._window = breach_window.clear(self._window)
            self._since = self._errors = 0
            if not self._plan:
                self.off &= {choice.model}
                self._interval = None

    def tokens(self, model: str, below: Sequence[bool], own: bool = False) -> None:
        """Record tokens in order: whether each left below its threshold.

        Nothing is decided from tokens of a model that is evaluated or does not serve any more, nor
        of a request with an objective of its own.
        """
        self.below += sum(below)
        self.emitted += len(below)
        if self._plan and self._plan[0].choice == self.current and model == self.current.model:
            self._plan[0] = evaluations.count_tokens(self._plan[0], () if own else below)
        if own or not self._serves(model):
            return
        self._window, seen = breach_window.count_tokens(self._window, below)
        if seen is not None:
            self._breached(seen)

    def _serves(self, model: str) -> bool:
        """Return whether a model serves and neither a change nor an evaluation is under way."""
        serving = self.current is not None and self.wanted == self.current and not self._plan
        return serving and self.current.model == model

    def waited(self, model: str, seconds: float) -> None:
        """Record the seconds from a request's arrival to its first token.

        A request that came before what serves was loaded, or while a model is evaluated, waited for
        that. It does not count unless what it waited since then is more than the limit by itself.
        """
        if not self._serves(model) or model not in self.shares:
            return
        since = self._clock() - self._begun
        if seconds > since and since <= self.objective.limits.get("ttft_p99", math.inf):
            return
        expected = self.profiles[model].serving(self.shares[model], self.current.depth)
        self._expected.lateness.add(self.current, min(seconds, since), expected)

    def failed(self, model: str) -> None:
        """Record an answer, not one of an evaluation, that ended in an error.

        As many of them as an evaluation has prompts lead to one.
        """
        if self._plan and self._plan[0].model == model:
            self._fails()
        elif not self._plan and self.current is not None and self.current.model == model:
            self._errors += 1
            if self._errors >= self.options.prompts:
                self._evaluate("answers end in errors")

    def _fails(self) -> None:
        seen = self._plan[0] = evaluations.record_failure(self._plan[0])
        if seen.failed >= self.options.prompts:
            self.gives_up(seen.model, "its answers end in errors")

    def gives_up(self, model: str, why: str) -> bool:
        """Stop evaluating and serving a model if there is another one; return whether there is."""
        if len(self.failing | {model}) == len(self.profiles):
            return False
        warnings.warn(f"{model!r} is served no more: {why}", stacklevel=2)
        self.failing.add(model)
        if self.current is not None and self.current.model == model:
            self.current = None  # who comes waits for another one
        self.shares.pop(model, None)
        self.serving = None if self.serving == model else self.serving
        self._plan = [seen for seen in self._plan if seen.model != model]
        if self.wanted.model != model:
            return True
        if self._plan:
            self._want("evaluate", self._plan[0].choice, f"{model}: {why}")
        elif self.shares:
            self._serve()
        else:
            self._evaluate(f"{model}: {why}")
        return True

    def answered(self, model: str, telemetry: Telemetry, exits: Sequence[int]) -> None:
        """Record the telemetry of an evaluation's answer, and the exits of its tokens."""
        if not self._plan or self._plan[0].model != model or not self._plan[0].open:
            return
        exits = [e for e in exits if 0 <= e < self.profiles[model].exits]
        if not exits:  # which says nothing
            self.dropped(model)
            return
        seen = self._plan[0] = evaluations.record_answer(self._plan[0], telemetry, exits)
        if seen.done:
            self._evaluated(seen)

    def dropped(self, model: str, failed: bool = False) -> None:
        """Give an evaluation another prompt; a model that `failed` too often is given up."""
        if not self._plan or self._plan[0].model != model or not self._plan[0].open:
            return
        self._plan[0] = evaluations.return_prompt(self._plan[0])
        if failed:
            self._fails()

    def audited(self, model: str, audit: DisagreementBound) -> None:
        """Record audits of the model that serves; `audit` has the last ones.

        With too many wrong tokens (`strictness.too_many`), another exit is loaded, or thresholds
        rise. Where the whole model would not keep the limit either, better models are evaluated, if
        there are any, once between two assessments.
        """
        if self.wanted != self.current or self._plan or model != self.serving:
            return
        self._bounds[model] = audit.high
        expected = 1 - self._expected_of(self.current)[0].accuracy
        if not strictness.too_many(audit, self._allowed, expected):
            return
        why = f"{audit.low:.1%} to {audit.high:.1%} of its tokens are not the whole model's"
        others = () if model in self._compared else self._better_in_quality(model)
        if others and self._expected.without_exits(model).accuracy < 1 - self._allowed:
            self._compared.add(model)
            self._evaluate(why, [model, *others])  # its own answers may be worse than expected
            return
        now, exits = self.strictness[model], self.profiles[model].exits
        state = strictness.tightened(now, self.level(model), self.current.depth, exits)
        if state is None:
            return
        self.strictness[model] = state
        wanted = ModelDepth(model, max(state.least, self.current.depth))
        expected, seconds = self._with_cost(wanted)
        self._want("tighten", wanted, why, seconds, expected)

    def _better_in_quality(self, model: str) -> list[str]:
        """Return other models with better answers than a model's own without exits, best first."""
        quality = lambda m: self._expected.without_exits(m).accuracy
        found = (m for m in self.profiles if m not in self.failing and quality(m) > quality(model))
        return sorted(found, key=quality, reverse=True)

    @property
    def _allowed(self) -> float:
        """Return the share of tokens that may differ from the whole model's."""
        return 1.0 - self.objective.limits.get("accuracy", 0.0)

    def level(self, model: str, evaluated: bool = False) -> int:
        """Return how strict a model's thresholds are now (`stricter`).

        What is evaluated shows where its tokens would leave, though a limit forbids it to other
        prompts.
        """
        return STRICTEST if model in self.off and not evaluated else self.strictness[model].level

    def _expected_of(
        self, choice: ModelDepth, shares: Sequence[float] | None = None, hope: float = 0.0
    ) -> tuple[Telemetry, bool]:
        return self._expected.expected(self.objective, choice, shares, hope)

    def best(self, weights: Mapping[str, float]) -> str | None:
        """Return the best loaded model by other weights than the server's, within its limits.

        None where none was evaluated yet.
        """
        objective = dataclasses.replace(self.objective, weights=weights)
        expected = lambda m: self._expected.expected(objective, ModelDepth(m, self._there[m]))[0]
        known = [m for m in self._there if m in self.shares]
        return max(known, key=lambda m: objective.rank(expected(m)), default=None)

    def _candidates(self) -> list[str]:
        """Return the models to evaluate.

        The one that serves comes first, because its evaluation costs nothing and tells which others
        could be better.
        """
        known = [model for model in self.profiles if model not in self.failing]
        try:
            names = self.repository.candidates(known, self.objective, self.options.candidates)
        except DataError as error:
            warnings.warn(f"all models are candidates: {error}", stacklevel=2)
            names = known
        if self.serving is None:
            return names
        others = [n for n in names if n != self.serving and self._may_be_better(n)]
        return [self.serving, *others]

    def _settled(self) -> bool:
        """Return whether an assessment could change nothing.

        No model may be better than the one that serves, which has no layers to spare. Breaches and
        audits tell if it needs more.
        """
        model, depth = self.current
        return depth == self.greedy_depth(model) == 1 and self._candidates() == [model]

    def _assess(self) -> None:
        """Reassess after an interval."""
        late = self._expected_of(self.current)[0].ttft_p99
        limit = self.objective.limits.get("ttft_p99", math.inf)
        self._expected.lateness.forget(self.current, missed=late > limit)
        self._broken.pop(self.current, None)  # for all of the interval it was not
        self._lasted = self.current
        self._compared.clear()
        self._age = {model: age + 1 for model, age in self._age.items()}
        if self._settled():
            self._since = 0
        else:
            self._evaluate(f"{self.interval} prompts were served")

    def _evaluate(self, why: str, names: Sequence[str] = ()) -> None:
        """Evaluate models, one after the other: the one that serves as it is, others whole."""
        names = names or self._candidates()
        now = self.current if self.current == self.wanted else self.wanted
        own = now if now is not None and now.model == self.serving else None
        whole = lambda name: ModelDepth(name, self.profiles[name].exits)
        choices = [own if own and name == own.model else whole(name) for name in names]
        self._plan = [RunningEvaluation(choice, self.options.prompts) for choice in choices]
        self._since = self._errors = 0
        self._want("evaluate", choices[0], why)

    def _may_be_better(self, model: str) -> bool:
        """Return whether a model might beat the one that serves by the gain.

        Its tokens leave and are right as `forecast.hoped` assumes. The cost of another evaluation
        has to pay off in as many intervals as have passed since its last one.
        """
        bar = [m for m in self.shares if self.serving in (None, m)]
        if not bar:
            return True
        known = self.shares.get(model)
        hope, shares = forecast.hoped(known, self._age[model], self.profiles[model].exits)
        expected, _ = self._expected_of(
            ModelDepth(model, self.greedy_depth(model, shares, hope)), shares, hope
        )
        if known is not None and self._age[model] < math.inf:
            seconds = self._evaluation_cost(model)
            energy = seconds * expected.energy * expected.throughput
            prompts = self.interval * max(self._age[model], 1)
            expected = expected.with_overhead(seconds, energy, prompts, self._expected.length)
        now = [self._expected_of(ModelDepth(m, self.greedy_depth(m)))[0] for m in bar]
        excess, score = max(self.objective.rank(t) for t in now)
        return self.objective.rank(expected) > (excess, score + self.options.gain)

    def _evaluation_cost(self, model: str) -> float:
        known, length = self.shares.get(model), self._expected.length
        return forecast.evaluation_cost(self.profiles, self._on_device, model, known, length)

    def _evaluated(self, seen: RunningEvaluation) -> None:
        row = evaluations.history_row(
            seen,
            self.profiles[seen.model],
            self._expected,
            self.counted,
            self.level(seen.model, evaluated=True),
        )
        self._expected.learn(row)
        self._age[seen.model] = 0
        try:
            self.repository.add(row)
        except DataError as error:  # who is served does not depend on it
            warnings.warn(f"an evaluation is not kept: {error}", stacklevel=2)
        self._plan.pop(0)
        unknown = lambda name: name == self.serving or name not in self.shares
        self._plan = [n for n in self._plan if unknown(n.model) or self._may_be_better(n.model)]
        if self._plan:
            self._want("evaluate", self._plan[0].choice, "the next candidate")
        else:
            self._serve()

    def _serve(self, why: str = "it is best for the objective") -> None:
        """Serve the best of the candidates, each up to the exit by which most tokens leave."""
        self._since = 0
        for model, bound in self._bounds.items():
            state = self.strictness[model]
            self.strictness[model] = strictness.assessed(state, bound, self._allowed)
        self._bounds.clear()
        options = [ModelDepth(model, self.greedy_depth(model)) for model in self.shares]
        best, expected, seconds = self._best(options, assessed=True)
        self._want("serve", best, why, seconds, expected)

    def greedy_depth(
        self, model: str, shares: Sequence[float] | None = None, hope: float = 0.0
    ) -> int:
        """Return the exits up to the one by which most tokens leave.

        It is more where the objective, its limits, or the limit on breaches ask for it. shares,
        hope: as in `_expected_of`.
        """
        if not self.options.greedy:
            return self.profiles[model].exits
        shares = self.shares[model] if shares is None else shares
        rank = lambda d: self.objective.rank(
            self._expected_of(ModelDepth(model, d), shares, hope)[0]
        )
        calm = lambda d: self._calm(ModelDepth(model, d), shares)
        return selection.greedy_depth(shares, self.strictness[model].least, calm, rank)

    def _calm(self, choice: ModelDepth, shares: Sequence[float]) -> bool:
        return selection.calm(choice, shares, self.options, self._broken[choice])

    def _best(
        self, options: Sequence[ModelDepth], assessed: bool = False
    ) -> tuple[ModelDepth, Telemetry, float]:
        """Return (choice, its expected telemetry, seconds that it costs).

        What serves stays unless another choice is better by the gain, costs included. The cost of
        continuing with less of the model that serves does not count. Where models were `assessed`,
        neither does that of
        continuing with any part of it: whatever replaces it has to do so too once both are
        evaluated again, and they would take turns.
        """
        found = []
        for choice in options:
            expected, seconds = self._with_cost(choice)
            if choice.model == self.serving and (assessed or self._on_device.has(choice)):
                expected, _ = self._expected_of(choice)
            stays = self.options.gain if choice.model == self.serving else 0.0
            rank = selection.favoured(self.objective.rank(expected), stays)
            found.append((rank, choice, expected, seconds))
        _, choice, expected, seconds = max(found, key=lambda row: row[0])
        return choice, expected, seconds

    def _with_cost(self, choice: ModelDepth) -> tuple[Telemetry, float]:
        """Return what a choice is expected to bring until the next assessment, and its cost."""
        seconds, (expected, _) = self.cost(choice), self._expected_of(choice)
        energy = seconds * expected.energy * expected.throughput
        return expected.with_overhead(
            seconds, energy, self.interval, self._expected.length
        ), seconds

    @property
    def _on_device(self) -> DeviceState:
        return DeviceState(self._there, self._held, self.current, self.options.budget)

    def cost(self, choice: ModelDepth) -> float:
        """Return the seconds of changing to a choice (`forecast.change_cost`)."""
        return forecast.change_cost(self.profiles, self._on_device, choice)

    def _breached(self, seen: float) -> None:
        """Load more layers, or another model, whichever is better with its cost.

        seen: share of tokens below their threshold.
        """
        self._window = breach_window.clear(self._window)
        model, depth = self.current
        exits = self.profiles[model].exits
        if depth == exits:  # nothing is below its threshold but at the end
            return
        self._broken[self.current] += 1
        if self._lasted == self.current:  # texts are other ones now: all may have become better
            self._age = dict.fromkeys(self._age, math.inf)
        self._lasted = None
        self._expected.breached(model, depth, seen)
        more = [ModelDepth(model, d) for d in range(depth + 1, exits + 1)]
        more = [c for c in more if self._calm(c, self.shares[model])] or more[-1:]
        others = [ModelDepth(m, self.greedy_depth(m)) for m in self.shares if m != model]
        best, expected, seconds = self._best([*more, *others])
        self._since = 0
        kind = "grow" if best.model == model else "switch"
        self._want(kind, best, "too many tokens left below their threshold", seconds, expected)

    def _want(
        self,
        kind: str,
        choice: ModelDepth,
        why: str,
        seconds: float = 0.0,
        expected: Telemetry | None = None,
    ) -> None:
        if kind == "serve" and self.serving not in (None, choice.model):
            kind = "switch"
        self.wanted = choice
        if kind != "evaluate":
            off = choice.model in self.shares and self._expected_of(choice)[1]
            # Of another one that goes on until this is there nothing changes before it is.
            self.off = self.off | {choice.model} if off else self.off - {choice.model}
            self.serving = choice.model
        self._window = breach_window.clear(self._window)
        why = self.objective.reason(why, expected)
        self.decisions.append(Decision(self._clock(), kind, choice, why, seconds, expected))
