"""Expected performance of models, from their profiles and evaluations."""

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
      shares: by model, shares of tokens by exit if all exits were loaded, for the models for which
        they are known, in the order in which they became known.
      energy, shortfall, perplexity: by model, measured values over those of the profile. The
        shortfall is the difference between the quality and the profile's ceiling.
      lateness: model of the time to first token.
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

        A whole model serves without exits if that is better by the objective.

        Args:
          profile: profile of the model.
          objective: the objective.
          choice: model and depth.
          shares: shares of tokens by exit that replace the known ones.
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
        # A model that was not measured gets the factor of another one, so that units agree.
        energy = self.energy.get(choice.model) or next(iter(self.energy.values()), 1.0)
        return dataclasses.replace(
            self.with_quality(profile, choice.model, telemetry),
            ttft_p99=self.lateness.of(choice, telemetry),
            energy=telemetry.energy * energy,
        )

    def with_quality(self, profile: ModelProfile, model: str, telemetry: Telemetry) -> Telemetry:
        """Return telemetry whose quality and perplexity are corrected by what was measured."""
        short = max(profile.ceiling - telemetry.accuracy, 0.0) * self.shortfall.get(model, 1.0)
        perplexity = telemetry.perplexity * self.perplexity.get(model, 1.0)
        return dataclasses.replace(
            telemetry,
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
        """Return the expectations after an evaluation."""
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

    def breached(self, model: str, depth: int, share: float) -> Expectations:
        """Return expectations with at least a share `share` of the tokens above a depth.

        They are spread as when all exits were loaded.
        """
        shares = self.shares[model]
        above = max(share, breaches(shares, depth))
        low = 1 - breaches(shares, depth)
        loaded = [s / low * (1 - above) if low > 0 else 0.0 for s in shares[:depth]]
        return self.with_shares(model, (*loaded, *self.above(model, depth, above)))

    def above(self, model: str, depth: int, above: float) -> list[float]:
        """Return shares of tokens by the exits that are not loaded, with the sum `above`.

        They are spread as when all exits were loaded, or evenly if no token left by them.
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

        Those of a model whose shares were not known are spread evenly over the deeper exits.

        Args:
          shares: shares with `depth` exits.
          above: share of tokens that left by the last of them below its threshold.
        """
        above = min(above, shares[depth - 1])
        loaded = [*shares[: depth - 1], shares[depth - 1] - above]
        known = self if model in self.shares else self.with_shares(model, (0.0,) * len(shares))
        return (*loaded, *known.above(model, depth, above))
