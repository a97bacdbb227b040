"""Expected performance of models, by their profiles and what evaluations found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from eejax.helios.choices import ModelDepth, ModelProfile, breaches
from eejax.helios.lateness import LatenessModel
from eejax.helios.objectives import ServiceObjective, Telemetry
from eejax.helios.repository import StoredEvaluation


class Expectations:
    """Expected telemetry of models at any depth.

    Attributes:
      profiles: by model.
      shares: of tokens by the exit that they would leave by if all were loaded, of the models of
        which that is known.
      length: mean tokens of an answer.
      lateness: of first tokens.
    """

    def __init__(self, profiles: Mapping[str, ModelProfile], length: float):
        self.profiles, self.length, self.lateness = profiles, length, LatenessModel()
        self.shares: dict[str, tuple[float, ...]] = {}
        # As measured, over what the profiles say.
        self._scale: dict[str, float] = {}  # energy
        self._wrong: dict[str, float] = {}  # what quality lacks of the profile's ceiling
        self._perplexity: dict[str, float] = {}

    def expected(
        self,
        objective: ServiceObjective,
        choice: ModelDepth,
        shares: Sequence[float] | None = None,
        hope: float = 0.0,
    ) -> tuple[Telemetry, bool]:
        """Return what a choice is expected to bring by itself, and whether without early exits,
        which a whole model does without where that is better by the objective.

        Args:
          shares: of tokens by exit, in place of those that are known.
          hope: share of the wrong tokens that are taken to be right.
        """
        profile = self.profiles[choice.model]
        shares = self.shares[choice.model] if shares is None else shares
        telemetry = self._corrected(choice, profile.serving(shares, choice.depth, hope))
        if choice.depth == profile.exits:
            without = self.without_exits(choice.model)
            if objective.rank(without) > objective.rank(telemetry):
                return without, True
        return telemetry, False

    def without_exits(self, model: str) -> Telemetry:
        """Return what a whole model is expected to bring if no token leaves early."""
        profile = self.profiles[model]
        last = (*(0.0,) * (profile.exits - 1), 1.0)
        return self._corrected(
            ModelDepth(model, profile.exits), profile.serving(last, profile.exits)
        )

    def _corrected(self, choice: ModelDepth, telemetry: Telemetry) -> Telemetry:
        """Correct an expectation by what was measured while serving: energy, the shortfall of
        quality, perplexity, and seconds to the first token."""
        # Who has none of its own is in the unit of the others.
        scale = self._scale.get(choice.model) or next(iter(self._scale.values()), 1.0)
        best = self.profiles[choice.model].ceiling
        short = max(best - telemetry.accuracy, 0.0) * self._wrong.get(choice.model, 1.0)
        perplexity = telemetry.perplexity * self._perplexity.get(choice.model, 1.0)
        return dataclasses.replace(
            telemetry,
            ttft_p99=self.lateness.of(choice, telemetry),
            energy=telemetry.energy * scale,
            accuracy=max(best - short, 0.0),
            perplexity=max(perplexity, 1.0),
        )

    def learn(self, row: StoredEvaluation) -> None:
        """Expect of a model what an evaluation found."""
        profile, model, telemetry = self.profiles[row.model], row.model, row.telemetry
        self.shares[model] = tuple(count / row.tokens for count in row.exits)
        said = profile.worked(self.shares[model], row.depth)
        if said and telemetry.energy:
            self._scale[model] = telemetry.energy / said
        agreement = profile.agreement(self.shares[model], row.depth)
        short = lambda quality: (profile.ceiling - quality) * row.tokens
        expected = max(short(profile.quality_at(agreement)), 0.0)
        self._wrong[model] = (max(short(telemetry.accuracy), 0.0) + 1) / (expected + 1)
        self._perplexity[model] = telemetry.perplexity / profile.perplexity_at(agreement)
        self.length = row.tokens / row.prompts

    def breached(self, model: str, depth: int, seen: float) -> None:
        """Expect at least a share `seen` of the tokens above a depth, spread as they were when all
        was loaded."""
        shares = self.shares[model]
        above = max(seen, breaches(shares, depth))
        low = 1 - breaches(shares, depth)
        loaded = [s / low * (1 - above) if low > 0 else 0.0 for s in shares[:depth]]
        self.shares[model] = (*loaded, *self.above(model, depth, above))

    def above(self, model: str, depth: int, above: float) -> list[float]:
        """Shares of tokens by the exits that are not loaded, `above` together, as they were spread
        when all was loaded; evenly where none of them were."""
        shares, n = self.shares[model], self.profiles[model].exits
        high = breaches(shares, depth)
        return [
            above * (shares[e] / high if high > 0 else 1 / (n - depth)) for e in range(depth, n)
        ]

    def spread(
        self, model: str, depth: int, above: float, shares: Sequence[float]
    ) -> tuple[float, ...]:
        """Shares as they would be with all exits, of those with `depth` of them, of which a part
        `above` left by the last one below its threshold."""
        above = min(above, shares[depth - 1])
        loaded = [*shares[: depth - 1], shares[depth - 1] - above]
        return (*loaded, *self.above(model, depth, above))
