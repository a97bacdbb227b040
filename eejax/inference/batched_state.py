"""What the engine `batched` keeps of every slot, and its static choices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from eejax.common.errors import require, require_count
from eejax.inference.packing import Plan, Standing
from eejax.inference.shaping import Likely, Shaping
from eejax.inference.state import Request, Weights
from eejax.kernels import call
from eejax.models.cache import KVCache, init_cache
from eejax.models.config import ModelConfig

CHUNKS = {"cpu": 64, "gpu": 512}
"""Prompt tokens of a sweep by default. Every chunk reads the whole model: a GPU needs some hundreds
of rows for their products to take as long."""


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Static choices of the engine `batched`; each combination compiles once.

    cap: most tokens of a request that may wait for deeper keys and values; with so many it runs
        through all layers before its next token.
    buckets: row counts that a segment is compiled for, ascending; the largest is at least the cap.
        Empty: powers of two from a quarter of the slots up to all that they may have pending, and
        one row, so that a request that is alone does not pay for the slots that are free.
    chunk: prompt tokens of a sweep. None: as many as the device takes well together (`CHUNKS`), and
        at most the engine's context.
    drafts: most tokens of a request that are drafted past one that no exit has decided yet; which
        may, and how many, is said by its `ExitPolicy.drafts`.
    max_depth: segments to load, from the bottom; None: all.
    shaping: whether requests may bring a `Shaping`.
    grows: whether segments may be added while requests run (`deepening.deepen`): then the states
        behind the last one are kept of all positions.
    """

    cap: int = 16
    buckets: tuple[int, ...] = ()
    chunk: int | None = None
    drafts: int = 4
    max_depth: int | None = None
    shaping: bool = False
    grows: bool = False

    def __post_init__(self):
        listed = isinstance(self.buckets, tuple | list)
        require(listed, "buckets", self.buckets, "must be a sequence of row counts")
        for w in self.buckets:
            require_count("buckets", w)
        object.__setattr__(self, "buckets", tuple(sorted({*self.buckets})))
        require_count("cap", self.cap)
        if self.chunk is not None:
            require_count("chunk", self.chunk)
        require_count("drafts", self.drafts, least=0)
        if self.max_depth is not None:
            require_count("max_depth", self.max_depth)
        for name in ("shaping", "grows"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, value, "must be True or False")
        require(
            not self.buckets or self.buckets[-1] >= self.cap,
            "buckets", self.buckets, f"must reach the cap, {self.cap}, at least",
            "A request's waiting tokens go deeper together.",
        )  # fmt: skip

    @property
    def leaves_early(self) -> bool:
        return True

    def of_model(self, config: ModelConfig) -> BatchOptions:
        """Choose the chunk where none is given; one request's context is no bound for it."""
        if self.chunk is not None:
            return self
        most = CHUNKS["gpu" if call.for_gpu() else "cpu"]
        return dataclasses.replace(self, chunk=min(most, config.context_length))

    def of_slots(self, slots: int) -> BatchOptions:
        """With the buckets there are for so many slots."""
        if self.buckets:
            return self
        most = max(slots * min(max(self.drafts + 1, 2), self.cap), self.cap)
        least = max(slots // 4, 4)  # fewer take hardly less time
        powers = [1 << i for i in range((most - 1).bit_length() + 1) if 1 << i >= least]
        alone = (1,) if slots > 1 else ()  # one slot is run in place
        buckets = (*alone, *(powers or [1 << (most - 1).bit_length()]))
        return dataclasses.replace(self, buckets=buckets)


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
class Pending:
    """What is known of the newest rows of every slot: [slots, m], position p's in place p % m.

    fed: the token the row reads; token, logprob, confidence, exit: of the one that follows, by the
    exit that decided it, -1 while none has: then `token` is a draft. seen, streak: what the gates
    remember of the row (`Memory`). drafted: whether the row behind it began with the draft;
    accepted: whether that was right. likely: [slots, m, ...], where requests may ask for them.
    """

    fed: jax.Array
    token: jax.Array
    logprob: jax.Array
    confidence: jax.Array
    exit: jax.Array
    seen: jax.Array
    streak: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    likely: Likely | None

    @classmethod
    def blank(cls, *shape: int, shaping: bool) -> Pending:
        none, zero = jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.int32)
        number, likely = jnp.zeros(shape, jnp.float32), Likely.blank(*shape) if shaping else None
        return cls(zero, none, number, number, none, none, zero, zero, zero, likely)


@struct.dataclass
class BatchedState:
    """Everything that slots carry from sweep to sweep; arrays are [slots, ...].

    cache, waiting, token, position, remaining, request: as in `state.DecodeState`. The row at
    `position` decides the token to emit next. Rows from there on that the first segment has seen
    are *pending*: the first is undecided, those behind it read drafts.
    since: the sweep in which the first pending row came to the segment it stands at.
    prompt [slots, context], given: the tokens a request came with, and how many. They are more
        than `request.start` where it had been under way before: then what follows is decoded.
        Behind them, where requests may bring a `Shaping`, what was generated since.
    clock: sweeps since the start.
    boundary [slots, length, d]: the states behind the last segment, of the positions that it has
        seen, where segments may be added; else None.
    """

    cache: KVCache
    boundary: jax.Array | None
    waiting: tuple[jax.Array, ...]
    pending: Pending
    token: jax.Array
    position: jax.Array
    remaining: jax.Array
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

    @property
    def standing(self) -> Standing:
        return Standing(self.cache.filled, self.position, self.remaining, self.given)

    def begins(self, cap: int) -> jax.Array:
        """`Standing.begins`; nothing is drafted behind a draft that would end the request, or where
        there is none, as drafting was paused."""
        policy, m = self.request.policy, self.pending.fed.shape[1]
        most = jnp.where(policy.paused, 0, jnp.minimum(policy.drafts, m - 1))
        if self.request.shaping is not None:  # penalties are of tokens that are decided
            most = jnp.where(self.request.shaping.changes, 0, most)
        last = at(self.pending.token, self.cache.filled[:, 0] - 1)[:, None]
        most = jnp.where(stops(self.request, last)[:, 0] | (last[:, 0] < 0), 0, most)
        return self.standing.begins(cap, most)


def at(a: jax.Array, position: jax.Array) -> jax.Array:
    """[slots] of a [slots, m]: what is kept of positions [slots]."""
    return jnp.take_along_axis(a, (position % a.shape[1])[:, None], 1)[:, 0]


def stops(request: Request, tokens: jax.Array) -> jax.Array:
    """[slots, n] whether tokens [slots, n] end their requests."""
    return jnp.any(tokens[..., None] == request.stops[:, None], -1)


def blank(
    weights: Weights, plan: Plan, *, config: ModelConfig, options: BatchOptions, slots: int,
    length: int, context: int,
) -> BatchedState:  # fmt: skip
    """All slots free; `length` positions of cache for each."""
    n = weights.last
    zero, none = jnp.zeros((slots,), jnp.int32), jnp.zeros((), jnp.uint32)
    ring = lambda: jnp.zeros((slots, options.cap, config.d_model), config.dtype)
    above = options.grows and n < config.n_exits
    return BatchedState(
        cache=init_cache(config, slots, length, n + 1, weights.axes),
        boundary=jnp.zeros((slots, length, config.d_model), config.dtype) if above else None,
        waiting=tuple(ring() for _ in range(n)),
        pending=Pending.blank(slots, options.drafts + 1, shaping=options.shaping),
        token=zero, position=zero, remaining=zero, since=zero,
        prompt=jnp.zeros((slots, context), jnp.int32), given=zero, clock=jnp.int32(0),
        work=Work(
            jnp.zeros((n + 1, 1 + len(options.buckets)), jnp.uint32),
            jnp.zeros((n + 1,), jnp.uint32), none, none, none,
        ),
        plan=plan,
        request=Request.blank(config, slots).replace(
            shaping=Shaping.blank(slots) if options.shaping else None
        ),
    )  # fmt: skip
