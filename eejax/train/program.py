"""Program of an experiment: its optimiser, its state's shapes and its compiled steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from eejax.common.axes import PIPE
from eejax.common.errors import require
from eejax.common.trees import Tree
from eejax.losses.multi_exit import ExitSums
from eejax.models import params
from eejax.pipeline.config import PipelineConfig
from eejax.pipeline.partition import partition
from eejax.pipeline.plan import plan
from eejax.pipeline.stage import Arrays
from eejax.sharding.mesh import check_batch
from eejax.train import optimizer, recipes, state, step
from eejax.train.config import Experiment, TrainConfig
from eejax.train.placement import Placement, placement
from eejax.train.scope import Scope


def check_batches(train: TrainConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raise `ConfigError` for a batch size that devices and microbatches do not divide."""
    for rows in train.batch_sizes.sizes:
        field = "train.batch_size" if rows == train.batch_size else "train.batch_rampup"
        check_batch(rows, mesh, train.microbatches, field)


@dataclasses.dataclass(frozen=True)
class Program:
    """Parts that follow from `experiment` alone, on `mesh`.

    An abstract mesh suffices for `abstract_state`.
    """

    experiment: Experiment
    mesh: Mesh | AbstractMesh

    @property
    def device_mesh(self) -> Mesh:
        """Mesh of devices. Raises `ValueError` for an abstract one."""
        if isinstance(self.mesh, AbstractMesh):
            raise ValueError(f"{self.mesh} has no devices: make the program on a mesh of devices")
        return self.mesh

    @functools.cached_property
    def scope(self) -> Scope:
        """The part of the model that is trained."""
        return Scope.of(self.experiment)

    @functools.cached_property
    def placement(self) -> Placement:
        """The places of the parameters on the mesh."""
        return placement(self.scope, self.mesh, self.pipeline)

    @functools.cached_property
    def pipeline(self) -> PipelineConfig:
        """The settings of the stages, with the number of layers of each."""
        given, stages = self.experiment.pipeline, self.mesh.shape[PIPE]
        if stages == 1:
            return given
        own = (self.scope.config, stages, given.layers, given.placement, self.scope.which)
        cut = partition(*own, self.experiment.data.length)
        return dataclasses.replace(given, layers=cut.layers)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return self._optimizer(self.placement.declarations[0])

    def _optimizer(self, declared: Tree) -> optax.GradientTransformation:
        decays = params.map_params(lambda p: p.decay, declared)
        return optimizer.transformation(self.experiment.optimizer, decays)

    @property
    def _extra(self) -> dict[str, Any]:
        """Settings of the state beside parameters and moments."""
        train, scaled = self.experiment.train, self.experiment.model.dtype == "float16"
        return {"ema": train.ema is not None, "loss_scale": train.loss_scale if scaled else None}

    @functools.cached_property
    def abstract_state(self) -> state.TrainState:
        """The state as shape structs with shardings."""
        e = self.experiment
        return state.abstract(
            e.model,
            self.optimizer,
            self.mesh,
            self.scope,
            layout=e.mesh,
            pipeline=self.pipeline,
            **self._extra,
        )

    def check(self) -> None:
        """Raise `ConfigError` if the model does not fit the mesh, before any work is done.

        A run that is only read needs no stages, so its experiment may ask to fill their bubbles.
        Exits of a smaller vocabulary, too, may be read or stay as they are, but have no loss.
        """
        e = self.experiment
        exits = [e.model.exits[i] for i in self.scope.which if i < e.model.n_exits]
        known = {x.boundary: x.vocabulary for x in exits if x.vocabulary}
        require(
            not known,
            "model.exits.vocabulary",
            known,
            "must be 0 for every exit with a loss, and these do not know all labels",
            "Train other exits alone (tune.part = 'exits' and tune.exits), or begin with the model "
            "that eejax.tune gave these exits, and repeat it afterwards.",
        )
        require(
            e.pipeline.fill == "none" or e.mesh.pipe > 1,
            "pipeline.fill",
            e.pipeline.fill,
            f"must be 'none' on one stage (mesh.pipe = {e.mesh.pipe}), which is never idle",
            "Set pipeline.fill to 'none', or mesh.pipe to the number of stages.",
        )
        _ = self.abstract_state

    @functools.cached_property
    def portable_state(self) -> state.TrainState:
        """The state as a checkpoint holds it, whatever the mesh: shape structs with shardings."""
        if self.placement.stages is None:
            return self.abstract_state.replace(frozen={})
        of_model = self._optimizer(self.scope.declarations()[0])
        return state.portable(of_model, self.mesh, self.scope, **self._extra)

    def to_portable(self, now: state.TrainState) -> state.TrainState:
        """Return the state in the form of `portable_state`, without frozen parameters."""
        now = now.replace(frozen={})
        return now if self.placement.stages is None else self._take(now)

    def from_portable(self, saved: state.TrainState) -> state.TrainState:
        """Invert `to_portable`."""
        return saved if self.placement.stages is None else self._place(saved)

    @functools.cached_property
    def _take(self):
        return _moving(self.placement.take, self.portable_state)

    @functools.cached_property
    def _place(self):
        return _moving(self.placement.place, self.abstract_state.replace(frozen={}))

    def create(self) -> state.TrainState:
        """Return the initial state of a run that trains the whole model."""
        e = self.experiment
        return state.create(
            e.model,
            self.optimizer,
            e.train.seed,
            self.device_mesh,
            layout=e.mesh,
            pipeline=self.pipeline,
            **self._extra,
        )

    def begin(self, values: Tree) -> state.TrainState:
        """Return the initial state of trained `values`, without frozen parameters."""
        return state.begin(values, self.optimizer, **self._extra)

    @property
    def layer_dropout(self) -> step.StepFunction | None:
        """Schedule step -> probability [l] of leaving out each layer; None without dropout."""
        train, model = self.experiment.train, self.experiment.model
        if not train.layer_dropout:
            return None
        return recipes.layer_dropout(
            train.layer_dropout,
            model.n_layers,
            growth=train.layer_dropout_growth,
            steps=train.steps,
        )

    def train_step(self) -> step.TrainStep:
        """Return the training step (`step.make_train_step`)."""
        e = self.experiment
        return step.make_train_step(
            e.model,
            self.optimizer,
            optimizer.learning_rate(e.optimizer, e.train.steps),
            e.exit_weights.schedule(e.train.steps),
            self.device_mesh,
            layout=e.mesh,
            pipeline=self.pipeline,
            clip_norm=e.optimizer.clip_norm,
            microbatches=e.train.microbatches,
            remat=e.train.remat,
            seed=e.train.seed,
            scope=self.scope,
            objective=e.loss,
            sparse=e.exit_weights.sparse,
            layer_dropout=self.layer_dropout,
            ema=e.train.ema,
            loss_scale=self._extra["loss_scale"],
            loss_scale_interval=e.train.loss_scale_interval,
        )

    def eval_step(self) -> Callable[[Tree, Arrays], ExitSums[jax.Array]]:
        """Return the evaluation step (`step.make_eval_step`)."""
        e = self.experiment
        return step.make_eval_step(
            e.model, self.device_mesh, self.scope, e.mesh, self.pipeline, self.eval_microbatches
        )

    @property
    def inserted(self) -> int:
        """Microbatches of a step that are computed in the idle time of the others."""
        e, stages = self.experiment, self.placement.stages
        if stages is None or e.pipeline.fill == "none":
            return 0
        made = plan(
            e.pipeline,
            stages.partition,
            e.train.microbatches,
            length=e.data.length,
            remat=e.train.remat,
            objective=e.loss,
        )
        return e.train.microbatches - made.factors.main if made.factors else 0

    @property
    def eval_microbatches(self) -> int:
        """Microbatches of an evaluation step; on stages as many as in a training step."""
        return 1 if self.placement.stages is None else self.experiment.train.microbatches


def _moving(move: Callable[[Tree], Tree], wanted: state.TrainState):
    """Return a compiled `move` over a state's trees, with results placed like `wanted`."""
    shardings = jax.tree.map(lambda a: a.sharding, wanted)
    return jax.jit(lambda now: state.map_trees(now, now.params, move), out_shardings=shardings)
