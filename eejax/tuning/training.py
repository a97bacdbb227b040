"""Training of exits on stored states of a model that stays as it is (EE-Tuning, Pan et al. 2024).

Exits learn the final exit's distribution, at every counted position of a text. Neither the model's
layers nor its head are run for that: both gave the stored states and predictions once
(`states.collect`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eejax.common import progress
from eejax.common.errors import DataError, require
from eejax.common.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_fields,
)
from eejax.common.trees import Tree
from eejax.inference.sampling import argmax
from eejax.losses.cross_entropy import IGNORE
from eejax.losses.soft_targets import SoftTargets, soft_cross_entropy
from eejax.models import exits, layers, params
from eejax.models.config import ModelConfig
from eejax.models.exits import Head
from eejax.tuning.states import StoredStates

WARM_UP = 0.05  # share of the steps in which the learning rate rises
FROZEN = ("head", "head_bias", "router")  # leaves of an exit that are not trained


@dataclasses.dataclass(frozen=True)
class TuningOptions:
    """Settings of a training by AdamW.

    Attributes:
      passes: passes over the text. The states are computed once, and a pass runs exits alone.
      windows: windows of text in a step.
      learning_rate: highest learning rate; it rises at first and falls by a cosine to 0.
      weight_decay: of matrices.
      predictions: number of the final exit's most likely tokens that are kept for a position. The
        others count as impossible.
      held_out: windows that are measured and not trained on, as a share of all.
      seed: of the order of windows.
    """

    passes: PositiveInt = 8
    windows: PositiveInt = 4
    learning_rate: PositiveFloat = 2e-3
    weight_decay: NonNegativeFloat = 0.01
    predictions: PositiveInt = 16
    held_out: float = 0.05
    seed: NonNegativeInt = 0

    def __post_init__(self):
        check_fields(self)
        allowed = "must lie between 0 and 1, both excluded"
        require(0 < self.held_out < 1, "TuningOptions.held_out", self.held_out, allowed)


class ExitQuality(NamedTuple):
    """An exit on held-out text.

    Attributes:
      boundary: layers below it.
      agreement: share of positions at which its most likely token is the final exit's.
      loss: mean cross entropy with the final exit's likeliest tokens that it knows, in nats.
    """

    boundary: int
    agreement: float
    loss: float


class TunedExits(NamedTuple):
    """Trained exits.

    Attributes:
      exits: parameters of each exit by its name; trained ones are float32.
      before, after: quality of each exit as it was and as it is.
      tokens: positions that exits were trained at, all passes together.
    """

    exits: Tree
    before: tuple[ExitQuality, ...]
    after: tuple[ExitQuality, ...]
    tokens: int


def train_exits(
    whole: Tree,
    config: ModelConfig,
    stored: StoredStates,
    options: TuningOptions,
    *,
    watch: Callable[[str], None],
) -> TunedExits:
    """Train the exits of a model at the boundaries of stored states.

    Every exit keeps the pass of least loss on held-out windows.

    Args:
      whole: the model's parameters, which hold initial ones of the exits.
      config: its configuration, with exits at `stored.boundaries`.
      stored: states and predictions of its text.
      options: settings.
      watch: called with lines of progress.

    Raises:
      DataError: for fewer than two windows.
      FloatingPointError: for a loss that is not finite.
    """
    n = stored.windows
    if n < 2:
        raise DataError(f"{n} windows of text: at least 2 are needed, of which one is held out.")
    held = max(1, round(options.held_out * n))
    order = np.random.default_rng(options.seed).permutation(n)
    report, own = np.sort(order[:held]), order[held:]
    size = min(options.windows, len(own))
    steps = options.passes * (len(own) // size)
    numbers = [config.exit_boundaries.index(b) for b in stored.boundaries]
    names = [config.exits[e].name for e in numbers]
    parts = {name: _split(whole["exits"][name]) for name in names}
    chosen = {name: own for name, (own, _) in parts.items()}
    trained = jax.tree.map(lambda a: jnp.array(a, copy=True), chosen)  # steps donate it
    known = exits.with_known_rows(whole, config)
    rest = whole | {"exits": {name: _split(known[name])[1] for name in names}}
    rest = {k: rest[k] for k in ("embed", "shared_head", "exits") if k in rest}
    optimizer = _optimizer(config, options, steps, trained)
    state = optimizer.init(trained)
    measure = partial(_measure, rest=rest, config=config, exits_=tuple(numbers))
    before = best = _qualities(measure, trained, stored, report, size)
    watch("before: " + described(before))
    tokens = 0
    with progress.steps("training exits", steps, "step") as advance:
        for done in range(1, options.passes + 1):
            for rows in _batches(own, size, options.seed + done):
                trained, state = _step(
                    trained,
                    state,
                    rest,
                    _arrays(stored, rows),
                    config=config,
                    exits_=tuple(numbers),
                    optimizer=optimizer,
                )
                tokens += int((stored.labels[rows] != IGNORE).sum())
                advance(1)
            found = _qualities(measure, trained, stored, report, size)
            watch(f"pass {done} of {options.passes}: " + described(found))
            better = [new.loss < old.loss for new, old in zip(found, best, strict=True)]
            best = tuple(
                new if yes else old for new, old, yes in zip(found, best, better, strict=True)
            )
            for name, yes in zip(names, better, strict=True):
                if yes:
                    chosen[name] = jax.tree.map(jnp.copy, trained[name])
    exits_ = {name: own | parts[name][1] for name, own in chosen.items()}
    return TunedExits(exits_, before, best, tokens)


def described(qualities: Sequence[ExitQuality]) -> str:
    """Return agreement and loss of exits as a line."""
    return "; ".join(
        f"exit {q.boundary}: {q.agreement:.1%} agree, loss {q.loss:.3f}" for q in qualities
    )


def _split(tree: Tree) -> tuple[Tree, Tree]:
    """Return (trained, frozen) parameters of an exit, of which the trained ones are float32."""
    frozen = {name: leaf for name, leaf in tree.items() if name in FROZEN}
    trained = {name: leaf for name, leaf in tree.items() if name not in FROZEN}
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), trained), frozen


def _optimizer(config, options: TuningOptions, steps: int, trained: Tree):
    declared = params.abstract(config)["exits"]
    decays = {
        name: {part: params.map_params(lambda p: p.decay, declared[name][part]) for part in own}
        for name, own in trained.items()
    }
    rising = max(1, round(WARM_UP * steps))
    rate = optax.warmup_cosine_decay_schedule(
        options.learning_rate / rising, options.learning_rate, rising, max(steps, rising + 1)
    )
    return optax.adamw(rate, b2=0.98, weight_decay=options.weight_decay, mask=_Mask(decays))


@dataclasses.dataclass(frozen=True, eq=False)
class _Mask:
    """A mask of optax: a function, because a tree of booleans could not be a static argument."""

    tree: Tree

    def __call__(self, _: Any) -> Tree:
        return self.tree


def _batches(windows: np.ndarray, size: int, seed: int) -> Iterator[np.ndarray]:
    order = np.random.default_rng(seed).permutation(windows)
    for i in range(0, len(order) - size + 1, size):
        yield np.sort(order[i : i + size])


def _arrays(stored: StoredStates, rows: np.ndarray) -> tuple:
    """Return the arrays of some windows on the device."""
    arrays = *stored.states, stored.tokens, stored.logprobs, stored.labels
    return jax.tree.map(lambda a: jnp.asarray(a[rows]), arrays)


def _state(whole: Tree, config: ModelConfig, e: int, x: jax.Array) -> jax.Array:
    """Return what exit e's head reads of boundary states x [b, t, d], [b * t, d]."""
    context = layers.make_context(config, jnp.arange(x.shape[1])[None])
    h = exits.state(whole, config, e, x.astype(config.dtype), context)
    return h.reshape(-1, h.shape[-1])


def _targets(tokens: jax.Array, logprobs: jax.Array, labels: jax.Array) -> SoftTargets:
    p = jnp.exp(logprobs.astype(jnp.float32)).reshape(-1, logprobs.shape[-1])
    counted = (labels.reshape(-1) != IGNORE).astype(jnp.float32)
    rows = tokens.reshape(p.shape)
    return SoftTargets(rows, p / jnp.sum(p, -1, keepdims=True), counted)


def _known(targets: SoftTargets, head: Head) -> SoftTargets:
    """Leave out tokens that a head does not know; a position counts by the rest."""
    known = targets.rows < head.options.vocab_size
    p = jnp.where(known, targets.probabilities, 0.0)
    total = jnp.sum(p, -1)
    p = p / jnp.where(total > 0, total, 1.0)[:, None]
    return SoftTargets(jnp.where(known, targets.rows, 0), p, targets.weights * total)


def _cost(whole: Tree, config: ModelConfig, e: int, x: jax.Array, targets: SoftTargets):
    """Return the states [n, d] that exit e's head reads, the head, and the sum of its costs."""
    h, head = _state(whole, config, e, x), exits.head(whole, config, e)
    return h, head, soft_cross_entropy(h, head, _known(targets, head))


def _with(rest: Tree, trained: Tree, dtype: Any) -> Tree:
    own = {name: tree | rest["exits"][name] for name, tree in trained.items()}
    return rest | {"exits": params.for_compute(own, dtype)}


@partial(
    jax.jit,
    static_argnames=("config", "exits_", "optimizer"),
    donate_argnames=("trained", "state"),
)
def _step(trained, state, rest, arrays, *, config, exits_, optimizer):
    *states, tokens, logprobs, labels = arrays
    targets = _targets(tokens, logprobs, labels)
    count = jnp.maximum(jnp.sum(targets.weights), 1.0)

    def loss(trained):
        whole = _with(rest, trained, config.dtype)
        costs = [
            _cost(whole, config, e, x, targets)[2] for e, x in zip(exits_, states, strict=True)
        ]
        return sum(costs) / count

    gradient = jax.grad(loss)(trained)
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32
        updates, state = optimizer.update(gradient, state, trained)
    return optax.apply_updates(trained, updates), state


@partial(jax.jit, static_argnames=("config", "exits_"))
def _measure(trained, arrays, *, rest, config, exits_):
    """Return (agreements [e], losses [e]) summed over counted positions, and their number."""
    *states, tokens, logprobs, labels = arrays
    targets, counted = _targets(tokens, logprobs, labels), labels.reshape(-1) != IGNORE
    whole = _with(rest, trained, config.dtype)
    agreements, losses = [], []
    for e, x in zip(exits_, states, strict=True):
        h, head, cost = _cost(whole, config, e, x, targets)
        best = argmax(exits.logits(head, h))
        agreements.append(jnp.sum(counted & (best == targets.rows[:, 0])))
        losses.append(cost)
    return jnp.stack(agreements), jnp.stack(losses), jnp.sum(counted)


def _qualities(measure, trained, stored, windows, size) -> tuple[ExitQuality, ...]:
    sums: list[Any] = [0, 0, 0]
    for i in range(0, len(windows), size):
        rows = windows[i : i + size]
        found = jax.device_get(measure(trained, _arrays(stored, rows)))
        sums = [a + b for a, b in zip(sums, found, strict=True)]
    agreements, losses, count = sums
    if not np.isfinite(losses).all():
        raise FloatingPointError("the loss of an exit is not finite: lower the learning rate.")
    return tuple(
        ExitQuality(b, float(a / max(count, 1)), float(loss / max(count, 1)))
        for b, a, loss in zip(stored.boundaries, agreements, losses, strict=True)
    )
