"""Which exit a token leaves by: thresholds, active exits, and the emission they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from eejax.common.errors import require
from eejax.gates import confidence
from eejax.inference.sampling import Sampling, choose
from eejax.models.config import ModelConfig


@struct.dataclass
class ExitPolicy:
    """Per-request exit rules as traced arrays: changing one never recompiles.

    thresholds: [b, E] float32; a token leaves by the earliest active exit whose confidence
        reaches its threshold. Threshold 1 never fires.
    active: [b, E] bool.
    prefill_exit: [b] bool, whether the first token, which the prompt's pass produces, may be
        emitted by an early exit too. The pass runs all layers either way.
    """

    thresholds: jax.Array
    active: jax.Array
    prefill_exit: jax.Array

    @classmethod
    def make(
        cls,
        config: ModelConfig,
        batch: int,
        threshold: float | Sequence[float] | np.ndarray = 1.0,
        exits: Sequence[int] | None = None,
        prefill_exit: bool = False,
    ) -> ExitPolicy:
        """One threshold for all, one per exit [E], or one per request and exit [b, E].

        `exits` lists the boundaries of the active exits (default: all). Raises ConfigError for
        thresholds outside [0, 1], NaN, a wrong shape, or an exit the model does not have.
        """
        n = config.n_exits
        a = np.asarray(threshold, np.float32)
        require(
            a.shape in ((), (n,), (batch, n)),
            "threshold", threshold,
            f"must be one number, one per early exit ({n}), or of shape ({batch}, {n})",
        )  # fmt: skip
        require(bool(np.all((a >= 0) & (a <= 1))), "threshold", threshold, "must lie in [0, 1]")
        boundaries = [e.boundary for e in config.exits]
        chosen = boundaries if exits is None else list(exits)
        for boundary in chosen:
            require(
                boundary in boundaries, "exits", list(chosen),
                f"must be among this model's exit boundaries {boundaries}",
            )  # fmt: skip
        active = np.array([b in chosen for b in boundaries], bool)
        return cls(
            jnp.asarray(np.broadcast_to(a, (batch, n)).astype(np.float32)),
            jnp.asarray(np.broadcast_to(active, (batch, n))),
            jnp.full((batch,), prefill_exit),
        )

    def may_fire(self, e: int) -> jax.Array:
        """[b] whether exit e could fire at all."""
        return self.active[:, e] & (self.thresholds[:, e] < 1)


class Emission(NamedTuple):
    """The token a step emits for each request; arrays [b].

    exit: number of the emitting exit (E: the final one), -1 while undecided.
    """

    token: jax.Array
    logprob: jax.Array
    confidence: jax.Array
    exit: jax.Array

    @classmethod
    def undecided(cls, batch: int) -> Emission:
        zero = jnp.zeros((batch,), jnp.float32)
        none = jnp.full((batch,), -1, jnp.int32)
        return cls(none, zero, zero, none)


def consider(
    emission: Emission,
    e: int,
    logits: jax.Array,
    allowed: jax.Array,
    policy: ExitPolicy | None,
    sampling: Sampling,
    position: jax.Array,
) -> Emission:
    """Emits from exit e, where `allowed` [b] and still undecided, if its gate fires.

    `policy` None is the final exit, which always emits. position [b]: of the emitted token.
    """
    conf = confidence.max_probability(logits)
    leaves = allowed & (emission.exit < 0)
    if policy is not None:
        leaves &= confidence.fires(conf, policy.thresholds[:, e], policy.active[:, e])
    token = choose(logits, sampling, position)
    peak = jnp.max(logits, -1)
    picked = jnp.take_along_axis(logits, token[:, None], -1)[:, 0]
    new = Emission(token, picked - peak + jnp.log(conf), conf, jnp.full_like(token, e))
    return Emission(*(jnp.where(leaves, a, b) for a, b in zip(new, emission, strict=True)))
