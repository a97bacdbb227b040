"""Batches to time and simulate: full ones, and requests that come through a scheduler."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np


class SteadyBatch:
    """Batch whose slots are all in use.

    `start` runs the prompts up to their first tokens, `finish` decodes until `quota` more tokens
    were emitted.

    Attributes:
      tokens: number of tokens that each `finish` emitted.
      works: of `batched`, the work of each `finish`.
    """

    def __init__(self, engine, prompts, quota: int, threshold=1.0, drafts: int = 0, gate=None):
        self.engine, self.prompts, self.quota = engine, prompts, quota
        self.rules = {"threshold": threshold, "drafts": drafts, "gate": gate or "max_probability"}
        self.tokens: list[int] = []
        self.works: list = []

    def _request(self):
        from eejax.inference.policy import ExitPolicy
        from eejax.inference.sampling import SamplingParams
        from eejax.inference.state import RequestRows

        config, n = self.engine.config, len(self.prompts)
        lengths = [len(p) for p in self.prompts]
        policy = ExitPolicy.make(config, n, **self.rules)
        room = [self.engine.context - length for length in lengths]
        return RequestRows.make(config, lengths, room, policy, SamplingParams.make(n))

    def start(self) -> None:
        import jax

        rows, _ = self.engine.prefill(self.prompts, self._request())
        self.state = self.engine.insert(self.engine.start(), rows, range(len(self.prompts)))
        # A request whose prompt is done waits for the others, at one token a step.
        self._pause(True)
        while hasattr(self.state, "progress") and np.asarray(self.state.progress.in_prefill).any():
            self._call(1)
        self._pause(False)
        jax.block_until_ready(self.state)
        self.before = self._work()

    def _pause(self, paused: bool) -> None:
        request = self.state.request
        policy = request.policy.replace(paused=np.full((self.engine.slots,), paused))
        self.state = self.state.replace(request=request.replace(policy=policy))

    def _work(self):
        import jax

        return jax.tree.map(np.array, self.state.work) if hasattr(self.state, "work") else None

    def _call(self, steps: int) -> int:
        self.state, record = self.engine.generate(self.state, steps)
        return int((np.asarray(record.exit) >= 0).sum())

    def finish(self) -> None:
        from eejax.inference.slot_engine import STEPS_PER_CALL

        came = 0
        while came < self.quota and np.asarray(self.state.live).any():
            came += self._call(STEPS_PER_CALL)
        self.tokens.append(came)

    def tell(self) -> None:
        """Collect the work after a `finish`."""
        if self.before is not None:
            from eejax.inference.batch_costs import work_between

            self.works.append(work_between(self._work(), self.before))


@dataclasses.dataclass
class ServedBatch:
    """Result of requests through a scheduler's queue.

    Attributes:
      seconds: time of all requests.
      tokens: their tokens.
      gaps: seconds between a request's tokens, as they are reported.
      first: seconds from the start to a request's first token.
    """

    seconds: float
    tokens: int
    gaps: np.ndarray
    first: np.ndarray


def serve(engine, prompts, limits, threshold, drafts: int, payoff=None, **kwargs):
    """Run all requests at once, through all slots of the engine; kwargs are `Scheduler`'s."""
    from eejax.inference.policy import ExitPolicy
    from eejax.inference.request import EngineRequest
    from eejax.inference.scheduler import Scheduler

    scheduler = Scheduler(engine, payoff=payoff, **kwargs)
    policy = ExitPolicy.make(engine.config, 1, threshold, drafts=drafts)
    begin = time.perf_counter()
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        scheduler.add_request(EngineRequest(str(i), prompt, limit, policy))
    last, gaps, first, tokens = {}, [], {}, 0
    while not scheduler.idle:
        outputs = scheduler.step()
        now = time.perf_counter()
        for id_, new, _ in outputs:
            tokens += len(new)
            if not new:
                continue
            first.setdefault(id_, now - begin)
            if id_ in last:
                gaps.append(now - last[id_])
            gaps += [0.0] * (len(new) - 1)
            last[id_] = now
    seconds = time.perf_counter() - begin
    return ServedBatch(seconds, tokens, np.array(gaps), np.array([*first.values()]))


def roofline(
    layers: Sequence[int],
    d: int,
    vocab: int,
    context: int,
    sizes: Sequence[int],
    *,
    bandwidth: float,
    flops: float,
    start: float,
    size: int = 2,
):
    """Return `StepCosts` of a decoder on a device, by the slower of bytes and products.

    Attention reads the keys and values of half a context: those of a slot once for a span, or in
    place for all slots.

    Args:
      layers: number of layers of each segment.
      d: width of the decoder.
      vocab: size of the vocabulary.
      context: tokens of a context.
      sizes: rows of all slots in place, then of each bucket.
      bandwidth: bytes a second, as far as they are reached.
      flops: products a second, as far as they are reached.
      start: seconds to start a layer's kernels.
      size: bytes of a number.
    """
    from eejax.inference.batch_simulator import StepCosts

    weights, table, cache = 12 * d * d * size, vocab * d * size, context * d * size
    rows = np.asarray(sizes, float)

    def time_of(read):
        return np.maximum(read / bandwidth, rows * read / size * 2 / flops)

    layer = start + time_of(weights)
    layer[0] += rows[0] * cache / bandwidth
    look = start + time_of(table)
    chunk = sum(layers) * (start + max(weights / bandwidth, 64 * weights / size * 2 / flops))
    return StepCosts(
        start,
        tuple(layer.tolist()),
        tuple(look.tolist()),
        cache / bandwidth,
        chunk,
        0.0,
        tuple(layers),
    )
