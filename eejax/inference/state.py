"""What the engines share: prepared weights, the decoding state, and one step's record."""

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
from eejax.inference.policy import Emission, ExitPolicy
from eejax.inference.sampling import Sampling
from eejax.inference.shaping import Likely, Shaping
from eejax.models import exits, transformer
from eejax.models.cache import KVCache, unstack_segments, varying
from eejax.models.config import ModelConfig
from eejax.models.params import for_compute

PIPELINED = "pipelined"
ENGINES = ("full", "posthoc", "recompute", PIPELINED, "propagate", "speculative")
PROPAGATIONS = ("state", "mask")
STOPS = 8  # stop tokens of a request; `Generator` takes more by other programs, slots do not
FIRST_ACCEPTANCE = 0.8  # share of drafts taken to be accepted before any was made


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Static choices of an engine; each combination compiles once.

    engine: "full" runs every layer and emits from the final exit; "posthoc" runs every layer and
        emits from the earliest exit whose gate fires (the oracle); "recompute" stops there, and
        later carries the waiting tokens along (KV recomputation); "pipelined", on the stages of a
        mesh (`pipelined.PipelinedGenerator`), leaves the deeper layers to the stages behind;
        "propagate" stops there too, and fills the deeper keys and values at once, from the state
        it stopped at (CALM), which makes other texts; "speculative" emits what "full" would,
        several tokens at a time: an exit drafts them and one pass through the layers above it
        verifies them (LayerSkip).
    cap: most tokens of a request that may wait for deeper keys and values; when a token is
        the cap-th, it runs all layers (and is still emitted where its gate fired).
    buckets: row counts a deeper segment is compiled for, kept as a tuple; the largest there can
        be, the cap or gamma + 1, is always one.
    max_depth: segments to load, from the bottom; the exit above the last of them then emits what
        no gate before it did. None: all.
    propagate: what "propagate" leaves in the layers above a token's exit: "state", keys and values
        of the state it left with, or "mask", nothing: later tokens do not see it there.
    draft_exit: number of the exit that drafts for "speculative".
    gamma: most tokens it drafts in a step.
    adapt: whether it drafts fewer, or none, for a request whose drafts are seldom accepted.
    """

    engine: str = "recompute"
    cap: int = 16
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16)
    max_depth: int | None = None
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
        if self.max_depth is not None:
            require_count("max_depth", self.max_depth)
        require_one_of("propagate", self.propagate, PROPAGATIONS)
        require(
            isinstance(self.draft_exit, int) and self.draft_exit >= 0,
            "draft_exit", self.draft_exit, "must be the number of an exit, the first being 0",
        )  # fmt: skip
        require(isinstance(self.adapt, bool), "adapt", self.adapt, "must be True or False")
        require(
            self.max_depth is None or self.engine != "speculative",
            "max_depth", self.max_depth, "must be None with the engine 'speculative'",
            "What verifies its drafts is the final exit.",
        )  # fmt: skip

    @property
    def leaves_early(self) -> bool:
        """Whether early exits emit tokens."""
        return self.engine not in ("full", "speculative")

    @property
    def most_rows(self) -> int:
        """Most rows of a request that go through a deeper segment together."""
        return self.gamma + 1 if self.engine == "speculative" else self.cap

    @property
    def widths(self) -> tuple[int, ...]:
        """Row counts deeper segments are compiled for, ascending, the largest last."""
        return (*sorted({w for w in self.buckets if w < self.most_rows}), self.most_rows)


@struct.dataclass
class Weights:
    """Parameters laid out for decoding, in the dtype of computation.

    segments: per loaded segment its layers' trees, unstacked; params: everything else; axes: those
    of the mesh of which this is one device's share, inside of a `shard_map` (`inference.sharded`).
    """

    segments: tuple[tuple[Tree, ...], ...]
    params: Tree
    axes: Axes = struct.field(pytree_node=False, default=LOCAL)

    @property
    def last(self) -> int:
        """Number of the exit above the last segment, which emits what no other did."""
        return len(self.segments) - 1


def without_stages(options: EngineOptions | str) -> EngineOptions:
    """The options, or those of an engine's name. Raises `ConfigError` for one that needs stages."""
    options = EngineOptions(engine=options) if isinstance(options, str) else options
    require(
        options.engine != PIPELINED, "engine", options.engine, "decodes on the stages of a mesh",
        "Use inference.PipelinedGenerator.",
    )  # fmt: skip
    return options


def engine_config(config: ModelConfig, options: EngineOptions) -> ModelConfig:
    """The model an engine decodes with: "full" has no exits, "speculative" the one that drafts.

    Raises ConfigError for more segments than there are, for less than the whole under "full", for
    a drafting exit that there is not, and for its cap or gamma beyond the context.
    """
    if options.engine == "full":
        config = config.replace(exits=())
    if options.engine == "speculative":
        boundaries = [e.boundary for e in config.exits]
        require(
            options.draft_exit < len(boundaries),
            "draft_exit", options.draft_exit,
            f"must be the number of one of this model's {len(boundaries)} early exits, which lie at"
            f" the boundaries {boundaries}",
            "" if boundaries else "Tune an exit first, or decode with the engine 'full'.",
        )  # fmt: skip
        config = config.replace(exits=(config.exits[options.draft_exit],))
    if name := dict(recompute="cap", pipelined="cap", speculative="gamma").get(options.engine):
        rows, most = getattr(options, name), config.context_length
        require(rows <= most, name, rows, f"must be at most {most}, the model's context_length")
    n = config.n_exits + 1
    require(
        options.max_depth is None or options.max_depth <= n,
        "max_depth", options.max_depth,
        f"must be at most the {n} segments that the engine {options.engine!r} has of this model",
    )  # fmt: skip
    return config


def prepare(
    params: Tree, config: ModelConfig, max_depth: int | None = None, axes: Axes = LOCAL
) -> Weights:
    """Unstacks the layers by segment and casts once, so that no step copies or casts weights.

    With a `max_depth`, parameters above that segment are left out. With `axes`, `params` are one
    device's share.
    """
    n = max_depth or config.n_exits + 1
    params = for_compute(params, config.dtype)
    rest = outside(params, config, n)
    rest["exits"] = exits.fuse(rest["exits"], config, axes)
    return Weights(unstack_segments(params, config, n, axes), rest, axes)


def outside(params: Tree, config: ModelConfig, n: int) -> Tree:
    """What the first n segments need of a tree like the parameters' beside their layers."""
    rest = {k: v for k, v in params.items() if k != "layers"}
    if n <= config.n_exits:
        rest.pop("final", None)
        names = {e.name for e in config.exits[:n]}
        rest["exits"] = {k: v for k, v in rest["exits"].items() if k in names}
    return rest


@struct.dataclass
class Request:
    """What is asked for, by row: traced arrays, so that none of it compiles anything anew.

    stops: [b, n] token ids that end a request, padded with -1; start: [b] tokens of its prompt;
    limit: [b] most tokens to emit; shaping: what else it asks of its tokens, of engines that take
    it (`BatchOptions.shaping`).
    """

    policy: ExitPolicy
    sampling: Sampling
    stops: jax.Array
    start: jax.Array
    limit: jax.Array
    shaping: Shaping | None = None

    @classmethod
    def make(
        cls,
        config: ModelConfig,
        lengths: Sequence[int] | np.ndarray,
        limits: Sequence[int] | np.ndarray,
        policy: ExitPolicy,
        sampling: Sampling,
        stop_tokens: Sequence[int] = (),
        width: int = STOPS,
        shaping: Shaping | None = None,
    ) -> Request:
        """Of prompts of so many tokens, and as many limits. Raises ConfigError for what are no such
        numbers, for stop tokens that there are not, or for more than `width` of them, which all
        requests of an engine must have alike."""
        for name, value in (("lengths", lengths), ("limits", limits)):
            allowed = "must be a sequence of numbers of tokens"
            a = require_array(name, value, allowed)
            ok = a.ndim == 1 and a.dtype.kind in "iu" and bool(np.all(a >= 0))
            require(ok, name, value, allowed)
        require(
            len(limits) == len(lengths), "limits", limits,
            f"must be {len(lengths)}: one for each of the prompts",
        )  # fmt: skip
        allowed = f"must be a sequence of token ids, each in 0..{config.vocab_size - 1}"
        ids = require_array("stop_tokens", stop_tokens, allowed)
        require(
            ids.ndim == 1
            and (not ids.size or ids.dtype.kind in "iu")
            and bool(np.all((ids >= 0) & (ids < config.vocab_size))),
            "stop_tokens", stop_tokens, allowed,
        )  # fmt: skip
        require(ids.size <= width, "stop_tokens", stop_tokens, f"must be at most {width} of them")
        stops = np.full((len(lengths), width), -1, np.int32)
        stops[:, : ids.size] = ids
        as_rows = lambda a: np.minimum(a, np.iinfo(np.int32).max).astype(np.int32)
        return cls(policy, sampling, stops, as_rows(lengths), as_rows(limits), shaping)

    @classmethod
    def blank(cls, config: ModelConfig, rows: int) -> Request:
        """Of free slots."""
        none = np.zeros((rows,), np.int32)
        return cls.make(config, none, none, ExitPolicy.make(config, rows), Sampling.make(rows))

    def progress(self, position: jax.Array) -> jax.Array:
        """[b] the share of a request's tokens that come before the one at `position` [b]."""
        done = (position - self.start).astype(jnp.float32)
        return done / jnp.maximum(self.limit, 1).astype(jnp.float32)


@struct.dataclass
class DecodeState:
    """Everything a generation carries from step to step; rows are requests, or slots for them.

    cache: keys, values and `filled`.
    waiting: per boundary below the last one, [b, cap, d]: states of the positions that wait
        there, position p in slot p % cap. Empty where the engine never skips.
    reach: [b, s] int32 the last segment each position has keys and values in; no positions where
        that is the same for all, as it is but under `propagate` = "mask".
    acceptance: [b] share of a request's drafts that is accepted, lately; only "speculative" drafts.
    token: [b] the last emitted token, which the next step reads; position: [b] its position.
    remaining: [b] tokens still to emit; 0 when done, and in a free slot.
    """

    cache: KVCache
    waiting: tuple[jax.Array, ...]
    reach: jax.Array
    acceptance: jax.Array
    token: jax.Array
    position: jax.Array
    remaining: jax.Array
    request: Request

    @property
    def live(self) -> jax.Array:
        return self.remaining > 0


class Record(NamedTuple):
    """What one step did for each request; arrays [b], or [n, b] where it emits up to n tokens.

    exit: number of the emitting exit, -1 where no token was emitted.
    layers: layers executed in the step (all requests of a batch share a step), whatever their
        rows; see also `Result`. Of several tokens of a step only the first has them, so that
        their sum counts each once. The engine "batched" has no steps that slots share: it gives the
        layers below the emitting exit, and what was run in `BatchedState.work`.
    margin: the smallest distance to another outcome: of the top two logits at the emitting exit,
        and of confidence to threshold at every exit considered. Only "posthoc" measures it.
    drafted: tokens drafted for the request in the step; only its first token has them. By "batched"
        1 for a token that others were run ahead on before it was decided.
    accepted: 1 for a token that was drafted, 0 for one that only the emitting exit came up with.
        Both are 0 for engines that do not draft.
    likely: the most likely tokens, of requests that asked (`Shaping.likely`), where an engine takes
        such requests.
    """

    token: jax.Array
    logprob: jax.Array
    confidence: jax.Array
    exit: jax.Array
    layers: jax.Array
    margin: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    likely: Likely | None = None


def blank(
    weights: Weights, config: ModelConfig, options: EngineOptions, cache: KVCache, request: Request
) -> DecodeState:
    """The state behind the prompts, before any token: nobody waits, and nothing is emitted."""
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


def beside(state: Tree, weights: Weights) -> Tree:
    """A one-device state that lies as the weights do, and with it what steps return: a program
    would be compiled again for arrays that JAX may put elsewhere, which weights from a checkpoint
    are not."""
    like = jax.tree.leaves(weights)[0]
    if not like.committed or len(like.devices()) > 1:
        return state
    named = isinstance(like.sharding, NamedSharding)
    return jax.device_put(state, NamedSharding(like.sharding.mesh, P()) if named else like.sharding)


def reader(weights: Weights, config: ModelConfig, e: int, h: jax.Array) -> exits.Reader:
    """Exit e's, of the states behind its block, h [b, d]; on a mesh it says the same of the whole
    vocabulary on every shard, so that all decide alike."""
    return exits.reader(weights.params, config, e, h, weights.axes)


def embed_last(weights: Weights, config: ModelConfig, state: DecodeState) -> jax.Array:
    """[b, 1, d]: the last emitted tokens, embedded."""
    token, position = state.token[:, None], state.position[:, None]
    return transformer.embed(weights.params, config, token, position, weights.axes)


def undecided(weights: Weights, batch: int) -> Emission:
    """`Emission.undecided` of a device's requests."""
    return varying(Emission.undecided(batch), weights.axes.data)


def advance(
    state: DecodeState, emission: Emission, layers: jax.Array
) -> tuple[DecodeState, Record]:
    """Appends the emission to live requests; a stop token ends its request."""
    live, none = state.live, jnp.zeros_like(state.token)
    stopped = jnp.any(emission.token[:, None] == state.request.stops, -1)
    remaining = jnp.where(live, jnp.where(stopped, 0, state.remaining - 1), 0)
    record = Record(
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
    """`state` with the rows of another in the slots [n]; that one's cache may be shorter.

    What a slot held before is gone. Rows whose slot is no slot of the state are left out.
    """
    cache = rows.cache.replace(
        segments=lengthened(rows.cache.segments, state.cache.segments),
        blocks=lengthened(rows.cache.blocks, state.cache.blocks),
    )
    reach = lengthened(rows.reach, state.reach)
    n, b = rows.token.shape[0], state.token.shape[0]
    return put(state, rows.replace(cache=cache, reach=reach), slots, n, b)


def put(tree: Tree, rows: Tree, slots: jax.Array, n: int, b: int) -> Tree:
    """A tree of b slots with a tree of n requests in the slots [n].

    Leaves [b m, ...] and [n m, ...], where m rows in turn belong to one request.
    """

    def one(whole, part):
        per = part.shape[0] // n
        grouped = whole.reshape(b, per, *whole.shape[1:])
        new = part.reshape(n, per, *part.shape[1:])
        return grouped.at[slots].set(new, mode="drop").reshape(whole.shape)

    return jax.tree.map(one, tree, rows)


def lengthened(tree: Tree, like: Tree) -> Tree:
    """Leaves [r, s, ...] with as many positions s as those of `like`, zeros behind their own."""

    def one(part, whole):
        more = [(0, 0), (0, whole.shape[1] - part.shape[1])]
        return jnp.pad(part, more + [(0, 0)] * (part.ndim - 2))

    return jax.tree.map(one, tree, like)


def free(state: DecodeState, slots: jax.Array) -> DecodeState:
    """`state` with the slots [n] empty: no step works for them, until another request comes, and
    nobody's attention reads as far as they were written."""
    none = lambda a: a.at[slots].set(0, mode="drop")
    return state.replace(
        cache=state.cache.replace(filled=none(state.cache.filled)),
        position=none(state.position), remaining=none(state.remaining),
    )  # fmt: skip
