"""Device memory of a training step: an estimate from shapes, and XLA's figures for the program.

Nothing is allocated and no device is needed for the estimate. The activations between the forward
and the backward pass do not come from a formula: they are what `jax.vjp` of the loss keeps,
evaluated on shapes under the run's own rematerialization policy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from eejax.common.axes import DATA, MESH_AXES, MODEL
from eejax.common.trees import Tree, join, nbytes, new_leaves
from eejax.losses.cross_entropy import chunk_size
from eejax.losses.multi_exit import multi_exit_loss
from eejax.models import attention, params
from eejax.models.transformer import layer_residuals
from eejax.pipeline import runner
from eejax.pipeline.plan import plan
from eejax.pipeline.stage import Pipeline, PipelineStage, vary_over
from eejax.sharding import rules
from eejax.sharding.mesh import make_mesh, mesh_axes
from eejax.train.config import Experiment
from eejax.train.program import Program, check_batches
from eejax.train.step import local_parameters


@dataclasses.dataclass(frozen=True)
class TrainingMemory:
    """Bytes on each device during a step.

    The first three are exact, the rest are estimates. Dropout's masks are not counted.

    Attributes:
      params: the float32 parameters that are trained.
      optimizer: their optimiser state.
      other: the rest of the state, such as frozen parameters.
      gradients: the float32 sum and, with several microbatches, also the gradients of the current
        microbatch in the dtype of computation.
      weights: copies of matrices in that dtype that the backward pass reads again.
      activations: everything else that the backward pass of one microbatch keeps.
      layer: what is recomputed of a single layer under rematerialisation, and the scores of one
        block of queries.
      logits: one chunk of logits and its gradient.
    """

    params: int
    optimizer: int
    other: int
    gradients: int
    weights: int
    activations: int
    layer: int
    logits: int

    @property
    def state(self) -> int:
        """Bytes on the device between steps."""
        return self.params + self.optimizer + self.other

    @property
    def temporary(self) -> int:
        """Bytes that a step allocates and frees; logits and a recomputed layer never coexist."""
        return self.gradients + self.weights + self.activations + max(self.layer, self.logits)

    @property
    def total(self) -> int:
        return self.state + self.temporary


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """XLA's figures for a compiled program, in bytes on each device.

    Attributes:
      arguments: arguments of the program.
      outputs: its results.
      temporary: temporary memory.
      aliased: the part of `outputs` that is written over the arguments (donation).
    """

    arguments: int
    outputs: int
    temporary: int
    aliased: int

    @property
    def total(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporary


def training_memory(experiment: Experiment) -> TrainingMemory:
    """Estimate the memory of `experiment` on its own mesh, whatever devices this machine has.

    Raises:
      ConfigError: for a mesh or a batch that training would also refuse.
    """
    mesh = AbstractMesh(
        experiment.mesh.shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )
    train, model = experiment.train, experiment.model
    check_batches(train, mesh)
    program = Program(experiment, mesh)
    state = program.abstract_state
    trained, moments = device_bytes(state.params), device_bytes(state.opt_state)
    rows = train.batch_size // (mesh.shape[DATA] * train.microbatches)
    staged = program.placement.stages is not None
    kept = _kept_on_stages(program, rows) if staged else _kept(program, rows)
    grads = trained
    if train.microbatches > 1 and not staged:
        under_way = jax.eval_shape(lambda p: params.for_compute(p, model.dtype), state.params)

        def cast(a, g):
            return jax.ShapeDtypeStruct(g.shape, g.dtype, sharding=a.sharding)

        grads += device_bytes(jax.tree.map(cast, state.params, under_way))
    return TrainingMemory(
        params=trained,
        optimizer=moments,
        other=device_bytes(state) - trained - moments,
        gradients=grads,
        weights=kept.weights,
        activations=kept.activations,
        layer=_one_layer(program, rows),
        logits=_logits(program, rows * experiment.data.length),
    )


def compiled_memory(compiled: jax.stages.Compiled) -> CompiledMemory:
    """Return the memory of a compiled program, by XLA.

    XLA's CPU backend computes bfloat16 in float32: there a bfloat16 model's temporaries are no
    smaller than a float32 model's (measured), and say little about an accelerator.

    Raises:
      RuntimeError: if the backend does not report it.
    """
    a = compiled.memory_analysis()
    if a is None:
        raise RuntimeError("XLA's backend does not report a program's memory")
    return CompiledMemory(
        a.argument_size_in_bytes,
        a.output_size_in_bytes,
        a.temp_size_in_bytes,
        a.alias_size_in_bytes,
    )


def compile_step(experiment: Experiment) -> jax.stages.Compiled:
    """Compile the training step of `experiment` for its mesh from shapes; nothing is allocated.

    Raises:
      ConfigError: if there are too few devices.
    """
    program = Program(experiment, make_mesh(experiment.mesh))
    shape = experiment.train.batch_size, experiment.data.length
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    names = ["tokens", "labels"]
    if experiment.data.document_masks:
        names += ["segment_ids", "positions"]
    batch = dict.fromkeys(names, tokens)
    return program.train_step().lower(program.abstract_state, batch).compile()


def device_bytes(tree: Tree) -> int:
    """Return the bytes that each device holds of shape structs or arrays with shardings."""

    def one(a):
        return math.prod(a.sharding.shard_shape(a.shape)) * jnp.dtype(a.dtype).itemsize

    return sum(map(one, jax.tree.leaves(tree)))


class _SavedBytes(NamedTuple):
    weights: int
    activations: int


def _structs(declaration: Tree) -> Tree:
    return params.map_params(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), declaration)


def _on_a_device(measure: Callable[..., Any], mesh: Mesh | AbstractMesh, specs: Any, shapes: Any):
    """Return the result of `measure` for one device of the mesh.

    It receives the arrays [local shapes] that the device holds of `shapes`, laid out by `specs`.
    The result is plain Python values, found while tracing.
    """
    found = []

    def body(*arrays):
        found.append(measure(*arrays))
        return ()

    jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=()), *shapes)
    return found[0]


def _kept(program: Program, rows: int) -> _SavedBytes:
    """Return the bytes kept between the forward and the backward pass of `rows` sequences.

    They are those of one device. Inputs that are kept, mainly parameters, are counted with the
    state. Weights are cast in advance, so that their copies can be told from inputs: a weight that
    is cast already is not cast again.
    """
    experiment, scope = program.experiment, program.scope
    config = scope.config.replace(dropout=0.0)
    mesh, layout = program.mesh, experiment.mesh
    declared = scope.declarations()
    specs = tuple(rules.specs(d, mesh, layout.params_over) for d in declared)
    tokens = jax.ShapeDtypeStruct((rows * mesh.shape[DATA], experiment.data.length), jnp.int32)
    weights = jax.ShapeDtypeStruct((len(scope.which),), jnp.float32)

    def measure(trained, frozen, tokens, weights):
        def cast(tree):
            return join(
                params.for_compute(tree, config.dtype), {k: tree[k] for k in tree if k == "embed"}
            )

        documents = {}
        if experiment.data.document_masks:
            documents = {"positions": tokens, "segment_ids": tokens}
        trained, frozen = map(local_parameters, (trained, frozen), specs)
        copies, constant = cast(trained), cast(frozen)
        keys = None
        if experiment.loss.exit_tokens < 1:
            keys = jax.random.split(jax.random.key(0), len(tokens))

        def loss(p):
            return multi_exit_loss(
                join(constant, p),
                config,
                tokens,
                tokens,
                weights,
                dropout_keys=keys,
                axes=mesh_axes(mesh, layout),
                remat=experiment.train.remat,
                which=scope.which,
                objective=experiment.loss,
                **documents,
            )

        kept = new_leaves(
            jax.vjp(loss, copies, has_aux=True)[1], (trained, frozen, tokens, weights)
        )
        activations = new_leaves(kept, (copies, constant))
        return _SavedBytes(nbytes(new_leaves(kept, activations)), nbytes(activations))

    shapes = (*map(_structs, declared), tokens, weights)
    return _on_a_device(measure, mesh, (*specs, P(DATA), P()), shapes)


def _kept_on_stages(program: Program, rows: int) -> _SavedBytes:
    """Return the bytes of `_kept` for all microbatches that are in flight on a stage."""
    e, places, mesh = program.experiment, program.placement, program.mesh
    stages = places.stages
    assert stages is not None
    pipeline = Pipeline(stages, mesh, e.mesh, e.train.remat, e.loss)
    n, cut = e.train.microbatches, stages.partition
    tokens = jax.ShapeDtypeStruct((n * rows * mesh.shape[DATA], e.data.length), jnp.int32)
    batch = {"tokens": tokens, "labels": tokens}
    if e.data.document_masks:
        batch |= {"positions": tokens, "segment_ids": tokens}

    def measure(trained, frozen, batch):
        trained, frozen = vary_over((trained, frozen), pipeline.specs)
        stage = PipelineStage(pipeline, trained, frozen, batch, jnp.zeros((), jnp.int32), None, n)
        copies = nbytes(new_leaves(stage.params, (trained, frozen)))
        if places.scope.tuned:  # nothing is kept where nothing goes backward
            return _SavedBytes(copies, 0)
        made = plan(e.pipeline, cut, n, length=e.data.length, remat=e.train.remat, objective=e.loss)
        return _SavedBytes(copies, runner.kept_bytes(stage, made.schedule))

    shapes = (*map(_structs, places.declarations), batch)
    return _on_a_device(measure, mesh, (*pipeline.specs, P(DATA)), shapes)


def _one_layer(program: Program, rows: int) -> int:
    """Return the bytes of one layer while its backward pass runs, beyond those kept for it.

    They are the scores of one block of queries, their exponentials and the gradient of either, in
    float32; what the layer keeps without rematerialisation but not with it; and, where its
    parameters are gathered, the layer itself with its gradient.
    """
    experiment, mesh, config = program.experiment, program.mesh, program.experiment.model
    length, layout = experiment.data.length, experiment.mesh
    blocks = attention.query_blocks(length)
    heads = config.n_heads // mesh.shape[MODEL]
    scores = 3 * 4 * rows * heads * -(-length // blocks) * length
    declared, axes = params.layer(config), mesh_axes(mesh, layout)
    specs = rules.specs(declared, mesh)

    def measure(p, x):
        p = local_parameters(p, specs)

        def kept(remat: str) -> int:
            q = params.for_compute(p, config.dtype)
            return nbytes(layer_residuals(q, x, config, length, remat, axes))

        whole = 2 * nbytes(p) if layout.params_over and mesh.shape[DATA] > 1 else 0
        return scores + kept("none") - kept(experiment.train.remat) + whole

    shape = rows * mesh.shape[DATA], length, config.d_model
    stream = jax.ShapeDtypeStruct(shape, config.dtype), P(DATA, axes.sequence)
    return _on_a_device(measure, mesh, (specs, stream[1]), (_structs(declared), stream[0]))


def _logits(program: Program, tokens: int) -> int:
    """Return the bytes of one chunk of float32 logits [n, v] and of its gradient.

    The chunk is that of `losses.cross_entropy`. The bytes include the teacher's logits if an exit
    is distilled, and a table that is gathered.
    """
    config, mesh = program.experiment.model, program.mesh
    rows = config.padded_vocab // mesh.shape[MODEL]
    arrays = 3 if program.experiment.loss.distillation and config.n_exits else 2
    table = config.d_model if program.experiment.mesh.params_over and mesh.shape[DATA] > 1 else 0
    return 4 * rows * (arrays * chunk_size(tokens, rows) + table)
