"""Continuous batching: requests that leave by drawn exits, against requests that never leave.

Each request has an exit of its own, drawn from a seed, by which all of its tokens leave: gates are
"fixed", and thresholds turn the other exits off. Text and rounding do not change the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from eejax.experiments import card_programs
from eejax.experiments.batch_runs import SteadyBatch
from eejax.experiments.gpu_check.check import METERED, StageCheck, mean_joules
from eejax.experiments.gpu_check.decode import prompts, weights

SHARES = (0.5, 0.25, 0.25)
"""Shares of requests that leave by the first exit, by the second, and by the final one."""


@dataclasses.dataclass(frozen=True)
class BatchStageSizes:
    """Model and tokens of the stage.

    Attributes:
      model: the model.
      context: tokens of a slot.
      prompt: tokens of a prompt.
      new: generated tokens.
      chunks: prompt tokens of a step, each of which is measured.
      calls: calls to which costs are fitted.
      repeats: timed runs.
      metered: seconds over which energy is counted.
    """

    model: card_programs.ModelSize = card_programs.BILLION
    context: int = 2048
    prompt: int = 512
    new: int = 64
    chunks: tuple[int, ...] = (64, 256, 512)
    calls: int = 120
    repeats: int = 5
    metered: float = METERED


SMALL = BatchStageSizes(card_programs.SMALL, 64, 24, 8, (8, 16), 40, 2, 0.0)


def sizes(check: StageCheck) -> BatchStageSizes:
    return SMALL if check.small else BatchStageSizes()


def run(check: StageCheck) -> None:
    setup, slots = sizes(check), 2 if check.small else int(check.part)
    config = setup.model.config(setup.context)
    params = weights(config)
    check.measure("full", lambda: full(setup, params, slots))
    for chunk in reversed(setup.chunks):
        check.measure(f"chunk {chunk}", partial(recompute, setup, params, slots, chunk))
    check.measure("costs", lambda: costs(setup, params, slots))


def programs(check: StageCheck) -> Iterator[tuple[str, Callable]]:
    """Yield the engines' loops for every number of slots and chunk."""
    from eejax.inference.options import CHUNKS

    setup = sizes(check)
    config = setup.model.config(setup.context)
    named = (int(check.part),) if check.part else (8, 64)
    for slots in (2,) if check.small else named:
        one = dict(config=config, slots=slots, cache=setup.context, options=full_options())
        yield f"full {slots} slots", partial(card_programs.slots, **one)
        default = min(CHUNKS["gpu"], config.context_length)
        for chunk in dict.fromkeys((*setup.chunks, default)):
            one = dict(
                config=config, slots=slots, cache=setup.context, options=batch_options(chunk)
            )
            yield f"recompute {slots} slots, chunk {chunk}", partial(card_programs.slots, **one)


def full_options():
    """Return the options of the engine `full`."""
    from eejax.inference import EngineOptions

    return EngineOptions("full")


def batch_options(chunk: int | None):
    """Return the options of `recompute` in slots at a chunk, or at its default one."""
    from eejax.inference.options import EngineOptions

    return EngineOptions(chunk=chunk)


def draw_thresholds(config, slots: int, seed: int = 0) -> np.ndarray:
    """Draw thresholds [slots, exits]: each request leaves by one exit, or by the final one."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(np.arange(slots) % len(SHARES) if slots < 4 else _apportioned(slots))
    return (chosen[:, None] != np.arange(config.n_exits)[None]).astype(float)


def _apportioned(slots: int) -> np.ndarray:
    """Return exits of `slots` requests, as near to `SHARES` as whole numbers are."""
    ends = np.round(np.cumsum(SHARES) * slots).astype(int)
    return np.repeat(np.arange(len(SHARES)), np.diff([0, *ends]))


def engine(setup: BatchStageSizes, params, slots: int, chunk: int | None = None):
    from eejax.inference.engine import EarlyExitEngine

    config = setup.model.config(setup.context)
    return EarlyExitEngine.make(params, config, batch_options(chunk), slots=slots)


def timed(steady: SteadyBatch, repeats: int) -> tuple[float, float]:
    """Return seconds of all prompts up to their first tokens, and of a token after them."""
    import time

    begun, each = [], []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        steady.start()
        begun.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        steady.finish()
        each.append((time.perf_counter() - begin) / steady.tokens[-1])
    return float(np.median(begun[1:])), float(np.median(each[1:]))


def joules_per_token(steady: SteadyBatch, seconds: float) -> float | None:
    """Return the joules of a token after the prompts; None if the device counts none."""
    joules = mean_joules(steady.finish, steady.start, seconds)
    return None if joules is None else joules / steady.tokens[-1]


def full(setup: BatchStageSizes, params, slots: int) -> dict[str, float]:
    """Time the engine `full`, with the same number of slots."""
    from eejax.inference.engine import EarlyExitEngine

    config = setup.model.config(setup.context)
    made = EarlyExitEngine.make(params, config, full_options(), slots=slots)
    texts = prompts(config, slots, setup.prompt)
    steady = SteadyBatch(made, texts, slots * setup.new)
    begun, each = timed(steady, setup.repeats)
    return dict(
        prompts_ms=1e3 * begun,
        tokens_per_second=1 / each,
        joules_per_token=joules_per_token(steady, setup.metered),
    )


def recompute(setup: BatchStageSizes, params, slots: int, chunk: int) -> dict[str, Any]:
    """Time `recompute` in slots at a chunk, with exits and without."""
    made = engine(setup, params, slots, chunk)
    texts = prompts(made.config, slots, setup.prompt)
    without = SteadyBatch(made, texts, slots * setup.new)
    exits = draw_thresholds(made.config, slots)
    leaving = SteadyBatch(made, texts, slots * setup.new, exits, gate="fixed")
    begun, each = timed(without, setup.repeats)
    _, each_leaving = timed(leaving, setup.repeats)
    boundaries = np.array(made.config.exit_boundaries)
    depth = np.where((exits == 0).any(1), boundaries[(exits == 0).argmax(1)], boundaries[-1]).mean()
    by_layers = float(made.config.n_layers / depth)
    return dict(
        prompts_ms=1e3 * begun,
        prompt_tokens_per_second=slots * setup.prompt / begun,
        tokens_per_second=1 / each,
        leaving_tokens_per_second=1 / each_leaving,
        speedup=each / each_leaving,
        speedup_by_layers=by_layers,
        share_of_layer_ratio=each / each_leaving / by_layers,
        joules_per_token=joules_per_token(without, setup.metered),
        leaving_joules_per_token=joules_per_token(leaving, setup.metered),
    )


def costs(setup: BatchStageSizes, params, slots: int) -> dict[str, Any]:
    """Fit the costs of the engine's work, and compare the plan that they suggest with none."""
    from eejax.inference import batch_costs
    from eejax.inference.batch_simulator import best_plan

    made = engine(setup, params, slots)
    texts = prompts(made.config, slots, setup.prompt)
    fitted = batch_costs.measure(made, texts, calls=setup.calls)
    exits = draw_thresholds(made.config, slots)
    traces = batch_costs.trace_requests(made, texts, setup.new, threshold=exits, gate="fixed")
    found = best_plan(traces, fitted, batch_costs.engine_sizes(made))
    planned = dataclasses.replace(made, plan=found.plan)
    seconds = {}
    for name, one in (("no plan", made), ("planned", planned)):
        steady = SteadyBatch(one, texts, slots * setup.new, exits, gate="fixed")
        seconds[name] = timed(steady, setup.repeats)[1]
    return dict(
        fitted=dataclasses.asdict(fitted),
        chunk=made.options.chunk,
        fill=np.asarray(found.plan.fill).tolist(),
        patience=np.asarray(found.plan.patience).tolist(),
        simulated_tokens_per_second=found.simulated.tokens / found.simulated.seconds,
        tokens_per_second={k: 1 / s for k, s in seconds.items()},
        speedup_of_plan=seconds["no plan"] / seconds["planned"],
    )
