"""Simulated latencies of early-exit decoding, from a trace of exits.

A trace lists, for one request, the number of the exit that emitted each token (a row of
`GenerationResult.exits`, without the prompt's pass). Times are in the unit of the costs, from the
start of the first of these tokens' passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from eejax.calibration.prediction import recompute_seconds
from eejax.common.errors import require
from eejax.models.config import ModelConfig
from eejax.pipeline.partition import Partition


@dataclasses.dataclass(frozen=True)
class ForwardTimes:
    """Forward times of one token.

    Attributes:
      layers: [L] each layer.
      exits: [E + 1] each exit, the final one last; a token that was emitted before skips it.
    """

    layers: tuple[float, ...]
    exits: tuple[float, ...]

    @classmethod
    def of_segments(
        cls, config: ModelConfig, segments: Sequence[float], exits: Sequence[float] | float = 0.0
    ) -> ForwardTimes:
        """Split each segment's time evenly over its layers; `exits` has one time or one each."""
        n = config.n_exits + 1
        require(len(segments) == n, "segments", segments, f"must be {n} times, one per segment")
        each = tuple(exits) if isinstance(exits, Sequence) else (exits,) * n
        require(len(each) == n, "exits", exits, f"must be one time, or {n}, one per exit")
        spread = [
            time / (end - begin)
            for time, (begin, end) in zip(segments, config.segments, strict=True)
            for _ in range(begin, end)
        ]
        return cls(tuple(spread), each)


def _check(trace: Sequence[int], config: ModelConfig, times: ForwardTimes) -> list[int]:
    require(
        len(times.layers) == config.n_layers and len(times.exits) == config.n_exits + 1,
        "times",
        times,
        f"must have {config.n_layers} layers and {config.n_exits + 1} exits, like the model",
    )
    exits = [int(e) for e in trace]
    require(
        all(0 <= e <= config.n_exits for e in exits),
        "trace",
        exits,
        f"must be numbers of exits, 0..{config.n_exits}",
    )
    return exits


def pipelined(
    trace: Sequence[int],
    partition: Partition,
    times: ForwardTimes,
    *,
    cap: int | None = None,
    hop: float = 0.0,
) -> np.ndarray:
    """Return [n], the times at which free-running stages emit each token (EE-LLM, section 4).

    The first stage starts a token when the previous one is emitted and its own work on it is done.
    The other stages take tokens in order, each as soon as it arrives. If no stage falls behind, a
    token takes the forward time up to its exit, and on the first stage that of the whole stage, as
    the paper says. `PipelinedGenerator` works in ticks of one part on every stage instead, which is
    the same if all parts take equally long.

    Args:
      cap: no token starts while this many are in flight; None for no limit.
      hop: time from a stage to the next.
    """
    c, p = partition.config, partition
    emitted, free = [], [0.0] * p.stages  # free: when each stage is done with the token before
    left: list[float] = []  # when each token leaves the last stage
    for t, exit_ in enumerate(_check(trace, c, times)):
        now = max(emitted[-1] if emitted else 0.0, free[0])
        if cap is not None and t >= cap:
            now = max(now, left[t - cap])
        for i in range(p.stages):
            now = max(now, free[i])
            for n in range(p.layers[i] + 1):
                if n:
                    now += times.layers[p.starts[i] + n - 1]
                for place in p.on(i):
                    if place.layers == n and len(emitted) == t:
                        now += times.exits[place.exit]
                        if place.exit == exit_:
                            emitted.append(now)
            free[i] = now
            now += hop
        left.append(free[-1])
    return np.array(emitted)


def recompute(
    trace: Sequence[int],
    config: ModelConfig,
    times: ForwardTimes,
    *,
    cap: int = 16,
    rows: Callable[[int], float] = lambda rows: 1.0,
) -> np.ndarray:
    """Return [n], the times at which one device with KV recomputation emits each token.

    See `calibration.prediction.recompute_seconds`.

    rows: returns the time of a number of rows through a layer, relative to one row. By default they
    take no longer than one, which holds while a layer's time is that of reading its weights
    (EE-LLM's batching effect).
    """
    exits = np.array([_check(trace, config, times)], np.int64)
    seconds = recompute_seconds(
        exits,
        config,
        times.layers,
        times.exits,
        factor=np.vectorize(rows, otypes=[np.float64]),
        cap=cap,
    )
    return np.cumsum(seconds[0])
