"""Time and memory of an experiment on the stages of its pipeline, without running it."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class ExperimentStages:
    """An experiment on its stages. Changed copies are other ways to run it.

    Attributes:
      rows: sequences of a microbatch on a device.
      parts: measured times, or None.
    """

    experiment: object
    partition: object
    microbatches: int
    exits: str
    remat: str
    parts: object = None
    measured_rows: int = 1

    @classmethod
    def of(cls, experiment, parts=None) -> ExperimentStages:
        """Build the stages. Raises `ConfigError` for settings that training would refuse."""
        from eejax.common.errors import require
        from eejax.pipeline.partition import partition

        train, mesh, settings = experiment.train, experiment.mesh, experiment.pipeline
        require(
            experiment.tuned is None,
            "tune.part",
            experiment.tune.part,
            "must not be exits alone: tuned exits have no plan",
        )
        parted = mesh.data * train.microbatches
        require(
            train.batch_size % parted == 0,
            "train.batch_size",
            train.batch_size,
            f"must be a multiple of mesh.data x train.microbatches = {parted}",
        )
        own = (experiment.model, mesh.pipe, settings.layers, settings.placement)
        cut = partition(*own, length=experiment.data.length)
        rows = train.batch_size // parted
        if experiment.loss.distillation:
            settings = settings.distilling()
        return cls(experiment, cut, train.microbatches, settings.exits, train.remat, parts, rows)

    @property
    def exit_policies(self) -> tuple[str, ...]:
        from eejax.pipeline.schedule import EXIT_POLICIES

        return ("deferred",) if self.experiment.loss.distillation else EXIT_POLICIES

    @property
    def rows(self) -> int:
        return self.experiment.train.batch_size // (self.experiment.mesh.data * self.microbatches)

    @functools.cached_property
    def costs(self):
        """`StageCosts` of a microbatch.

        With the placement "earlier", exits between stages are inside the earlier stage.
        """
        from eejax.pipeline.costs import model_costs
        from eejax.pipeline.partition import INPUT, INSIDE
        from eejax.pipeline.simulate import NO_WORK

        p, e = self.partition, self.experiment
        if self.parts is not None:

            def count(at):
                return [len(p.on(i, at)) for i in range(p.stages)]

            costs = self.parts.costs(p.layers, count(INPUT), count(INSIDE))
            behind = len(p.on(p.stages - 1, "output")) - 1
            last = costs.final.plus(self._part("exit") * behind)
            return _times(dataclasses.replace(costs, final=last), self.rows / self.measured_rows)
        costs = model_costs(e.model, p.layers, self.rows, e.data.length)
        if p.placement == "earlier":
            inner = [
                w.plus(x) for w, x in zip(costs.inner, (*costs.entry[1:], NO_WORK), strict=True)
            ]
            entry = (costs.entry[0],) + (NO_WORK,) * (p.stages - 1)
            costs = dataclasses.replace(costs, entry=entry, inner=tuple(inner))
        return _times(costs, 1 / e.mesh.model / 1e12)

    def _part(self, name: str):
        from eejax.pipeline.simulate import PassTime

        return PassTime(*getattr(self.parts, name))

    @property
    def recompute(self) -> bool:
        return self.remat == "full"

    @functools.cached_property
    def schedule(self):
        return self.table(self.microbatches)

    def table(self, microbatches: int):
        from eejax.pipeline.schedule import GENERATORS

        return GENERATORS[self.experiment.pipeline.schedule](
            self.partition.stages,
            microbatches,
            exits=self.exits,
            recompute=self.recompute,
            exit_stages=self.partition.input_exit_stages,
        )

    def work(self, stage: int) -> dict[str, float]:
        """Return the times of a microbatch on a stage.

        They are forward, backward, exits, total, and share of exits. The exits are the early ones
        and, on the last stage, the final one.
        """
        from eejax.pipeline.simulate import BACKWARD, EXITS, FORWARD

        inner = self.costs.inner[stage].total
        times = {
            "forward": self.costs.of(FORWARD, stage, self.recompute),
            "backward": self.costs.of(BACKWARD, stage, self.recompute) - inner,
            "exits": self.costs.of(EXITS, stage) + inner,
        }
        total = sum(times.values())
        return times | {"total": total, "share of exits": times["exits"] / total}

    @functools.cached_property
    def step(self) -> float:
        """Time of a step."""
        from eejax.pipeline.simulate import neighbours_time, step_costs

        time = neighbours_time(step_costs(self.schedule, self.costs))
        exchange = self.parts.exchange if self.parts is not None else 0.0
        return time + exchange * len(self.schedule.steps)

    @property
    def bottleneck(self) -> int:
        loads = [self.work(i)["total"] for i in range(self.partition.stages)]
        return int(np.argmax(loads))

    @property
    def bubble(self) -> float:
        """Share of the step in which the busiest stage is idle."""
        return 1 - self.microbatches * self.work(self.bottleneck)["total"] / self.step

    @functools.cached_property
    def memory(self) -> dict[str, int]:
        """Bytes of a device, the same on every stage, as all run one program.

        They are by part. state: parameters and moments. gradients: their float32 sums. weights:
        matrices in the dtype of computation. states, residuals: slots of the rings for hidden
        states, and for the values that the backward pass of the layers needs. logits: a chunk of
        them and of its gradient.
        """
        from eejax.losses.cross_entropy import chunk_size
        from eejax.pipeline.schedule import rings

        e, c = self.experiment, self.experiment.model
        shards, tokens = e.mesh.model, self.rows * e.data.length
        cut = shards if e.mesh.sequence else 1
        distils = bool(e.loss.distillation and c.n_exits)
        ring = rings(self.schedule, self.partition.input_exit_stages, distils)
        state = tokens * c.d_model * np.dtype(_dtype(c)).itemsize // cut
        # "full" keeps the input, which is one of the states, and reruns a stage as "dots" does.
        kept = "dots" if self.recompute else self.remat
        slots = 1 if self.recompute else ring.n_residuals
        layer = self.rows * _layer_kept(c, e.data.length, kept, shards, e.mesh.sequence)
        vocabulary = c.padded_vocab // shards
        return _state_bytes(e, self.partition) | {
            "states": ring.n_states * state,
            "residuals": slots * layer * self.partition.max_layers,
            "logits": 2 * 4 * chunk_size(tokens, vocabulary) * vocabulary,
        }

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    def replace(self, **changes) -> ExperimentStages:
        return dataclasses.replace(self, **changes)


def _times(costs, factor: float):
    """Multiply `StageCosts` by a number."""

    def scale(works):
        return tuple(w * factor for w in works)

    return dataclasses.replace(
        costs,
        layers=scale(costs.layers),
        entry=scale(costs.entry),
        inner=scale(costs.inner),
        final=costs.final * factor,
    )


def _dtype(model):
    import jax.numpy as jnp

    return jnp.dtype(model.dtype)


@functools.cache
def _layer_kept(model, length: int, remat: str, shards: int, sequence: bool) -> int:
    """Return the bytes of one sequence that a layer keeps on one shard.

    With sequence parallelism everything is sharded; without it, values that all shards hold whole
    are not.
    """
    from eejax.experiments.stage_memory import layer_kept

    if sequence:
        return layer_kept(model, 1, length, remat) // shards
    own = model.replace(
        n_heads=model.n_heads // shards,
        n_kv_heads=max(1, model.n_kv_heads // shards),
        head_dim=model.head_dim,
        d_ff=model.d_ff // shards,
        exits=(),  # an exit's MLP may be wider than a part of the layers'
    )
    return layer_kept(own, 1, length, remat)


@functools.lru_cache(32)
def _state_bytes(experiment, partition) -> dict[str, int]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import AbstractMesh, AxisType

    from eejax.common.axes import MESH_AXES
    from eejax.common.trees import nbytes
    from eejax.models import params
    from eejax.pipeline.layout import StageLayout
    from eejax.sharding import rules
    from eejax.train import optimizer
    from eejax.train.memory import device_bytes

    mesh_config = experiment.mesh
    types = (AxisType.Auto,) * len(MESH_AXES)
    mesh = AbstractMesh(mesh_config.shape, MESH_AXES, axis_types=types)
    declared = StageLayout(partition).declarations()[0]
    whole = rules.structs(declared, mesh)
    spread = device_bytes(rules.structs(declared, mesh, mesh_config.moments_over))
    adam = optimizer.transformation(
        experiment.optimizer, params.map_params(lambda p: p.decay, declared)
    )
    moments = round(nbytes(jax.eval_shape(adam.init, whole)) / nbytes(whole))  # of each parameter
    copies = moments + (experiment.train.ema is not None)
    held = device_bytes(whole)
    narrow = jnp.dtype(experiment.model.dtype).itemsize
    matrices = {"layers": whole["layers"]}
    cast = device_bytes(matrices) * narrow // 4 if narrow < 4 else 0
    return {"state": held + copies * spread, "gradients": held, "weights": cast}
