"""Which exit a token leaves by: gates, thresholds, active exits, and the emission they lead to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from eejax.common.errors import require, require_array, require_one_of
from eejax.gates import confidence
from eejax.gates.confidence import GATES, Memory
from eejax.inference.sampling import Sampling, argmax, choose
from eejax.inference.shaping import Likely, Shaping, most_likely
from eejax.models.config import ModelConfig
from eejax.models.exits import Reader

CONSTANT = -1.0  # decay of thresholds that do not fall


@struct.dataclass
class ExitPolicy:
    """Per-request exit rules as traced arrays: changing one never recompiles.

    gate: [b] int32, a number of `gates.confidence.GATES`.
    thresholds: [b, E] float32; a token leaves by the earliest active exit whose confidence
        reaches its threshold. Threshold 1 never fires.
    active: [b, E] bool.
    decay: [b] float32; how fast thresholds fall while a text grows (`confidence.falling`), negative
        where they do not.
    prefill_exit: [b] bool, whether the first token, which the prompt's pass produces, may be
        emitted by an early exit too. The pass runs all layers either way.
    paused: [b] bool; while it is set no exit fires, and none drafts (`auto.AutoGenerator`).
    drafts: [b] int32; tokens that the first exit may draft past one that no exit has decided yet.
        Only the engine `batched` does so, and it changes no text.
    """

    gate: jax.Array
    thresholds: jax.Array
    active: jax.Array
    decay: jax.Array
    prefill_exit: jax.Array
    paused: jax.Array
    drafts: jax.Array

    @classmethod
    def make(
        cls,
        config: ModelConfig,
        batch: int,
        threshold: float | Sequence[float] | np.ndarray = 1.0,
        exits: Sequence[int] | None = None,
        prefill_exit: bool = False,
        gate: str | Sequence[str] = "max_probability",
        min_depth: int | Sequence[int] = 0,
        decay: float | Sequence[float] | None = None,
        drafts: int | Sequence[int] = 0,
    ) -> ExitPolicy:
        """One threshold for all, one per exit [E], or one per request and exit [b, E].

        `exits` lists the boundaries of the active exits (default: all), or is a list of such lists,
        one for each request; exits below `min_depth` layers are not active. `gate`, `min_depth`,
        `decay` and `drafts` are one for all or one for each request. Raises ConfigError for
        thresholds outside [0, 1], NaN, a wrong shape, an unknown gate, or an exit the model does
        not have.
        """
        n = config.n_exits
        allowed = f"must be one number, one per early exit ({n}), or of shape ({batch}, {n})"
        a = require_array("threshold", threshold, allowed)
        ok = a.dtype.kind in "iuf" and a.shape in ((), (n,), (batch, n))
        require(ok, "threshold", threshold, allowed)
        require(bool(np.all((a >= 0) & (a <= 1))), "threshold", threshold, "must lie in [0, 1]")
        named = isinstance(gate, str | list | tuple)
        kinds = [gate] * batch if isinstance(gate, str) else list(gate) if named else []
        require(len(kinds) == batch, "gate", gate, f"must be one name, or {batch}: one each")
        for kind in kinds:
            require_one_of("gate", kind, GATES)
        least = _numbers(
            "min_depth", min_depth, batch, f"must be a number of layers in 0..{config.n_layers}",
            config.n_layers,
        )  # fmt: skip
        falls = CONSTANT if decay is None else decay
        if decay is not None:
            falls = _numbers("decay", decay, batch, "must be finite and at least 0, or None")
        whether = require_array("prefill_exit", prefill_exit, "must be True or False")
        require(
            whether.dtype == bool and whether.shape in ((), (batch,)), "prefill_exit", prefill_exit,
            f"must be True or False, or {batch} of them: one each",
        )  # fmt: skip
        ahead = _numbers("drafts", drafts, batch, "must be a number of tokens", whole=True)
        boundaries = [e.boundary for e in config.exits]
        active = _active(boundaries, batch, exits) & (np.array(boundaries) >= least[:, None])
        active = _routed(config, np.array([kind == "router" for kind in kinds]), active, exits)
        # On the host: to move them one by one would compile a program for every number of requests.
        rows = lambda a, dtype, *shape: np.array(
            np.broadcast_to(np.asarray(a, dtype), (batch, *shape))
        )
        return cls(
            rows([GATES.index(kind) for kind in kinds], np.int32),
            rows(a, np.float32, n),
            rows(active, bool, n),
            rows(falls, np.float32),
            rows(whether, bool),
            rows(False, bool),
            rows(ahead, np.int32),
        )

    def may_fire(self, e: int) -> jax.Array:
        """[b] whether exit e could fire at all."""
        return self.active[:, e] & (self.thresholds[:, e] < 1) & ~self.paused

    def threshold(self, e: int, progress: jax.Array) -> jax.Array:
        """[b] that of exit e after a share `progress` [b] of a request's tokens."""
        return confidence.falling(self.thresholds[:, e], self.decay, progress)


def _numbers(
    name: str, value, batch: int, allowed: str, most: float = np.inf, whole: bool = False
) -> np.ndarray:
    a = require_array(name, value, allowed)
    largest = min(most, np.iinfo(np.int32).max if whole else np.finfo(np.float32).max)
    ok = a.dtype.kind in ("iu" if whole else "iuf") and bool(np.all((a >= 0) & (a <= largest)))
    require(ok, name, value, allowed)
    require(a.shape in ((), (batch,)), name, value, f"must be one number, or {batch}: one each")
    return np.broadcast_to(a, (batch,))


def _active(boundaries: list[int], batch: int, exits) -> np.ndarray:
    """[b, E] bool of `ExitPolicy.make`'s exits."""
    listed = exits is None or isinstance(exits, list | tuple | np.ndarray)
    require(listed, "exits", exits, f"must be a list of boundaries, among {boundaries}")
    chosen = boundaries if exits is None else list(exits)
    each = bool(chosen) and all(isinstance(c, list | tuple | np.ndarray) for c in chosen)
    require(
        not each or len(chosen) == batch, "exits", chosen,
        f"must be boundaries, or {batch} lists of them: one each",
    )  # fmt: skip
    rows = chosen if each else [chosen] * batch
    for row in rows:
        for boundary in row:
            require(
                boundary in boundaries, "exits", list(row),
                f"must be among this model's exit boundaries {boundaries}",
            )  # fmt: skip
    active = [[b in row for b in boundaries] for row in rows]
    return np.array(active, bool).reshape(batch, len(boundaries))


def gates_of(config: ModelConfig) -> tuple[str, ...]:
    """Names of the gates that a model can be asked for."""
    return tuple(g for g in GATES if g != "router" or any(e.router for e in config.exits))


def _routed(config: ModelConfig, by_router: np.ndarray, active: np.ndarray, exits) -> np.ndarray:
    """[b, E] active exits, of requests `by_router` [b] those that have a router network alone."""
    has = np.array([e.router > 0 for e in config.exits], bool)
    if not by_router.any():
        return active
    lacking = [e.boundary for e, r in zip(config.exits, has, strict=True) if not r]
    require(
        bool(has.any()), "gate", "router", "no exit of this model has a router",
        "experiments.calibrate (eejax.calibrate) trains them.",
    )  # fmt: skip
    named = exits is not None and bool((active[by_router] & ~has).any())
    require(not named, "exits", exits, f"the exits at {lacking} have no router")
    return active & (has | ~by_router[:, None])


class Emission(NamedTuple):
    """The token a step emits for each request; arrays [b].

    exit: number of the emitting exit (the last: the final one), -1 while undecided. margin: the
    smallest distance to another outcome so far, where it is measured (`state.Record`). likely: the
    most likely tokens, of requests that are to be told, where an engine can tell them.
    """

    token: jax.Array
    logprob: jax.Array
    confidence: jax.Array
    exit: jax.Array
    margin: jax.Array
    likely: Likely | None = None

    @classmethod
    def undecided(cls, batch: int) -> Emission:
        zero = jnp.zeros((batch,), jnp.float32)
        none = jnp.full((batch,), -1, jnp.int32)
        return cls(none, zero, zero, none, jnp.full_like(zero, jnp.inf))


class Look(NamedTuple):
    """What an exit sees of each request. head: makes logits [b, v], or what is to be known of them,
    which costs a product.

    e: the exit's number; state [b, d]: at its boundary; allowed [b]: who may leave here; position
    [b]: of the token to emit; progress [b]: share of its request's tokens before it; router: what
    the exit's router network makes of states, None where it has none; shaping: what requests ask
    for, and shape: what it makes of logits, where an engine takes any.
    """

    e: int
    state: jax.Array
    head: Reader
    allowed: jax.Array
    position: jax.Array
    progress: jax.Array
    router: Callable[[jax.Array], jax.Array] | None = None
    shaping: Shaping | None = None
    shape: Callable[[jax.Array], jax.Array] | None = None


def consider(
    emission: Emission,
    memory: Memory,
    look: Look,
    policy: ExitPolicy,
    sampling: Sampling,
    config: ModelConfig,
    measure: bool = False,
    drafts: jax.Array | None = None,
) -> tuple[Emission, Memory]:
    """Emits from an early exit, for those `look.allowed` and undecided whose gate fires.

    Logits are made where a gate reads them, or where one that does not fires; with `measure`,
    which fills in margins, wherever an exit could fire. Where there is a kernel for what they are
    made for, and nobody samples, it is not logits that are made. Those that `drafts` [b] get a
    token, of no exit, where no gate fires either.
    """
    e, kind = look.e, policy.gate
    open_ = look.allowed & (emission.exit < 0) & policy.may_fire(e)
    threshold = policy.threshold(e, look.progress)
    by_state, memory = confidence.of_state(kind, look.state, memory, look.router)
    reads = confidence.needs_logits(kind)

    def fired(seen, after, memory):
        conf = jnp.where(reads, seen, by_state)
        keep = lambda a, b: jnp.where(open_, a, b)
        memory = memory._replace(
            token=keep(after.token, memory.token), streak=keep(after.streak, memory.streak)
        )
        return conf, open_ & (conf >= threshold), memory

    def by_statistics(carry):
        emission, memory = carry
        head = look.head.confidence()
        seen, after = confidence.of_statistics(
            kind, head, memory, config.n_exits, config.vocab_size
        )
        conf, fires, memory = fired(seen, after, memory)
        return _said(emission, e, head.token, jnp.log(head.top), conf, fires, drafts), memory

    def by_logits(carry):
        emission, memory = carry
        logits = look.head.logits()
        top = argmax(logits)
        seen, after = confidence.of_logits(
            kind, logits, top, memory, config.n_exits, config.vocab_size
        )
        conf, fires, memory = fired(seen, after, memory)
        if measure:
            # Patience counts agreements: what may tip it are the tokens and not the count.
            counts = kind == confidence.PATIENCE
            near = jnp.where(counts, top_gap(logits, top), jnp.abs(conf - threshold))
            near = jnp.where(open_, near, jnp.inf)
            near = jnp.where(fires, jnp.minimum(near, top_gap(logits, top)), near)
            emission = emission._replace(margin=jnp.minimum(emission.margin, near))
        token, logprob, likely = _drawn(look, logits, sampling, asked)
        return _said(emission, e, token, logprob, conf, fires, drafts, likely), memory

    needed = open_ if measure else open_ & (reads | (by_state >= threshold))
    if drafts is not None:
        drafts = drafts & look.allowed & (emission.exit < 0)
        needed = needed | drafts
    asked = open_ if drafts is None else open_ | drafts
    ways = by_logits, None if measure else by_statistics
    return _emitted((emission, memory), look, needed, asked, sampling, *ways)


def _emitted(carry, look, needed, asked, sampling, by_logits, by_statistics):
    """What becomes of `carry`: nothing where nobody `needed` [b] a look at the head, else what all
    who are `asked` [b] are served by. One choice of three, as a GPU waits for each."""
    if look.head.confidence is None or by_statistics is None:
        return lax.cond(jnp.any(needed), by_logits, lambda c: c, carry)
    more = sampling.temperature > 0
    if look.shaping is not None:
        more = more | look.shaping.needs_logits
    way = jnp.where(jnp.any(needed), jnp.where(jnp.any(asked & more), 1, 2), 0)
    return lax.switch(way, (lambda c: c, by_logits, by_statistics), carry)


def _drawn(look: Look, logits, sampling, asked) -> tuple[jax.Array, jax.Array, Likely | None]:
    """(token, its log-probability, the most likely ones) of logits [b, v]; the last two are of the
    logits as they came, before what requests ask for."""
    if look.shaping is None:
        token = choose(logits, sampling, look.position)
        return token, log_probability(logits, token), None
    any_of = lambda which: jnp.any(asked & which)
    shaped = lax.cond(any_of(look.shaping.changes), look.shape, lambda y: y, logits)
    none = lambda y: Likely.blank(len(y))
    likely = lax.cond(any_of(look.shaping.likely > 0), most_likely, none, logits)
    token = choose(shaped, sampling, look.position)
    return token, log_probability(logits, token), likely


def conclude(emission: Emission, look: Look, sampling: Sampling, measure: bool = False) -> Emission:
    """Emits from the last exit, for those `look.allowed` and undecided."""
    open_ = look.allowed & (emission.exit < 0)

    def by_statistics(emission):
        head = look.head.confidence()
        return _said(emission, look.e, head.token, jnp.log(head.top), head.top, open_)

    def by_logits(emission):
        logits = look.head.logits()
        conf = confidence.max_probability(logits)
        if measure:
            near = jnp.where(open_, top_gap(logits, argmax(logits)), jnp.inf)
            emission = emission._replace(margin=jnp.minimum(emission.margin, near))
        token, logprob, likely = _drawn(look, logits, sampling, open_)
        return _said(emission, look.e, token, logprob, conf, open_, likely=likely)

    ways = by_logits, None if measure else by_statistics
    return _emitted(emission, look, open_, open_, sampling, *ways)


def top_gap(logits: jax.Array, top: jax.Array) -> jax.Array:
    """[b] distance of the largest logit, that of token `top`, to the second."""
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    others = jnp.where(index == top[:, None], -jnp.inf, logits)
    return jnp.max(logits, -1) - jnp.max(others, -1)


def log_probability(logits: jax.Array, token: jax.Array) -> jax.Array:
    """[...] natural log-probability of tokens [...] under logits [..., v]."""
    picked = jnp.take_along_axis(logits, token[..., None], -1)[..., 0]
    return picked - jnp.max(logits, -1) + jnp.log(confidence.max_probability(logits))


def _said(emission, e, token, logprob, conf, leaves, drafts=None, likely=None) -> Emission:
    """`emission` with exit e's token where it `leaves`, and that alone where it `drafts`."""
    take = lambda new, old: jnp.where(leaves, new, old)
    said = leaves if drafts is None else leaves | drafts
    if likely is not None:
        keep = lambda new, old: jnp.where(leaves[:, None], new, old)
        likely = jax.tree.map(keep, likely, emission.likely)
    return Emission(
        jnp.where(said, token, emission.token), take(logprob, emission.logprob),
        take(conf, emission.confidence), take(jnp.full_like(token, e), emission.exit),
        emission.margin, emission.likely if likely is None else likely,
    )  # fmt: skip
