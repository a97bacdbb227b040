"""Continuous batching in which every request exits by its own gate.

The model is cut into segments at its exits, and a *sweep* gives each segment its turn, from the
lowest: the slots whose newest token wants through it are gathered, with all rows of theirs that
wait below it (KV recomputation, as in `recompute`), and run as one flat batch of rows, padded to
the smallest of a few buckets. Who exits goes on with its next token in the next sweep; who does not
stands at the next segment. Few that want through a segment may be held back for others to come
(`packing`), while these go on. Keys and values stay where they are, by slot. Prompts are run in
chunks, one a sweep, beside the requests that decode.

Every request gets the tokens and exits that `posthoc` gives it alone.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from eejax.common.errors import require, require_count
from eejax.common.trees import Tree
from eejax.gates.confidence import Memory
from eejax.inference import state as s
from eejax.inference.engine import Slots, check_slots
from eejax.inference.packing import HELD, IN_PLACE, PACKED, Chosen, Plan, choose
from eejax.inference.policy import Emission, Look, conclude, consider
from eejax.inference.state import Record, Request, Weights
from eejax.models import transformer
from eejax.models.cache import KVCache, init_cache, run_packed, run_segment
from eejax.models.config import ModelConfig
from eejax.models.mixing import Packed

SPAN = 4  # rows of a slot that attention takes together
PROMPT_SPAN = 32  # of a prompt
PROMPT = -1  # `stage` of a request whose prompt is not done


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Static choices of the engine `batched`; each combination compiles once.

    cap: most tokens of a request that may wait for deeper keys and values; with so many it runs
        through all layers before its next token.
    buckets: row counts that a segment is compiled for, ascending; the largest is at least the cap.
        Empty: powers of two up to twice the slots, or the cap.
    chunk: prompt tokens of a sweep.
    max_depth: segments to load, from the bottom; None: all.
    """

    cap: int = 16
    buckets: tuple[int, ...] = ()
    chunk: int = 64
    max_depth: int | None = None

    def __post_init__(self):
        listed = isinstance(self.buckets, tuple | list)
        require(listed, "buckets", self.buckets, "must be a sequence of row counts")
        for w in self.buckets:
            require_count("buckets", w)
        object.__setattr__(self, "buckets", tuple(sorted({*self.buckets})))
        for name in ("cap", "chunk"):
            require_count(name, getattr(self, name))
        if self.max_depth is not None:
            require_count("max_depth", self.max_depth)
        require(
            not self.buckets or self.buckets[-1] >= self.cap,
            "buckets", self.buckets, f"must reach the cap, {self.cap}, at least",
            "A request's waiting tokens go deeper together.",
        )  # fmt: skip

    @property
    def leaves_early(self) -> bool:
        return True

    def of_slots(self, slots: int) -> BatchOptions:
        """With the buckets there are for so many slots."""
        if self.buckets:
            return self
        most = max(2 * slots, self.cap)
        powers = [1 << i for i in range(1, most.bit_length()) if 1 << i < most]
        return dataclasses.replace(self, buckets=(*powers, most))


@struct.dataclass
class Work:
    """What was run since the start, in numbers that begin anew at 2^32.

    runs [e, 1 + buckets]: of each segment in place, and of each bucket; spans [e]: of packed rows;
    chunks, chunk_spans: of prompts; sweeps.
    """

    runs: jax.Array
    spans: jax.Array
    chunks: jax.Array
    chunk_spans: jax.Array
    sweeps: jax.Array


@struct.dataclass
class BatchedState:
    """Everything that slots carry from sweep to sweep; arrays are [slots, ...].

    cache, waiting, token, position, remaining, request: as in `state.DecodeState`.
    memory: what gates carry from exit to exit of the newest token.
    stage: the segment that the newest token is to go through next, `PROMPT` while the prompt is
        not done; since: the sweep in which it came there.
    prompt [slots, context], given: the tokens a request came with, and how many. They are more
        than `request.start` where it had been under way before: then what follows is decoded.
    clock: sweeps since the start.
    """

    cache: KVCache
    waiting: tuple[jax.Array, ...]
    memory: Memory
    token: jax.Array
    position: jax.Array
    remaining: jax.Array
    stage: jax.Array
    since: jax.Array
    prompt: jax.Array
    given: jax.Array
    clock: jax.Array
    work: Work
    plan: Plan
    request: Request

    @property
    def live(self) -> jax.Array:
        return self.remaining > 0


class Flat(NamedTuple):
    """Rows of some slots, packed. order [r]: the slots, longest waiting first; valid [r]: whether
    one is meant; last [r]: its last row."""

    packed: Packed
    order: jax.Array
    valid: jax.Array
    last: jax.Array


@partial(jax.jit, static_argnames=("config", "options", "slots", "length", "context"))
def blank(
    weights: Weights, plan: Plan, *, config: ModelConfig, options: BatchOptions, slots: int,
    length: int, context: int,
) -> BatchedState:  # fmt: skip
    """All slots free; `length` positions of cache for each."""
    n = weights.last
    zero, none = jnp.zeros((slots,), jnp.int32), jnp.zeros((), jnp.uint32)
    ring = lambda: jnp.zeros((slots, options.cap, config.d_model), config.dtype)
    return BatchedState(
        cache=init_cache(config, slots, length, n + 1, weights.axes),
        waiting=tuple(ring() for _ in range(n)),
        memory=Memory.blank(jnp.zeros((slots, config.d_model), config.dtype)),
        token=zero, position=zero, remaining=zero, stage=zero, since=zero,
        prompt=jnp.zeros((slots, context), jnp.int32), given=zero, clock=jnp.int32(0),
        work=Work(
            jnp.zeros((n + 1, 1 + len(options.buckets)), jnp.uint32),
            jnp.zeros((n + 1,), jnp.uint32), none, none, none,
        ),
        plan=plan,
        request=Request.blank(config, slots),
    )  # fmt: skip


def flatten(chosen: Chosen, start: jax.Array, size: int, width: int) -> Flat:
    """Chosen rows, from positions `start` [slots] onward, as `size` flat ones."""
    slots = start.shape[0]
    count = chosen.count[chosen.order]
    ends = jnp.cumsum(count)
    begins = ends - count
    row = jnp.arange(size, dtype=jnp.int32)
    i = jnp.minimum(jnp.searchsorted(ends, row, side="right"), slots - 1)
    real = row < ends[-1]
    slot = jnp.where(real, chosen.order[i], slots)
    behind = row - begins[i]
    position = jnp.where(real, start[chosen.order[i]] + behind, 0)
    first = jnp.nonzero(real & (behind % width == 0), size=size, fill_value=0)[0]
    spans = jnp.sum(-(-count // width))
    r = min(size, slots)
    packed = Packed(slot, position, first.astype(jnp.int32), spans, width)
    return Flat(packed, chosen.order[:r], count[:r] > 0, jnp.maximum(ends - 1, 0)[:r])


def _look(weights, config, state, e, order, x, h, allowed, emission, memory):
    """Exit e's turn for slots `order` (None: all of them, in place); x, h [r, d] of their newest
    tokens, allowed [r]. Emission and memory [slots] with what they leave."""
    take = lambda tree: tree if order is None else jax.tree.map(lambda a: a[order], tree)
    request, position = take((state.request, state.position + 1))
    logits = lambda: s.step_logits(weights, config, e, h)
    look = Look(e, x, logits, allowed, position, request.progress(position))
    before = take((emission, memory))
    if e == weights.last:
        after = conclude(before[0], look, request.sampling), before[1]
    else:
        after = consider(*before, look, request.policy, request.sampling, config)

    def put(whole, old, new):
        new = jnp.where(allowed.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
        return new if order is None else whole.at[order].set(new)

    return jax.tree.map(put, (emission, memory), before, after)


def _in_place(weights, config, state, e, count, decides, carry):
    """One row of every slot through segment e; a branch of a conditional."""
    emission, memory, below, above, kvs, block = carry
    start, slots = state.cache.filled[:, e], state.token.shape[0]
    x = s.embed_last(weights, config, state) if e == 0 else _rows(below, jnp.arange(slots), start)
    x, h, kvs, block = run_segment(
        weights.params, weights.segments[e], config, e, x, start, kvs, block, axes=weights.axes
    )
    above = _stored(above, jnp.where(count > 0, jnp.arange(slots), slots), start, x)
    emission, memory = _look(
        weights, config, state, e, None, x[:, 0], h[:, 0], decides, emission, memory
    )
    return emission, memory, below, above, kvs, block


def _packed(weights, config, state, e, size, chosen, decides, carry):
    """The chosen rows through segment e, as `size` flat ones; a branch of a conditional."""
    emission, memory, below, above, kvs, block = carry
    flat = flatten(chosen, state.cache.filled[:, e], size, SPAN)
    packed = flat.packed
    if e == 0:
        token = state.token[jnp.minimum(packed.slot, len(state.token) - 1)]
        x = transformer.embed(
            weights.params, config, token[:, None], packed.position[:, None], weights.axes
        )
    else:
        x = _rows(below, packed.slot, packed.position)
    x, h, kvs, block = run_packed(
        weights.params, weights.segments[e], config, e, x, packed, kvs, block, axes=weights.axes
    )
    above = _stored(above, packed.slot, packed.position, x)
    allowed = flat.valid & decides[flat.order]
    emission, memory = _look(
        weights, config, state, e, flat.order, x[flat.last, 0], h[flat.last, 0], allowed, emission,
        memory,
    )  # fmt: skip
    return emission, memory, below, above, kvs, block


def _rows(ring: jax.Array, slot: jax.Array, position: jax.Array) -> jax.Array:
    """[t, 1, d]: the states of slots [t] that wait at positions [t] in a ring [slots, cap, d]."""
    return ring[jnp.minimum(slot, len(ring) - 1), position % ring.shape[1]][:, None]


def _stored(ring: jax.Array, slot: jax.Array, position: jax.Array, x: jax.Array) -> jax.Array:
    """The ring with states x [t, 1, d] of slots [t], left out where there is no such slot."""
    if not ring.shape[1]:
        return ring
    return ring.at[slot, position % ring.shape[1]].set(x[:, 0], mode="drop")


def sweep(
    weights: Weights, state: BatchedState, *, config: ModelConfig, options: BatchOptions
) -> tuple[BatchedState, Record]:
    """Every segment's turn, then a chunk of prompts: at most one token for every slot."""
    n, slots = weights.last, state.token.shape[0]
    emission, memory = s.undecided(weights, slots), state.memory
    begun = state.remaining
    for e in range(n + 1):
        filled, live = state.cache.filled, state.live
        full = filled[:, 0] - filled[:, n] >= options.cap  # before its next token all must go deeper
        fresh = live & (state.stage == 0) & (emission.exit < 0)
        if e == 0:
            decides = fresh & ~full
            goes, rows = decides, jnp.ones_like(state.stage)
            memory = jax.tree.map(
                lambda a, b: jnp.where(decides.reshape(-1, *(1,) * (a.ndim - 1)), b, a),
                memory, Memory.blank(memory.state),
            )  # fmt: skip
        else:
            decides = live & (state.stage == e)
            rows = filled[:, e - 1] - filled[:, e]
            goes = decides | (live & (state.stage == 0) & full & (rows > 0))
        # Those whom the next sweep finds with a token to begin, or still with their prompt.
        movers = jnp.any(live & (((state.stage == 0) & ~full) | (state.stage == PROMPT))) & (e > 0)
        chosen = choose(
            jnp, state.plan, e, options.buckets, SPAN, goes, rows, state.clock - state.since, movers
        )
        taken = chosen.count > 0
        decides &= taken
        # All slots in place: others' oldest waiting rows ride along.
        riders = live & (rows > 0) & (state.stage != PROMPT) if e else taken
        in_place = jnp.where(taken | riders, 1, 0)
        below = state.waiting[e - 1] if e else jnp.zeros((slots, 0, 0))
        above = state.waiting[e] if e < n else jnp.zeros((slots, 0, 0))
        carry = (
            emission, memory, below, above, state.cache.segments[e], state.cache.blocks[e]
        )  # fmt: skip
        ways = {IN_PLACE: partial(_in_place, weights, config, state, e, in_place, decides)}
        for i, size in enumerate(options.buckets):
            ways[PACKED + i] = partial(_packed, weights, config, state, e, size, chosen, decides)
        for way, run in ways.items():  # conditionals of two branches each: see `recompute`
            which = (chosen.way == way).astype(jnp.int32)
            carry = lax.switch(which, [lambda c: c, run], carry)
        emission, memory, _, above, kvs, block = carry
        count = jnp.where(chosen.way == IN_PLACE, in_place, chosen.count)
        fires = decides & (emission.exit == e)
        stage = jnp.where(fires, 0, jnp.where(decides, e + 1, state.stage))
        swap = lambda tree, new, e=e: (*tree[:e], new, *tree[e + 1 :])
        state = state.replace(
            cache=KVCache(
                swap(state.cache.segments, kvs), swap(state.cache.blocks, block),
                filled.at[:, e].add(count),
            ),
            waiting=swap(state.waiting, above) if e < n else state.waiting,
            stage=stage,
            since=jnp.where(decides, state.clock, state.since),
            work=_counted(state.work, e, chosen),
        )  # fmt: skip

    prompting = state.live & (state.stage == PROMPT)
    carry = emission, memory, state.cache, state.work
    run = partial(_chunk, weights, config, options, state, prompting)
    some = jnp.any(prompting).astype(jnp.int32)
    emission, memory, cache, work = lax.switch(some, [lambda c: c, run], carry)
    emits = emission.exit >= 0
    stopped = jnp.any(emission.token[:, None] == state.request.stops, -1)
    none = jnp.zeros_like(emission.token)
    record = Record(
        token=jnp.where(emits, emission.token, -1),
        logprob=emission.logprob,
        confidence=emission.confidence,
        exit=emission.exit,
        layers=jnp.where(
            emits,
            jnp.where(prompting, config.stops[n], jnp.array(config.stops)[emission.exit]), 0,
        ).astype(jnp.int32),
        margin=emission.margin,
        drafted=none,
        accepted=none,
    )  # fmt: skip
    return state.replace(
        cache=cache, memory=memory,
        token=jnp.where(emits, emission.token, state.token),
        position=state.position + emits.astype(jnp.int32),
        remaining=jnp.where(emits, jnp.where(stopped, 0, begun - 1), begun),
        stage=jnp.where(prompting & emits, 0, state.stage),
        since=jnp.where(emits, state.clock + 1, state.since),
        clock=state.clock + 1,
        work=work.replace(sweeps=work.sweeps + 1),
    ), record  # fmt: skip


def _counted(work: Work, e: int, chosen: Chosen) -> Work:
    ways = jnp.arange(work.runs.shape[1]) + IN_PLACE
    spans = jnp.where(chosen.way >= PACKED, chosen.spans, 0)
    return work.replace(
        runs=work.runs.at[e].add((ways == chosen.way).astype(jnp.uint32)),
        spans=work.spans.at[e].add(spans.astype(jnp.uint32)),
    )


def _chunk(weights, config, options, state, prompting, carry):
    """A chunk of prompts through all segments, those that came first first; a branch."""
    emission, memory, cache, work = carry
    start, slots = cache.filled[:, 0], len(prompting)
    left = jnp.where(prompting, state.given - start, 0)
    order = jnp.argsort(jnp.where(prompting, state.since, jnp.iinfo(jnp.int32).max), stable=True)
    upto = jnp.cumsum(left[order])
    count = jnp.clip(left[order] - jnp.maximum(upto - options.chunk, 0), 0)[jnp.argsort(order)]
    flat = flatten(
        Chosen(PACKED, count, order, None), start, options.chunk,
        min(PROMPT_SPAN, options.chunk),
    )  # fmt: skip
    packed = flat.packed
    token = state.prompt[jnp.minimum(packed.slot, slots - 1), packed.position]
    x = transformer.embed(
        weights.params, config, token[:, None], packed.position[:, None], weights.axes
    )
    done = flat.valid & (count == left)[flat.order]
    # What a request had been given before is decoded on: its next token may leave by any exit.
    early = state.request.policy.prefill_exit | (state.given > state.request.start)
    segments, blocks = [], []
    for e, layers in enumerate(weights.segments):
        x, h, kvs, block = run_packed(
            weights.params, layers, config, e, x, packed, cache.segments[e], cache.blocks[e],
            axes=weights.axes,
        )  # fmt: skip
        segments.append(kvs)
        blocks.append(block)
        allowed = done if e == weights.last else done & early[flat.order]
        if e == 0:
            memory = jax.tree.map(
                lambda a, b: jnp.where(prompting.reshape(-1, *(1,) * (a.ndim - 1)), b, a),
                memory, Memory.blank(memory.state),
            )  # fmt: skip
        emission, memory = _look(
            weights, config, state, e, flat.order, x[flat.last, 0], h[flat.last, 0], allowed,
            emission, memory,
        )  # fmt: skip
    cache = KVCache(tuple(segments), tuple(blocks), cache.filled + count[:, None])
    work = work.replace(
        chunks=work.chunks + 1, chunk_spans=work.chunk_spans + packed.spans.astype(jnp.uint32)
    )
    return emission, memory, cache, work


@partial(jax.jit, static_argnames=("config", "options", "n"), donate_argnames="state")
def decode(
    weights: Weights, state: BatchedState, *, config: ModelConfig, options: BatchOptions, n: int
) -> tuple[BatchedState, Record]:
    """Up to `n` sweeps in one compiled loop: records [n, slots]. Ends when all requests are done."""
    run = partial(sweep, config=config, options=options)
    shapes = jax.eval_shape(run, weights, state)[1]
    records = jax.tree.map(lambda r: jnp.zeros((n, *r.shape), r.dtype), shapes)
    records = records._replace(exit=jnp.full_like(records.exit, -1))

    def body(carry):
        i, state, records = carry
        state, record = run(weights, state)
        put = lambda a, r: lax.dynamic_update_index_in_dim(a, r, i, 0)
        return i + 1, state, jax.tree.map(put, records, record)

    carry = (jnp.int32(0), state, records)
    return lax.while_loop(lambda c: (c[0] < n) & jnp.any(c[1].live), body, carry)[1:]


@partial(jax.jit, donate_argnums=0)
def _insert(state: BatchedState, tokens, given, request, slots) -> BatchedState:
    put = lambda a, rows: a.at[slots].set(rows, mode="drop")
    return state.replace(
        cache=state.cache.replace(filled=put(state.cache.filled, 0)),
        position=put(state.position, given - 1),
        remaining=put(state.remaining, jnp.maximum(request.limit - (given - request.start), 0)),
        stage=put(state.stage, PROMPT),
        since=put(state.since, state.clock),
        prompt=put(state.prompt, tokens),
        given=put(state.given, given),
        request=jax.tree.map(put, state.request, request),
    )


@partial(jax.jit, donate_argnums=0)
def _free(state: BatchedState, slots) -> BatchedState:
    none = lambda a: a.at[slots].set(0, mode="drop")
    return state.replace(
        cache=state.cache.replace(filled=none(state.cache.filled)),
        position=none(state.position), remaining=none(state.remaining), stage=none(state.stage),
    )  # fmt: skip


class Joining(NamedTuple):
    """What `BatchedEngine.prefill` makes: padded prompts [m, context], their lengths, requests."""

    tokens: np.ndarray
    given: np.ndarray
    request: Request


@dataclasses.dataclass(frozen=True)
class BatchedEngine(Slots):
    """An `engine.Engine` whose requests exit, wait and go deeper each by its own gate.

    `prefill` runs nothing: prompts are run by `generate`, in chunks, and so come first tokens. A
    prompt may be longer than `request.start`: what is behind that was generated before, and the
    request goes on from there as if it had never left its slot.

    `plan` says what is measured and how long to hold requests back (`batch_plan`); the state
    carries it, and `replan` changes it in a running one.
    """

    weights: Weights
    config: ModelConfig
    options: BatchOptions
    slots: int
    context: int
    plan: Plan

    resumes = True

    @classmethod
    def make(
        cls,
        params: Tree,
        config: ModelConfig,
        options: BatchOptions | None = None,
        *,
        slots: int,
        context: int | None = None,
        plan: Plan | None = None,
    ) -> BatchedEngine:
        """From training parameters. Raises ConfigError for slots, a context or options there cannot
        be."""
        context = check_slots(config, slots, context)
        options = (BatchOptions() if options is None else options).of_slots(slots)
        most, n = config.context_length, config.n_exits + 1
        require(
            options.max_depth is None or options.max_depth <= n, "max_depth", options.max_depth,
            f"must be at most {n}, the segments of this model",
        )  # fmt: skip
        for name in ("cap", "chunk"):
            value = getattr(options, name)
            require(value <= most, name, value, f"must be at most {most}, the model's context_length")
        weights = s.prepare(params, config, options.max_depth)
        plan = plan or Plan.make(len(weights.segments), slots, options.buckets)
        return cls(weights, config, options, slots, context, plan)

    @property
    def max_depth(self) -> int:
        return len(self.weights.segments)

    def start(self) -> BatchedState:
        length = self.context + max(SPAN, min(PROMPT_SPAN, self.options.chunk))
        return blank(
            self.weights, self.plan, config=self.config, options=self.options, slots=self.slots,
            length=length, context=self.context,
        )  # fmt: skip

    def _prefill(self, tokens, given, request) -> tuple[Joining, Record]:
        m = len(tokens)
        none = np.zeros((m,), np.int32)
        zero = np.zeros((m,), np.float32)
        record = Record(
            none - 1, zero, zero, none - 1, none, np.full_like(zero, np.inf), none, none
        )
        return Joining(tokens, given, request), record

    def _insert(self, state, rows, slots) -> BatchedState:
        return _insert(state, rows.tokens, rows.given, rows.request, slots)

    def _decode(self, state, n) -> tuple[BatchedState, Record]:
        return decode(self.weights, state, config=self.config, options=self.options, n=n)

    def _free(self, state, slots) -> BatchedState:
        return _free(state, slots)
