"""State that engines share: prepared weights, the decoding state and the record of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eejax.common.axes import LOCAL, Axes
from eejax.common.errors import require, require_array, require_count, require_one_of
from eejax.common.trees import Tree
from eejax.inference.logits_params import LogitsParams, TopLogprobs
from eejax.inference.policy import Emission, ExitPolicy
from eejax.inference.sampling import SamplingParams
from eejax.models import exits
from eejax.models.cache import KVCache, unstack_segments, varying
from eejax.models.config import ModelConfig
from eejax.models.params import for_compute

PIPELINED = "pipelined"
ENGINES = ("full", "posthoc", "recompute", PIPELINED, "propagate", "speculative")
PROPAGATIONS = ("state", "mask")
MAX_STOP_TOKENS = (
    8  # stop tokens of a request; `Generator` takes more by other programs, slots do not
)
FIRST_ACCEPTANCE = 0.8  # share of drafts taken to be accepted before any was made


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Static options of an engine; each combination compiles once.

    Attributes:
      engine: one of `ENGINES`.
        "full" runs every layer and emits from the final exit.
        "posthoc" runs every layer and emits from the earliest exit whose gate fires (the oracle).
        "recompute" stops at that exit; later tokens carry the waiting ones along (KV
        recomputation). "pipelined" leaves the deeper layers to the next stages of a mesh
        (`pipelined.PipelinedGenerator`). "propagate" stops at that exit and fills the deeper keys
        and values at once, from the state there (CALM). Its texts may differ. "speculative" emits
        what "full" would, several tokens at a time: an exit drafts them, and one pass through the
        layers above verifies them (LayerSkip).
      cap: most tokens of a request that may wait for deeper keys and values. The cap-th such token
        runs all layers, and is still emitted where its gate fired.
      buckets: row counts that a deeper segment is compiled for. The largest possible count, the cap
        or gamma + 1, is always one.
      num_segments: segments to load, from the bottom; the exit above the last of them emits what no
        gate before it did. None loads all.
      propagate: what "propagate" leaves in the layers above a token's exit. "state": keys and
        values of the state at that exit. "mask": nothing, so later tokens do not attend to it
        there.
      draft_exit: number of the exit that drafts for "speculative".
      gamma: most tokens that it drafts in a step.
      adapt: draft fewer tokens, or none, for a request whose drafts are rarely accepted.
    """

    engine: str = "recompute"
    cap: int = 16
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16)
    num_segments: int | None = None
    propagate: str = "state"
    draft_exit: int = 0
    gamma: int = 4
    adapt: bool = True

    def __post_init__(self):
        listed = isinstance(self.buckets, tuple | list)
        require(listed, "buckets", self.buckets, "must be a sequence of row counts")
        object.__setattr__(self, "buckets", tuple(self.buckets))  # hashable
        require_one_of("engine", self.engine, ENGINES)
        require(bool(self.buckets), "buckets", self.buckets, "must have one row count at least")
        for w in self.buckets:
            require_count("buckets", w)
        for name in ("cap", "gamma"):
            require_count(name, getattr(self, name))
        if self.num_segments is not None:
            require_count("num_segments", self.num_segments)
        require_one_of("propagate", self.propagate, PROPAGATIONS)
        require(
            isinstance(self.draft_exit, int) and self.draft_exit >= 0,
            "draft_exit",
            self.draft_exit,
            "must be the number of an exit, the first being 0",
        )
        require(isinstance(self.adapt, bool), "adapt", self.adapt, "must be True or False")
        require(
            self.num_segments is None or self.engine != "speculative",
            "num_segments",
            self.num_segments,
            "must be None with the engine 'speculative'",
            "What verifies its drafts is the final exit.",
        )

    @property
    def leaves_early(self) -> bool:
        """Early exits emit tokens."""
        return self.engine not in ("full", "speculative")

    @property
    def most_rows(self) -> int:
        """Most rows of a request that run through a deeper segment together."""
        return self.gamma + 1 if self.engine == "speculative" else self.cap

    @property
    def widths(self) -> tuple[int, ...]:
        """Row counts that deeper segments are compiled for, ascending."""
        return (*sorted({w for w in self.buckets if w < self.most_rows}), self.most_rows)


@struct.dataclass
class Weights:
    """Parameters laid out for decoding, in the dtype of computation.

    Attributes:
      segments: for each loaded segment the trees of its layers, unstacked.
      params: everything else.
      axes: axes of the mesh, where this is one device's share inside a `shard_map`
        (`inference.sharded`).
    """

    segments: tuple[tuple[Tree, ...], ...]
    params: Tree
    axes: Axes = struct.field(pytree_node=False, default=LOCAL)

    @property
    def last(self) -> int:
        """Number of the exit above the last segment, which emits what no other exit did."""
        return len(self.segments) - 1


def without_stages(options: EngineOptions | str) -> EngineOptions:
    """Return engine options, also for an engine's name. Raises `ConfigError` if it needs stages."""
    options = EngineOptions(engine=options) if isinstance(options, str) else options
    require(
        options.engine != PIPELINED,
        "engine",
        options.engine,
        "decodes on the stages of a mesh",
        "Use inference.PipelinedGenerator.",
    )
    return options


def engine_config(config: ModelConfig, options: EngineOptions) -> ModelConfig:
    """Return the model that an engine decodes with.

    "full" has no exits, "speculative" only the one that drafts.

    Raises:
      ConfigError: for more segments than the model has, fewer than all of them with "full", a draft
        exit that does not exist, or a cap or gamma beyond the context.
    """
    if options.engine == "full":
        config = config.replace(exits=())
    if options.engine == "speculative":
        boundaries = [e.boundary for e in config.exits]
        require(
            options.draft_exit < len(boundaries),
            "draft_exit",
            options.draft_exit,
            f"must be the number of one of this model's {len(boundaries)} early exits, which lie at"
            f" the boundaries {boundaries}",
            "" if boundaries else "Tune an exit first, or decode with the engine 'full'.",
        )
        config = config.replace(exits=(config.exits[options.draft_exit],))
    if name := dict(recompute="cap", pipelined="cap", speculative="gamma").get(options.engine):
        rows, most = getattr(options, name), config.context_length
        require(rows <= most, name, rows, f"must be at most {most}, the model's context_length")
    n = config.n_exits + 1
    require(
        options.num_segments is None or options.num_segments <= n,
        "num_segments",
        options.num_segments,
        f"must be at most the {n} segments that the engine {options.engine!r} has of this model",
    )
    return config


def prepare(
    params: Tree, config: ModelConfig, num_segments: int | None = None, axes: Axes = LOCAL
) -> Weights:
    """Unstack the layers by segment and cast them once, so that no step copies or casts weights.

    With `num_segments`, parameters above that segment are left out. With `axes`, `params` are one
    device's share.
    """
    n = num_segments or config.n_exits + 1
    params = for_compute(params, config.dtype)
    rest = unlayered_params(params, config, n)
    rest["exits"] = exits.fuse(rest["exits"], config, axes)
    return Weights(unstack_segments(params, config, n, axes), rest, axes)


def unlayered_params(params: Tree, config: ModelConfig, n: int) -> Tree:
    """Return what the first n segments need of a parameter tree beside their layers."""
    rest = {k: v for k, v in params.items() if k != "layers"}
    if n <= config.n_exits:
        rest.pop("final", None)
        names = {e.name for e in config.exits[:n]}
        rest["exits"] = {k: v for k, v in rest["exits"].items() if k in names}
    return rest


@struct.dataclass
class RequestRows:
    """Requests of an engine, one a row, as traced arrays: changing one compiles nothing.

    Attributes:
      policy: exit rules.
      sampling: sampling settings.
      stop_token_ids: [b, n] int32, token ids that end a request, padded with -1.
      start: [b] int32, tokens of the prompt.
      limit: [b] int32, most tokens to emit.
      logits_params: logits processing, for engines that take it (`BatchOptions.logits_params`).
    """

    policy: ExitPolicy
    sampling: SamplingParams
    stop_token_ids: jax.Array
    start: jax.Array
    limit: jax.Array
    logits_params: LogitsParams | None = None

    @classmethod
    def make(
        cls,
        config: ModelConfig,
        lengths: Sequence[int] | np.ndarray,
        limits: Sequence[int] | np.ndarray,
        policy: ExitPolicy,
        sampling: SamplingParams,
        stop_token_ids: Sequence[int] = (),
        width: int = MAX_STOP_TOKENS,
        logits_params: LogitsParams | None = None,
    ) -> RequestRows:
        """Check the settings of requests whose prompts have `lengths` tokens.

        limits: most tokens to emit, one a request. width: stop tokens of a row; it must be the same
        for all requests of an engine.

        Raises:
          ConfigError: for lengths or limits that are not counts, unknown stop tokens, or more than
            `width` of them.
        """
        for name, value in (("lengths", lengths), ("limits", limits)):
            allowed = "must be a sequence of numbers of tokens"
            a = require_array(name, value, allowed)
            ok = a.ndim == 1 and a.dtype.kind in "iu" and bool(np.all(a >= 0))
            require(ok, name, value, allowed)
        require(
            len(limits) == len(lengths),
            "limits",
            limits,
            f"must be {len(lengths)}: one for each of the prompts",
        )
        allowed = f"must be a sequence of token ids, each in 0..{config.vocab_size - 1}"
        ids = require_array("stop_token_ids", stop_token_ids, allowed)
        require(
            ids.ndim == 1
            and (not ids.size or ids.dtype.kind in "iu")
            and bool(np.all((ids >= 0) & (ids < config.vocab_size))),
            "stop_token_ids",
            stop_token_ids,
            allowed,
        )
        allowed = f"must be at most {width} of them"
        require(ids.size <= width, "stop_token_ids", stop_token_ids, allowed)
        rows = np.full((len(lengths), width), -1, np.int32)
        rows[:, : ids.size] = ids
        as_rows = lambda a: np.minimum(a, np.iinfo(np.int32).max).astype(np.int32)
        return cls(policy, sampling, rows, as_rows(lengths), as_rows(limits), logits_params)

    @classmethod
    def blank(cls, config: ModelConfig, rows: int) -> RequestRows:
        """Return the rows of free slots."""
        none = np.zeros((rows,), np.int32)
        return cls.make(
            config, none, none, ExitPolicy.make(config, rows), SamplingParams.make(rows)
        )

    def progress(self, position: jax.Array) -> jax.Array:
        """Return [b], the share of a request's tokens before the one at `position` [b]."""
        done = (position - self.start).astype(jnp.float32)
        return done / jnp.maximum(self.limit, 1).astype(jnp.float32)


@struct.dataclass
class DecodeState:
    """Everything a generation carries from step to step; rows are requests, or their slots.

    Attributes:
      cache: keys, values and `filled`.
      waiting: for each boundary below the last one, [b, cap, d]: states of the positions that wait
        there, position p at index p % cap. Empty but for "recompute".
      reach: [b, s] int32, the last segment in which each position has keys and values. It has no
        positions unless `propagate` is "mask": else the segment is the same for all.
      acceptance: [b] recent share of accepted drafts; only "speculative" drafts.
      token: [b] int32, the last emitted token, which the next step reads.
      position: [b] int32, its position.
      remaining: [b] int32, tokens still to emit; 0 when finished, and in a free slot.
    """

    cache: KVCache
    waiting: tuple[jax.Array, ...]
    reach: jax.Array
    acceptance: jax.Array
    token: jax.Array
    position: jax.Array
    remaining: jax.Array
    request: RequestRows

    @property
    def live(self) -> jax.Array:
        return self.remaining > 0


class DecodeRecord(NamedTuple):
    """Outcome of a step for each request; [b], or [n, b] where it emits up to n tokens.

    Attributes:
      token, logprob, confidence: of the emitted token.
      exit: number of the emitting exit, -1 where no token was emitted.
      layers: layers executed in the step, which all requests of a batch share; see also
        `GenerationResult`. Of several tokens of a step only the first has them, so that their sum
        counts each layer once. Slots of "batched" share no step: there it is the layers below the
        emitting exit, and `BatchedState.work` has what was run.
      margin: smallest distance to another outcome: between the top two logits at the emitting exit,
        and from confidence to threshold at every exit considered. Only "posthoc" measures it.
      drafted: tokens drafted for the request in the step, on its first token. With "batched", 1 for
        a token from which others were drafted before it was decided.
      accepted: 1 for a token that was drafted, 0 for one that only the emitting exit found. Both
        are 0 for engines that do not draft.
      top_logprobs: the most likely tokens, for requests that ask for them
        (`LogitsParams.top_logprobs`), where the engine supports it.
    """

    token: jax.Array
    logprob: jax.Array
    confidence: jax.Array
    exit: jax.Array
    layers: jax.Array
    margin: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    top_logprobs: TopLogprobs | None = None


def blank(
    weights: Weights,
    config: ModelConfig,
    options: EngineOptions,
    cache: KVCache,
    request: RequestRows,
) -> DecodeState:
    """Return the state behind the prompts, before any token: no position waits."""
    b = request.start.shape[0]
    rings = weights.last if options.engine == "recompute" else 0
    masks = options.engine == "propagate" and options.propagate == "mask"
    own = lambda a: varying(a, weights.axes.data)
    return DecodeState(
        cache=cache,
        waiting=tuple(
            own(jnp.zeros((b, options.cap, config.d_model), config.dtype)) for _ in range(rings)
        ),
        reach=own(jnp.full((b, cache.length if masks else 0), weights.last, jnp.int32)),
        acceptance=own(jnp.full((b,), FIRST_ACCEPTANCE, jnp.float32)),
        token=own(jnp.zeros((b,), jnp.int32)),
        position=jnp.maximum(request.start - 1, 0),
        remaining=request.limit,
        request=request,
    )


def colocate(state: Tree, weights: Weights) -> Tree:
    """Place a one-device state where the weights are, and with it what steps return.

    A program would be compiled again for arrays that JAX may place elsewhere, which weights from a
    checkpoint are not.
    """
    like = jax.tree.leaves(weights)[0]
    if not like.committed or len(like.devices()) > 1:
        return state
    named = isinstance(like.sharding, NamedSharding)
    return jax.device_put(state, NamedSharding(like.sharding.mesh, P()) if named else like.sharding)


def advance(
    state: DecodeState, emission: Emission, layers: jax.Array
) -> tuple[DecodeState, DecodeRecord]:
    """Append the emission to live requests; a stop token ends its request."""
    live, none = state.live, jnp.zeros_like(state.token)
    stopped = jnp.any(emission.token[:, None] == state.request.stop_token_ids, -1)
    remaining = jnp.where(live, jnp.where(stopped, 0, state.remaining - 1), 0)
    record = DecodeRecord(
        token=jnp.where(live, emission.token, -1),
        logprob=emission.logprob,
        confidence=emission.confidence,
        exit=jnp.where(live, emission.exit, -1),
        layers=jnp.where(live, layers, 0).astype(jnp.int32),
        margin=emission.margin,
        drafted=none,
        accepted=none,
    )
    state = state.replace(
        token=jnp.where(live, emission.token, state.token),
        position=state.position + live.astype(jnp.int32),
        remaining=remaining,
    )
    return state, record


def place(state: DecodeState, rows: DecodeState, slots: jax.Array) -> DecodeState:
    """Return `state` with the rows of another one in the slots [n]; its cache may be shorter.

    What a slot held before is lost. Rows whose slot does not exist are dropped.
    """
    cache = rows.cache.replace(
        segments=pad_cache(rows.cache.segments, state.cache.segments),
        blocks=pad_cache(rows.cache.blocks, state.cache.blocks),
    )
    reach = pad_cache(rows.reach, state.reach)
    n, b = rows.token.shape[0], state.token.shape[0]
    return put(state, rows.replace(cache=cache, reach=reach), slots, n, b)


def put(tree: Tree, rows: Tree, slots: jax.Array, n: int, b: int) -> Tree:
    """Put a tree of n requests into the slots [n] of a tree of b slots.

    Leaves are [n m, ...] and [b m, ...], where m consecutive rows belong to one request.
    """

    def one(whole, part):
        per = part.shape[0] // n
        grouped = whole.reshape(b, per, *whole.shape[1:])
        new = part.reshape(n, per, *part.shape[1:])
        return grouped.at[slots].set(new, mode="drop").reshape(whole.shape)

    return jax.tree.map(one, tree, rows)


def pad_cache(tree: Tree, like: Tree) -> Tree:
    """Pad leaves [r, s, ...] with zeros to as many positions s as those of `like`."""

    def one(part, whole):
        more = [(0, 0), (0, whole.shape[1] - part.shape[1])]
        return jnp.pad(part, more + [(0, 0)] * (part.ndim - 2))

    return jax.tree.map(one, tree, like)


def free(state: DecodeState, slots: jax.Array) -> DecodeState:
    """Return `state` with the slots [n] empty.

    No step works for them until another request comes, and no attention reads what they held.
    """
    none = lambda a: a.at[slots].set(0, mode="drop")
    return state.replace(
        cache=state.cache.replace(filled=none(state.cache.filled)),
        position=none(state.position),
        remaining=none(state.remaining),
    )
