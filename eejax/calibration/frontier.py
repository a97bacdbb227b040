"""The quality-speed frontier: what every threshold would do, from one teacher-forced pass.

A gate looks only at its own exit and the exits before it. One pass over held-out text therefore
answers for all gates, thresholds and subsets of exits at once: it records every exit's top token
and confidences, from which follow where each token would leave and whether it would be the full
model's token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eejax.common.errors import DataError, require
from eejax.common.trees import Tree, map_chunks
from eejax.data import Tokenizer
from eejax.gates import confidence, router
from eejax.gates.confidence import GATES
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import argmax
from eejax.kernels import call
from eejax.losses.cross_entropy import IGNORE
from eejax.models import exits, transformer
from eejax.models.config import ModelConfig

CHUNK = 1024  # tokens whose logits exist at a time


@dataclasses.dataclass(frozen=True)
class ExitScores:
    """Predictions of every exit at every counted position; [e, n], the final exit last.

    Attributes:
      config: the configuration of the scored model.
      labels: [n] the token that was to be predicted.
      units: [n] number of the text (a prompt, a window) of a position; positions of a text are in
        order.
      tokens: [e, n] the most likely token, after the exit's own temperature.
      nlls: [e, n] -log p of the label, in nats.
      confidences: [e, n] by gate, for gates that record one (max_probability, margin, entropy,
        saturation, and router where the model has any). Patience follows from the tokens and the
        active exits, and fixed is 1.
    """

    config: ModelConfig
    labels: np.ndarray
    units: np.ndarray
    tokens: np.ndarray
    nlls: np.ndarray
    confidences: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return self.tokens.shape[1]

    @property
    def progress(self) -> np.ndarray:
        """Share [n] float32 of a text's counted positions that come before each position.

        Falling thresholds depend on it, as in an engine that is asked for exactly that many tokens.
        """
        _, index, counts = np.unique(self.units, return_inverse=True, return_counts=True)
        before = np.empty(len(self), np.int64)
        starts = np.cumsum(counts) - counts
        order = np.argsort(index, kind="stable")
        before[order] = np.arange(len(self)) - np.repeat(starts, counts)
        return before.astype(np.float32) / counts[index].astype(np.float32)

    def bytes_per_token(self, tokenizer: Tokenizer) -> float:
        """Compute the mean UTF-8 bytes of the scored labels, for `FrontierPoint.bits_per_byte`."""
        return float(tokenizer.byte_lengths[self.labels].mean())


@dataclasses.dataclass(frozen=True)
class SegmentCosts:
    """Seconds that one token takes in each segment's layers and in each exit's head.

    Any other unit will do, as only ratios are compared.

    Attributes:
      segments: [e] seconds of each segment's layers.
      heads: [e] seconds of each exit's head, the final one last.

    Raises:
      ConfigError: for lengths that differ, and costs that are negative or not finite.
    """

    segments: Sequence[float]
    heads: Sequence[float]

    def __post_init__(self):
        for name in ("segments", "heads"):
            costs = tuple(map(float, getattr(self, name)))
            ok = all(math.isfinite(c) and c >= 0 for c in costs)
            require(ok, name, costs, "must be finite and at least 0")
            object.__setattr__(self, name, costs)
        same = len(self.segments) == len(self.heads) > 0
        require(same, "heads", self.heads, f"must be one for each of the segments {self.segments}")

    @property
    def full(self) -> float:
        """Seconds of all layers and the final head."""
        return sum(self.segments) + self.heads[-1]


@dataclasses.dataclass(frozen=True)
class FrontierPoint:
    """Effect of one threshold on held-out text.

    Attributes:
      agreement: share of positions whose emitted token is the full model's most likely one.
      depth: mean layers below the emitting exit; n_layers / depth bounds the speed-up.
      nll: mean -log p of the label under the emitting exit, in nats.
      shares: [e] share of each exit, the final one last.
      seconds: predicted mean time of a token from `SegmentCosts`, None without them: the layers
        below the emitting exit and the heads that were read. Layers that are caught up later, in
        rows beside those of other tokens, are not included.
    """

    threshold: float | tuple[float, ...]
    agreement: float
    depth: float
    nll: float
    shares: tuple[float, ...]
    seconds: float | None = None

    @property
    def perplexity(self) -> float:
        """Perplexity per token of the emitted distributions."""
        return math.exp(self.nll)

    def bits_per_byte(self, bytes_per_token: float) -> float:
        """Compute the bits per byte of the emitted distributions (`ExitScores.bytes_per_token`)."""
        return self.nll / (math.log(2) * bytes_per_token)


@partial(jax.jit, static_argnames="config")
def _score(params: Tree, config: ModelConfig, batch: Mapping[str, jax.Array]):
    """Return (tokens, nlls, confidences by gate), each [e, b * t]."""
    boundaries = []

    def tap(e, x):
        boundaries.append(x)
        return x

    states = transformer.exit_states(
        params,
        config,
        batch["tokens"],
        positions=batch.get("positions"),
        segment_ids=batch.get("segment_ids"),
        tap=tap,
    )
    before = [jnp.zeros_like(boundaries[0]), *boundaries[:-1]]
    labels = batch["labels"].reshape(-1)
    n = labels.size
    heads = [exits.head(params, config, e) for e in range(config.n_exits + 1)]

    def by_statistics(head, inputs):
        h, label = inputs
        seen = exits.statistics(head, h)
        vocab, table = config.vocab_size, confidence.LOGITS_GATES
        gates = {name: gate.of_statistics(seen, vocab) for name, gate in table.items()}
        picked = exits.label_logits(head, h, jnp.maximum(label, 0))
        return seen.token, seen.lse - picked, gates

    def by_logits(head, inputs):
        h, label = inputs
        y = exits.logits(head, h)
        picked = jnp.take_along_axis(y, jnp.maximum(label, 0)[:, None], 1)[:, 0]
        vocab, table = config.vocab_size, confidence.LOGITS_GATES
        gates = {name: gate.of_logits(y, vocab) for name, gate in table.items()}
        return argmax(y), jax.nn.logsumexp(y, -1) - picked, gates

    rows, one = [], by_statistics if call.by_kernels() else by_logits
    for e, (head, h) in enumerate(zip(heads, states, strict=True)):
        head = head._replace(table=head.table.astype(h.dtype))
        tokens, nlls, gates = map_chunks(partial(one, head), (h.reshape(n, -1), labels), CHUNK)
        gates["saturation"] = confidence.saturation(boundaries[e], before[e]).reshape(-1)
        if any(exit_.router for exit_ in config.exits):
            says = router.of_exit(params, config, e)
            none = jnp.zeros((n,), jnp.float32)
            gates["router"] = none if says is None else says(boundaries[e]).reshape(-1)
        rows.append((tokens, nlls, gates))
    return jax.tree.map(lambda *a: jnp.stack(a), *rows)


def score(params: Tree, config: ModelConfig, batches: Iterable[Mapping[str, Any]]) -> ExitScores:
    """Score every exit on `batches` (as `data.batches` gives) in one teacher-forced pass.

    Positions with label -1 are left out. A batch may say in "units" [b] which text each row is part
    of; otherwise every row is a text of its own, numbered through all batches.

    Raises:
      DataError: where no position is left.
      ConfigError: for units that are not one for each row.
      FloatingPointError: for logits that are not finite.
    """
    parts, rows = [], 0
    for batch in batches:
        labels = np.asarray(batch["labels"])
        units = np.asarray(batch.get("units", rows + np.arange(len(labels))))
        require(
            units.shape == labels.shape[:1],
            "units",
            f"shape {units.shape}",
            f"must be one number for each of the {len(labels)} rows",
        )
        rows += len(labels)
        out = _score(params, config, {k: a for k, a in batch.items() if k != "units"})
        counted = labels.reshape(-1) != IGNORE
        every = labels.reshape(-1), np.repeat(units, labels.shape[1]), *out
        parts.append(jax.tree.map(lambda a, c=counted: np.asarray(a)[..., c], every))
    if not sum(len(part[0]) for part in parts):
        raise DataError("no labelled position to score: give batches of held-out text.")
    scores = ExitScores(config, *jax.tree.map(lambda *a: np.concatenate(a, -1), *parts))
    if not np.isfinite(scores.nlls).all():
        raise FloatingPointError("logits are not finite: check the model's parameters.")
    return scores


def emitting_exits(
    scores: ExitScores,
    threshold: float | Sequence[float],
    exits: Sequence[int] | None = None,
    **rules,
) -> np.ndarray:
    """Return [n], the number of the exit that each position leaves by, by the engines' rule.

    A position leaves by the earliest active exit whose confidence reaches its threshold, where a
    threshold of 1 never fires, or else by the final exit. Thresholds fall with
    `ExitScores.progress`. The arguments `threshold`, `exits`, and of `rules` `gate`,
    `min_exit_layer` and `decay`, are those of `ExitPolicy.make`.
    """
    return _leaving(scores, _policy(scores.config, threshold, exits, **rules))


def at_threshold(
    scores: ExitScores,
    threshold: float | Sequence[float],
    exits: Sequence[int] | None = None,
    *,
    costs: SegmentCosts | None = None,
    **rules,
) -> FrontierPoint:
    """Evaluate a threshold (one, or one per early exit) on the scored text.

    `exits` and `rules` are those of `emitting_exits`. With `costs` the point has its predicted
    time.
    """
    policy = _policy(scores.config, threshold, exits, **rules)
    number = _leaving(scores, policy)

    def take(a):
        return np.take_along_axis(a, number[None], 0)[0]

    counts = np.bincount(number, minlength=scores.config.n_exits + 1)
    plain = np.asarray(threshold, np.float64).tolist()
    shares = counts / len(scores)
    return FrontierPoint(
        threshold=tuple(plain) if isinstance(plain, list) else plain,
        agreement=float(np.mean(take(scores.tokens) == scores.tokens[-1])),
        depth=float(np.mean(np.asarray(scores.config.exit_boundaries)[number])),
        nll=float(np.mean(take(scores.nlls), dtype=np.float64)),
        shares=tuple(shares.tolist()),
        seconds=None if costs is None else float(_seconds(costs, policy) @ shares),
    )


def sweep(
    scores: ExitScores,
    thresholds: Iterable[float | Sequence[float]],
    exits: Sequence[int] | None = None,
    **rules,
) -> list[FrontierPoint]:
    """Evaluate each of `thresholds` (`at_threshold`)."""
    return [at_threshold(scores, t, exits, **rules) for t in thresholds]


def fastest(points: Sequence[FrontierPoint], agreement: float) -> FrontierPoint | None:
    """Return the fastest point with at least this agreement, None if there is none.

    The fastest point is that of least predicted time, or of least depth where no time was
    predicted. It is chosen on the text that it is judged on, so it is an estimate: it carries no
    guarantee for other text (`guarantee.calibrate` does).
    """
    require(0 <= agreement <= 1, "agreement", agreement, "must lie in [0, 1]")

    def cost(p):
        return p.depth if p.seconds is None else p.seconds

    return min((p for p in points if p.agreement >= agreement), key=cost, default=None)


def _policy(
    config: ModelConfig, threshold, exits=None, gate="max_probability", min_exit_layer=0, decay=None
) -> ExitPolicy:
    """Return the policy of one request."""
    return ExitPolicy.make(
        config, 1, threshold, exits=exits, gate=gate, min_exit_layer=min_exit_layer, decay=decay
    )


def _open(policy: ExitPolicy) -> np.ndarray:
    """Return [E] whether each early exit could fire."""
    return np.asarray(policy.active & (policy.thresholds < 1))[0]


def _leaving(scores: ExitScores, policy: ExitPolicy) -> np.ndarray:
    """Return [n], the number of the exit that each position leaves by."""
    n = len(scores)
    thresholds = np.asarray(policy.thresholds).T  # [E, 1]
    if policy.decay[0] >= 0:
        progress = jnp.asarray(scores.progress[None])
        thresholds = np.asarray(
            confidence.falling(policy.thresholds.T, policy.decay[None], progress)
        )
    open_ = _open(policy)
    fires = open_[:, None] & (_confidences(scores, policy, open_) >= thresholds)
    return np.concatenate([fires, np.ones((1, n), bool)]).argmax(0)


def _confidences(scores: ExitScores, policy: ExitPolicy, open_: np.ndarray) -> np.ndarray:
    """Return the confidences [E, n] of the policy's gate at each early exit that is open [E]."""
    n_exits, gate = scores.config.n_exits, GATES[int(policy.gate[0])]
    if gate == "fixed":
        return np.ones((n_exits, len(scores)), np.float32)
    if gate != "patience":
        return scores.confidences[gate][:n_exits]
    # Only exits that could fire are evaluated, so only they can agree.
    streaks = np.zeros((n_exits, len(scores)), np.int32)
    last, streak = np.full(len(scores), -1), np.zeros(len(scores), np.int32)
    for e in np.flatnonzero(open_):
        streak = np.where(scores.tokens[e] == last, streak, 0) + 1
        last, streaks[e] = scores.tokens[e], streak
    return np.asarray(confidence.patience(jnp.asarray(streaks), n_exits))


def _seconds(costs: SegmentCosts, policy: ExitPolicy) -> np.ndarray:
    """Return [E + 1] seconds of a token that leaves by each exit."""
    n = policy.active.shape[1] + 1
    require(
        len(costs.segments) == n,
        "costs.segments",
        costs.segments,
        f"must be one for each of the model's {n} segments",
    )
    heads = np.array(costs.heads)
    if confidence.needs_logits(policy.gate)[0]:
        # Every exit on the way that could fire computed its logits to decide.
        heads = np.cumsum(np.append(_open(policy), True) * heads)
    return np.cumsum(costs.segments) + heads
