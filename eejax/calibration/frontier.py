"""The quality-speed frontier: what every threshold would do, from one teacher-forced pass.

A gate looks at nothing but its own exit's logits, so one pass over held-out text that records
every exit's top token and confidence answers for all thresholds at once: where each token would
leave, and whether it would be the token of the full model.
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
from jax import lax

from eejax.common.errors import DataError, require
from eejax.common.trees import Tree
from eejax.data import Tokenizer
from eejax.gates import confidence
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import argmax
from eejax.losses.cross_entropy import IGNORE
from eejax.models import exits, transformer
from eejax.models.config import ModelConfig

CHUNK = 1024  # tokens whose logits exist at a time


@dataclasses.dataclass(frozen=True)
class Scores:
    """What every exit says at every counted position; arrays [e, n], the final exit last.

    tokens: the most likely token. confidences: its gate's, after the exit's own temperature.
    nlls: -log p of the label, in nats. labels [n]: the token that was to be predicted.
    """

    config: ModelConfig
    labels: np.ndarray
    tokens: np.ndarray
    confidences: np.ndarray
    nlls: np.ndarray

    def __len__(self) -> int:
        return self.tokens.shape[1]

    def bytes_per_token(self, tokenizer: Tokenizer) -> float:
        """Mean UTF-8 bytes of text of the scored labels, for `Point.bits_per_byte`."""
        return float(tokenizer.byte_lengths[self.labels].mean())


@dataclasses.dataclass(frozen=True)
class Point:
    """What one threshold does to held-out text.

    agreement: share of positions whose emitted token is the full model's most likely one.
    depth: mean layers below the emitting exit; n_layers / depth bounds the speed-up.
    nll: mean -log p of the label under the emitting exit, in nats. shares [e]: of each exit,
    the final one last.
    """

    threshold: float | tuple[float, ...]
    agreement: float
    depth: float
    nll: float
    shares: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        """Per token, of the emitted distributions."""
        return math.exp(self.nll)

    def bits_per_byte(self, bytes_per_token: float) -> float:
        """Of the emitted distributions; see `Scores.bytes_per_token`."""
        return self.nll / (math.log(2) * bytes_per_token)


@partial(jax.jit, static_argnames="config")
def _score(params: Tree, config: ModelConfig, batch: Mapping[str, jax.Array]):
    states = transformer.exit_states(
        params, config, batch["tokens"],
        positions=batch.get("positions"), segment_ids=batch.get("segment_ids"),
    )  # fmt: skip
    labels = batch["labels"].reshape(-1)
    n = labels.size
    chunk = min(CHUNK, n)
    pad = lambda a: jnp.pad(a, [(0, -n % chunk)] + [(0, 0)] * (a.ndim - 1))
    cut = lambda a: pad(a).reshape(-1, chunk, *a.shape[1:])
    heads = [exits.head(params, config, e) for e in range(config.n_exits + 1)]

    def one(head, inputs):
        h, label = inputs
        y = exits.logits(head._replace(table=head.table.astype(h.dtype)), h)
        picked = jnp.take_along_axis(y, jnp.maximum(label, 0)[:, None], 1)[:, 0]
        nll = jax.nn.logsumexp(y, -1) - picked
        return argmax(y), confidence.max_probability(y), nll

    columns = []
    for head, h in zip(heads, states, strict=True):
        out = lax.map(partial(one, head), (cut(h.reshape(n, -1)), cut(labels)))
        columns.append([a.reshape(-1)[:n] for a in out])
    return tuple(jnp.stack(a) for a in zip(*columns, strict=True))


def score(params: Tree, config: ModelConfig, batches: Iterable[Mapping[str, Any]]) -> Scores:
    """One teacher-forced pass over `batches` (as `data.batches` gives), at every exit.

    Positions with label -1 are left out. Raises DataError where no position is left.
    """
    parts = []
    for batch in batches:
        labels = np.asarray(batch["labels"]).reshape(-1)
        counted = labels != IGNORE
        columns = [np.asarray(a)[..., counted] for a in _score(params, config, dict(batch))]
        parts.append([labels[counted], *columns])
    if not sum(len(p[0]) for p in parts):
        raise DataError("no labelled position to score: give batches of held-out text.")
    return Scores(config, *(np.concatenate(a, -1) for a in zip(*parts, strict=True)))


def emitting_exits(
    scores: Scores, threshold: float | Sequence[float], exits: Sequence[int] | None = None
) -> np.ndarray:
    """[n] number of the exit each position leaves by: the engines' rule.

    `threshold` and `exits` as in `ExitPolicy.make`: the earliest active exit whose confidence
    reaches its threshold, a threshold of 1 never firing; else the final exit.
    """
    policy = ExitPolicy.make(scores.config, 1, threshold, exits)
    thresholds, active = np.asarray(policy.thresholds).T, np.asarray(policy.active).T  # [e, 1]
    early = scores.confidences[: scores.config.n_exits]
    fires = active & (thresholds < 1) & (early >= thresholds)
    return np.concatenate([fires, np.ones((1, len(scores)), bool)]).argmax(0)


def at_threshold(
    scores: Scores, threshold: float | Sequence[float], exits: Sequence[int] | None = None
) -> Point:
    """What this threshold (one, or one per early exit) does to the scored text."""
    number = emitting_exits(scores, threshold, exits)
    take = lambda a: np.take_along_axis(a, number[None], 0)[0]
    counts = np.bincount(number, minlength=scores.config.n_exits + 1)
    plain = float(threshold) if np.ndim(threshold) == 0 else tuple(map(float, threshold))
    return Point(
        threshold=plain,
        agreement=float(np.mean(take(scores.tokens) == scores.tokens[-1])),
        depth=float(np.mean(np.asarray(scores.config.stops)[number])),
        nll=float(np.mean(take(scores.nlls), dtype=np.float64)),
        shares=tuple((counts / len(scores)).tolist()),
    )


def sweep(
    scores: Scores,
    thresholds: Iterable[float | Sequence[float]],
    exits: Sequence[int] | None = None,
) -> list[Point]:
    """`at_threshold` for each of `thresholds`."""
    return [at_threshold(scores, t, exits) for t in thresholds]


def fastest(points: Sequence[Point], agreement: float) -> Point | None:
    """The point of least depth among those with at least this agreement, None without any.

    Chosen on the text it is judged on, so an estimate: it carries no guarantee for other text.
    """
    require(0 <= agreement <= 1, "agreement", agreement, "must lie in [0, 1]")
    return min((p for p in points if p.agreement >= agreement), key=lambda p: p.depth, default=None)
