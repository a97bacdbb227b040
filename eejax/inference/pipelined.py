"""Early-exit decoding on a pipeline of stages (EE-LLM, section 4 and Appendix D.3).

A token runs through the stages in order. Where its gate fires it is emitted, and the first stage
starts the next token while later stages still compute the old one's keys and values. So every layer
has the keys and values of every token and computes them once, and tokens and exits equal those of
`posthoc`.

Decoding is one compiled loop of ticks. In a tick every stage runs one part of its layers
(`StagedModel.ends`) for the token that each request has there. Then all stages exchange what was
emitted, and pass finished tokens on to the inbox of the next stage. Requests are independent
streams with their own positions on every stage: in one tick they may be at different parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eejax.common.axes import DATA, PIPE
from eejax.common.errors import require
from eejax.common.trees import Tree, where_rows
from eejax.gates.confidence import Memory
from eejax.inference import sharded
from eejax.inference import state as s
from eejax.inference.generate import Decoder, decode_size
from eejax.inference.options import PIPELINED, EngineOptions, engine_config, given_options
from eejax.inference.policy import Emission
from eejax.inference.stages import (
    DecodingStage,
    StageCache,
    StagedModel,
    StageRows,
    StageWeights,
)
from eejax.inference.state import DecodeRecord, RequestRows
from eejax.models.cache import varying
from eejax.models.config import ModelConfig
from eejax.pipeline.layout import StageLayout
from eejax.pipeline.partition import EVEN, partition
from eejax.pipeline.residuals import send
from eejax.pipeline.stage import vary_over
from eejax.sharding.mesh import MeshConfig, check_batch, known_mesh


class InFlightToken(NamedTuple):
    """A token on its way through the stages; leaves [b, ...], in an inbox [b, cap, ...].

    Attributes:
      x: [d] its state.
      emitted: an exit has emitted the next token from it.
      memory: what gates remember about it.
    """

    x: jax.Array
    emitted: jax.Array
    memory: Memory

    @classmethod
    def blank(cls, x: jax.Array) -> InFlightToken:
        """Return tokens at the first layer with states x [b, d]."""
        return cls(x, jnp.zeros_like(x[:, 0], bool), Memory.blank(x))


class StageProgress(struct.PyTreeNode):
    """Progress of a stage with every request; leaves [P, b], those of the inbox [P, b, cap, ...].

    Attributes:
      done: positions whose keys and values are complete on the stage (`KVCache.filled`).
      part: finished parts of the position after those.
      come: positions that have reached the inbox, position p at index p % cap. The first stage
        reads the last emitted token instead.
      inbox: the tokens that have arrived.
    """

    done: jax.Array
    part: jax.Array
    come: jax.Array
    inbox: InFlightToken


class PipelineState(struct.PyTreeNode):
    """`EngineState` of a pipeline; what belongs to stages is sharded over `pipe`.

    Attributes:
      progress: progress of the stages.
      kept: [b] positions that are complete on the last stage; all stages have this number.
      ticks: [] ticks since the prompts' pass.
    """

    cache: StageCache
    progress: StageProgress
    kept: jax.Array
    ticks: jax.Array
    token: jax.Array
    position: jax.Array
    remaining: jax.Array
    request: RequestRows

    @property
    def live(self) -> jax.Array:
        return self.remaining > 0


def state_specs(stages: StagedModel) -> PipelineState:
    """Return prefixes of a state's partition specs."""
    specs: dict[str, Any] = dict.fromkeys(
        (f.name for f in dataclasses.fields(PipelineState)), P(DATA)
    )
    specs.update(cache=stages.cache_spec, progress=P(PIPE, DATA), ticks=P())
    return PipelineState(**specs)


def _on_stage(state: PipelineState, f) -> PipelineState:
    """Apply f to the parts of a state that belong to stages."""
    return state.replace(
        cache=jax.tree.map(f, state.cache), progress=jax.tree.map(f, state.progress)
    )


enter = partial(_on_stage, f=lambda a: a[0])  # a device's share of a state, without the stage axis
leave = partial(_on_stage, f=lambda a: a[None])


def _broadcast_from(chosen: jax.Array, tree: Tree) -> Tree:
    """Return on all stages, for every row [b], the value of the one stage that has `chosen` it."""

    def masked(a):
        return jnp.where(chosen, a, jnp.zeros((), a.dtype))

    return lax.psum(jax.tree.map(masked, tree), PIPE)


def _broadcast_emission(chosen: jax.Array, emission: Emission) -> Emission:
    """Return on all stages what any stage has emitted; exit -1 where there is nothing."""
    masked = _broadcast_from(chosen, emission._replace(exit=emission.exit + 1))
    return masked._replace(exit=masked.exit - 1)


@partial(jax.jit, static_argnames=("stages", "cap", "length"))
def prefill(
    weights: StageWeights,
    tokens: jax.Array,
    request: RequestRows,
    *,
    stages: StagedModel,
    cap: int,
    length: int,
) -> tuple[PipelineState, DecodeRecord]:
    """Run the prompts, whole, through the stages in order; otherwise as `posthoc.prefill`."""

    def local(weights, tokens, request):
        state, record = pass_prompts(DecodingStage(stages, weights), cap, length, tokens, request)
        return leave(state), record

    given, made = (stages.specs, P(DATA), P(DATA)), (state_specs(stages), P(DATA))
    return sharded.shard(local, stages.mesh, given, made)(weights, tokens, request)


def pass_prompts(
    stage: DecodingStage, cap: int, length: int, tokens: jax.Array, request: RequestRows
) -> tuple[PipelineState, DecodeRecord]:
    """Run a stage's share of `prefill` inside its `shard_map`; the state is as `enter`'s."""
    c, p = stage.config, stage.stages.partition
    b, t = tokens.shape

    def vary(tree):
        return vary_over(tree, P())

    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    x = lax.cond(
        stage.first,
        lambda: stage.embed(tokens, positions),
        lambda: vary(jnp.zeros((b, t, c.d_model), c.dtype)),
    )
    zero = vary(jnp.zeros((b,), jnp.int32))
    hop: tuple[jax.Array, Memory, Emission]
    hop = (x, Memory.blank(x[:, 0]), vary(Emission.undecided(b)))
    rows = StageRows(zero, request.start - 1, request.policy.prefill_exit, request)

    def step(carry, i):
        hop, cache = carry
        here = stage.index == i
        below = _from_below(hop, p.stages)
        x, *rest = jax.tree.map(partial(jnp.where, here & ~stage.first), below, hop)
        end = zero + jnp.where(here, stage.ends[-1], 0)
        cache, x, memory, emission = stage.run(cache, x, zero, end, rows, *rest)
        return ((x, memory, emission), cache), None

    carry = (hop, stage.empty(b, length))
    hop, cache = lax.scan(step, carry, jnp.arange(p.stages))[0]
    state = blank(stage, cache, cap, request)
    depth = jnp.full((b,), p.depth)
    return s.advance(state, _broadcast_emission(stage.last, hop[2]), depth, state.live)


def blank(stage: DecodingStage, cache: StageCache, cap: int, request: RequestRows) -> PipelineState:
    """Return a stage's state behind the prompts, before any token."""
    c, lengths = stage.config, request.start
    x = vary_over(jnp.zeros((len(lengths), c.d_model), c.dtype), P())

    def empty(a):
        return jnp.zeros_like(a, shape=(len(lengths), cap, *a.shape[1:]))

    done = vary_over(lengths, P(DATA))
    progress = StageProgress(
        done, jnp.zeros_like(done), done, jax.tree.map(empty, InFlightToken.blank(x))
    )
    return PipelineState(
        cache,
        progress,
        lengths,
        jnp.int32(0),
        jnp.zeros_like(lengths),
        jnp.maximum(lengths - 1, 0),
        request.limit,
        request,
    )


@partial(jax.jit, static_argnames=("stages", "cap", "size"), donate_argnames="state")
def decode(
    weights: StageWeights,
    state: PipelineState,
    n: jax.Array | np.int32,
    *,
    stages: StagedModel,
    cap: int,
    size: int,
) -> tuple[PipelineState, DecodeRecord]:
    """Decode up to `n` tokens, at most `size`, of every live request in one compiled loop.

    Records are [size, b]; rows for which a request has no token have exit -1. Tokens that stages
    still work on when the last one is emitted stay in place for the next call. `state` is donated.
    """

    def local(weights, state, n):
        stage, state = DecodingStage(stages, weights), enter(state)
        b = state.token.shape[0]
        zero, undecided = varying((jnp.zeros((b,), jnp.int32), Emission.undecided(b)), DATA)
        blank = s.advance(state, undecided, zero, state.live)[1]
        records = jax.tree.map(lambda r: jnp.zeros_like(r, shape=(size, b)), blank)
        records = records._replace(exit=records.exit - 1)

        def wanted(state, count):
            return state.live & (count < n)

        def some(rows):
            return lax.psum(jnp.any(rows).astype(jnp.int32), DATA)

        def body(carry):
            _, state, count, records = carry
            starts = wanted(state, count)
            state, record = _tick(stage, cap, state, starts)
            place = jnp.where(record.exit >= 0, count, size)
            records = jax.tree.map(
                lambda a, r: a.at[place, jnp.arange(b)].set(r, mode="drop"), records, record
            )
            count = count + (record.exit >= 0).astype(jnp.int32)
            return some(wanted(state, count)), state, count, records

        carry = (some(wanted(state, zero)), state, zero, records)
        _, state, _, records = lax.while_loop(lambda carry: carry[0] > 0, body, carry)
        return leave(state), records

    specs = state_specs(stages)
    given, made = (stages.specs, specs, P()), (specs, P(None, DATA))
    return sharded.shard(local, stages.mesh, given, made)(weights, state, n)


def _tick(
    stage: DecodingStage, cap: int, state: PipelineState, starts: jax.Array
) -> tuple[PipelineState, DecodeRecord]:
    """Run one part on every stage, then exchange.

    starts: [b] bool, requests that may start a token.
    """
    progress, b = state.progress, len(starts)
    done, part = progress.done, progress.part
    # The first stage begins a token once the one before is emitted and its own work on it is done.
    # At most `cap` tokens are in flight, so every inbox has room for them.
    room = state.position - state.kept < cap
    starts = starts & stage.first & (part == 0) & (done == state.position) & room
    busy = jnp.where(stage.first, starts | (part > 0), done < progress.come)

    token = _take(progress.inbox, done % cap)

    def embed(x):
        return stage.embed(state.token[:, None], state.position[:, None])[:, 0]

    x = lax.cond(jnp.any(starts), embed, lambda x: x, token.x)
    token = where_rows(starts, InFlightToken.blank(x), token)

    ends = stage.ends[part]
    begins = jnp.where(part > 0, stage.ends[part - 1], 0)
    nothing = vary_over(Emission.undecided(b), P())
    emission = nothing._replace(exit=jnp.where(token.emitted, stage.stages.last, nothing.exit))
    rows = StageRows(done, jnp.zeros_like(done), jnp.full_like(busy, True), state.request)
    begin, end = jnp.where(busy, begins, 0), jnp.where(busy, ends, 0)
    cache, x, memory, emission = stage.run(
        state.cache, token.x[:, None], begin, end, rows, token.memory, emission
    )
    emits = busy & ~token.emitted & (emission.exit >= 0)
    token = InFlightToken(x[:, 0], emission.exit >= 0, memory)
    leaves = busy & (ends == stage.ends[-1])
    inbox = _put(progress.inbox, token, done % cap, busy & ~leaves)
    done = done + leaves.astype(jnp.int32)
    part = jnp.where(leaves, 0, part + busy.astype(jnp.int32))

    # Every stage takes part in the exchange, whatever it did.
    comes, token = _from_below((leaves, token), stage.stages.partition.stages)
    inbox = _put(inbox, token, progress.come % cap, comes)
    come = progress.come + comes.astype(jnp.int32)
    emission = _broadcast_emission(emits, emission)
    kept = _broadcast_from(stage.last, done)
    executed = jnp.asarray(stage.stages.executed)[emission.exit]
    after, record = s.advance(state, emission, executed, state.live)
    emitted = emission.exit >= 0
    state = state.replace(
        cache=cache,
        progress=StageProgress(done, part, come, inbox),
        kept=kept,
        ticks=state.ticks + 1,
        token=jnp.where(emitted, after.token, state.token),
        position=jnp.where(emitted, after.position, state.position),
        remaining=jnp.where(emitted, after.remaining, state.remaining),
    )
    return state, record


def _from_below(tree: Tree, stages: int) -> Tree:
    """Return the tree of the stage below, zeros on the first stage.

    It sends one message for each dtype, because the time of a message is its latency.
    """
    leaves, structure = jax.tree.flatten(tree)
    for dtype in dict.fromkeys(a.dtype for a in leaves):
        which = [i for i, a in enumerate(leaves) if a.dtype == dtype]
        message = send(jnp.concatenate([leaves[i].ravel() for i in which]), stages, up=True)
        cuts = np.cumsum([leaves[i].size for i in which])[:-1]
        for i, part in zip(which, jnp.split(message, cuts), strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, leaves)


def _take(inbox: InFlightToken, slot: jax.Array) -> InFlightToken:
    """Return [b, ...], the entries of an inbox at the indices [b]."""
    rows = jnp.arange(len(slot))
    return jax.tree.map(lambda a: a[rows, slot], inbox)


def _put(
    inbox: InFlightToken, token: InFlightToken, slot: jax.Array, rows: jax.Array
) -> InFlightToken:
    """Return the inbox with a token at its index [b], for the `rows` [b]."""
    cap = inbox.x.shape[1]
    at = jnp.where(rows, slot, cap)

    def put(a, new):
        return a.at[jnp.arange(len(slot)), at].set(new, mode="drop")

    return jax.tree.map(put, inbox, token)


@dataclasses.dataclass(frozen=True)
class PipelinedGenerator(Decoder):
    """A model prepared for generation on the stages of a mesh; otherwise as `generate.Generator`.

    Build it with `PipelinedGenerator.make`. `GenerationResult.layers` counts the layers on a
    token's way to its emission, at least all of the first stage (`StagedModel.executed`); they make
    up the paper's latency. The layers above run beside the next tokens.
    """

    weights: StageWeights
    stages: StagedModel
    config: ModelConfig
    options: EngineOptions

    @classmethod
    def make(
        cls,
        params: Tree,
        config: ModelConfig,
        mesh: MeshConfig | Mesh,
        options: EngineOptions | str = PIPELINED,
        *,
        layers: str | Sequence[int] = EVEN,
    ) -> PipelinedGenerator:
        """Prepare a generator from training parameters (stacked layers).

        Args:
          layers: layers of each stage, as `pipeline.partition.partition` takes them.
          options: `cap` is the maximum tokens of a request in flight; `buckets` are not used.

        Raises:
          ConfigError: if the mesh needs more devices than there are, or does not fit the model.
        """
        options = given_options(options)
        require(
            options.engine == PIPELINED,
            "engine",
            options.engine,
            f"must be {PIPELINED!r} on stages",
            "Generator.make takes the other engines.",
        )
        config = engine_config(config, options)
        mesh = known_mesh(mesh)
        which = tuple(range(options.num_segments or config.n_exits + 1))
        cut = partition(config, mesh.shape[PIPE], layers, "earlier", which)
        stages = StagedModel(StageLayout(cut), mesh)
        return cls(stages.prepare(params), stages, config, options)

    def _prefill(self, tokens, request, length):
        check_batch(len(tokens), self.stages.mesh, field="prompts")
        return prefill(
            self.weights, tokens, request, stages=self.stages, cap=self.options.cap, length=length
        )

    def _decode(self, state, n):
        static = dict(stages=self.stages, cap=self.options.cap, size=decode_size(n))
        return decode(self.weights, state, np.int32(n), **static)
