"""Placement of a run's parameters: as the model has them, or on the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from eejax.common.axes import DATA, PIPE
from eejax.common.trees import Tree, join
from eejax.models import params
from eejax.pipeline.config import PipelineConfig
from eejax.pipeline.layout import StageLayout
from eejax.pipeline.partition import partition
from eejax.sharding import rules
from eejax.train.scope import Scope


@dataclasses.dataclass(frozen=True)
class Placement:
    """Parameters of a scope as a run holds them on `mesh`.

    Checkpoints, and all code outside of a step, use the model's tree.

    Attributes:
      scope: the part of the model that is trained.
      mesh: the devices.
      stages: layout on a pipeline's stages; None where parameters lie as in the model.
    """

    scope: Scope
    mesh: Mesh | AbstractMesh
    stages: StageLayout | None = None

    @functools.cached_property
    def declarations(self) -> tuple[Tree, Tree]:
        """Return (trained, frozen) parameters, as `models.params.abstract` declares a model's."""
        return (self.stages or self.scope).declarations()

    @property
    def parameters(self) -> Tree:
        """Return the declarations of all parameters that the loss reads."""
        return join(*self.declarations)

    def place(self, tree: Tree) -> Tree:
        """Move trained or frozen parameters, or a tree like them, from the model's layout."""
        stages = self.stages
        return tree if stages is None else self._moved(stages, stages.to_stages, tree)

    def take(self, tree: Tree) -> Tree:
        """Invert `place`."""
        stages = self.stages
        return tree if stages is None else self._moved(stages, stages.from_stages, tree)

    def _moved(self, stages: StageLayout, move: Callable[[Tree], Tree], tree: Tree) -> Tree:
        """Return move(tree), in which layers move to other rows of uneven stages' stacks.

        Meanwhile every device has a part of all layers: with rows on several devices, XLA would
        gather whole stacks.
        """
        if stages.partition.even or "layers" not in tree:
            return move(tree)
        specs = rules.specs(
            params.abstract(self.scope.config)["layers"],
            self.mesh,
            (PIPE, DATA),
            rules=dict(rules.RULES) | {"l": None},
        )
        cut = rules.shardings(specs, self.mesh)

        def by_part(tree):
            return tree | {"layers": lax.with_sharding_constraint(tree["layers"], cut)}

        return by_part(move(by_part(tree)))

    @property
    def moved(self) -> Tree | None:
        """Mask `Scope.moved` in this layout: 1.0 or 0.0 for each leaf or each of its rows.

        It is None if all trained parameters move.
        """
        moved = self.scope.moved
        return moved if moved is None or self.stages is None else self.stages.to_stages(moved)

    def norm(self, tree: Tree) -> jax.Array:
        """Return the global norm of the trained parameters' gradients.

        Each parameter is counted once.
        """
        if self.stages is None:
            return optax.tree.norm(tree)
        return jax.numpy.sqrt(self.stages.squared_norm(tree))


def placement(scope: Scope, mesh: Mesh | AbstractMesh, pipeline: PipelineConfig) -> Placement:
    """Return the `Placement` on `mesh`. Raises `ConfigError` if the stages do not fit the model."""
    stages = mesh.shape[PIPE]
    if stages == 1:
        return Placement(scope, mesh)
    cut = partition(scope.config, stages, pipeline.layers, pipeline.placement, scope.which)
    return Placement(scope, mesh, StageLayout(cut, tuned=scope.tuned is not None))
