"""The controller of a fleet: which model serves, and how much of it is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eejax.common.errors import DataError
from eejax.helios import decisions, prospects, selection, transitions
from eejax.helios.choices import Assignment, ControllerOptions, Decision, ModelDepth, ModelProfile
from eejax.helios.controller_state import ControllerRules, ControllerState, Transition
from eejax.helios.disagreement_bound import DisagreementBound
from eejax.helios.objectives import ServiceObjective, Telemetry
from eejax.helios.repository import Repository, StoredEvaluation


class Controller:
    """Holder of the state from which `transitions` decide which model serves, up to which exit.

    The server calls `prompt_arrived` for every prompt, reports its outcome with `tokens_emitted`
    and `prompt_answered`, and calls `model_loaded` when the wanted choice is loaded. `wanted` is
    the choice that should serve: the server loads and frees models for it, and until then prompts
    go to the previous choice.

    Attributes:
      state: current state.
      decisions: all decisions so far.
      repository: keeps the evaluations.
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
        """Start with the earlier evaluations `known` that still hold, by model."""
        options = options or ControllerOptions()
        selection.check_models(profiles, options.budget)
        try:
            ranking = tuple(repository.candidates([*profiles], objective, len(profiles)))
        except DataError as error:
            warnings.warn(f"all models are candidates: {error}", stacklevel=2)
            ranking = None
        rules = ControllerRules(dict(profiles), objective, options, ranking)
        self.repository, self._clock = repository, clock
        self.state: ControllerState
        self.decisions: list[Decision] = []
        for outcome in decisions.begin(rules, clock(), known or {}):
            self._keep(outcome)

    def _keep(self, outcome: Transition) -> None:
        self.state = outcome.state
        if outcome.decision is not None:
            self.decisions.append(outcome.decision)
        if outcome.warning:
            warnings.warn(outcome.warning, stacklevel=4)
        if outcome.evaluation is not None:
            try:
                self.repository.add(outcome.evaluation)
            except DataError as error:  # the choice of the model does not depend on it
                warnings.warn(f"an evaluation is not kept: {error}", stacklevel=4)

    def apply(self, event: Callable[..., Transition], *details: Any) -> Transition:
        """Apply an event of `transitions` to the state, and keep its decision and evaluation."""
        outcome = event(self.state, self._clock(), *details)
        self._keep(outcome)
        return outcome

    @property
    def objective(self) -> ServiceObjective:
        return self.state.rules.objective

    @property
    def options(self) -> ControllerOptions:
        return self.state.rules.options

    @property
    def current(self) -> ModelDepth | None:
        """Model and depth that serve; None at first."""
        return self.state.current

    @property
    def wanted(self) -> ModelDepth:
        """Model and depth that are to serve, once they are loaded."""
        return self.state.require_wanted()

    @property
    def below_share(self) -> float:
        """Share of all tokens that left below their threshold."""
        return self.state.below / self.state.emitted if self.state.emitted else 0.0

    def change_rules(self, **changes: Any) -> None:
        """Change fields of `ControllerRules` from now on."""
        self.apply(transitions.rules_changed, self.state.rules.replaced(**changes))

    def level(self, model: str, evaluated: bool = False) -> int:
        """Return how strict a model's thresholds are now (`prospects.level`)."""
        return prospects.level(self.state, model, evaluated)

    def best_loaded(self, weights: Mapping[str, float]) -> str | None:
        """Return the best loaded model by other weights (`prospects.best_loaded`)."""
        return prospects.best_loaded(self.state, weights)

    def device_reported(self, depths: Mapping[str, int], num_cached_tokens: int) -> None:
        """Record the loaded exits by model, and the number of tokens on the device."""
        self.apply(transitions.device_reported, depths, num_cached_tokens)

    def prompt_arrived(self) -> Assignment:
        """Return where the next prompt goes."""
        assignment = self.apply(transitions.prompt_arrived).assignment
        assert assignment is not None  # every prompt that arrives has one
        return assignment

    def model_loaded(self, choice: ModelDepth) -> None:
        """Record that the wanted choice is loaded and serves from now on."""
        self.apply(transitions.model_loaded, choice)

    def depth_limited(self, choice: ModelDepth) -> None:
        """Record that no more than `choice` of the wanted model can be loaded."""
        self.apply(transitions.depth_limited, choice)

    def model_given_up(self, model: str, why: str) -> bool:
        """Stop evaluating and serving a model if there is another one; return whether there is."""
        self.apply(transitions.model_given_up, model, why)
        return model in self.state.failing

    def tokens_emitted(self, model: str, below: Sequence[bool], own: bool = False) -> None:
        """Record tokens in order: whether each left below its threshold."""
        self.apply(transitions.tokens_emitted, model, below, own)

    def first_token_emitted(self, model: str, seconds: float) -> None:
        """Record the seconds from a request's arrival to its first token."""
        self.apply(transitions.first_token_emitted, model, seconds)

    def answer_failed(self, model: str) -> None:
        """Record an answer, not one of an evaluation, that ended in an error."""
        self.apply(transitions.answer_failed, model)

    def prompt_answered(
        self, model: str, telemetry: Telemetry, exits: Sequence[int], judged: bool = True
    ) -> None:
        """Record the telemetry of an evaluation's answer, and the exits of its tokens."""
        self.apply(transitions.prompt_answered, model, telemetry, exits, judged)

    def prompt_dropped(self, model: str, failed: bool = False) -> None:
        """Record a prompt of an evaluation without an answer, or with one that `failed`."""
        self.apply(transitions.prompt_dropped, model, failed)

    def answers_audited(self, model: str, audit: DisagreementBound) -> None:
        """Record audits of the model that serves; `audit` has the last ones."""
        self.apply(transitions.answers_audited, model, audit)
