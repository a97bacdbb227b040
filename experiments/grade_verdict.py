"""Verdict of a grade in a sentence, and the lines that decode as it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eejax.calibration.drafting import DraftPrediction
from eejax.calibration.frontier import ExitScores
from eejax.calibration.prediction import DecodingTimes, DepthScore, GatePoint
from eejax.experiments.grade_times import DRAFTS, GATE, LOOKUP, MeasuredSpeed
from eejax.interop.api import LOOKUP as MAX_LOOKUP

TARGETS = (0.95, 0.97, 0.99)  # agreement
WORTH = 1.05  # predicted speed from which on exits agree well enough, and something else fails
WORTH_IF_FREE = 1.1  # the same, where heads, or all that exits add, would cost nothing


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Lines that decode as the verdict says; the command is None where there is none."""

    python: str
    command: str | None


@dataclasses.dataclass(frozen=True)
class GradeVerdict:
    """Answer to the question whether early exit pays.

    Attributes:
      pays: whether early exits or their drafts are faster than the full model, as measured.
      way: the way that the recipe takes. Where exits do not pay it is "lookup" if the
        text's own drafts do, and otherwise None.
      reason: "heads", "engine", "agreement" or "measured" where no way is faster; "" otherwise.
      sentence: the answer in words.
    """

    pays: bool
    way: str | None
    reason: str
    sentence: str


def judge(
    scores: ExitScores,
    times: DecodingTimes,
    depths: Sequence[DepthScore],
    gate: GatePoint | None,
    draft: DraftPrediction,
    measured: Sequence[MeasuredSpeed],
) -> GradeVerdict:
    """Say whether early exit pays on this device, and otherwise why not.

    Of the ways that were measured, those count whose whole interval is faster than the full model:
    drafts of an exit, and a threshold that kept its agreement on the text that checks it.

    Args:
      scores: scores of the text that chooses.
      times: measured times.
      depths: quality of every exit.
      gate: the threshold that was measured, as checked, or None.
      draft: the exit whose drafts were measured.
      measured: what was measured.
    """
    parts, paying = [], []
    for m in measured:
        if m.way == DRAFTS and m.pays:
            parts.append(
                f"drafts of the exit after layer {draft.boundary} decode the same text "
                f"{m.speed:.2f} times as fast ({m.low:.2f} to {m.high:.2f}, measured)"
            )
            paying.append(m)
        if m.way == GATE and gate is not None and m.pays and gate.agreement >= TARGETS[0]:
            parts.append(
                f"{_named(gate.exits)} with the gate {gate.gate} at threshold "
                f"{gate.threshold:.5g} decode {m.speed:.2f} times as fast ({m.low:.2f} to "
                f"{m.high:.2f}, measured) and keep {gate.agreement:.1%} of the tokens"
            )
            paying.append(m)
    if paying:
        best = max(paying, key=lambda m: m.speed)
        sentence = f"Early exit pays on this device: {', and '.join(parts)}."
        return GradeVerdict(True, best.way, "", sentence)
    reason, why = _reason(scores, times, depths, measured)
    sentence = f"Early exit does not pay on this device: {why}."
    for m in measured:
        if m.way == LOOKUP and m.pays:
            more = f"Drafts from the text itself do ({m.speed:.2f} times as fast)."
            return GradeVerdict(False, LOOKUP, reason, f"{sentence} {more}")
    return GradeVerdict(False, None, reason, sentence)


def _named(exits: Sequence[int]) -> str:
    """Return words for exits at boundaries."""
    if len(exits) == 1:
        return f"exits after layer {exits[0]}"
    return f"exits after layers {', '.join(map(str, exits[:-1]))} and {exits[-1]}"


def _reason(
    scores: ExitScores,
    times: DecodingTimes,
    depths: Sequence[DepthScore],
    measured: Sequence[MeasuredSpeed],
) -> tuple[str, str]:
    """Return why early exit does not pay, as a word and in words."""
    from eejax.calibration import prediction

    n_layers = scores.config.n_layers
    tried = [(m.predicted, m) for m in measured if m.predicted is not None]
    promise, best = max(tried, key=lambda one: one[0], default=(0.0, None))
    if best is not None and promise >= WORTH:
        way = "drafts" if best.way == DRAFTS else "exits"
        return "measured", (
            f"{way} should decode {promise:.2f} times as fast by the times of its "
            f"parts, but whole texts took {best.speed:.2f} times ({best.low:.2f} to "
            f"{best.high:.2f}) the speed of the full model"
        )

    def fastest(free: DecodingTimes) -> float:
        points = prediction.frontiers_of(scores, free).values()
        found = prediction.fastest_point([p for ps in points for p in ps], TARGETS[0])
        return 0.0 if found is None else found.speed

    without_heads = times.without_early_heads()
    if (speed := fastest(without_heads)) >= WORTH_IF_FREE:
        return "heads", (
            f"the head of an exit takes as long as {times.heads[-1] / times.layer:.1f} layers (the "
            f"model has {n_layers}); with heads that cost nothing, decoding would be "
            f"{speed:.2f} times as fast at {TARGETS[0]:.0%} agreement"
        )
    if (speed := fastest(without_heads.without_early_work())) >= WORTH_IF_FREE:
        work = times.early_step[0] / times.layer
        return "engine", (
            f"a step with an exit takes as long as {work:.1f} layers more beside its head (the "
            f"model has {n_layers}); with exits that cost nothing, decoding would be {speed:.2f} "
            f"times as fast at {TARGETS[0]:.0%} agreement"
        )
    middle = min(depths[:-1], key=lambda d: abs(2 * d.boundary - n_layers))
    return "agreement", (
        f"exits disagree with the final exit; after {middle.boundary} of {n_layers} layers they "
        f"say the same token for {middle.agreement:.0%} of the text"
    )


def recipe(
    name: str,
    own: Sequence[int],
    workdir: bool,
    verdict: GradeVerdict,
    gate: GatePoint | None,
    draft: DraftPrediction,
    tokenizer: str | None = None,
) -> Recipe:
    """Return lines that decode as a verdict says: the full model where nothing pays.

    Args:
      name: name that the model is loaded by.
      own: boundaries of the exits that the model has.
      workdir: whether `name` is the workdir of a run, which the command takes.
      verdict: the verdict.
      gate: the threshold that was measured.
      draft: the exit whose drafts were measured.
      tokenizer: as the model is loaded with.
    """
    given = "" if tokenizer is None else f', tokenizer="{tokenizer}"'
    load = f'import eejax\nmodel = eejax.load("{name}"{given})\n'
    call = "text, result = eejax.generate(model, prompt"
    command = f"eejax generate --workdir={name} --prompt=..."
    if verdict.way in (DRAFTS, LOOKUP):
        at = draft.boundary
        if verdict.way == LOOKUP and not draft.tuned:
            return Recipe(f'{load}{call}, engine="speculative")', None)
        line = f"{command} --engine=speculative --draft_exit={at}"
        line += f" --lookup={MAX_LOOKUP}" if verdict.way == LOOKUP else ""
        usable = workdir and at in own
        return Recipe(f"{load}{call}, draft_exit={at})", line if usable else None)
    if verdict.way == GATE and gate is not None:
        exits, threshold = list(gate.exits), f"{gate.threshold:.8g}"
        rule = f'gate="{gate.gate}", threshold={threshold}'
        # Patience divides by the number of all exits of a model.
        if set(exits) == set(own) or (set(exits) < set(own) and gate.gate != "patience"):
            listed = ",".join(map(str, exits))
            line = f"{command} --gate={gate.gate} --threshold={threshold} --exits={listed}"
            return Recipe(f"{load}{call}, {rule}, exits={exits})", line if workdir else None)
        lines = (
            "import dataclasses",
            "import eejax",
            "from eejax.calibration import with_exits",
            f'model = eejax.load("{name}"{given})',
            f"kept = tuple(e for e in model.config.exits if e.boundary in {exits})",
            f"params, config = with_exits(model.params, model.config.replace(exits=kept), {exits})",
            "model = dataclasses.replace(model, params=params, config=config)",
            f"{call}, {rule})",
        )
        return Recipe("\n".join(lines), None)
    return Recipe(f'{load}{call}, engine="full")', f"{command} --engine=full" if workdir else None)
