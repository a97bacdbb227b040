"""One training step and one evaluation step, on a mesh of data- and tensor-parallel devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eejax.common.axes import DATA
from eejax.common.errors import require
from eejax.common.trees import Tree, join
from eejax.losses.multi_exit import BatchSums, ExitSums, multi_exit_loss
from eejax.losses.objective import CROSS_ENTROPY, LossObjective
from eejax.models.config import ModelConfig
from eejax.pipeline import runner
from eejax.pipeline.config import PIPELINE, PipelineConfig
from eejax.pipeline.forward import evaluation, exit_gradients
from eejax.pipeline.plan import plan
from eejax.pipeline.stage import Arrays, Pipeline
from eejax.sharding import rules
from eejax.sharding.mesh import DEFAULT, Layout, check_batch, mesh_axes
from eejax.sharding.spread import is_spread, parted
from eejax.sharding.spread import parts as parts_of
from eejax.train.placement import Placement, placement
from eejax.train.recipes import averaged
from eejax.train.scope import Scope
from eejax.train.state import TrainState, abstract

Metrics = dict[str, jax.Array]
StepFunction = Callable[[jax.Array], jax.Array]
GradientSums = Callable[[TrainState, jax.Array, jax.Array | None, Arrays], BatchSums[jax.Array]]
"""(state, weights [e], layer_dropout [l] or None, batch) -> sums."""


def put_batch(
    batch: Mapping[str, np.ndarray], mesh: Mesh, shard: tuple[int, int] = (0, 1)
) -> dict[str, jax.Array]:
    """Shard a global batch over the data axis; each process passes the rows it has.

    Args:
      batch: arrays [rows, t], at least the rows that belong on this process's devices.
      mesh: the devices.
      shard: (index, count), the part of the global batch that `batch` is
        (`sharding.distributed.shard`); by default all.

    Returns:
      Arrays [b, t].

    Raises:
      ConfigError: b does not divide.
    """
    index, count = shard
    rows = len(batch["tokens"])
    check_batch(rows * count, mesh)
    sharding, first = NamedSharding(mesh, P(DATA)), index * rows

    def put(value: np.ndarray) -> jax.Array:
        shape = (rows * count, *value.shape[1:])

        def part(where: tuple[slice, ...] | None) -> np.ndarray:
            assert where is not None  # JAX passes an index for every shard
            start, stop, _ = where[0].indices(shape[0])
            return value[start - first : stop - first]

        return jax.make_array_from_callback(shape, sharding, part)

    return {name: put(value) for name, value in batch.items()}


class TrainStep(Protocol):
    """A compiled training step, which can also be lowered for shape structs of a batch."""

    def __call__(self, state: TrainState, batch: Arrays, /) -> tuple[TrainState, Metrics]: ...

    def lower(self, state: TrainState, batch: Any, /) -> jax.stages.Lowered: ...


def make_train_step(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    learning_rate: StepFunction,
    exit_weights: StepFunction,
    mesh: Mesh,
    *,
    layout: Layout = DEFAULT,
    pipeline: PipelineConfig = PIPELINE,
    clip_norm: float | None = 1.0,
    microbatches: int = 1,
    remat: str = "none",
    seed: int = 0,
    scope: Scope | None = None,
    objective: LossObjective = CROSS_ENTROPY,
    sparse: bool = False,
    layer_dropout: StepFunction | None = None,
    ema: float | None = None,
    loss_scale: float | None = None,
    loss_scale_interval: int = 1000,
) -> TrainStep:
    """Compile the step `(state, batch) -> (state, metrics)`; `state` is donated.

    The loss is sum_e w_e L_e with L_e the mean over all counted tokens of the global batch
    (EE-LLM Eq. 1). Each data shard takes its samples in `microbatches` parts one after the other.
    Sums are carried, and divided once by the global count, so neither the number of parts nor that
    of devices changes the result beyond rounding. Dropout keys are folded from (seed, step, number
    of the sample in the global batch). On a mesh with several stages the microbatches go through
    them as `pipeline` says, and the state lies on the stages (`train.placement`).

    Where the loss or the gradient norm is not finite, or the batch counts no token, parameters,
    average and optimiser state stay as they were, `state.skipped` is increased, and `state.step`
    moves on.

    Args:
      exit_weights: step -> w of the early exits; that of the final exit is 1.
      layout: the one that the state was made with.
      clip_norm: largest norm of the gradient, or None.
      scope: what is trained, by default everything. The gradient of frozen parameters is never
        formed, and exit_weights and exit_losses are of its exits.
      objective: what a token costs.
      sparse: leave out exits whose weight is 0 at a step.
      layer_dropout: step -> probabilities [l] of layers to be left out for a sample.
      ema: decay of the parameters' average, or None.
      loss_scale: the first scale of the loss, adjusted as `recipes.LossScale` says every
        `loss_scale_interval` clean steps. It multiplies the weights of all exits alike, as a scale
        of the mean loss of one microbatch on one device, and divides the gradients before anything
        else is done with them.

    Returns:
      The step. `batch` holds tokens and labels [b, t], and optionally segment_ids and positions
      [b, t]. Metrics: loss, exit_losses [e] (cross entropies), exit_weights [e], exit_grad_norms
      [e] (of what each exit's weighted loss sends into the hidden states at its boundary, or of the
      gradient in its own parameters where these are frozen), grad_norm (before clipping),
      learning_rate, tokens, skipped (so far), finite, and loss_scale where there is one: that of
      this step. Without a counted token losses and norm are 0, and finite is false.

    Raises:
      ConfigError: a mesh that does not divide the model, or an objective that distils on several
        stages.
    """
    scope = scope or Scope(config)
    require(scope.config == config, "scope", scope.config.exits, "must be of the same model")
    final, devices = scope.which[-1:] == (config.n_exits,), mesh.shape[DATA]
    places = placement(scope, mesh, pipeline)
    settings = {
        "microbatches": microbatches,
        "remat": remat,
        "seed": seed,
        "objective": objective,
        "sparse": sparse,
    }
    if places.stages is None:
        gradients = gradient_sums(scope, mesh, layout, **settings)
    else:
        gradients = pipelined_sums(places, mesh, layout, pipeline, **settings)
    spread = rules.specs(places.declarations[0], mesh, layout.moments_over)
    update = Update(
        optimizer,
        learning_rate,
        clip_norm,
        ema,
        loss_scale_interval,
        rules.shardings(spread, mesh),
        places.norm,
        places.moved,
    )

    def step(state: TrainState, batch: Arrays) -> tuple[TrainState, Metrics]:
        check_batch(batch["tokens"].shape[0], mesh, microbatches)
        weights = exit_weights(state.step)
        if final:
            weights = jnp.append(weights, jnp.ones(1, jnp.float32))
        scale = jnp.ones((), jnp.float32)
        if state.loss_scale is not None:
            scale = state.loss_scale.value / (batch["tokens"].size / microbatches / devices)
        rates = layer_dropout(state.step) if layer_dropout is not None else None
        sums = gradients(state, weights * scale, rates, batch)
        state, metrics = update(state, sums, scale)
        return state, metrics | {"exit_weights": weights}

    # The next state is laid out as this one was declared, so that no second program is compiled.
    shapes = abstract(
        config,
        optimizer,
        mesh,
        scope,
        layout=layout,
        pipeline=pipeline,
        ema=ema is not None,
        loss_scale=loss_scale,
    )
    placed = jax.tree.map(lambda a: a.sharding, shapes)
    return jax.jit(step, donate_argnums=0, out_shardings=(placed, None))


def gradient_sums(
    scope: Scope,
    mesh: Mesh,
    layout: Layout = DEFAULT,
    *,
    microbatches: int,
    remat: str,
    seed: int,
    objective: LossObjective,
    sparse: bool,
) -> GradientSums:
    """Return the function of summed gradients for a mesh of data and model axes.

    The settings are those of `make_train_step`.

    Raises:
      ConfigError: a mesh that does not divide the model.
    """
    config, axes = scope.config, mesh_axes(mesh, layout)
    declared = scope.declarations()
    param_specs, frozen_specs = (rules.specs(d, mesh, layout.params_over) for d in declared)
    grad_specs = rules.specs(declared[0], mesh, layout.moments_over)

    def loss(trained, frozen, weights, batch, keys, rates):
        params, probes = trained
        return multi_exit_loss(
            join(frozen, params),
            config,
            batch["tokens"],
            batch["labels"],
            weights,
            positions=batch.get("positions"),
            segment_ids=batch.get("segment_ids"),
            dropout_keys=keys,
            axes=axes,
            remat=remat,
            which=scope.which,
            objective=objective,
            sparse=sparse,
            layer_dropout=rates,
            probes=probes,
        )

    def local(params, frozen, weights, rates, batch, step):
        # Parameters vary over data from the start, so the backward pass has no hidden sums over it;
        # there is one sum at the end. Parameters that are whole on every shard of the model axis
        # (norms, biases behind a sum) stay so: autodiff sums their gradients where necessary.
        weights, rates = _vary((weights, rates))
        params = local_parameters(params, param_specs)
        frozen = local_parameters(frozen, frozen_specs)

        def part(a):
            return a.reshape(microbatches, -1, *a.shape[1:])

        parts = jax.tree.map(part, dict(batch))
        keys = None
        if config.dropout or rates is not None or objective.exit_tokens < 1:
            keys = part(_sample_keys(seed, step, batch["tokens"].shape[0]))
        # The gradient of an exit's probe is what the exit sends into the trunk.
        trained = params, None if scope.tuned else jnp.zeros_like(weights)

        def one(part):
            batch, keys = part
            (total, sums), (grads, squares) = jax.value_and_grad(loss, has_aux=True)(
                trained, frozen, weights, batch, keys, rates
            )
            return BatchSums(parts_of(grads), squares, total, sums)

        if microbatches == 1:
            sums = one(jax.tree.map(lambda a: a[0], (parts, keys)))
        else:
            shapes = jax.eval_shape(one, jax.tree.map(lambda a: a[0], (parts, keys)))
            zeros = _vary(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes))
            zeros = zeros._replace(grads=jax.tree.map(_vary_as, zeros.grads, param_specs))

            def add(sums, part):
                return (jax.tree.map(jnp.add, sums, one(part)), None)

            sums, _ = lax.scan(add, zeros, (parts, keys))
        # Each device gets the part of a gradient whose moments it holds.
        grads = jax.tree.map(_sum_over_data, sums.grads, param_specs, grad_specs)
        return lax.psum(sums._replace(grads=()), DATA)._replace(grads=grads)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(param_specs, frozen_specs, P(), P(), P(DATA), P()),
        out_specs=BatchSums(grad_specs, P(), P(), ExitSums(P(), P())),
    )

    def gradients(state, weights, rates, batch):
        sums = mapped(state.params, state.frozen, weights, rates, batch, state.step)
        if scope.tuned:
            exits = [sums.grads["exits"][config.exits[e].name] for e in scope.which]
            squares = [optax.tree.norm(own, squared=True) for own in exits]
            sums = sums._replace(squares=jnp.stack(squares))
        return sums

    return gradients


def pipelined_sums(
    places: Placement,
    mesh: Mesh,
    layout: Layout,
    pipeline: PipelineConfig,
    *,
    microbatches: int,
    remat: str,
    seed: int,
    objective: LossObjective,
    sparse: bool,
) -> GradientSums:
    """Return the function of `gradient_sums` for a state that lies on stages."""
    keys = functools.partial(_sample_keys, seed)
    on_stages = places.stages
    assert on_stages is not None
    stages = Pipeline(on_stages, mesh, layout, remat, objective, sparse, keys)

    def gradients(state, weights, rates, batch):
        length = batch["tokens"].shape[1]
        if places.scope.tuned:
            run = exit_gradients(stages, microbatches)
        else:
            cut = on_stages.partition
            schedule, factors = plan(
                pipeline, cut, microbatches, length=length, remat=remat, objective=objective
            )
            run = runner.gradients(stages, schedule, factors)
        return run(state.params, state.frozen, weights, rates, dict(batch), state.step)

    return gradients


@dataclasses.dataclass(frozen=True)
class Update:
    """Part of a step from summed gradients to the next state.

    Attributes not listed are as in `make_train_step`.

    Attributes:
      moments: layout of each parameter's moments. A parameter is updated in these parts, and
        gathered if it lies whole.
      norm: the norm of all gradients.
      moved: for each parameter a mask that is positive where it is updated; None for everything.
    """

    optimizer: optax.GradientTransformation
    learning_rate: StepFunction
    clip_norm: float | None
    ema: float | None
    loss_scale_interval: int
    moments: Tree | None = None
    norm: Callable[[Tree], jax.Array] = optax.tree.norm
    moved: Tree | None = None

    def __call__(
        self, state: TrainState, sums: BatchSums[jax.Array], scale: jax.Array
    ) -> tuple[TrainState, Metrics]:
        """Return the next state and the metrics; `sums` are of a loss multiplied by `scale`."""
        counted = sums.exits.num_tokens > 0
        count = jnp.maximum(sums.exits.num_tokens, 1).astype(jnp.float32)
        total, factor = sums.total / scale, 1.0 / (scale * count)
        sums = sums._replace(grads=self._only_moved(sums.grads))
        norm = self.norm(sums.grads) * factor
        finite = jnp.isfinite(norm) & jnp.isfinite(total) & counted
        rate = self.learning_rate(state.step)
        metrics = {
            "loss": total / count,
            "exit_losses": sums.exits.sums / count,
            "grad_norm": norm,
            "learning_rate": rate,
            "tokens": sums.exits.num_tokens,
            "skipped": state.skipped + (~finite).astype(jnp.int32),
            "finite": finite,
            "exit_grad_norms": jnp.sqrt(sums.squares) * factor,
        }
        if self.clip_norm is not None:
            factor = factor * jnp.minimum(1.0, self.clip_norm / norm)
        grads = jax.tree.map(lambda g: g * factor, sums.grads)
        params = state.params
        if self.moments is not None:
            params = lax.with_sharding_constraint(params, self.moments)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, params)
        updates = self._only_moved(updates)  # includes weight decay
        moved = jax.tree.map(lambda p, u: p - rate * u, params, updates)

        average, scaling = state.ema, state.loss_scale
        if self.ema is not None:
            new = averaged(average, moved, self.ema, state.step)
            average = optax.tree.where(finite, new, average)
        if scaling is not None:
            metrics["loss_scale"] = scaling.value
            # A batch without a token is skipped too, and says nothing about the scale.
            adjusted = scaling.after(finite, self.loss_scale_interval)
            scaling = optax.tree.where(counted, adjusted, scaling)
        state = TrainState(
            step=state.step + 1,
            params=optax.tree.where(finite, moved, params),
            opt_state=optax.tree.where(finite, opt_state, state.opt_state),
            skipped=metrics["skipped"],
            frozen=state.frozen,
            ema=average,
            loss_scale=scaling,
        )
        return state, metrics

    def _only_moved(self, tree: Tree) -> Tree:
        """Return a tree like the trained parameters', 0 where these stay as they are."""
        if self.moved is None:
            return tree

        def one(moves, a):
            moves = jnp.asarray(moves).reshape(moves.shape + (1,) * (a.ndim - moves.ndim))
            return jnp.where(moves > 0, a, jnp.zeros((), a.dtype))

        return jax.tree.map(one, self.moved, tree)


def make_eval_step(
    config: ModelConfig,
    mesh: Mesh,
    scope: Scope | None = None,
    layout: Layout = DEFAULT,
    pipeline: PipelineConfig = PIPELINE,
    microbatches: int = 1,
) -> Callable[[Tree, Arrays], ExitSums[jax.Array]]:
    """Compile `(params, batch) -> ExitSums`: the summed loss of every exit, and counted tokens.

    With a `scope`, params are `scope.parameters()` and the exits those of `scope.which`. On a mesh
    with several stages the batch goes through them in `microbatches` parts.
    """
    scope = scope or Scope(config)
    places = placement(scope, mesh, pipeline)
    if places.stages is not None:
        return jax.jit(evaluation(Pipeline(places.stages, mesh, layout), microbatches))
    axes = mesh_axes(mesh, layout)

    def local(params, batch):
        weights = _vary(jnp.ones((len(scope.which),), jnp.float32))
        params = local_parameters(params, param_specs)
        _, sums = multi_exit_loss(
            params,
            config,
            batch["tokens"],
            batch["labels"],
            weights,
            positions=batch.get("positions"),
            segment_ids=batch.get("segment_ids"),
            axes=axes,
            which=scope.which,
        )
        return lax.psum(sums, DATA)

    param_specs = rules.specs(scope.parameters(), mesh, layout.params_over)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(param_specs, P(DATA)), out_specs=P()))


def _sample_keys(seed: int, step: jax.Array, local: int) -> jax.Array:
    """Return keys [local] of this device's samples, by their numbers in the global batch."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    numbers = lax.axis_index(DATA) * local + jnp.arange(local)
    return jax.vmap(lambda n: jax.random.fold_in(key, n))(numbers)


def _vary(tree: Tree) -> Tree:
    """Make arrays vary over the data axis."""
    return jax.tree.map(lambda a: lax.pcast(a, (DATA,), to="varying"), tree)


def local_parameters(params: Tree, specs: Tree) -> Tree:
    """Return the parameters inside a `shard_map` over `specs` as the loss takes them.

    All vary over the data axis, and are `Spread` where they are cut over it.
    """
    whole = parted(params, specs, DATA)
    return jax.tree.map(lambda a: a if is_spread(a) else _vary(a), whole, is_leaf=is_spread)


def _sum_over_data(grad: jax.Array, within: P, spec: P) -> jax.Array:
    """Sum the gradient of a parameter over the data axis.

    Args:
      within: how the parameter lies inside the `shard_map`.
      spec: how the sum leaves it: whole, or the part that belongs to this device.
    """
    if DATA in within:  # gathering the parameter has summed it
        return grad
    if DATA not in spec:
        return lax.psum(grad, DATA)
    return lax.psum_scatter(grad, DATA, scatter_dimension=spec.index(DATA), tiled=True)


def _vary_as(a: jax.Array, spec: P) -> jax.Array:
    """Make `a`, which varies over data, vary over all mesh axes that cut a parameter of `spec`."""
    cut = tuple(axis for axis in spec if axis not in (None, DATA))
    return lax.pcast(a, cut, to="varying") if cut else a
