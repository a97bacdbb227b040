"""A whole training run: begin or resume, step, evaluate, save, stop on a signal."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from eejax import data
from eejax.checkpoint import overlay
from eejax.checkpoint.files import only_user, unwritable, write_text
from eejax.checkpoint.manager import Checkpoints
from eejax.checkpoint.model import CHECKPOINTS, TOKENIZER, TUNING
from eejax.common.errors import DataError
from eejax.common.paths import expanded
from eejax.common.trees import Tree, join
from eejax.data.prefetch import import_grain
from eejax.pipeline.stage import Arrays
from eejax.sharding import distributed
from eejax.sharding.mesh import make_mesh
from eejax.train import base as bases
from eejax.train import base_weights, inputs, profile
from eejax.train.clock import StepClock
from eejax.train.config import Experiment
from eejax.train.evaluate import Evaluation, evaluate_mixture
from eejax.train.hooks import Hooks, RunParts, RunPosition, is_due
from eejax.train.program import Program, check_batches
from eejax.train.run_checkpoints import RunCheckpoints
from eejax.train.run_report import RunReport
from eejax.train.signals import Stopping, StopRequest
from eejax.train.state import TrainState
from eejax.train.step import Metrics, put_batch

CONFIG = "config.json"


class TrainResult(NamedTuple):
    """Result of a run.

    Attributes:
      state: the state after `step` steps.
      step: steps taken, skipped ones included.
      evaluation: the last evaluation of this call, or None.
      stopped: the signal that ended the run early, or None.
    """

    state: TrainState
    step: int
    evaluation: Evaluation | None
    stopped: signal.Signals | None


def fit(experiment: Experiment, workdir: str | os.PathLike) -> TrainResult:
    """Train until `train.steps`, from the newest usable checkpoint in `workdir` if there is one.

    A resumed run is bitwise the uninterrupted one: parameters, optimiser, data position, dropout.
    On SIGTERM or Ctrl-C, the current step is finished, a checkpoint is saved and `stopped` is set;
    a second Ctrl-C ends the process at once. The workdir holds config.json, tokenizer/, data/,
    checkpoints/, metrics.jsonl and tensorboard/.

    A run with a `train.base` begins with its weights, evaluates them before the first step, and
    records the base in base.json. Afterwards it no longer needs the base, unless it trains only
    exits: such a run keeps the checkpoints it resumes from in tuning/, and writes the whole model
    to checkpoints/ at its end.

    In a run of several processes (`sharding.distributed`), all of them call this with the same
    arguments and share the workdir. Process 0 prepares the text, records and reports; a signal to
    any process stops all of them at the same step.

    Raises:
      ConfigError, DataError: the settings or the text cannot be used, or the workdir is in use or
        has a calibrated run.
      CheckpointError: the checkpoints are of another run (`runs.check_same_run`), none is usable,
        or one cannot be written.
      OSError: anything else cannot be written; the message names the checkpoint that stays usable.
    """
    mesh = make_mesh(experiment.mesh)
    distributed.check_mesh(mesh)
    check_batches(experiment.train, mesh)
    if experiment.data.prefetch:
        import_grain()  # before all the text is packed
    workdir = expanded(workdir).absolute()
    overlay.require_free(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as lock:
            distributed.broadcast_from_process_zero(
                lambda: lock.enter_context(only_user(workdir)) is None
            )
            return _fit(experiment, workdir, mesh)
    except OSError as error:
        folder = CHECKPOINTS if experiment.tuned is None else TUNING
        raise unwritable(error, workdir / folder) from error


def _fit(experiment: Experiment, workdir: pathlib.Path, mesh: Mesh) -> TrainResult:
    train = experiment.train
    if train.base is not None:
        bases.check_workdir(workdir, train.base)
    program = Program(experiment, mesh)
    program.check()
    tuned = program.scope.tuned
    folder = workdir / (TUNING if tuned else CHECKPOINTS)
    checkpoints, base = Checkpoints(folder, keep=train.keep_checkpoints), None
    try:
        begins = not distributed.broadcast_from_process_zero(checkpoints.steps)
        if train.base is not None and train.base_step is None and not begins:
            # Keep the same checkpoint, even if the base has trained on since this run began.
            began = bases.remembered(workdir, train.base)
            experiment = _with_step(experiment, began and began.step)
        if train.base is not None and (tuned or begins):
            base = base_weights.load_base(experiment, mesh, workdir)
            experiment = _with_step(experiment, base.facts.step)
        dataset = inputs.prepare(experiment.data, experiment.model.vocab_size, workdir, TOKENIZER)
        loader = inputs.loader(experiment, dataset, distributed.shard(mesh))
        run = RunParts(program, experiment, workdir, dataset, loader)
        steps = program.train_step(), program.eval_step()
        saved = RunCheckpoints(run, checkpoints)
        position = saved.begin_or_resume(base)
        base = None  # its weights are in the state
        if position.step < train.steps:  # otherwise there is nothing left to train
            settings = json.dumps(experiment.to_dict(), indent=1)
            distributed.broadcast_from_process_zero(lambda: write_text(workdir / CONFIG, settings))
        with StopRequest() as stop:
            stopped = _train(run, *steps, saved, position, Stopping(stop, mesh))
            if tuned and stopped is None:
                # The trunk makes room for the whole model.
                position.state = position.state.replace(frozen={})
                saved.save_whole_model(position)
        checkpoints.close()
        return TrainResult(position.state, position.step, position.evaluation, stopped)
    except BaseException:
        # Report what ended the run, not a failure that follows from it.
        with contextlib.suppress(Exception):
            checkpoints.close()
        raise
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # empty if the run was refused


def _with_step(experiment: Experiment, step: int | None) -> Experiment:
    """Record the base's checkpoint that a run began with in its experiment."""
    train = dataclasses.replace(experiment.train, base_step=step)
    return dataclasses.replace(experiment, train=train)


def _train(
    run: RunParts,
    train_step: Callable,
    eval_step: Callable,
    saved: RunCheckpoints,
    position: RunPosition,
    stop: Stopping,
) -> signal.Signals | None:
    """Train to the last step, and return the signal that stopped the run before it, or None."""
    train = run.experiment.train
    with contextlib.closing(RunReport(run, position.step)) as report:
        report.begin(position.step, saved.batch_before)

        def evaluate(position: RunPosition) -> None:
            try:
                _evaluate(run, eval_step, report, position)
            except DataError:  # on all hosts alike; what was trained is kept
                if position.step:
                    saved.save(position)
                raise

        if position.step == 0 and train.base is not None and train.eval_every:
            with report.clock.paused():
                evaluate(position)
        with _batches(run) as batches, _profiler(run) as profiler:
            hooks = Hooks(
                before_step=profiler.before,
                after_step=profiler.after,
                on_metrics=report.on_metrics,
                at_intervals=((train.eval_every, evaluate), (train.checkpoint_every, saved.save)),
            )
            to_devices = functools.partial(
                _to_devices, run, distributed.shard(run.program.device_mesh)
            )
            batches = map(to_devices, batches)
            run_steps(position, train.steps, train_step, batches, hooks, stop, report.clock)
        stopped = stop.signal if position.step < train.steps else None  # after the last: done
        if stopped is not None:
            saved.save(position)
        saved.wait()
        report.end(position.step, stopped)
    return stopped


class _PendingStep(NamedTuple):
    """A step that was dispatched and whose metrics are not fetched yet."""

    step: int
    metrics: Metrics
    vote: jax.Array | None


def run_steps(
    position: RunPosition,
    last: int,
    train_step: Callable[[TrainState, Arrays], tuple[TrainState, Metrics]],
    batches: Iterator[Arrays],
    hooks: Hooks,
    stop: Stopping,
    clock: StepClock,
) -> None:
    """Take steps until `last` or a signal to stop.

    Args:
      position: where the run is; moved on.
      last: number of the last step.
      train_step: the compiled step.
      batches: a batch on the devices for each step.
      hooks: called on the way.
      stop: asked before each step.
      clock: paused while a step compiles and while hooks run at their intervals.
    """
    pending, compiled = None, set()
    while position.step < last and stop.signal is None:
        hooks.before_step(position.step + 1, position.state)
        batch = next(batches)
        size = len(batch["tokens"])  # a new one is compiled at the call
        with contextlib.nullcontext() if size in compiled else clock.paused():
            position.state, metrics = train_step(position.state, batch)
        compiled.add(size)
        position.step += 1
        hooks.after_step(position.step, metrics)
        # The step before is fetched while this one runs: the device never waits.
        _fetch(pending, position, hooks, stop)
        pending = _PendingStep(position.step, metrics, stop.vote())
        done = position.step == last
        due = [hook for every, hook in hooks.at_intervals if done or is_due(position.step, every)]
        if due:
            _fetch(pending, position, hooks, stop)
            pending = None
            with clock.paused():
                for hook in due:
                    hook(position)
    _fetch(pending, position, hooks, stop)


def _fetch(
    pending: _PendingStep | None, position: RunPosition, hooks: Hooks, stop: Stopping
) -> None:
    """Wait for the metrics and the vote of a pending step, if there is one."""
    if pending is None:
        return
    metrics = jax.device_get(pending.metrics)
    stop.count(pending.vote)
    position.tokens += int(metrics["tokens"])
    hooks.on_metrics(pending.step, metrics, position.tokens)


def _batches(run: RunParts) -> contextlib.AbstractContextManager:
    """Iterate over the loader's batches, made on demand or prefetched."""
    threads = run.experiment.data.prefetch
    if not threads:
        return contextlib.nullcontext(run.loader)
    return data.Prefetch(run.loader, threads=threads, buffer=2 * threads)


def _to_devices(run: RunParts, shard: tuple[int, int], batch: data.Batch) -> Arrays:
    rows = inputs.strip(batch, run.loader.document_masks)
    return put_batch(rows, run.program.device_mesh, shard)


def _profiler(run: RunParts) -> profile.Profiler:
    train = run.experiment.train
    steps = train.profile_steps if distributed.is_first() else 0
    return profile.Profiler(run.workdir / profile.FOLDER, train.profile_begin, steps)


def _evaluate(run: RunParts, eval_step: Callable, report: RunReport, position: RunPosition) -> None:
    """Evaluate the parameters, and their average if there is one, where there is held-out text."""
    if not run.experiment.data.validation_fraction:
        return
    state, step = position.state, position.step
    found = _evaluation(run, eval_step, join(state.frozen, state.params))
    position.evaluation = dataclasses.replace(found, step=step)
    report.evaluation(step, position.tokens, found)
    if state.ema:
        report.averaged(step, _evaluation(run, eval_step, join(state.frozen, state.ema)))


def _evaluation(run: RunParts, eval_step: Callable, params: Tree) -> Evaluation:
    """Evaluate parameters on the validation split."""
    # Use microbatches to bound memory; the windows are those of whole batches.
    train, program = run.experiment.train, run.program
    parts = train.microbatches // program.eval_microbatches
    rows, limit = train.batch_size // parts, train.eval_batches
    batches = inputs.held_out(run.experiment.data, run.dataset, rows, limit and limit * parts)
    byte_lengths = run.dataset.tokenizer.byte_lengths
    mesh = program.device_mesh
    return evaluate_mixture(eval_step, params, batches, mesh, run.names, byte_lengths)
