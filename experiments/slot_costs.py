"""Costs of a pipeline's operations on the available devices, measured with the executor itself.

A model of three stages with an early exit on the input of the second has every part of a pipeline
separately: the first stage embeds, the last one has the final exit, and each holds as many layers
and one vocabulary table. One table of the schedule runs a microbatch through; others begin with
several more of one operation on one stage, the other stages idle. The cost of an operation is the
difference divided by their number, less a step in which stages only exchange values. It is the
median over repetitions in turn, so that lasting noise slows a table and its baseline alike.
"""

from __future__ import annotations

import dataclasses
import time
from typing import NamedTuple

import numpy as np

STAGES = 3
IDLE = ("idle", 0)
SLOTS = (
    ("forward", 0),
    ("forward", 1),
    ("exits", 1),
    ("exits", 2),
    ("backward", 0),
    ("backward", 1),
)


class MicrobatchCosts(NamedTuple):
    """Seconds of the operations of a microbatch.

    An exit's forward and backward pass are one operation, of which a third counts as forward.

    Attributes:
      layer: one layer, forward and backward.
      exit: one early exit, forward and backward.
      final: the final exit, forward and backward.
      embedding: the embedding, forward and backward.
      exchange: the exchange between two steps.
      spread: quartile distance over the median, of each operation.
    """

    layer: tuple[float, float]
    exit: tuple[float, float]
    final: tuple[float, float]
    embedding: tuple[float, float]
    exchange: float
    spread: dict[str, float]

    def costs(self, layers, entry=(), inner=()):
        """Return `StageCosts` of stages with these layers and exits (`simulate.stage_costs`)."""
        from eejax.pipeline.simulate import PassTime, stage_costs

        of = {
            name: PassTime(*getattr(self, name)) for name in ("layer", "exit", "final", "embedding")
        }
        return stage_costs(tuple(layers), tuple(entry), tuple(inner), **of)


def three_stages(model, layers: int):
    """Return the model to measure: three stages of `layers`, and its first exit between two."""
    exits = tuple(dataclasses.replace(e, boundary=layers) for e in model.exits[:1])
    windows = model.sliding_window
    if isinstance(windows, tuple):
        windows = windows[:layers] * STAGES
    return model.replace(n_layers=STAGES * layers, exits=exits, sliding_window=windows)


def pipelined(model, mesh_config, remat: str, devices=None):
    """Return a pipeline and its parameters, random, laid onto the mesh."""
    import jax

    from eejax.models import params
    from eejax.pipeline.layout import StageLayout
    from eejax.pipeline.partition import partition
    from eejax.pipeline.stage import Pipeline
    from eejax.sharding import rules
    from eejax.sharding.mesh import make_mesh

    mesh = make_mesh(mesh_config, devices)
    layout = StageLayout(partition(model, mesh_config.pipe))
    pipeline = Pipeline(layout, mesh, mesh_config, remat=remat)

    def make(key):
        return layout.to_stages(params.init(model, key))

    shardings = rules.shardings(pipeline.specs[0], mesh)
    return pipeline, jax.jit(make, out_shardings=shardings)(jax.random.key(0))


def batch(pipeline, rows: int, length: int):
    """Return random tokens [rows, length], the same in every process, and the same as labels."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    def make(key):
        tokens = jax.random.randint(key, (rows, length), 0, pipeline.config.vocab_size, jnp.int32)
        return {"tokens": tokens, "labels": tokens}

    sharding = NamedSharding(pipeline.mesh, PartitionSpec("data"))
    return jax.jit(make, out_shardings=sharding)(jax.random.key(1))


def run_of(pipeline, parameters, table, rows: int, length: int):
    """Return a run of a table for `analysis.interleave`, and the compiled program.

    A microbatch has `rows` sequences on each device.
    """
    import jax

    from eejax.pipeline import runner

    data = batch(pipeline, table.microbatches * rows * pipeline.mesh.shape["data"], length)
    weights = np.ones(pipeline.config.n_exits + 1, np.float32)
    arguments = parameters, {}, weights, None, data, np.zeros((), np.int32)
    step = jax.jit(runner.gradients(pipeline, table)).lower(*arguments).compile()
    return lambda _: jax.block_until_ready(step(*arguments)), step


def slot_tables(more: int, recompute: bool) -> dict:
    """Return a table for each of `SLOTS` and `IDLE`, which begins with `more` steps of it.

    The table of None has no such steps.
    """
    from eejax.pipeline.schedule import Operation, ScheduleStep, one_f_one_b

    base = one_f_one_b(STAGES, 1, exit_stages=(1,), recompute=recompute)

    def begin(key):
        kind, stage = key
        ops = tuple(
            (Operation(kind, 0),) if i == stage and key != IDLE else () for i in range(STAGES)
        )
        steps = (ScheduleStep(ops),) * more + base.steps
        return dataclasses.replace(base, name=f"{kind} on {stage}", steps=steps)

    return {None: base} | {key: begin(key) for key in (*SLOTS, IDLE)}


def barrier(_=None) -> None:
    """Wait for the other processes, if there are any."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("turn")


def time_slots(
    pipeline,
    parameters,
    rows: int,
    length: int,
    repetitions: int,
    more: int,
    clock=time.perf_counter,
):
    """Return {key of `slot_tables`: seconds [repetitions]} of this process."""
    from eejax.analysis import interleave

    tables = slot_tables(more, pipeline.remat == "full")
    runs = [run_of(pipeline, parameters, t, rows, length)[0] for t in tables.values()]
    return dict(zip(tables, interleave(runs, repetitions, clock, barrier), strict=True))


def parts_of(seconds: dict, layers: int, more: int, remat: str) -> MicrobatchCosts:
    """Return `MicrobatchCosts` from the seconds of `time_slots`.

    With "full" a backward pass runs the layers again, which is subtracted.
    """
    each = {key: (s - seconds[None]) / more for key, s in seconds.items() if key is not None}
    exchange = max(0.0, float(np.median(each[IDLE])))
    quartiles = {key: np.quantile(each[key], (0.25, 0.5, 0.75)) for key in SLOTS}
    of = {key: max(0.0, float(q[1]) - exchange) for key, q in quartiles.items()}
    forward = of["forward", 1]
    backward = max(0.0, of["backward", 1] - (forward if remat == "full" else 0))
    embedding = [of[kind, 0] - of[kind, 1] for kind in ("forward", "backward")]

    def exit_(total):
        return (total / 3, total * 2 / 3)

    spread = {
        f"{kind} {stage}": float((q[2] - q[0]) / max(q[1], 1e-9))
        for (kind, stage), q in quartiles.items()
    }
    return MicrobatchCosts(
        (forward / layers, backward / layers),
        exit_(of["exits", 1]),
        exit_(of["exits", 2]),
        tuple(max(0.0, t) for t in embedding),
        exchange,
        spread,
    )


def measure(
    model, layers: int, rows: int, length: int, *, mesh=None, remat="dots", repetitions=7, more=4
) -> MicrobatchCosts:
    """Measure the `MicrobatchCosts` of a model with `layers` layers on each stage.

    It runs on three of this process's devices, or on three stages of `mesh`'s data- and
    tensor-parallel devices.

    Raises:
      ConfigError: if there are too few devices.
    """
    from eejax.sharding.mesh import MeshConfig

    mesh = dataclasses.replace(mesh or MeshConfig(), pipe=STAGES)
    built = pipelined(three_stages(model, layers), mesh, remat)
    seconds = time_slots(*built, rows, length, repetitions, more)
    return parts_of(seconds, layers, more, remat)
