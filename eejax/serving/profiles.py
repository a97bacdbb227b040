"""What models cost, measured: seconds of every segment, of loading it, and of filling in its cache.

All depths are run twice, and only the second pass counts, so that what is compiled is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np

from eejax import calibration
from eejax.common.errors import require
from eejax.inference import state as s
from eejax.inference.partial import PartialModel
from eejax.inference.policy import ExitPolicy
from eejax.serving.controller import Profile
from eejax.serving.fleet import Member


def measure(
    member: Member, texts: Sequence[Sequence[int]], batches: Iterable[Mapping[str, np.ndarray]], *,
    slots: int, context: int | None = None, new: int = 32,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:  # fmt: skip
    """Of a model with all slots taken, by requests of these texts and `new` tokens each; how often
    exits agree with the final one is counted on `batches`, as those of `calibration.score`.

    Energy is not measured: of a token in a segment it is the multiplications of its layers, twice.
    """
    require(len(texts) > 0, "texts", texts, "must be one at least")
    n = member.config.n_exits + 1
    for _ in range(2):  # the first one compiles
        part = PartialModel(
            member.params, member.config, member.options, slots=slots, depth=1, context=context
        )
        rows = [_Depth(part, texts, new, clock)]
        for depth in range(2, n + 1):
            begin = clock()
            part.grow(depth)
            jax.block_until_ready(part._coming)
            loaded = clock() - begin
            held = part.scheduler.held
            begin = clock()
            part.exchange()
            jax.block_until_ready(part.scheduler.state)
            filled = (clock() - begin) / max(held, 1)
            rows.append(_Depth(part, texts, new, clock, loaded, filled))
    weights = part.engine.weights
    sizes = [_bytes(segment) for segment in weights.segments]
    outside = [_bytes(s.outside(weights.params, member.config, d)) for d in range(1, n + 1)]
    steps = lambda values: np.maximum(np.diff([0.0, *values]), 0.0)
    begin = clock()
    jax.block_until_ready(jax.device_put(part._host["layers"]))
    first = (clock() - begin) * sizes[0] / max(sum(sizes), 1)
    scores = calibration.score(member.params, member.config, batches)
    rules = {k: v for k, v in member.rules.items() if k != "prefill_exit"}  # of prompts alone
    leaves = calibration.emitting_exits(scores, **({"threshold": 1.0} | rules))
    same = scores.tokens == scores.tokens[-1]
    share = lambda e, which: float(same[e][which].mean()) if which.any() else float(same[e].mean())
    layers = [end - begin for begin, end in member.config.segments]
    a_layer = sum(a.size for a in jax.tree.leaves(member.params["layers"])) / sum(layers)
    told = dict(
        seconds=steps([row.token for row in rows]), prefill=steps([row.first for row in rows]),
        load=[first, *(row.loaded for row in rows[1:])],
        rebuild=[0.0, *(row.filled for row in rows[1:])],
        bytes=np.array(sizes) + steps(outside), energy=[2.0 * a_layer * k for k in layers],
        sure=[share(e, leaves == e) for e in range(n)],
        unsure=[share(e, leaves > e) for e in range(n - 1)] + [1.0],
    )  # fmt: skip
    return Profile(**{name: tuple(map(float, values)) for name, values in told.items()})


def _bytes(tree) -> int:
    return sum(a.nbytes for a in jax.tree.leaves(tree))


class _Depth:
    """A depth at work. token: seconds of one where none leaves early, of all slots together; first:
    to the first one, of requests that come together; loaded, filled: as measured before."""

    def __init__(self, part: PartialModel, texts, new, clock, loaded=0.0, filled=0.0):
        self.loaded, self.filled = loaded, filled
        scheduler, config = part.scheduler, part.config
        for number in [*scheduler.running, *scheduler.waiting]:
            scheduler.cancel(number)
        part.run()
        policy = ExitPolicy.make(config, 1, 1.0)
        slots, begin, first, count = part.engine.slots, clock(), None, 0
        room = part.engine.context
        for i in range(slots):
            text = list(texts[i % len(texts)])[: room - new - 1]
            scheduler.submit(text, room - len(text), policy=policy)
        decoded = 0.0
        while count < slots * new:
            outputs = part.step()
            got = sum(len(o.tokens) for o in outputs)
            if first is None and got:
                first, decoded = clock() - begin, clock()
            elif first is not None:
                count += got
        self.first, self.token = first, (clock() - decoded) / count
