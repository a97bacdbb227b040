"""How many requests a budget of memory holds, from shapes alone: nothing is allocated.

HELIOS (Kumar et al., 2025) loads a prefix of a model's layers, so that more requests fit beside it.
Counted is what lies on the device between steps: the weights and the state of a `BatchedEngine`.
What a step takes while it runs, compiled programs, and gaps that an allocator leaves come on top: a
budget has to leave room for them.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache, partial

import jax

from eejax.common.errors import require, require_count
from eejax.common.trees import nbytes
from eejax.inference import state as s
from eejax.inference.batched import PROMPT_SPAN, SPAN
from eejax.inference.batched_slots import BatchedEngine
from eejax.inference.batched_state import BatchOptions, blank
from eejax.models import params
from eejax.models.config import ModelConfig


def weight_bytes(config: ModelConfig, depth: int) -> int:
    """Of the first `depth` segments, and of the embeddings, norms and heads they need: what an
    engine with this `max_depth` holds. Raises ConfigError for a depth there is not."""
    require_count("depth", depth)
    most = config.n_exits + 1
    require(depth <= most, "depth", depth, f"must be in 1..{most}, the segments of this model")
    prepare = partial(s.prepare, config=config, max_depth=depth)
    return nbytes(jax.eval_shape(prepare, params.shapes(config)))


@cache
def audit_bytes(config: ModelConfig, depth: int) -> int:
    """Bytes that are brought to the device while a model judges an answer, beside its first `depth`
    segments: one layer after the other, and the final exit; with depth 0 the embeddings too."""
    if depth > config.n_exits:
        return 0
    whole = jax.eval_shape(partial(s.prepare, config=config), params.shapes(config))
    missing = [layer for segment in whole.segments[depth:] for layer in segment]
    rest = {k: v for k, v in whole.params.items() if k not in ("exits", "final")}
    most = max(map(nbytes, [*missing, whole.params["final"]]))
    return most if depth else most + nbytes(rest)


def request_bytes(
    config: ModelConfig, options: BatchOptions, depth: int, context: int | None = None
) -> int:
    """What one more slot takes of an engine's state: keys and values in `depth` segments, the rows
    that wait below them, the states behind them where it may grow, and what it knows of its
    request. `max_depth` is set here; else as `BatchedEngine.make`, and raises as it does."""
    options = options.of_slots(1)  # the same for both
    one, two = (_state_bytes(config, options, depth, context, n) for n in (1, 2))
    return two - one


def engine_bytes(
    config: ModelConfig, options: BatchOptions, depth: int, context: int | None, slots: int
) -> int:
    """Of an engine with so many slots and of its state. Raises as `request_bytes`."""
    require_count("slots", slots)
    each = request_bytes(config, options, depth, context)
    one = _state_bytes(config, options.of_slots(slots), depth, context, 1)
    return weight_bytes(config, depth) + one + (slots - 1) * each


def slots(
    config: ModelConfig, options: BatchOptions, depth: int, context: int | None, budget: float,
    most: int | None = None,
) -> int:  # fmt: skip
    """The most slots, up to `most`, of an engine of `depth` segments that takes no more than
    `budget` bytes; 0 where it does not hold the engine of one. Raises as `request_bytes`, and for a
    budget that is no number, or that nothing ends."""
    ends = isinstance(budget, int | float) and budget < math.inf  # not so of NaN
    endless = budget == math.inf and most is not None
    require(ends or endless, "budget", budget, "must be a number of bytes", "Or give `most`, too.")
    if most is not None:
        require_count("most", most, least=0)
    each = request_bytes(config, options, depth, context)
    room = budget - weight_bytes(config, depth)
    n = most if endless else max(int(room // each), 0)
    n = n if most is None else min(n, most)
    # What slots share is little, and follows from their number: the buckets that there are for it.
    one = lambda n: _state_bytes(config, options.of_slots(n), depth, context, 1)
    while n and one(n) + (n - 1) * each > room:
        n -= 1
    return n


def _state_bytes(config, options, depth, context, n) -> int:
    options = dataclasses.replace(options, max_depth=depth)

    def start(p):
        engine = BatchedEngine.make(p, config, options, slots=n, context=context)
        # As `BatchedEngine.start`, which looks where its weights lie, and here they lie nowhere.
        behind = max(SPAN, options.cap, min(PROMPT_SPAN, engine.options.chunk))
        return blank(
            engine.weights, engine.plan, config=config, options=engine.options, slots=n,
            length=engine.context + behind, context=engine.context,
        )  # fmt: skip

    return nbytes(jax.eval_shape(start, params.shapes(config)))
