"""State of the evaluations that run while models serve, and the outcome of their answers."""

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
      choice: the choice that is evaluated.
      left, open: prompts that it still gets, and prompts that are not answered yet.
      failed: number of answers that ended in an error.
      begin: time of its first prompt; 0 before that.
      answers, lengths: telemetry of the answers, and their numbers of tokens.
      judged: number of answers whose quality was measured.
      exits: exits by which these tokens left.
      below, emitted: number of tokens below their threshold, and of all tokens meanwhile.
    """

    choice: ModelDepth
    left: int
    open: int = 0
    failed: int = 0
    begin: float = 0.0
    answers: tuple[Telemetry, ...] = ()
    lengths: tuple[int, ...] = ()
    judged: int = 0
    exits: tuple[int, ...] = ()
    below: int = 0
    emitted: int = 0

    @property
    def model(self) -> str:
        return self.choice.model

    @property
    def done(self) -> bool:
        return not self.left and not self.open


def assign_prompt(running: RunningEvaluation, now: float) -> RunningEvaluation:
    """Count a prompt that is assigned to the evaluation at time `now`."""
    return dataclasses.replace(
        running, left=running.left - 1, open=running.open + 1, begin=running.begin or now
    )


def return_prompt(running: RunningEvaluation) -> RunningEvaluation:
    """Take a prompt back that will not be answered."""
    return dataclasses.replace(running, left=running.left + 1, open=running.open - 1)


def record_failure(running: RunningEvaluation) -> RunningEvaluation:
    """Count an answer that ended in an error."""
    return dataclasses.replace(running, failed=running.failed + 1)


def count_tokens(running: RunningEvaluation, below: Sequence[bool]) -> RunningEvaluation:
    """Count tokens by whether they left below their threshold."""
    return dataclasses.replace(
        running, below=running.below + sum(below), emitted=running.emitted + len(below)
    )


def record_answer(
    running: RunningEvaluation, telemetry: Telemetry, exits: Sequence[int], judged: bool
) -> RunningEvaluation:
    """Add an answer's telemetry, and the exits by which its tokens left."""
    return dataclasses.replace(
        running,
        open=running.open - 1,
        answers=(*running.answers, telemetry),
        lengths=(*running.lengths, len(exits)),
        judged=running.judged + judged,
        exits=(*running.exits, *exits),
    )


def pooled(answers: Sequence[Telemetry], lengths: Sequence[int]) -> Telemetry:
    """Return the mean of answers.

    `ttft_p99` is the maximum time to first token. Perplexity is that of all tokens, so that a short
    answer counts for little.
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
    running: RunningEvaluation,
    profile: ModelProfile,
    expected: Expectations,
    counted: str,
    strictness: int,
) -> StoredEvaluation:
    """Return an evaluation's result, with tokens by exit as if all exits were loaded.

    In a part of a model, tokens below their threshold would go deeper; they are spread over the
    deeper exits as was known before.
    """
    counts = [running.exits.count(e) for e in range(profile.exits)]
    if running.choice.depth < profile.exits:
        above = running.below / max(running.emitted, 1)
        shares = [count / sum(counts) for count in counts]
        shares = expected.spread(running.model, running.choice.depth, above, shares)
        counts = apportioned(shares, sum(counts))
    return StoredEvaluation(
        time=running.begin,
        model=running.model,
        depth=running.choice.depth,
        prompts=len(running.answers),
        tokens=sum(counts),
        exits=tuple(counts),
        counted=counted,
        telemetry=pooled(running.answers, running.lengths),
        strictness=strictness,
    )
