"""Expected performance of models, by their profiles and what evaluations found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from eejax.helios.choices import FrozenMappings, ModelDepth, ModelProfile, breaches
from eejax.helios.lateness import LatenessModel
from eejax.helios.objectives import ServiceObjective, Telemetry
from eejax.helios.repository import StoredEvaluation


@dataclasses.dataclass(frozen=True)
class Expectations(FrozenMappings):
    """Knowledge of models beside their profiles, which methods take as an argument.

    Attributes:
      length: mean tokens of an answer.
      shares: by model, shares of tokens by the exit that they would leave by if all were loaded;
        of the models of which that is known, in the order in which it came to be.
      energy, shortfall, perplexity: by model, measured values over those of the profile; of quality
        it is what the quality lacks of the profile's ceiling.
      lateness: of first tokens.
    """

    length: float
    shares: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    energy: Mapping[str, float] = dataclasses.field(default_factory=dict)
    shortfall: Mapping[str, float] = dataclasses.field(default_factory=dict)
    perplexity: Mapping[str, float] = dataclasses.field(default_factory=dict)
    lateness: LatenessModel = dataclasses.field(default_factory=LatenessModel)

    def expected(
        self,
        profile: ModelProfile,
        objective: ServiceObjective,
        choice: ModelDepth,
        shares: Sequence[float] | None = None,
        hope: float = 0.0,
    ) -> tuple[Telemetry, bool]:
        """Return (expected telemetry of a choice, whether that is without early exits).

        A whole model does without them where that is better by the objective.

        Args:
          shares: of tokens by exit, in place of those that are known.
          hope: share of the wrong tokens that are taken to be right.
        """
        shares = self.shares[choice.model] if shares is None else shares
        telemetry = self._corrected(profile, choice, profile.serving(shares, choice.depth, hope))
        if choice.depth == profile.exits:
            without = self.without_exits(profile, choice.model)
            if objective.rank(without) > objective.rank(telemetry):
                return without, True
        return telemetry, False

    def without_exits(self, profile: ModelProfile, model: str) -> Telemetry:
        """Return the expected telemetry of a whole model if no token leaves early."""
        last = (*(0.0,) * (profile.exits - 1), 1.0)
        whole = ModelDepth(model, profile.exits)
        return self._corrected(profile, whole, profile.serving(last, profile.exits))

    def _corrected(
        self, profile: ModelProfile, choice: ModelDepth, telemetry: Telemetry
    ) -> Telemetry:
        """Correct energy, quality, perplexity and lateness by what was measured while serving."""
        # A model without a measurement of its own is in the unit of the others.
        energy = self.energy.get(choice.model) or next(iter(self.energy.values()), 1.0)
        short = max(profile.ceiling - telemetry.accuracy, 0.0)
        short *= self.shortfall.get(choice.model, 1.0)
        perplexity = telemetry.perplexity * self.perplexity.get(choice.model, 1.0)
        return dataclasses.replace(
            telemetry,
            ttft_p99=self.lateness.of(choice, telemetry),
            energy=telemetry.energy * energy,
            accuracy=max(profile.ceiling - short, 0.0),
            perplexity=max(perplexity, 1.0),
        )

    def with_shares(self, model: str, shares: Sequence[float]) -> Expectations:
        """Return these expectations with other shares of a model's tokens by exit."""
        return self.replaced(shares={**self.shares, model: tuple(shares)})

    def without(self, model: str) -> Expectations:
        """Return these expectations without a model's shares."""
        shares = {name: known for name, known in self.shares.items() if name != model}
        return self.replaced(shares=shares)

    def learn(self, profile: ModelProfile, row: StoredEvaluation) -> Expectations:
        """Return what is expected after an evaluation."""
        model, telemetry = row.model, row.telemetry
        shares = tuple(count / row.tokens for count in row.exits)
        said = profile.worked(shares, row.depth)
        energy = {model: telemetry.energy / said} if said and telemetry.energy else {}
        agreement = profile.agreement(shares, row.depth)

        def short(quality: float) -> float:
            return (profile.ceiling - quality) * row.tokens

        wrong = max(short(telemetry.accuracy), 0.0) + 1
        expected = max(short(profile.quality_at(agreement)), 0.0) + 1
        perplexity = telemetry.perplexity / profile.perplexity_at(agreement)
        return self.with_shares(model, shares).replaced(
            length=row.tokens / row.prompts,
            energy={**self.energy, **energy},
            shortfall={**self.shortfall, model: wrong / expected},
            perplexity={**self.perplexity, model: perplexity},
        )

    def breached(self, model: str, depth: int, seen: float) -> Expectations:
        """Return expectations with at least a share `seen` of the tokens above a depth.

        They are spread as they were when all was loaded.
        """
        shares = self.shares[model]
        above = max(seen, breaches(shares, depth))
        low = 1 - breaches(shares, depth)
        loaded = [s / low * (1 - above) if low > 0 else 0.0 for s in shares[:depth]]
        return self.with_shares(model, (*loaded, *self.above(model, depth, above)))

    def above(self, model: str, depth: int, above: float) -> list[float]:
        """Return shares of tokens by the exits that are not loaded, `above` together.

        They are spread as when all was loaded; evenly where none left by them.
        """
        shares = self.shares[model]
        high, n = breaches(shares, depth), len(shares)
        return [
            above * (shares[e] / high if high > 0 else 1 / (n - depth)) for e in range(depth, n)
        ]

    def spread(
        self, model: str, depth: int, above: float, shares: Sequence[float]
    ) -> tuple[float, ...]:
        """Return shares as they would be with all exits.

        Args:
          shares: with `depth` exits.
          above: share that left by the last of them below its threshold.
        """
        above = min(above, shares[depth - 1])
        loaded = [*shares[: depth - 1], shares[depth - 1] - above]
        return (*loaded, *self.above(model, depth, above))
