"""Training of router networks for a model that stays as it is (TIDE, section 3.1).

Routers learn from held states of one pass (`states.collect`), all of them together and on the
device. What a router is asked is one of `LABELS`: would the token be the full model's, or has the
state converged?
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
from eejax.common.trees import Tree
from eejax.gates import router
from eejax.inference.stages import where_rows
from eejax.models import params
from eejax.models.config import ModelConfig

LABELS = {"top1": None, "cosine": 0.98, "kl": 0.1}
"""What a token must be to leave, and the default bound of that.

top1: the exit's most likely token is the final one's. cosine: its state's cosine to the last
layer's, both under the final norm, is at least the bound (TIDE: of raw states, Eq. 1).
kl: KL(final || exit) is at most the bound, in nats.
"""

SCHEDULES = ("cosine", "constant")
"""Learning rates over a training: a cosine to 0 (ours), or one rate throughout (TIDE's)."""

PARTS = (0.8, 0.1, 0.1)  # of the windows: to train on, to choose by, and to report
CHECKPOINT = "routers.safetensors"
WIDEST = 8192  # a bottleneck is narrower than any model


@dataclasses.dataclass(frozen=True)
class RouterOptions:
    """width: the bottleneck. label: of `LABELS`; bound: its bound, one or one for each exit, None
    for the default. epochs, batch (tokens), learning_rate, schedule (of `SCHEDULES`), weight_decay,
    seed: of the training, by AdamW. TIDE's are 100 epochs, 1e-3, "constant" and no decay (section
    3.1). least: positive tokens without which an exit gets no router.
    """

    width: int = 128
    label: str = "top1"
    bound: float | Sequence[float] | None = None
    epochs: int = 12
    batch: int = 1024
    learning_rate: float = 1e-3
    schedule: str = "cosine"
    weight_decay: float = 0.1
    least: int = 100
    seed: int = 0

    def __post_init__(self):
        require_one_of("label", self.label, tuple(LABELS))
        require_one_of("schedule", self.schedule, SCHEDULES)
        for name in ("width", "epochs", "batch", "least"):
            require_count(name, getattr(self, name))
        require(self.width <= WIDEST, "width", self.width, f"must be at most {WIDEST}")
        require_count("seed", self.seed, least=0)
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
                "Its tokens are the same, or not.",
            )
            values = np.asarray(self.bound, np.float64)
            lowest = -1.0 if self.label == "cosine" else 0.0
            ok = values.ndim <= 1 and values.size > 0 and bool(np.isfinite(values).all())
            ok = ok and bool((values >= lowest).all())
            ok = ok and (self.label != "cosine" or bool((values <= 1).all()))
            require(ok, "bound", self.bound, "must be cosines in [-1, 1], or nats from 0 on")
            object.__setattr__(self, "bound", tuple(np.ravel(values).tolist()))


@dataclasses.dataclass(frozen=True)
class Quality:
    """A router on windows that nothing was trained or chosen by.

    boundary: its exit's. positives: share of tokens that should leave there. auc: of telling them.
    error: expected calibration error. epoch: the one kept. refused: why there is no router, or "".
    """

    boundary: int
    positives: float
    auc: float
    error: float
    epoch: int
    refused: str = ""


class Routers(NamedTuple):
    """routers: by exit number, those that were trained; qualities: of every exit; report [n] bool:
    positions that nothing was trained or chosen by; confidences [e, r] float32 at those, 0 at an
    exit without a router; losses [epoch, exit]: cross entropy by which epochs are chosen."""

    routers: dict[int, Tree]
    qualities: list[Quality]
    report: np.ndarray
    confidences: np.ndarray
    losses: np.ndarray


def labels(states: States, options: RouterOptions) -> np.ndarray:
    """[e, n] bool: who should leave. Raises ConfigError for bounds of another number of exits."""
    if options.label == "top1":
        return states.tokens[:-1] == states.tokens[-1]
    n = len(states.cosine)
    given = LABELS[options.label] if options.bound is None else options.bound
    bound = tuple(np.ravel(given).tolist())
    require(len(bound) in (1, n), "bound", bound, f"must be one, or one for each of {n} exits")
    bound = np.broadcast_to(np.array(bound), (n,))[:, None]
    return states.cosine >= bound if options.label == "cosine" else states.kl <= bound


def divided(units: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions [n] bool to train on, to choose by and to report, whole windows (units [n]) each.

    Raises DataError for fewer than 10 windows.
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
    """A router for every exit of `states` but those that are refused one.

    start: by exit number, the norm each router begins with (a tree of `models.layers.norm`). The
    first bias is the log-odds of the label, so that rare positives are no reason to begin with
    wrong ones; each router's epoch of least cross entropy on the windows to choose by is kept, and
    its scale and bias are then fitted to them (Platt 1999). With a `folder` every epoch is kept
    there, and a run that was killed goes on; the caller sees to it that all else is the same.
    watch: is told the epoch and the losses [exits].

    Raises DataError where no exit has enough positives, telling how many there were.
    """
    wanted = labels(states, options)
    train, choose, report = divided(states.units, options.seed)
    counts = wanted[:, train].sum(-1)
    kept = [e for e, count in enumerate(counts) if count >= options.least]
    if not kept:
        found = ", ".join(f"{config.exit_boundaries[e]}: {c}" for e, c in enumerate(counts))
        raise DataError(
            f"no exit has {options.least} positive tokens by the label {options.label!r} among "
            f"{train.sum()} (boundary: positives; {found}): give more text, a weaker bound, or "
            "another label."
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
            told = f"{counts[e]} positives among {train.sum()} tokens, of which {options.least} are"
            qualities.append(
                Quality(config.exit_boundaries[e], share, np.nan, np.nan, 0, f"{told} needed")
            )
            continue
        i = kept.index(e)
        a, b = platt(logits[i], wanted[e, choose])
        own = jax.tree.map(lambda leaf, i=i: leaf[i], trained)
        own |= {"up": a * own["up"], "up_bias": jnp.float32(a * own["up_bias"] + b)}
        routers[e] = own
        # By the function that engines call, and not by what was put together here.
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
    """Initial routers, stacked."""
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
    """(best routers, their epochs [k], losses [epochs, k]), k routers stacked.

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
        raise ConfigError(f"{file}: is of another calibration: remove it, and begin anew.")
    values = [jnp.asarray(arrays[name]) for name in sorted(arrays)]
    losses = [np.array(row, np.float32) for row in json.loads(about["losses"])]
    return jax.tree.unflatten(treedef, values), losses


@partial(jax.jit, static_argnames=("config", "options", "steps"))
def _epoch(trained, moments, x, y, order, *, config, options, steps):
    """One pass in batches `order` [steps, batch] of positions."""
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
    """[k, n] log-odds of k routers, each of its own states x [k, n, d]."""
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
