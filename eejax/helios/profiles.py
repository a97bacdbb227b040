"""Measurement of what models cost: seconds to run every segment, to load it, and to fill its cache.

All depths run twice, and only the second pass counts, so that no compilation is measured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from eejax import calibration
from eejax.common.errors import DataError, require
from eejax.common.progress import LOG
from eejax.common.trees import nbytes
from eejax.helios.choices import ModelProfile
from eejax.helios.energy import layer_flops, segment_rows, token_work
from eejax.helios.pool import FleetMember, MemberRules
from eejax.inference.partial import PartialModel
from eejax.inference.policy import ExitPolicy
from eejax.inference.request import EngineRequest
from eejax.inference.weights import unlayered_params

log = logging.getLogger(LOG)


def measure(
    member: FleetMember,
    texts: Sequence[Sequence[int]],
    batches: Iterable[Mapping[str, np.ndarray]],
    *,
    slots: int | Sequence[int],
    context: int | None = None,
    new: int = 32,
    clock: Callable[[], float] = time.perf_counter,
) -> ModelProfile:
    """Measure a model with all slots of each depth in use (`PartialModel`).

    The requests have these texts and `new` tokens each. The agreement of exits with the final one
    is counted on `batches`, in the form of `calibration.score`.

    Energy is not measured: operations of layers and heads replace it (`token_work`). Raises
    DataError for a model whose logits are not finite.
    """
    require(len(texts) > 0, "texts", texts, "must have at least one text")
    n = member.config.n_exits + 1

    def grown(what: str):
        """Grow to every depth in turn, and return the whole model."""
        log.info("%s depth 1 of %d", what, n)
        begin = clock()
        part = PartialModel(
            member.params, member.config, member.options, slots=slots, depth=1, context=context
        )
        jax.block_until_ready((part.engine.weights, part.scheduler.state))
        rows = [_Depth(part, texts, new, clock, clock() - begin)]
        for depth in range(2, n + 1):
            log.info("%s depth %d of %d", what, depth, n)
            jax.block_until_ready(part.scheduler.state)  # ends the last steps
            begin = clock()
            part.grow(depth)
            jax.block_until_ready(part.weights)
            loaded = clock() - begin
            cached = part.scheduler.num_cached_tokens
            jax.block_until_ready(part.scheduler.state)
            begin = clock()
            part.adopt_growth()
            jax.block_until_ready(part.scheduler.state)
            filled = (clock() - begin) / max(cached, 1)
            rows.append(_Depth(part, texts, new, clock, loaded, filled))
        leaving = _Depth(part, texts, new, clock, rules=member.rules)
        weights = part.engine.weights
        sizes = [nbytes(segment) for segment in weights.segments]
        outside = [
            nbytes(unlayered_params(weights.params, member.config, d)) for d in range(1, n + 1)
        ]
        return rows, leaving, sizes, outside

    grown("compiling")  # the result is freed before the next one is made
    rows, leaving, sizes, outside = grown("measuring")

    def steps(values):
        return np.maximum(np.diff([0.0, *values]), 0.0)

    scores = calibration.score(member.params, member.config, batches)
    rules: dict[str, Any] = {**member.rules}
    rules.pop("prefill_exit", None)  # affects only prompts
    threshold = rules.pop("threshold", 1.0)
    leaves = calibration.emitting_exits(scores, threshold, **rules)
    same = scores.tokens == scores.tokens[-1]

    def share(e, which):
        return float(same[e][which].mean()) if which.any() else float(same[e].mean())

    layers = layer_flops(member.config)
    heads = np.diff([0.0, *(token_work(member.config, e).flops for e in range(n))]) - layers
    seconds = steps([row.token for row in rows])
    ideal = sum(leaving.reach[e] * seconds[e] for e in range(n))
    return ModelProfile(
        slots=tuple(row.slots for row in rows),
        state=tuple(row.state for row in rows),
        seconds=_floats(seconds),
        prefill=_floats(steps([row.first for row in rows])),
        load=_floats(row.loaded for row in rows),
        rebuild=_floats([rows[0].first / rows[0].given, *(row.filled for row in rows[1:])]),
        bytes=_floats(np.array(sizes) + steps(outside)),
        energy=_floats(layers),
        heads=_floats(heads),
        sure=_floats(share(e, leaves == e) for e in range(n)),
        shares=_floats((leaves == e).mean() for e in range(n)),
        unsure=_floats([*(share(e, leaves > e) for e in range(n - 1)), 1.0]),
        agrees=_floats(same[e].mean() for e in range(n)),
        saved=_part(sum(seconds), leaving.token, ideal),
        spared=spared(leaving.exits.values(), layers, member.options.cap),
    )


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(map(float, values))


def generate_answers(
    member: FleetMember,
    texts: Sequence[Sequence[int]],
    *,
    slots: int | Sequence[int],
    context: int | None = None,
    new: int = 32,
) -> dict[int, list[tuple[Sequence[int], list[int]]]]:
    """Return a model's greedy answers to texts, by the number of its loaded exits.

    All tokens leave by the last loaded exit. Each answer is (text, the `new` tokens after it).
    """
    found = {}
    for depth in range(1, member.config.n_exits + 2):
        part = PartialModel(
            member.params, member.config, member.options, slots=slots, depth=depth, context=context
        )
        answers: list[list[int]] = [[] for _ in texts]
        for i, text in enumerate(texts):
            part.scheduler.add_request(EngineRequest(str(i), tuple(text), new))
        for id_, tokens, _ in part.run():
            answers[int(id_)] += [token.id for token in tokens]
        found[depth] = [(text, ids) for text, ids in zip(texts, answers, strict=True) if ids]
    return found


def _part(most: float, took: float, ideal: float) -> float:
    """Return the share of the possible savings that was realized."""
    return float(np.clip((most - took) / (most - ideal), 0.0, 1.0)) if most > ideal else 1.0


def spared(texts: Iterable[Sequence[int]], layers: Sequence[float], cap: int) -> float:
    """Return the share of savings in layer operations that is kept if at most `cap` tokens wait.

    `texts` has the exits by which the tokens of each text left (`ModelProfile.spared`).
    """
    n, texts = len(layers), [[*exits][1:] for exits in texts]  # the prompt's pass emits the first
    run = np.array([segment_rows(exits, n, cap) for exits in texts])
    reached = np.array([[sum(e >= s for e in exits) for s in range(n)] for exits in texts])
    whole = sum(map(len, texts)) * sum(layers)
    return _part(whole, (run @ layers).sum(), (reached @ layers).sum())


class _Depth:
    """Measured depth of a model, without early exits or with the `rules` of a policy.

    Attributes:
      token: seconds per token while all slots decode.
      first: seconds to the first token of a lone request, with a prompt of `given` tokens.
      reach: shares of tokens that left by each exit or a later one.
      exits: exits by which the tokens of each request left.
      loaded, filled: seconds of loading and of filling in, measured before.
    """

    def __init__(
        self,
        part: PartialModel,
        texts,
        new,
        clock,
        loaded=0.0,
        filled=0.0,
        rules: MemberRules | None = None,
    ):
        self.loaded, self.filled, self.slots = loaded, filled, part.engine.slots
        self.state = nbytes(part.scheduler.state)
        scheduler, config = part.scheduler, part.config
        for id_ in [*scheduler.running, *scheduler.waiting]:
            scheduler.abort(id_)
        part.run()
        policy = ExitPolicy.make(config, 1, **(rules or MemberRules()))
        slots, room, left = part.engine.slots, part.engine.context, np.zeros(config.n_exits + 1)
        count, decoded, begun = 0, None, set()
        self.exits: dict[str, list[int]] = {}
        # The first requests must still run when the last one begins.
        texts = [tuple(text)[: room // 2] for text in texts]
        longest = max(texts, key=len)
        begin = clock()
        scheduler.add_request(EngineRequest("longest", longest, 1, policy))
        part.run()
        self.first, self.given = clock() - begin, len(longest)
        for i in range(slots):
            text = texts[i % len(texts)]
            scheduler.add_request(EngineRequest(str(i), text, room - len(text), policy))
        while count < slots * new and not part.idle:
            for id_, tokens, _ in part.step():
                begun |= {id_} if tokens else set()
                self.exits.setdefault(id_, []).extend(token.exit for token in tokens)
                for token in tokens if decoded is not None else ():
                    left[token.exit] += 1
                    count += 1
            if decoded is None and len(begun) == slots:
                decoded = clock()
        if decoded is None:
            raise DataError("its logits are not finite: look for NaN in its parameters.")
        self.token = (clock() - decoded) / max(count, 1)
        self.reach = np.cumsum(left[::-1])[::-1] / max(count, 1)
