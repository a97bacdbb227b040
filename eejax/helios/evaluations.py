"""Evaluations of models while they serve: those that run, and the outcome of their answers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from eejax.helios.choices import ModelDepth, ModelProfile, apportioned
from eejax.helios.disagreement_bound import perplexity_of
from eejax.helios.expectations import Expectations
from eejax.helios.objectives import Telemetry
from eejax.helios.repository import StoredEvaluation


@dataclasses.dataclass(frozen=True)
class RunningEvaluation:
    """An evaluation that is running.

    Attributes:
      choice: what is evaluated.
      left, open: prompts that it still gets, and those that are not answered yet.
      failed: answers that ended in an error.
      begin: when it got its first prompt; 0 before that.
      answers, lengths: of prompts that were answered, and tokens of each.
      exits: that these tokens left by.
      below, emitted: tokens below their threshold, and all tokens meanwhile.
    """

    choice: ModelDepth
    left: int
    open: int = 0
    failed: int = 0
    begin: float = 0.0
    answers: tuple[Telemetry, ...] = ()
    lengths: tuple[int, ...] = ()
    exits: tuple[int, ...] = ()
    below: int = 0
    emitted: int = 0

    @property
    def model(self) -> str:
        return self.choice.model

    @property
    def done(self) -> bool:
        return not self.left and not self.open


def assign_prompt(seen: RunningEvaluation, now: float) -> RunningEvaluation:
    """Count a prompt that is given to it at a time."""
    return dataclasses.replace(
        seen, left=seen.left - 1, open=seen.open + 1, begin=seen.begin or now
    )


def return_prompt(seen: RunningEvaluation) -> RunningEvaluation:
    """Take a prompt back that will not be answered."""
    return dataclasses.replace(seen, left=seen.left + 1, open=seen.open - 1)


def record_failure(seen: RunningEvaluation) -> RunningEvaluation:
    """Count an answer that ended in an error."""
    return dataclasses.replace(seen, failed=seen.failed + 1)


def count_tokens(seen: RunningEvaluation, below: Sequence[bool]) -> RunningEvaluation:
    """Count tokens by whether they left below their threshold."""
    return dataclasses.replace(
        seen, below=seen.below + sum(below), emitted=seen.emitted + len(below)
    )


def record_answer(
    seen: RunningEvaluation, telemetry: Telemetry, exits: Sequence[int]
) -> RunningEvaluation:
    """Add an answer, as it was measured, and the exits that its tokens left by."""
    return dataclasses.replace(
        seen,
        open=seen.open - 1,
        answers=(*seen.answers, telemetry),
        lengths=(*seen.lengths, len(exits)),
        exits=(*seen.exits, *exits),
    )


def pooled(answers: Sequence[Telemetry], lengths: Sequence[int]) -> Telemetry:
    """Return the mean of answers.

    Of the seconds to the first token it also has the most. Perplexity is that of all tokens, so
    that a short answer counts for little.
    """

    def mean(name):
        return sum(getattr(a, name) for a in answers) / len(answers)

    telemetry = Telemetry(*(mean(field.name) for field in dataclasses.fields(Telemetry)))
    nats = [n * math.log(max(a.perplexity, 1.0)) for a, n in zip(answers, lengths, strict=True)]
    return dataclasses.replace(
        telemetry,
        ttft_p99=max(a.ttft_p99 for a in answers),
        perplexity=perplexity_of(sum(nats), sum(lengths)),
    )


def history_row(
    seen: RunningEvaluation,
    profile: ModelProfile,
    expected: Expectations,
    counted: str,
    strictness: int,
) -> StoredEvaluation:
    """Return what an evaluation found, by the exits that tokens would leave by if all were loaded.

    Of a part of a model, the tokens below their threshold would go deeper, as many to each exit as
    was known before.
    """
    counts = [seen.exits.count(e) for e in range(profile.exits)]
    if seen.choice.depth < profile.exits:
        above = seen.below / max(seen.emitted, 1)
        shares = [count / sum(counts) for count in counts]
        shares = expected.spread(seen.model, seen.choice.depth, above, shares)
        counts = apportioned(shares, sum(counts))
    return StoredEvaluation(
        time=seen.begin,
        model=seen.model,
        depth=seen.choice.depth,
        prompts=len(seen.answers),
        tokens=sum(counts),
        exits=tuple(counts),
        counted=counted,
        telemetry=pooled(seen.answers, seen.lengths),
        strictness=strictness,
    )
