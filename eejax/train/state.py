"""State that a training step reads and writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from eejax.common.axes import DATA, PIPE
from eejax.common.trees import Tree
from eejax.models import params
from eejax.models.config import ModelConfig
from eejax.pipeline.config import PIPELINE, PipelineConfig
from eejax.sharding import rules
from eejax.sharding.mesh import DEFAULT, Layout
from eejax.train.placement import placement
from eejax.train.recipes import LossScale
from eejax.train.scope import Scope


class TrainState(flax.struct.PyTreeNode):
    """State that a training step reads and writes.

    Attributes:
      step: int32 number of steps taken, skipped ones included.
      params: the trained parameters.
      opt_state: the optimiser's state.
      skipped: int32 number of skipped steps.
      frozen: parameters that the loss reads and no step changes; they have no optimiser state and
        are in no checkpoint of the run (`train.scope`).
      ema: the averaged parameters, {} without an average.
      loss_scale: None unless the model computes in float16.
    """

    step: jax.Array
    params: Tree
    opt_state: optax.OptState
    skipped: jax.Array
    frozen: Tree = dataclasses.field(default_factory=dict)
    ema: Tree = dataclasses.field(default_factory=dict)
    loss_scale: LossScale | None = None


def create(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
    mesh: Mesh,
    *,
    layout: Layout = DEFAULT,
    pipeline: PipelineConfig = PIPELINE,
    ema: bool = False,
    loss_scale: float | None = None,
) -> TrainState:
    """Return the initial state, with every leaf made in its place on `mesh`."""
    extra = {"ema": ema, "loss_scale": loss_scale}
    shapes = abstract(config, optimizer, mesh, layout=layout, pipeline=pipeline, **extra)
    placed = jax.tree.map(lambda a: a.sharding, shapes)
    places = placement(Scope(config), mesh, pipeline)

    def initial(key):
        return begin(places.place(params.init(config, key)), optimizer, **extra)

    return jax.jit(initial, out_shardings=placed)(jax.random.key(seed))


def begin(
    values: Tree,
    optimizer: optax.GradientTransformation,
    *,
    ema: bool = False,
    loss_scale: float | None = None,
) -> TrainState:
    """Return the initial state of trained `values`; frozen parameters are passed separately.

    `ema` says whether their average is kept; `loss_scale` is the first scale, None for no scaling.
    """
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=zero,
        params=values,
        opt_state=optimizer.init(values),
        skipped=zero,
        ema=jax.tree.map(jnp.copy, values) if ema else {},
        loss_scale=None if loss_scale is None else LossScale.initial(loss_scale),
    )


def abstract(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    scope: Scope | None = None,
    *,
    layout: Layout = DEFAULT,
    pipeline: PipelineConfig = PIPELINE,
    ema: bool = False,
    loss_scale: float | None = None,
) -> TrainState:
    """Return the state as shape structs with shardings.

    A moment lies where its parameter lies, or is spread over more devices (`sharding.mesh.Layout`).
    On a mesh with stages both lie as `train.placement.Placement` says.

    `scope` is the trained part of the model, by default all of it; the rest is as in `begin`.
    """
    declarations = placement(scope or Scope(config), mesh, pipeline).declarations
    trained, frozen = (rules.structs(d, mesh, layout.params_over) for d in declarations)
    moments = rules.structs(declarations[0], mesh, layout.moments_over)
    return _laid_out(trained, moments, frozen, optimizer, mesh, ema, loss_scale)


def portable(
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    scope: Scope,
    *,
    ema: bool = False,
    loss_scale: float | None = None,
) -> TrainState:
    """Return the state as it is saved, as shape structs of the model's tree.

    The leaves are spread over all devices. Their shapes do not depend on `mesh`. Frozen parameters
    are not part of the state.
    """
    trained = rules.structs(scope.declarations()[0], mesh, (PIPE, DATA))
    return _laid_out(trained, trained, {}, optimizer, mesh, ema, loss_scale)


def _laid_out(
    trained: Tree,
    moments: Tree,
    frozen: Tree,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    ema: bool,
    loss_scale: float | None,
) -> TrainState:
    """Return a state whose parameters, moments and frozen parameters are the given structs."""
    state = jax.eval_shape(
        lambda values: begin(values, optimizer, ema=ema, loss_scale=loss_scale), trained
    )
    placed = jax.tree.map(lambda a: a.sharding, moments)

    def whole(a):
        return _struct(a, rules.replicated(mesh))

    return state.replace(
        step=whole(state.step),
        params=trained,
        opt_state=optax.tree_map_params(
            optimizer, _struct, state.opt_state, placed, transform_non_params=whole
        ),
        skipped=whole(state.skipped),
        frozen=frozen,
        ema=moments if ema else {},
        loss_scale=jax.tree.map(whole, state.loss_scale),
    )


def map_trees(state: TrainState, like: Tree, f: Callable[[Tree], Tree]) -> TrainState:
    """Apply `f` to the parameters, their average and every tree of moments.

    Those are all the trees that have the structure of `like`.
    """
    structure = jax.tree.structure(like)

    def of_this_shape(node):
        return jax.tree.structure(node) == structure

    def over(tree):
        return jax.tree.map(
            lambda node: f(node) if of_this_shape(node) else node, tree, is_leaf=of_this_shape
        )

    return state.replace(
        params=f(state.params),
        opt_state=over(state.opt_state),
        ema=f(state.ema) if state.ema else {},
    )


def _struct(a: jax.Array, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
