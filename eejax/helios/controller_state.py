"""State of a controller and the rules that it follows: frozen data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from eejax.helios.breach_window import BreachWindow
from eejax.helios.choices import (
    Assignment,
    ControllerOptions,
    Decision,
    FrozenMappings,
    ModelDepth,
    ModelProfile,
)
from eejax.helios.evaluations import RunningEvaluation
from eejax.helios.expectations import Expectations
from eejax.helios.objectives import ServiceObjective
from eejax.helios.repository import StoredEvaluation
from eejax.helios.strictness import Strictness


@dataclasses.dataclass(frozen=True)
class ControllerRules(FrozenMappings):
    """Settings that decisions follow.

    Attributes:
      profiles: profiles by model.
      ranking: models by their benchmarks, best first; None if unknown, and all models are
        candidates.
      counted: source of energy: "nvml" or "rapl" for joules, or "operations".
    """

    profiles: Mapping[str, ModelProfile]
    objective: ServiceObjective
    options: ControllerOptions
    ranking: tuple[str, ...] | None = None
    counted: str = "operations"

    @property
    def allowed(self) -> float:
        """Maximum mean shortfall of answers, which is 1 minus their quality."""
        return 1.0 - self.objective.limits.get("accuracy", 0.0)


@dataclasses.dataclass(frozen=True)
class ControllerState(FrozenMappings):
    """Everything that the decisions of a controller depend on.

    Attributes:
      expected: expected performance of the models.
      window: tokens in which breaches are counted.
      num_cached_tokens: tokens of the requests on the device; those of one prompt until reported.
      depths: loaded exits by model, as reported last.
      current: the choice that serves; None at first.
      wanted: the choice that is to serve once it is loaded.
      serving: the model of the last decision other than to evaluate a model.
      since: time in seconds at which `current` was loaded.
      plan: evaluations, of which the first is running.
      interval: prompts between two reassessments, once it was needed after a change.
      prompts, errors: prompts, and answers that ended in errors, since the last decision or change.
      ages: by model, reassessments since its last evaluation; infinite once texts changed.
      strictness: by model, as audits require it.
      without_exits: models whose exits a limit forbids.
      failing: models that were given up.
      bounds: by model, the bound from its audits since the last assessment.
      compared: models that audits led to compare with better ones since then.
      breaches: by choice, how often it was breached since it served for a whole interval.
      lasted: the choice that served for the whole last interval.
      below, emitted: number of tokens below their threshold, and of all tokens.
    """

    rules: ControllerRules
    expected: Expectations
    window: BreachWindow
    num_cached_tokens: int
    depths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    current: ModelDepth | None = None
    wanted: ModelDepth | None = None
    serving: str | None = None
    since: float = 0.0
    plan: tuple[RunningEvaluation, ...] = ()
    interval: int | None = None
    prompts: int = 0
    errors: int = 0
    ages: Mapping[str, float] = dataclasses.field(default_factory=dict)
    strictness: Mapping[str, Strictness] = dataclasses.field(default_factory=dict)
    without_exits: frozenset[str] = frozenset()
    failing: frozenset[str] = frozenset()
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    compared: frozenset[str] = frozenset()
    breaches: Mapping[ModelDepth, int] = dataclasses.field(default_factory=dict)
    lasted: ModelDepth | None = None
    below: int = 0
    emitted: int = 0

    @classmethod
    def first(cls, rules: ControllerRules) -> ControllerState:
        """Return the initial state."""
        options = rules.options
        return cls(
            rules,
            Expectations(float(options.tokens)),
            BreachWindow(options.window, options.breaches),
            options.tokens,
            ages=dict.fromkeys(rules.profiles, 0),
            strictness=dict.fromkeys(rules.profiles, Strictness()),
        )

    @property
    def shares(self) -> Mapping[str, tuple[float, ...]]:
        """Shares of tokens by exit if all exits were loaded, by model."""
        return self.expected.shares

    def require_wanted(self) -> ModelDepth:
        """Return `wanted`, which the first decision sets (`decisions.begin`)."""
        assert self.wanted is not None, "no decision was made yet"
        return self.wanted

    def serves(self, model: str) -> bool:
        """Return whether a model serves and neither a change nor an evaluation is running."""
        if self.current is None or self.wanted != self.current or self.plan:
            return False
        return self.current.model == model

    def with_first(self, evaluation: RunningEvaluation) -> ControllerState:
        """Return the state with another evaluation in place of the running one."""
        return self.replaced(plan=(evaluation, *self.plan[1:]))


class Transition(NamedTuple):
    """Result of an event.

    Attributes:
      state: the next state.
      decision: the decision, if one was made.
      assignment: where a prompt goes, if one arrived.
      evaluation: a finished evaluation that is to be stored.
      warning: a warning to give, or "".
    """

    state: ControllerState
    decision: Decision | None = None
    assignment: Assignment | None = None
    evaluation: StoredEvaluation | None = None
    warning: str = ""
