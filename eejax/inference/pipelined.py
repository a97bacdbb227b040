"""Early-exit decoding by a pipeline of stages (EE-LLM, section 4 and Appendix D.3).

A token goes through the stages one after the other. Where its gate fires it is emitted, and the
first stage starts the next token while the stages behind still make the old one's keys and values.
So none is missing, nothing is computed twice, and tokens and exits equal `posthoc`'s.

One compiled loop of ticks. In a tick every stage runs one part of its layers (`Stages.ends`) for
the token that each request has there; then all stages tell each other what was emitted, and hand
finished tokens up into the next stage's inbox. Requests are independent streams with positions of
their own on every stage: a tick may find them at different parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eejax.common.axes import DATA, PIPE
from eejax.common.errors import require
from eejax.common.trees import Tree
from eejax.gates.confidence import Memory
from eejax.inference import sharded
from eejax.inference import state as s
from eejax.inference.generate import Decoder
from eejax.inference.policy import Emission
from eejax.inference.stages import Stage, StageCache, Stages, StageWeights, where_rows
from eejax.inference.state import PIPELINED, EngineOptions, Record, Request
from eejax.models.cache import varying
from eejax.models.config import ModelConfig
from eejax.pipeline.layout import StageLayout
from eejax.pipeline.partition import EVEN, partition
from eejax.pipeline.residuals import send
from eejax.pipeline.stage import vary_over
from eejax.sharding.mesh import MeshConfig, check_batch, known_mesh


class Traveller(NamedTuple):
    """A token on its way up; leaves [b, ...], in an inbox [b, cap, ...].

    x [d]: its state; emitted: whether an exit has emitted the next token from it; memory: of gates.
    """

    x: jax.Array
    emitted: jax.Array
    memory: Memory

    @classmethod
    def blank(cls, x: jax.Array) -> Traveller:
        """Tokens at the first layer with states x [b, d]."""
        return cls(x, jnp.zeros_like(x[:, 0], bool), Memory.blank(x))


@struct.dataclass
class Desk:
    """Where a stage is with every request; leaves [P, b] and of the inbox [P, b, cap, ...].

    done: positions whose keys and values are complete on the stage (`KVCache.filled`); the next one
    is worked on, and its first `part` parts are done. come: positions that have reached the inbox,
    position p in slot p % cap; the first stage has them from the last emitted token instead.
    """

    done: jax.Array
    part: jax.Array
    come: jax.Array
    inbox: Traveller


@struct.dataclass
class PipelineState:
    """As `DecodeState`; what belongs to stages is cut over `pipe`, the rest is the same on all.

    kept: [b] positions that are complete on the last stage, as all stages know. ticks: [] since the
    prompts' pass.
    """

    cache: StageCache
    desk: Desk
    kept: jax.Array
    ticks: jax.Array
    token: jax.Array
    position: jax.Array
    remaining: jax.Array
    request: Request

    @property
    def live(self) -> jax.Array:
        return self.remaining > 0


def state_specs(stages: Stages) -> PipelineState:
    """Of a state: prefixes of its partition specs."""
    row = P(DATA)
    return PipelineState(stages.cache_spec, P(PIPE, DATA), row, P(), row, row, row, row)


def _on_stage(state: PipelineState, f) -> PipelineState:
    """A state with f over what belongs to stages."""
    return state.replace(cache=jax.tree.map(f, state.cache), desk=jax.tree.map(f, state.desk))


enter = partial(_on_stage, f=lambda a: a[0])  # what a device has of a state, as a stage sees it
leave = partial(_on_stage, f=lambda a: a[None])


def _told(chosen: jax.Array, tree: Tree) -> Tree:
    """Of every row [b] what the one stage that has `chosen` it says, on all stages; else zeros."""
    told = lambda a: jnp.where(chosen, a, jnp.zeros((), a.dtype))
    return lax.psum(jax.tree.map(told, tree), PIPE)


def _announced(chosen: jax.Array, emission: Emission) -> Emission:
    """What the stages have emitted, on all of them; exit -1 where nothing."""
    told = _told(chosen, emission._replace(exit=emission.exit + 1))
    return told._replace(exit=told.exit - 1)


@partial(jax.jit, static_argnames=("stages", "cap", "length"))
def prefill(
    weights: StageWeights,
    tokens: jax.Array,
    request: Request,
    *,
    stages: Stages,
    cap: int,
    length: int,
) -> tuple[PipelineState, Record]:
    """The prompts' pass through the stages, one after the other; `posthoc.prefill` otherwise."""

    def local(weights, tokens, request):
        state, record = pass_prompts(Stage(stages, weights), cap, length, tokens, request)
        return leave(state), record

    given, made = (stages.specs, P(DATA), P(DATA)), (state_specs(stages), P(DATA))
    return sharded.shard(local, stages.mesh, given, made)(weights, tokens, request)


def pass_prompts(
    stage: Stage, cap: int, length: int, tokens: jax.Array, request: Request
) -> tuple[PipelineState, Record]:
    """A stage's share of `prefill`, inside of its `shard_map`; the state as `enter` makes it."""
    c, p = stage.config, stage.stages.partition
    b, t = tokens.shape
    vary = lambda tree: vary_over(tree, P())
    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    x = lax.cond(
        stage.first, lambda: stage.embed(tokens, positions),
        lambda: vary(jnp.zeros((b, t, c.d_model), c.dtype)),
    )  # fmt: skip
    zero = vary(jnp.zeros((b,), jnp.int32))
    hop = (x, Memory.blank(x[:, 0]), vary(Emission.undecided(b)))

    def step(carry, i):
        hop, cache = carry
        here = stage.index == i
        below = _from_below(hop, p.stages)
        hop = jax.tree.map(partial(jnp.where, here & ~stage.first), below, hop)
        end = zero + jnp.where(here, stage.ends[-1], 0)
        cache, *hop = stage.run(
            cache, hop[0], zero, zero, end, request.start - 1, request.policy.prefill_exit,
            *hop[1:], request,
        )  # fmt: skip
        return (tuple(hop), cache), None

    carry = (hop, stage.empty(b, length))
    (_, _, emission), cache = lax.scan(step, carry, jnp.arange(p.stages))[0]
    state = blank(stage, cache, cap, request)
    return s.advance(state, _announced(stage.last, emission), jnp.full((b,), p.depth))


def blank(stage: Stage, cache: StageCache, cap: int, request: Request) -> PipelineState:
    """A stage's state behind the prompts, before any token: nothing is under way."""
    c, lengths = stage.config, request.start
    x = vary_over(jnp.zeros((len(lengths), c.d_model), c.dtype), P())
    empty = lambda a: jnp.zeros_like(a, shape=(len(lengths), cap, *a.shape[1:]))
    done = vary_over(lengths, P(DATA))
    desk = Desk(done, jnp.zeros_like(done), done, jax.tree.map(empty, Traveller.blank(x)))
    return PipelineState(
        cache, desk, lengths, jnp.int32(0), jnp.zeros_like(lengths), jnp.maximum(lengths - 1, 0),
        request.limit, request,
    )  # fmt: skip


@partial(jax.jit, static_argnames=("stages", "cap", "n"), donate_argnames="state")
def decode(
    weights: StageWeights, state: PipelineState, *, stages: Stages, cap: int, n: int
) -> tuple[PipelineState, Record]:
    """Up to `n` tokens for every live request in one compiled loop; records are [n, b].

    Rows that a request has no token for have exit -1. Tokens that stages still work on when the
    last one is emitted stay where they are for the next call. `state` is donated.
    """

    def local(weights, state):
        stage, state = Stage(stages, weights), enter(state)
        b = state.token.shape[0]
        zero, undecided = varying((jnp.zeros((b,), jnp.int32), Emission.undecided(b)), DATA)
        blank = s.advance(state, undecided, zero)[1]
        records = jax.tree.map(lambda r: jnp.zeros_like(r, shape=(n, b)), blank)
        records = records._replace(exit=records.exit - 1)
        wanted = lambda state, count: state.live & (count < n)
        some = lambda rows: lax.psum(jnp.any(rows).astype(jnp.int32), DATA)

        def body(carry):
            _, state, count, records = carry
            starts = wanted(state, count)
            state, record = _tick(stage, cap, state, starts)
            place = jnp.where(record.exit >= 0, count, n)
            records = jax.tree.map(
                lambda a, r: a.at[place, jnp.arange(b)].set(r, mode="drop"), records, record
            )
            count = count + (record.exit >= 0).astype(jnp.int32)
            return some(wanted(state, count)), state, count, records

        carry = (some(wanted(state, zero)), state, zero, records)
        _, state, _, records = lax.while_loop(lambda carry: carry[0] > 0, body, carry)
        return leave(state), records

    specs = state_specs(stages)
    given, made = (stages.specs, specs), (specs, P(None, DATA))
    return sharded.shard(local, stages.mesh, given, made)(weights, state)


def _tick(
    stage: Stage, cap: int, state: PipelineState, starts: jax.Array
) -> tuple[PipelineState, Record]:
    """One part on every stage, then the exchange; `starts` [b]: who may begin another token."""
    desk, b = state.desk, len(starts)
    done, part = desk.done, desk.part
    # The first stage begins a token once the one before it is emitted and its own work on that is
    # done. No more than `cap` are under way, so every inbox has room for all that may come.
    room = state.position - state.kept < cap
    starts = starts & stage.first & (part == 0) & (done == state.position) & room
    busy = jnp.where(stage.first, starts | (part > 0), done < desk.come)

    token = _take(desk.inbox, done % cap)
    embed = lambda x: stage.embed(state.token[:, None], state.position[:, None])[:, 0]
    x = lax.cond(jnp.any(starts), embed, lambda x: x, token.x)
    token = where_rows(starts, Traveller.blank(x), token)

    ends = stage.ends[part]
    begins = jnp.where(part > 0, stage.ends[part - 1], 0)
    nothing = vary_over(Emission.undecided(b), P())
    emission = nothing._replace(exit=jnp.where(token.emitted, stage.stages.last, nothing.exit))
    cache, x, memory, emission = stage.run(
        state.cache, token.x[:, None], done, jnp.where(busy, begins, 0), jnp.where(busy, ends, 0),
        jnp.zeros_like(done), jnp.full_like(busy, True), token.memory, emission, state.request,
    )  # fmt: skip
    emits = busy & ~token.emitted & (emission.exit >= 0)
    token = Traveller(x[:, 0], emission.exit >= 0, memory)
    leaves = busy & (ends == stage.ends[-1])
    inbox = _put(desk.inbox, token, done % cap, busy & ~leaves)
    done = done + leaves.astype(jnp.int32)
    part = jnp.where(leaves, 0, part + busy.astype(jnp.int32))

    # The exchange, which every stage takes part in whatever it did.
    comes, token = _from_below((leaves, token), stage.stages.partition.stages)
    inbox = _put(inbox, token, desk.come % cap, comes)
    come = desk.come + comes.astype(jnp.int32)
    emission = _announced(emits, emission)
    kept = _told(stage.last, done)
    executed = jnp.asarray(stage.stages.executed)[emission.exit]
    after, record = s.advance(state, emission, executed)
    emitted = emission.exit >= 0
    state = state.replace(
        cache=cache, desk=Desk(done, part, come, inbox), kept=kept, ticks=state.ticks + 1,
        token=jnp.where(emitted, after.token, state.token),
        position=jnp.where(emitted, after.position, state.position),
        remaining=jnp.where(emitted, after.remaining, state.remaining),
    )  # fmt: skip
    return state, record


def _from_below(tree: Tree, stages: int) -> Tree:
    """The tree of the stage below, zeros on the first: one message for each dtype, as what a
    message takes is its latency."""
    leaves, structure = jax.tree.flatten(tree)
    for dtype in dict.fromkeys(a.dtype for a in leaves):
        which = [i for i, a in enumerate(leaves) if a.dtype == dtype]
        message = send(jnp.concatenate([leaves[i].ravel() for i in which]), stages, up=True)
        cuts = np.cumsum([leaves[i].size for i in which])[:-1]
        for i, part in zip(which, jnp.split(message, cuts), strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, leaves)


def _take(inbox: Traveller, slot: jax.Array) -> Traveller:
    """[b, ...] what lies in the slots [b] of an inbox."""
    rows = jnp.arange(len(slot))
    return jax.tree.map(lambda a: a[rows, slot], inbox)


def _put(inbox: Traveller, token: Traveller, slot: jax.Array, rows: jax.Array) -> Traveller:
    """The inbox with a token in its slot [b], of the `rows` [b]."""
    cap = inbox.x.shape[1]
    at = jnp.where(rows, slot, cap)
    put = lambda a, new: a.at[jnp.arange(len(slot)), at].set(new, mode="drop")
    return jax.tree.map(put, inbox, token)


@dataclasses.dataclass(frozen=True)
class PipelinedGenerator(Decoder):
    """A model ready to generate on the stages of a mesh; as `generate.Generator` otherwise.

    Build with `PipelinedGenerator.make`. `Result.layers` are those on a token's way to its
    emission, all of the first stage at least (`Stages.executed`): what the paper's latency is made
    of. The layers above them are run as well, beside the next tokens' way.
    """

    weights: StageWeights
    stages: Stages
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
        """From training parameters (stacked layers).

        layers: of each stage, as `pipeline.partition.partition` takes them. Of the options, `cap`
        is the most tokens of a request that may be under way, and there are no `buckets`. Raises
        ConfigError where the mesh needs more devices than there are, or does not fit the model.
        """
        options = EngineOptions(options) if isinstance(options, str) else options
        require(
            options.engine == PIPELINED, "engine", options.engine,
            f"must be {PIPELINED!r} on stages", "Generator.make takes the others.",
        )  # fmt: skip
        config = s.engine_config(config, options)
        mesh = known_mesh(mesh)
        which = tuple(range(options.max_depth or config.n_exits + 1))
        cut = partition(config, mesh.shape[PIPE], layers, "earlier", which)
        stages = Stages(StageLayout(cut), mesh)
        return cls(stages.prepare(params), stages, config, options)

    def _prefill(self, tokens, request, length):
        check_batch(len(tokens), self.stages.mesh, field="prompts")
        return prefill(
            self.weights, tokens, request, stages=self.stages, cap=self.options.cap, length=length
        )

    def _decode(self, state, n):
        return decode(self.weights, state, stages=self.stages, cap=self.options.cap, n=n)
