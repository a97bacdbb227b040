"""What a training step reads and writes."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from eejax.common.trees import Tree
from eejax.models import params
from eejax.models.config import ModelConfig
from eejax.sharding import rules


@flax.struct.dataclass
class TrainState:
    """`step` counts the steps taken, skipped ones included; both counts are int32 scalars."""

    step: jax.Array
    params: Tree
    opt_state: optax.OptState
    skipped: jax.Array


def create(
    config: ModelConfig, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh
) -> TrainState:
    """The state before the first step, every leaf made where it belongs on `mesh`."""
    placed = jax.tree.map(lambda a: a.sharding, abstract(config, optimizer, mesh))
    return jax.jit(lambda key: _initial(config, optimizer, key), out_shardings=placed)(
        jax.random.key(seed)
    )


def abstract(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """The state as shape structs with shardings; a moment lies where its parameter lies."""
    declaration = params.abstract(config)
    placed = rules.shardings(rules.specs(declaration, mesh), mesh)
    state = jax.eval_shape(lambda: _initial(config, optimizer, jax.random.key(0)))
    whole = lambda a: _struct(a, rules.replicated(mesh))
    return TrainState(
        step=whole(state.step),
        params=jax.tree.map(_struct, state.params, placed),
        opt_state=optax.tree_map_params(
            optimizer, _struct, state.opt_state, placed, transform_non_params=whole
        ),
        skipped=whole(state.skipped),
    )


def _initial(config: ModelConfig, optimizer, key: jax.Array) -> TrainState:
    values = params.init(config, key)
    zero = jnp.zeros((), jnp.int32)
    return TrainState(step=zero, params=values, opt_state=optimizer.init(values), skipped=zero)


def _struct(a: jax.Array, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
