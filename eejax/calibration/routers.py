"""Training of router networks for a model that stays as it is (TIDE, section 3.1).

Routers learn from the hidden states of one pass (`states.collect`), all of them together and on the
device. A router predicts one of `LABELS`: whether the token is the full model's, or whether the
state has converged.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from eejax.calibration.quality import auc, calibration_error, platt
from eejax.calibration.states import States
from eejax.checkpoint.arrays import read_arrays, write_arrays
from eejax.common import progress
from eejax.common.errors import ConfigError, DataError, require, require_count, require_one_of
from eejax.common.trees import Tree, where_rows
from eejax.gates import router
from eejax.models import params
from eejax.models.config import ModelConfig

Label = Literal["top1", "cosine", "kl"]
LABELS: dict[Label, float | None] = {"top1": None, "cosine": 0.98, "kl": 0.1}
"""Labels of tokens that should leave, and their default bounds.

top1: the exit's most likely token is the final exit's. cosine: the cosine of its state and the last
layer's, both under the final norm, is at least the bound (TIDE: of raw states, Eq. 1).
kl: KL(final || exit) is at most the bound, in nats.
"""

RouterSchedule = Literal["cosine", "constant"]
"""Learning rate over a training: a cosine to 0 (ours), or constant (TIDE's)."""

PARTS = (0.8, 0.1, 0.1)  # shares of the windows: to train on, to choose by, and to report
CHECKPOINT = "routers.safetensors"
WIDEST = 8192  # a bottleneck is narrower than any model


@dataclasses.dataclass(frozen=True)
class RouterOptions:
    """Settings of routers and of their training by AdamW.

    TIDE's are 100 epochs, a learning rate of 1e-3, "constant" and no decay (section 3.1).

    Attributes:
      width: width of the bottleneck; TIDE has 64, 128 or 256.
      label: which tokens should leave (`LABELS`), which is what a router predicts.
      bound: bound of the labels cosine (by default 0.98) and kl (0.1): one number, or one for each
        exit.
      epochs: passes over the training positions.
      batch: tokens in a batch.
      learning_rate: the learning rate at the beginning.
      schedule: learning rate over the training (`RouterSchedule`).
      weight_decay: weight decay of AdamW.
      min_positives: minimum number of positive tokens; an exit with fewer gets no router.
      seed: seed of the training and of the split of windows.
    """

    width: int = 128
    label: Label = "top1"
    bound: float | Sequence[float] | None = None
    epochs: int = 12
    batch: int = 1024
    learning_rate: float = 1e-3
    schedule: RouterSchedule = "cosine"
    weight_decay: float = 0.1
    min_positives: int = 100
    seed: int = 0

    def __post_init__(self):
        require_one_of("label", self.label, tuple(LABELS))
        require_one_of("schedule", self.schedule, get_args(RouterSchedule))
        for name in ("width", "epochs", "batch", "min_positives"):
            require_count(name, getattr(self, name))
        require(self.width <= WIDEST, "width", self.width, f"must be at most {WIDEST}")
        require_count("seed", self.seed, minimum=0)
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            ok = isinstance(value, float | int) and np.isfinite(value) and value >= 0
            require(ok, name, value, "must be a finite number, at least 0")
        if self.bound is not None:
            require(
                self.label != "top1",
                "bound",
                self.bound,
                "must be None with the label 'top1'",
                "That label has no bound: tokens are equal or not.",
            )
            values = np.asarray(self.bound, np.float64)
            lowest = -1.0 if self.label == "cosine" else 0.0
            ok = values.ndim <= 1 and values.size > 0 and bool(np.isfinite(values).all())
            ok = ok and bool((values >= lowest).all())
            ok = ok and (self.label != "cosine" or bool((values <= 1).all()))
            require(ok, "bound", self.bound, "must be cosines in [-1, 1], or nats of at least 0")
            object.__setattr__(self, "bound", tuple(np.ravel(values).tolist()))


@dataclasses.dataclass(frozen=True)
class Quality:
    """Quality of a router on windows that were used neither for training nor for selection.

    Attributes:
      boundary: boundary of its exit.
      positives: share of tokens that should leave there.
      auc: area under the ROC curve of the confidence for the label.
      error: expected calibration error.
      epoch: the epoch that was kept.
      refused: why there is no router, or "".
    """

    boundary: int
    positives: float
    auc: float
    error: float
    epoch: int
    refused: str = ""


class Routers(NamedTuple):
    """Trained routers and what was measured of them.

    Attributes:
      routers: the trained routers by exit number.
      qualities: quality at every exit.
      report: [n] bool, positions that were used neither for training nor for selection.
      confidences: [e, r] float32 at those positions, 0 at an exit without a router.
      losses: [epoch, exit] cross entropy by which epochs are chosen.
    """

    routers: dict[int, Tree]
    qualities: list[Quality]
    report: np.ndarray
    confidences: np.ndarray
    losses: np.ndarray


def labels(states: States, options: RouterOptions) -> np.ndarray:
    """Return [e, n] bool, whether each position should leave at each exit.

    Raises:
      ConfigError: for bounds of another number of exits.
    """
    if options.label == "top1":
        return states.tokens[:-1] == states.tokens[-1]
    n = len(states.cosine)
    given: Any = LABELS[options.label] if options.bound is None else options.bound
    bound = tuple(np.ravel(given).tolist())
    require(len(bound) in (1, n), "bound", bound, f"must be one, or one for each of {n} exits")
    bound = np.broadcast_to(np.array(bound), (n,))[:, None]
    return states.cosine >= bound if options.label == "cosine" else states.kl <= bound


def divided(units: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the positions [n] bool to train on, to choose by and to report.

    Whole windows (units [n]) go to one of the three.

    Raises:
      DataError: for fewer than 10 windows.
    """
    names, index = np.unique(units, return_inverse=True)
    n = len(names)
    if n < 10:
        raise DataError(
            f"the calibration text has {n} windows, and 10 are needed to hold some out: give more "
            "text, or shorter windows."
        )
    ends = np.floor(np.cumsum(PARTS[:-1]) * n).astype(int)
    which = np.searchsorted(ends, np.random.default_rng(seed).permutation(n), side="right")[index]
    return tuple(which == i for i in range(3))


def train_routers(
    states: States,
    config: ModelConfig,
    start: Tree,
    options: RouterOptions,
    *,
    folder: str | os.PathLike | None = None,
    watch: Callable[[int, np.ndarray], None] | None = None,
) -> Routers:
    """Train a router for every exit of `states` that has enough positives.

    The first bias is the log-odds of the label, so that rare positives do not begin with wrong
    predictions. Each router keeps the epoch of least cross entropy on the windows to choose by, and
    its scale and bias are then fitted to them (Platt 1999). With a `folder` every epoch is saved
    there, and an interrupted run resumes; the caller ensures that everything else is the same.

    Args:
      states: hidden states to learn from.
      config: the model's configuration.
      start: by exit number, the norm that each router begins with (a tree of `models.layers.norm`).
      options: settings of the training.
      folder: where every epoch is saved.
      watch: called with the epoch and the losses [exits].

    Raises:
      DataError: where no exit has enough positives; the message says how many there were.
    """
    wanted = labels(states, options)
    train, choose, report = divided(states.units, options.seed)
    counts = wanted[:, train].sum(-1)
    kept = [e for e, count in enumerate(counts) if count >= options.min_positives]
    if not kept:
        found = ", ".join(f"{config.exit_boundaries[e]}: {c}" for e, c in enumerate(counts))
        raise DataError(
            f"no exit has {options.min_positives} positive tokens by the label {options.label!r} "
            f"among {train.sum()} (boundary: positives; {found}): give more text, a weaker bound, "
            "or another label."
        )
    x, y = jnp.asarray(states.boundary[kept]), jnp.asarray(wanted[kept], jnp.float32)
    trained, epochs, losses = _fit(
        x,
        y,
        _first(config, start, kept, counts / train.sum(), options),
        np.flatnonzero(train),
        np.flatnonzero(choose),
        config,
        options,
        folder,
        watch,
    )
    logits = np.asarray(_logits(trained, x[:, np.flatnonzero(choose)], config=config))
    reported = x[:, np.flatnonzero(report)]
    routers, confidences = {}, np.zeros((len(wanted), int(report.sum())), np.float32)
    qualities = []
    for e in range(len(wanted)):
        positive = wanted[e, report]
        share = float(positive.mean())
        if e not in kept:
            reason = (
                f"{counts[e]} positives among {train.sum()} tokens, but {options.min_positives} "
                "are needed"
            )
            qualities.append(Quality(config.exit_boundaries[e], share, np.nan, np.nan, 0, reason))
            continue
        i = kept.index(e)
        a, b = platt(logits[i], wanted[e, choose])
        own = jax.tree.map(lambda leaf, i=i: leaf[i], trained)
        own |= {"up": a * own["up"], "up_bias": jnp.float32(a * own["up_bias"] + b)}
        routers[e] = own
        # Engines call this function; the stacked routers above could round differently.
        said = confidences[e] = np.asarray(_confidence(own, reported[i], config=config))
        qualities.append(
            Quality(
                config.exit_boundaries[e],
                share,
                auc(said, positive),
                calibration_error(said, positive),
                int(epochs[i]),
            )
        )
    return Routers(routers, qualities, report, confidences, losses)


def _first(config, start, kept, shares, options) -> Tree:
    """Return the initial routers, stacked."""
    declared = params.router(config, options.width)
    odds = np.clip(shares, 1e-4, 1 - 1e-4)

    def one(e: int) -> Tree:
        key = jax.random.fold_in(jax.random.key(options.seed), e)
        keys = jax.random.split(key, 2)

        def draw(k, p):
            return p.std * jax.random.normal(k, p.shape, jnp.float32)

        return {
            "norm": jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), start[e]),
            "down": draw(keys[0], declared["down"]),
            "up": draw(keys[1], declared["up"]),
            "up_bias": jnp.float32(np.log(odds[e] / (1 - odds[e]))),
        }

    return jax.tree.map(lambda *a: jnp.stack(a), *(one(e) for e in kept))


def _optimizer(options: RouterOptions, steps: int) -> optax.GradientTransformation:
    rate: optax.ScalarOrSchedule = options.learning_rate
    if options.schedule == "cosine":
        rate = optax.cosine_decay_schedule(options.learning_rate, max(steps, 1))
    decays = {"norm": False, "down": True, "up": True, "up_bias": False}

    def mask(tree):
        return {k: jax.tree.map(lambda _, k=k: decays[k], v) for k, v in tree.items()}

    return optax.adamw(rate, weight_decay=options.weight_decay, mask=mask)


def _fit(x, y, first, train, choose, config, options, folder, watch):
    """Train k stacked routers; return (best routers, their epochs [k], losses [epochs, k]).

    x [k, n, d], y [k, n]; train, choose: positions.
    """
    size = min(options.batch, len(train))
    steps = len(train) // size
    optimizer = _optimizer(options, steps * options.epochs)
    best, chosen = first, jnp.zeros((len(y),), jnp.int32)
    state = (first, optimizer.init(first), best, jnp.full((len(y),), jnp.inf), chosen)
    losses: list[np.ndarray] = []
    file = None if folder is None else pathlib.Path(folder) / CHECKPOINT
    if file is not None and file.is_file():
        state, losses = _resumed(file, state)
    choose = jnp.asarray(choose)
    with progress.steps("training routers", options.epochs, "epoch") as done:
        done(len(losses))
        for epoch in range(len(losses), options.epochs):
            order = np.random.default_rng((options.seed, epoch)).permutation(train)
            order = jnp.asarray(order[: steps * size].reshape(steps, size))
            trained, moments, best, least, chosen = state
            trained, moments = _epoch(
                trained,
                moments,
                x,
                y,
                order,
                config=config,
                options=options,
                steps=steps * options.epochs,
            )
            loss = _losses(trained, x, y, choose, config=config)
            better = loss < least
            best = where_rows(better, trained, best)
            chosen = jnp.where(better, epoch + 1, chosen)
            state = trained, moments, best, jnp.where(better, loss, least), chosen
            losses.append(np.asarray(loss))
            if file is not None:
                leaves = {f"{i:03d}": np.asarray(a) for i, a in enumerate(jax.tree.leaves(state))}
                about = {"losses": json.dumps([row.tolist() for row in losses])}
                write_arrays(file, leaves, about)
            if watch is not None:
                watch(epoch + 1, losses[-1])
            done(1)
    return state[2], np.asarray(state[4]), np.stack(losses)


def _resumed(file: pathlib.Path, like: Any) -> tuple[Any, list[np.ndarray]]:
    arrays, about = read_arrays(file)
    leaves, treedef = jax.tree.flatten(like)
    shapes = [a.shape for a in leaves]
    found = [arrays[name].shape for name in sorted(arrays)]
    if found != shapes:
        raise ConfigError(f"{file}: belongs to another calibration: remove it to begin anew.")
    values = [jnp.asarray(arrays[name]) for name in sorted(arrays)]
    losses = [np.array(row, np.float32) for row in json.loads(about["losses"])]
    return jax.tree.unflatten(treedef, values), losses


@partial(jax.jit, static_argnames=("config", "options", "steps"))
def _epoch(trained, moments, x, y, order, *, config, options, steps):
    """Run one pass over batches `order` [steps, batch] of positions."""
    optimizer = _optimizer(options, steps)

    def loss(trained, index):
        logits = _stacked(trained, x[:, index], config)
        return jnp.sum(jnp.mean(optax.sigmoid_binary_cross_entropy(logits, y[:, index]), -1))

    def step(carry, index):
        trained, moments = carry
        slope = jax.grad(loss)(trained, index)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32
            updates, moments = optimizer.update(slope, moments, trained)
        return (optax.apply_updates(trained, updates), moments), None

    return lax.scan(step, (trained, moments), order)[0]


def _stacked(trained: Tree, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Return the log-odds [k, n] of k routers, each of its own states x [k, n, d]."""
    return jax.vmap(lambda p, x: router.logit(p, x, config))(trained, x)


@partial(jax.jit, static_argnames="config")
def _losses(trained, x, y, index, *, config):
    logits = _stacked(trained, x[:, index], config)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, y[:, index]), -1)


@partial(jax.jit, static_argnames="config")
def _logits(trained, x, *, config):
    return _stacked(trained, x, config)


@partial(jax.jit, static_argnames="config")
def _confidence(p, x, *, config):
    return router.confidence(p, x, config)
