"""Exit policies: gates, thresholds and active exits, and the token that an exit emits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from eejax.common.errors import is_integer, require, require_array, require_one_of
from eejax.common.trees import where_rows
from eejax.gates import confidence
from eejax.gates.confidence import GATES, Memory
from eejax.inference.logits_params import LogitsParams, TopLogprobs, compute_top_logprobs
from eejax.inference.sampling import SamplingParams, argmax, sample
from eejax.models.config import ModelConfig
from eejax.models.exits import Reader

CONSTANT = -1.0  # decay of thresholds that do not fall


class ExitRules(TypedDict, total=False):
    """Exit rules of requests, beside their thresholds, as keywords.

    Attributes:
      exits: boundaries of the active exits, or a list of such lists, one per request. All by
        default.
      prefill_exit: an early exit may emit the first token; by default not. It saves no layer: the
        prompt's pass runs all of them.
      gate: what a token's confidence is, by default max_probability: max_probability, margin,
        entropy, patience, saturation, fixed, router.
      min_exit_layer: exits below this number of layers are not active; 0 by default.
      decay: rate at which thresholds fall as a text grows (`confidence.falling`); by default they
        stay constant.

    All but `exits` are one value for all requests, or one per request.
    """

    exits: Sequence[int] | Sequence[Sequence[int]] | None
    prefill_exit: bool | Sequence[bool] | np.ndarray
    gate: str | Sequence[str]
    min_exit_layer: int | Sequence[int] | np.ndarray
    decay: float | Sequence[float] | np.ndarray | None


class ExitPolicy(struct.PyTreeNode):
    """Exit rules of each request.

    The arrays are traced: changing a rule compiles nothing.

    Attributes:
      gate: [b] int32, index into `gates.confidence.GATES`.
      thresholds: [b, E] float32. A token leaves by the earliest active exit whose confidence
        reaches its threshold. An exit with threshold 1 never fires.
      active: [b, E] bool.
      decay: [b] float32, rate at which thresholds fall as a text grows (`confidence.falling`);
        negative where they stay constant.
      prefill_exit: [b] bool, an early exit may emit the first token, which comes from the prompt's
        pass. That pass runs all layers either way.
      paused: [b] bool, no exit fires and none drafts (set by `AutoGenerator` and `Scheduler`).
      drafts: [b] int32, tokens that the first exit may draft past an undecided one, as far as
        `EngineOptions.drafts` leaves room. With 0 the text drafts nothing either. Drafts change no
        text.
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
        *,
        drafts: int | Sequence[int] = 0,
        **rules: Unpack[ExitRules],
    ) -> ExitPolicy:
        """Check exit rules and expand them to `batch` requests.

        Args:
          threshold: confidence at which a token leaves: one number for all exits, one per exit [E],
            or one per request and exit [b, E]. At 1 no token leaves early.
          drafts: one number for all requests, or one per request.

        Raises:
          ConfigError: for thresholds outside [0, 1], NaN, a wrong shape, an unknown gate, or an
            exit that the model does not have.
          TypeError: for an unknown rule.
        """
        known = ExitRules.__optional_keys__
        if unknown := sorted(set(rules) - known):
            raise TypeError(f"unknown exit rules {unknown}; known are {sorted(known)}")
        exits, gate = rules.get("exits"), rules.get("gate", "max_probability")
        prefill_exit, decay = rules.get("prefill_exit", False), rules.get("decay")
        min_exit_layer = rules.get("min_exit_layer", 0)
        n = config.n_exits
        allowed = f"must be one number, one per early exit ({n}), or of shape ({batch}, {n})"
        a = require_array("threshold", threshold, allowed)
        ok = a.dtype.kind in "iuf" and a.shape in ((), (n,), (batch, n))
        require(ok, "threshold", threshold, allowed)
        require(bool(np.all((a >= 0) & (a <= 1))), "threshold", threshold, "must lie in [0, 1]")
        named = isinstance(gate, str | list | tuple)
        kinds = [gate] * batch if isinstance(gate, str) else list(gate) if named else []
        require(len(kinds) == batch, "gate", gate, f"must be one name, or {batch}, one per request")
        for kind in kinds:
            require_one_of("gate", kind, GATES)
        least = _numbers(
            "min_exit_layer",
            min_exit_layer,
            batch,
            f"must be a number of layers in 0..{config.n_layers}",
            config.n_layers,
            whole=True,
        )
        falls = CONSTANT if decay is None else decay
        if decay is not None:
            falls = _numbers("decay", decay, batch, "must be finite and at least 0, or None")
        whether = require_array("prefill_exit", prefill_exit, "must be True or False")
        require(
            whether.dtype == bool and whether.shape in ((), (batch,)),
            "prefill_exit",
            prefill_exit,
            f"must be True or False, or {batch} of them, one per request",
        )
        ahead = _numbers("drafts", drafts, batch, "must be a number of tokens", whole=True)
        boundaries = [e.boundary for e in config.exits]
        active = _active(boundaries, batch, exits) & (np.array(boundaries) >= least[:, None])
        active = _restrict_to_routers(
            config, np.array([kind == "router" for kind in kinds]), active, exits
        )

        # On the host: moving them one by one would compile a program for every number of requests.
        def rows(a, dtype, *shape) -> Any:  # a host array stands in for a device array
            return np.array(np.broadcast_to(np.asarray(a, dtype), (batch, *shape)))

        return cls(
            rows([GATES.index(kind) for kind in kinds], np.int32),
            rows(a, np.float32, n),
            rows(active, bool, n),
            rows(falls, np.float32),
            rows(whether, bool),
            rows(False, bool),
            rows(ahead, np.int32),
        )

    @property
    def can_leave(self) -> np.ndarray:
        """[b] bool on the host, whether an exit could fire or draft, unless it is paused."""
        fires = np.asarray(self.active) & (np.asarray(self.thresholds) < 1)
        return fires.any(-1) | (np.asarray(self.drafts) > 0)

    def may_fire(self, e: int) -> jax.Array:
        """Return [b] bool, whether exit e can fire at all."""
        return self.active[:, e] & (self.thresholds[:, e] < 1) & ~self.paused

    def threshold(self, e: int, progress: jax.Array) -> jax.Array:
        """Return [b] float32, the threshold of exit e.

        progress [b]: share of the request's tokens that come before this one.
        """
        return confidence.falling(self.thresholds[:, e], self.decay, progress)


def _numbers(
    name: str, value, batch: int, allowed: str, most: float = np.inf, whole: bool = False
) -> np.ndarray:
    a = require_array(name, value, allowed)
    largest = min(most, np.iinfo(np.int32).max if whole else np.finfo(np.float32).max)
    ok = a.dtype.kind in ("iu" if whole else "iuf") and bool(np.all((a >= 0) & (a <= largest)))
    require(ok, name, value, allowed)
    allowed_shape = f"must be one number, or {batch}, one per request"
    require(a.shape in ((), (batch,)), name, value, allowed_shape)
    return np.broadcast_to(a, (batch,))


def _active(boundaries: list[int], batch: int, exits: Any) -> np.ndarray:
    """Return [b, E] bool, the active exits among the arguments of `ExitPolicy.make`."""
    listed = exits is None or isinstance(exits, list | tuple | np.ndarray)
    require(listed, "exits", exits, f"must be a list of boundaries, among {boundaries}")
    chosen: list[Any] = boundaries if exits is None else list(exits)
    each = bool(chosen) and all(isinstance(c, list | tuple | np.ndarray) for c in chosen)
    require(
        not each or len(chosen) == batch,
        "exits",
        chosen,
        f"must be boundaries, or {batch} lists of them, one per request",
    )
    rows = chosen if each else [chosen] * batch
    for row in rows:
        for boundary in row:
            require(
                is_integer(boundary) and boundary in boundaries,
                "exits",
                list(row),
                f"must be among this model's exit boundaries {boundaries}",
            )
    active = [[b in row for b in boundaries] for row in rows]
    return np.array(active, bool).reshape(batch, len(boundaries))


def available_gates(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the gates that a model supports."""
    return tuple(g for g in GATES if g != "router" or any(e.router for e in config.exits))


def _restrict_to_routers(
    config: ModelConfig, by_router: np.ndarray, active: np.ndarray, exits
) -> np.ndarray:
    """Return [b, E] active exits; requests `by_router` [b] keep only exits with a router."""
    has = np.array([e.router > 0 for e in config.exits], bool)
    if not by_router.any():
        return active
    lacking = [e.boundary for e, r in zip(config.exits, has, strict=True) if not r]
    require(
        bool(has.any()),
        "gate",
        "router",
        "no exit of this model has a router",
        "`eejax calibrate` (or eejax.calibrate) trains them.",
    )
    named = exits is not None and bool((active[by_router] & ~has).any())
    require(not named, "exits", exits, f"must have routers, which the exits at {lacking} lack")
    return active & (has | ~by_router[:, None])


class Emission(NamedTuple):
    """The token that a step emits for each request.

    Attributes:
      token: [b] int32.
      logprob: [b] float32, natural log-probability of the token.
      confidence: [b] float32, confidence of the emitting exit.
      exit: [b] int32, number of the emitting exit (the last one is the final exit), -1 while
        undecided.
      margin: [b] float32, smallest distance to another outcome so far (`state.DecodeRecord`);
        infinite where it is not measured.
      top_logprobs: the most likely tokens, for requests that ask for them; None where the engine
        does not support it.
    """

    token: jax.Array
    logprob: jax.Array
    confidence: jax.Array
    exit: jax.Array
    margin: jax.Array
    top_logprobs: TopLogprobs | None = None

    @classmethod
    def undecided(cls, batch: int) -> Emission:
        zero = jnp.zeros((batch,), jnp.float32)
        none = jnp.full((batch,), -1, jnp.int32)
        return cls(none, zero, zero, none, jnp.full_like(zero, jnp.inf))


class ExitInput(NamedTuple):
    """Input of an exit for each request.

    Attributes:
      e: number of the exit.
      state: [b, d] hidden states at its boundary.
      head: computes logits [b, v] or statistics of them; each call costs a product with the head.
      allowed: [b] bool, whether the request may leave here.
      position: [b] int32, position of the token to emit.
      progress: [b] float32, share of the request's tokens that come before it.
      policy, sampling: settings of the requests.
      router: the exit's router network, from states to confidences, or None.
      logits_params: per-request logits processing; None where the engine does not support it.
      process_logits: applies `logits_params` to logits [b, v].
    """

    e: int
    state: jax.Array
    head: Reader
    allowed: jax.Array
    position: jax.Array
    progress: jax.Array
    policy: ExitPolicy
    sampling: SamplingParams
    router: Callable[[jax.Array], jax.Array] | None = None
    logits_params: LogitsParams | None = None
    process_logits: Callable[[jax.Array], jax.Array] | None = None


def emit_early(
    emission: Emission,
    memory: Memory,
    look: ExitInput,
    config: ModelConfig,
    measure: bool = False,
    drafts: jax.Array | None = None,
) -> tuple[Emission, Memory]:
    """Emit a token from an early exit where its gate fires.

    Only requests that are allowed and undecided take part. Logits are computed if the gate reads
    them, if a gate that does not read them fires and, with `measure`, which fills in margins,
    wherever the exit could fire. If no request samples and a kernel computes the statistics, the
    logits are never written.

    drafts [b] bool: requests that get a draft token, with no exit, where no gate fires.
    """
    e, policy = look.e, look.policy
    kind = policy.gate
    open_ = look.allowed & (emission.exit < 0) & policy.may_fire(e)
    threshold = policy.threshold(e, look.progress)
    by_state, memory = confidence.of_state(kind, look.state, memory, look.router)
    reads = confidence.needs_logits(kind)

    def fired(seen, after, memory):
        conf = jnp.where(reads, seen, by_state)

        def keep(a, b):
            return jnp.where(open_, a, b)

        memory = memory._replace(
            token=keep(after.token, memory.token), streak=keep(after.streak, memory.streak)
        )
        return conf, open_ & (conf >= threshold), memory

    def by_statistics(head, carry):
        emission, memory = carry
        seen, after = confidence.of_statistics(
            kind, head, memory, config.n_exits, config.vocab_size
        )
        conf, fires, memory = fired(seen, after, memory)
        new = emission._replace(token=head.token, logprob=jnp.log(head.top), confidence=conf)
        return _update_emission(emission, new, e, fires, drafts), memory

    def by_logits(carry):
        emission, memory = carry
        logits = look.head.logits()
        top = argmax(logits)
        seen, after = confidence.of_logits(
            kind, logits, top, memory, config.n_exits, config.vocab_size
        )
        conf, fires, memory = fired(seen, after, memory)
        if measure:
            # Patience counts agreements: its outcome depends on the tokens, not on the count.
            counts = kind == confidence.PATIENCE
            near = jnp.where(counts, top_gap(logits, top), jnp.abs(conf - threshold))
            near = jnp.where(open_, near, jnp.inf)
            near = jnp.where(fires, jnp.minimum(near, top_gap(logits, top)), near)
            emission = emission._replace(margin=jnp.minimum(emission.margin, near))
        new = _sample(emission, look, logits, conf, asked)
        return _update_emission(emission, new, e, fires, drafts), memory

    needed = open_ if measure else open_ & (reads | (by_state >= threshold))
    if drafts is not None:
        drafts = drafts & look.allowed & (emission.exit < 0)
        needed = needed | drafts
    asked = open_ if drafts is None else open_ | drafts
    ways = by_logits, None if measure else by_statistics
    return _emit((emission, memory), look, needed, asked, *ways)


def _emit(carry, look, needed, asked, by_logits, by_statistics):
    """Update `carry` from logits or from statistics of them, or return it unchanged.

    It is a single three-way branch, because a GPU waits at each branch.

    needed: [b] bool, whether the head is needed. asked: [b] bool, requests that it serves.
    by_statistics also takes the head's statistics.
    """
    statistics = look.head.statistics
    if statistics is None or by_statistics is None:
        return lax.cond(jnp.any(needed), by_logits, lambda c: c, carry)
    more = look.sampling.temperature > 0
    if look.logits_params is not None:
        more = more | look.logits_params.needs_logits
    way = jnp.where(jnp.any(needed), jnp.where(jnp.any(asked & more), 1, 2), 0)
    branches = (lambda c: c, by_logits, lambda c: by_statistics(statistics(), c))
    return lax.switch(way, branches, carry)


def _sample(emission: Emission, look: ExitInput, logits, conf, asked) -> Emission:
    """Return an exit's emission from logits [b, v], with confidences [b].

    Log-probability and most likely tokens are those of the unprocessed logits.
    """
    shaped, top_logprobs = logits, emission.top_logprobs
    if look.logits_params is not None:

        def any_of(which):
            return jnp.any(asked & which)

        def none(y):
            return TopLogprobs.blank(len(y))

        process = look.process_logits
        assert process is not None
        shaped = lax.cond(any_of(look.logits_params.changes), process, lambda y: y, logits)
        top_logprobs = lax.cond(
            any_of(look.logits_params.top_logprobs > 0), compute_top_logprobs, none, logits
        )
    token = sample(shaped, look.sampling, look.position)
    return emission._replace(
        token=token,
        logprob=log_probability(logits, token),
        confidence=conf,
        top_logprobs=top_logprobs,
    )


def emit_final(emission: Emission, look: ExitInput, measure: bool = False) -> Emission:
    """Emit a token from the last exit for each request that is allowed and undecided."""
    open_ = look.allowed & (emission.exit < 0)

    def by_statistics(head, emission):
        new = emission._replace(token=head.token, logprob=jnp.log(head.top), confidence=head.top)
        return _update_emission(emission, new, look.e, open_)

    def by_logits(emission):
        logits = look.head.logits()
        conf = confidence.max_probability(logits)
        if measure:
            near = jnp.where(open_, top_gap(logits, argmax(logits)), jnp.inf)
            emission = emission._replace(margin=jnp.minimum(emission.margin, near))
        new = _sample(emission, look, logits, conf, open_)
        return _update_emission(emission, new, look.e, open_)

    ways = by_logits, None if measure else by_statistics
    return _emit(emission, look, open_, open_, *ways)


def top_gap(logits: jax.Array, top: jax.Array) -> jax.Array:
    """Return [b], how far the largest logit, that of token `top`, exceeds the second."""
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    others = jnp.where(index == top[:, None], -jnp.inf, logits)
    return jnp.max(logits, -1) - jnp.max(others, -1)


def log_probability(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Return [...], the natural log-probability of tokens [...] under logits [..., v]."""
    picked = jnp.take_along_axis(logits, token[..., None], -1)[..., 0]
    return picked - jnp.max(logits, -1) + jnp.log(confidence.max_probability(logits))


def _update_emission(emission: Emission, new: Emission, e: int, leaves, drafts=None) -> Emission:
    """Take exit e's `new` emission where it leaves; where it only drafts, the token alone."""

    gets_token = leaves if drafts is None else leaves | drafts
    new = new._replace(exit=jnp.full_like(emission.exit, e), margin=emission.margin)
    taken = where_rows(leaves, new, emission)
    token = jnp.where(gets_token, new.token, emission.token)
    return taken._replace(token=token, margin=emission.margin)
