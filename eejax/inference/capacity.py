"""Memory of engines, from shapes alone: how many requests a budget holds.

HELIOS (Kumar et al., 2025) loads a prefix of a model's layers so that more requests fit beside it.
The count includes what stays on the device between steps: the weights and the state of an
`EarlyExitEngine`. A budget has to leave room for what comes on top: temporary buffers of a step,
compiled programs and gaps of the allocator.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache, partial

import jax

from eejax.common.errors import require, require_count
from eejax.common.trees import nbytes
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.options import EngineOptions
from eejax.inference.state import blank
from eejax.inference.weights import prepare
from eejax.models import params
from eejax.models.config import ModelConfig


def weight_bytes(config: ModelConfig, depth: int) -> int:
    """Return the bytes of an engine's weights with `depth` segments.

    Counts those segments and the embeddings, norms and heads that they need. Raises ConfigError for
    a depth that does not exist.
    """
    require_count("depth", depth)
    n = config.n_exits + 1
    require(depth <= n, "depth", depth, f"must be in 1..{n}, the segments of this model")
    prepared = partial(prepare, config=config, num_segments=depth)
    return nbytes(jax.eval_shape(prepared, params.shapes(config)))


@cache
def audit_bytes(config: ModelConfig, depth: int) -> int:
    """Return the bytes that are loaded while a model judges an answer.

    They hold one layer at a time and the final exit, beside the first `depth` segments; with depth
    0 the embeddings too.
    """
    if depth > config.n_exits:
        return 0
    whole = jax.eval_shape(partial(prepare, config=config), params.shapes(config))
    missing = [layer for segment in whole.segments[depth:] for layer in segment]
    rest = {k: v for k, v in whole.params.items() if k not in ("exits", "final")}
    largest = max(map(nbytes, [*missing, whole.params["final"]]))
    return largest if depth else largest + nbytes(rest)


def request_bytes(
    config: ModelConfig, options: EngineOptions, depth: int, context: int | None = None
) -> int:
    """Return the bytes of one more slot in an engine's state.

    A slot has keys and values in `depth` segments, the rows that wait below them, the states behind
    them if segments may be added, and its request. `num_segments` is set here. Raises as
    `EarlyExitEngine.make`.
    """
    options = options.resolved(config, 1)  # the same buckets for both numbers of slots
    one, two = (_state_bytes(config, options, depth, context, n) for n in (1, 2))
    return two - one


def engine_bytes(
    config: ModelConfig, options: EngineOptions, depth: int, context: int | None, slots: int
) -> int:
    """Return the bytes of an engine and its state with so many slots. Raises as `request_bytes`."""
    require_count("slots", slots)
    each = request_bytes(config, options, depth, context)
    one = _state_bytes(config, options.resolved(config, slots), depth, context, 1)
    return weight_bytes(config, depth) + one + (slots - 1) * each


def slots(
    config: ModelConfig,
    options: EngineOptions,
    depth: int,
    context: int | None,
    budget: float,
    max_slots: int | None = None,
) -> int:
    """Return the largest number of slots, up to `max_slots`, with which an engine fits into
    `budget` bytes.

    The result is 0 if not even one slot fits. Raises as `request_bytes`, for a budget that is not a
    number, and for an infinite one without `max_slots`.
    """
    ends = isinstance(budget, int | float) and budget < math.inf  # False for NaN
    endless = budget == math.inf and max_slots is not None
    fix = "Or give `max_slots`, too."
    require(ends or endless, "budget", budget, "must be a number of bytes", fix)
    if max_slots is not None:
        require_count("max_slots", max_slots, minimum=0)
    each = request_bytes(config, options, depth, context)
    room = budget - weight_bytes(config, depth)
    fits = [] if max_slots is None else [max_slots]
    n = min(fits if endless else [*fits, max(int(room // each), 0)])

    # Slots share little: the buckets, whose number depends on the number of slots.
    def one(n):
        return _state_bytes(config, options.resolved(config, n), depth, context, 1)

    while n and one(n) + (n - 1) * each > room:
        n -= 1
    return n


def _state_bytes(config, options, depth, context, n) -> int:
    options = dataclasses.replace(options, num_segments=depth)

    def start(p):
        engine = EarlyExitEngine.make(p, config, options, slots=n, context=context)
        # As `EarlyExitEngine.start`, which needs weights on a device.
        return blank(
            engine.weights,
            engine.plan,
            config=config,
            options=engine.options,
            slots=n,
            length=engine.cache_length,
            context=engine.context,
        )

    return nbytes(jax.eval_shape(start, params.shapes(config)))
