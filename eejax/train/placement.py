"""Where a run's parameters lie: as the model has them, or on the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import functools

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from eejax.common.axes import PIPE
from eejax.common.trees import Tree, join
from eejax.pipeline.config import PipelineConfig
from eejax.pipeline.layout import StageLayout
from eejax.pipeline.partition import partition
from eejax.train.scope import Scope


@dataclasses.dataclass(frozen=True)
class Placement:
    """The parameters of a scope as a run holds them.

    stages: their places on a pipeline's stages; None where they lie as in the model. Checkpoints
    and everybody outside of a step know the model's tree alone.
    """

    scope: Scope
    stages: StageLayout | None = None

    @functools.cached_property
    def declarations(self) -> tuple[Tree, Tree]:
        """(trained, frozen) parameters, as `models.params.abstract` declares a model's."""
        return (self.stages or self.scope).declarations()

    @property
    def parameters(self) -> Tree:
        """Declaration of all that is held."""
        return join(*self.declarations)

    def place(self, tree: Tree) -> Tree:
        """Trained or frozen parameters, or anything of their tree, from the model's places."""
        return tree if self.stages is None else self.stages.to_stages(tree)

    def take(self, tree: Tree) -> Tree:
        """The inverse of `place`."""
        return tree if self.stages is None else self.stages.from_stages(tree)

    def norm(self, tree: Tree) -> jax.Array:
        """Global norm of the trained parameters' gradients, of each parameter once."""
        if self.stages is None:
            return optax.tree.norm(tree)
        return jax.numpy.sqrt(self.stages.squared_norm(tree))


def placement(scope: Scope, mesh: Mesh | AbstractMesh, pipeline: PipelineConfig) -> Placement:
    """The `Placement` on `mesh`. Raises `ConfigError` where the stages do not fit the model."""
    stages = mesh.shape[PIPE]
    if stages == 1:
        return Placement(scope)
    cut = partition(scope.config, stages, pipeline.layers, pipeline.placement, scope.which)
    return Placement(scope, StageLayout(cut, tuned=scope.tuned is not None))
