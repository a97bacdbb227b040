"""Times that a grade needs: parts of a decoding step, and whole texts beside the full model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from eejax.calibration.drafting import DraftPrediction
from eejax.calibration.prediction import DecodingTimes, GatePoint
from eejax.checkpoint.language_model import LanguageModel
from eejax.common.trees import Tree
from eejax.experiments import step_costs
from eejax.experiments.decode_times import TimedDecoding, with_layers_of
from eejax.models.config import ExitConfig

ROUNDS = 5
SECONDS, FEWEST, MOST = 30.0, 6, 24  # of all timed pairs, by default, and bounds of their number
GATE, DRAFTS, LOOKUP = "gate", "drafts", "lookup"


@dataclasses.dataclass(frozen=True)
class MeasuredSpeed:
    """Measured speed of a way to decode, over that of the engine "full".

    Attributes:
      way: "gate" (early exits emit), "drafts" (an exit drafts) or "lookup" (the text itself drafts
        where it repeats itself, and elsewhere the exit if the model has it).
      predicted: predicted speed by measured times; None for lookups, which depend on the text.
      speed: median over interleaved pairs.
      low: lower end of its 95 % interval.
      high: upper end.
      of_predicted: measured over predicted.
      pairs: number of pairs.
      same_tokens: share of generated tokens that are those of "full" at the same place.
      acceptance: share of drafts that were right, None without drafts.
      layers: mean layers that ran for a token.
    """

    way: str
    predicted: float | None
    speed: float
    low: float
    high: float
    of_predicted: float | None
    pairs: int
    same_tokens: float
    acceptance: float | None
    layers: float

    @property
    def pays(self) -> bool:
        """True if the whole interval is faster than the full model."""
        return self.low > 1


def measure_times(model: LanguageModel, prompts: list[list[int]], new: int) -> DecodingTimes:
    """Time layers and heads in turns with whole steps of engines.

    Exits that are made of the same parts have one time, as the final exit has with them. What exits
    add to a step is measured in engines in which none fires: one with the middle exit, one with
    three, and one whose middle exit may draft and is taken to be never right. Layers of the exits'
    own, which are part of the exits' times, are left out there.
    """
    from eejax.analysis import interleave
    from eejax.inference import EngineOptions, Generator
    from eejax.inference.weights import prepare

    config = model.config
    alike = [dataclasses.replace(e, boundary=0, router=0, temperature=1.0) for e in config.exits]
    last = ExitConfig(0, norm=config.final_norm, head=config.head)
    kinds = [kind for kind in dict.fromkeys(alike) if kind != last]
    few = config.replace(
        exits=tuple(
            dataclasses.replace(config.exits[alike.index(kind)], router=0) for kind in kinds
        )
    )
    recompute, speculative = EngineOptions(), EngineOptions("speculative")
    widths = sorted({1}.union(*(o.resolved(config, 1).buckets for o in (recompute, speculative))))
    length = len(prompts[0]) + new + max(widths)
    runs, read = step_costs.layer_runs(prepare(model.params, few), few, widths, length)

    full = Generator.make(model.params, config, "full")
    bare_params, bare = without_own_layers(model)
    middle = bare[len(bare) // 2]
    # An engine of all exits takes long to compile.
    chosen = tuple(dict.fromkeys((bare[0], middle, bare[-1])))
    drafter = dataclasses.replace(middle, acceptance=0.0)  # few drafts to find out that it stays so

    def timed(exits: Sequence[ExitConfig], options: EngineOptions, **rules) -> TimedDecoding:
        made = Generator.make(bare_params, config.replace(exits=tuple(exits)), options)
        return TimedDecoding(with_layers_of(full, made), prompts, new, **rules)

    whole = [
        TimedDecoding(full, prompts, new),
        timed([middle], recompute, threshold=1.0),
        timed([drafter], speculative),
    ]
    if len(chosen) > 1:
        whole.append(timed(chosen, recompute, threshold=1.0))
    seconds = interleave(
        [*runs, *(lambda _, w=w: w.finish() for w in whole)],
        ROUNDS,
        time.perf_counter,
        before=lambda r: whole[r - len(runs)].start() if r >= len(runs) else None,
    )
    parts, factors = read(np.median(seconds[: len(runs)], 1))
    by_kind = dict(zip([*kinds, last], parts.exits, strict=True))
    heads = (*(by_kind[kind] for kind in alike), parts.exits[-1])
    steps = seconds[len(runs) :] / new
    # Steps are timed whole: what layers and the head do not take is the engine's own work.
    rest = max(float(np.median(steps[0])) - sum(parts.layers) - heads[-1], 0.0)
    one, drafts, *more = (max(float(m), 0.0) for m in np.median(steps[1:] - steps[0], 1))
    further = max(more[0] - one, 0.0) / (len(chosen) - 1) if more else 0.0
    return DecodingTimes(
        parts.layers[0], heads, rest, tuple(factors.items()), (one, further), drafts
    )


def without_own_layers(model: LanguageModel) -> tuple[Tree, tuple[ExitConfig, ...]]:
    """Return (parameters, exits) of the model whose exits are norms and heads alone."""
    exits = tuple(
        dataclasses.replace(e, mlp=False, block=False, mlp_width=0) for e in model.config.exits
    )
    own = {
        name: {k: v for k, v in part.items() if k not in ("mlp", "mlp_norm", "block")}
        for name, part in model.params["exits"].items()
    }
    return model.params | {"exits": own}, exits


def measure_speeds(
    model: LanguageModel,
    prompts: list[list[int]],
    new: int,
    gate: GatePoint | None,
    draft: DraftPrediction,
    *,
    step_seconds: float,
    pairs: int | None = None,
) -> tuple[MeasuredSpeed, ...]:
    """Time decoding with a threshold and with drafts beside "full", in interleaved pairs.

    Args:
      model: the model, with the exits of `gate` and `draft`.
      prompts: token ids, in turn.
      new: tokens that are timed.
      gate: a threshold, or None.
      draft: an exit that drafts.
      step_seconds: of a step of the full model.
      pairs: number of pairs; by default as many as take some `SECONDS`.
    """
    from eejax.analysis import interleave, median_ratio
    from eejax.inference import EngineOptions, Generator
    from eejax.interop.api import LOOKUP as MAX_LOOKUP

    full = Generator.make(model.params, model.config, "full")

    def make(exits: Sequence[int], options: EngineOptions):
        # As the engine knows it of an exit that `eejax.tune` made. Any other engine begins with a
        # guess, and has found it out after some dozen tokens.
        kept = tuple(
            dataclasses.replace(e, acceptance=draft.acceptance)
            if e.boundary == draft.boundary and e.acceptance is None
            else e
            for e in model.config.exits
            if e.boundary in exits
        )
        made = Generator.make(model.params, model.config.replace(exits=kept), options)
        return with_layers_of(full, made)

    timed = {"full": TimedDecoding(full, prompts, new)}
    predicted: dict[str, float | None] = {}
    if gate is not None:
        rules = {"gate": gate.gate, "threshold": gate.threshold}
        timed[GATE] = TimedDecoding(make(gate.exits, EngineOptions()), prompts, new, **rules)
        predicted[GATE] = gate.speed
    # Beside the text, only an exit that the model has drafts.
    number = None if draft.tuned else 0
    for way, more in ((DRAFTS, {}), (LOOKUP, {"lookup": MAX_LOOKUP, "drafts": number})):
        options = EngineOptions("speculative", draft_exit=draft.boundary, **more)
        timed[way] = TimedDecoding(make([draft.boundary], options), prompts, new)
        predicted[way] = draft.timed if way == DRAFTS else None
    runs = list(timed.values())
    if pairs is None:
        pairs = int(np.clip(SECONDS / (step_seconds * new * len(runs)), FEWEST, MOST))
    seconds = interleave(
        [lambda _, t=t: t.finish() for t in runs],
        pairs,
        time.perf_counter,
        before=lambda r: runs[r].start(),
    )
    found = []
    for row, (way, promise) in zip(seconds[1:], predicted.items(), strict=True):
        ratio, results = median_ratio(seconds[0], row), timed[way].results
        same = [
            np.mean(a.tokens[0] == b.tokens[0])
            for a, b in zip(timed["full"].results, results, strict=True)
        ]
        drafted = sum(int(r.drafted.sum()) for r in results)
        accepted = sum(int(r.accepted.sum()) for r in results)
        found.append(
            MeasuredSpeed(
                way,
                promise,
                *ratio,
                None if promise is None else ratio.median / promise,
                pairs,
                float(np.mean(same)),
                accepted / drafted if drafted else None,
                float(np.mean([r.layers[0, 1:].mean() for r in results])),
            )
        )
    return tuple(found)
