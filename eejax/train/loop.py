"""A whole training run: begin or resume, step, evaluate, save, stop on a signal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import eejax
from eejax import data
from eejax.checkpoint.files import only_user, unwritable, write_text
from eejax.checkpoint.manager import Checkpoints
from eejax.checkpoint.model import CHECKPOINTS, EMA, PARAMS, TOKENIZER, TUNING
from eejax.common.paths import expanded
from eejax.common.trees import Tree, join, size
from eejax.data.prefetch import import_grain
from eejax.sharding import distributed
from eejax.sharding.mesh import make_mesh
from eejax.train import base as bases
from eejax.train import base_weights, flops, inputs, profile, recipes
from eejax.train import state as states
from eejax.train.clock import StepClock
from eejax.train.config import Experiment
from eejax.train.evaluate import Evaluation, evaluate_mixture
from eejax.train.metrics import MetricsWriter, NoMetrics, ProgressBar, duration, exit_names
from eejax.train.profile import Profiler, device_memory
from eejax.train.program import Program, check_batches
from eejax.train.runs import check_same_run
from eejax.train.signals import Stopping, StopRequest
from eejax.train.step import put_batch

CONFIG = "config.json"
TRAINING = "training"


class TrainResult(NamedTuple):
    """Result of a run: `evaluation` is the last one; `stopped` the signal that ended it early."""

    state: states.TrainState
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
      ConfigError, DataError: the settings or the text cannot be used, or the workdir is in use.
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
    folder = workdir / (TUNING if program.scope.tuned else CHECKPOINTS)
    checkpoints, base = Checkpoints(folder, keep=train.keep_checkpoints), None
    try:
        begins = not distributed.broadcast_from_process_zero(checkpoints.steps)
        if train.base is not None and train.base_step is None and not begins:
            # Keep the same checkpoint, even if the base has trained on since this run began.
            began = bases.remembered(workdir, train.base)
            experiment = _with_step(experiment, began and began.step)
        if train.base is not None and (program.scope.tuned or begins):
            base = base_weights.load_base(experiment, mesh, workdir)
            experiment = _with_step(experiment, base.facts.step)
        dataset = inputs.prepare(experiment.data, experiment.model.vocab_size, workdir, TOKENIZER)
        run = _Run(program, experiment, workdir, dataset, checkpoints, base)
        base = None  # its weights are in the state
        with StopRequest() as stop:
            result = run.run(Stopping(stop, mesh))
            if program.scope.tuned and result.stopped is None:
                # The trunk makes room for the whole model.
                result = result._replace(state=result.state.replace(frozen={}))
                run.state = None
                run.save_whole_model(result.state)
        checkpoints.close()
        return result
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


@dataclasses.dataclass
class _Flight:
    """A step that was dispatched and whose metrics are not fetched yet."""

    step: int
    metrics: dict[str, jax.Array]
    vote: jax.Array | None


class _Run:
    """Parts and counters of one run.

    `experiment` is the program's, with the step of its base's checkpoint filled in.
    """

    def __init__(
        self,
        program: Program,
        experiment: Experiment,
        workdir: pathlib.Path,
        dataset: inputs.Dataset,
        checkpoints: Checkpoints,
        base: base_weights.BaseWeights | None,
    ):
        self.program, self.scope = program, program.scope
        self.experiment, self.mesh = experiment, program.mesh
        self.model, self.train = self.experiment.model, self.experiment.train
        self.workdir, self.dataset, self.checkpoints = workdir, dataset, checkpoints
        names = exit_names(self.model)
        self.names = [names[e] for e in self.scope.which]
        self.shard = distributed.shard(self.mesh)
        self.loader = inputs.loader(self.experiment, dataset, self.shard)
        self.train_step, self.eval_step = program.train_step(), program.eval_step()
        self.evaluation: Evaluation | None = None
        self.resumed_from: dict[str, Any] | None = None  # train settings of the checkpoint
        self.tokens = 0  # labels counted in the steps that were fetched
        self.skipped = 0
        self.state, self.step = self._begin_or_resume(base)
        self.origin = {} if self.train.base is None else {"base": bases.origin(workdir)}
        if self.step < self.train.steps:  # otherwise there is nothing left to train
            settings = json.dumps(self.experiment.to_dict(), indent=1)
            distributed.broadcast_from_process_zero(lambda: write_text(workdir / CONFIG, settings))
        self.flops_per_token = flops.model_flops_per_token(
            self.model, self.experiment.data.length, self.experiment.loss.exit_tokens
        )
        # The FLOPs are those of training a whole model, with all of its exits at every step.
        devices = list(self.mesh.devices.flat)
        self.peak = None if self.scope.tuned else flops.peak_flops(devices)
        self.clock = StepClock()
        self.sizes: set[int] = set()  # batch sizes whose program is compiled

    def _begin_or_resume(
        self, base: base_weights.BaseWeights | None
    ) -> tuple[states.TrainState, int]:
        wanted = self.program.portable_state

        def check(metadata: dict[str, Any], folder: pathlib.Path) -> None:
            check_same_run(metadata, self.experiment, self.dataset.fingerprint, folder)

        def targets(metadata: dict[str, Any]) -> dict[str, Any]:
            check(metadata, self.checkpoints.folder)
            return _trees(wanted)

        if self.scope.tuned and (self.workdir / CHECKPOINTS).is_dir():
            # They are of this run, or of another one that owns the workdir.
            whole = Checkpoints(self.workdir / CHECKPOINTS, read_only=True)
            try:
                whole.restore(lambda metadata: check(metadata, whole.folder) or {})
            finally:
                whole.close()
        restored = self.checkpoints.restore(targets, set_aside=True)
        if restored is None:
            if base is None:
                return self.program.create(), 0
            bases.remember(self.workdir, base.facts)
            placed = self.program.abstract_state.replace(frozen={})
            placed = jax.tree.map(lambda a: a.sharding, placed)
            begin = jax.jit(self.program.begin, out_shardings=placed)
            return begin(base.first).replace(frozen=base.frozen), 0
        if self.train.base is not None:
            base_weights.same_base(self.workdir, restored.metadata, base and base.facts)
        self.loader.restore(restored.metadata["data"])
        self.resumed_from = restored.metadata["experiment"]["train"]
        self.tokens = restored.metadata["tokens"]
        training = restored.trees[TRAINING]
        self.skipped = int(training["skipped"])
        saved = states.TrainState(
            params=restored.trees[PARAMS],
            ema=restored.trees.get(EMA, {}),
            **_scale_of(training),
        )
        state = self.program.from_portable(saved)
        return state.replace(frozen={} if base is None else base.frozen), restored.step

    def run(self, stop: Stopping) -> TrainResult:
        train, start, speaks = self.train, self.step, distributed.is_first()
        self.stop = stop
        self.writer = MetricsWriter(self.workdir, resumed=start) if speaks else NoMetrics()
        self.progress = ProgressBar(start, train.steps, shown=speaks)
        self._announce(start)
        flight = None
        try:
            if start == 0 and train.base is not None and train.eval_every:
                with self.clock.paused():
                    self._evaluate()
            with self._batches() as batches, self._profiler() as profiler:
                while self.step < train.steps and stop.signal is None:
                    profiler.before(self.step + 1, self.state)
                    batch = next(batches)
                    batch = inputs.strip(batch, self.loader.document_masks)
                    batch = put_batch(batch, self.mesh, self.shard)
                    # A new batch size is compiled at this call.
                    new = len(batch["tokens"]) not in self.sizes
                    with self.clock.paused() if new else contextlib.nullcontext():
                        self.state, metrics = self.train_step(self.state, batch)
                    self.sizes.add(len(batch["tokens"]))
                    self.step += 1
                    profiler.after(self.step, metrics)
                    # The step before is fetched while this one runs: the device never waits.
                    if flight is not None:
                        self._report(flight)
                    flight = _Flight(self.step, metrics, stop.vote())
                    last = self.step == train.steps
                    evaluating = _due(self.step, train.eval_every) or last
                    saving = _due(self.step, train.checkpoint_every) or last
                    if evaluating or saving:
                        self._report(flight)
                        flight = None
                        with self.clock.paused():
                            if evaluating:
                                self._evaluate()
                            if saving:
                                self._save()
            if flight is not None:
                self._report(flight)
            stopped = stop.signal if self.step < train.steps else None  # after the last: done
            if stopped is not None:
                self._save()
            self.checkpoints.wait()
            self._say_goodbye(stopped)
        finally:
            self.progress.close()
            self.writer.close()
        return TrainResult(self.state, self.step, self.evaluation, stopped)

    def _batches(self):
        """Iterate over the loader's batches, made on demand or prefetched."""
        threads = self.experiment.data.prefetch
        if not threads:
            return contextlib.nullcontext(self.loader)
        return data.Prefetch(self.loader, threads=threads, buffer=2 * threads)

    def _profiler(self) -> Profiler:
        train = self.train
        steps = train.profile_steps if distributed.is_first() else 0
        return Profiler(self.workdir / profile.FOLDER, train.profile_begin, steps)

    def _report(self, flight: _Flight) -> None:
        """Wait for a step and record its metrics."""
        metrics = jax.device_get(flight.metrics)
        self.stop.count(flight.vote)
        self.tokens += int(metrics["tokens"])
        self.clock.tick(int(metrics["tokens"]))
        if not metrics["finite"]:
            self.skipped = int(metrics["skipped"])
            why = "loss or gradient not finite" if metrics["tokens"] else "no token counted"
            if "loss_scale" in metrics and metrics["tokens"]:
                scale = float(metrics["loss_scale"])
                why += f" at a loss scale of {scale:g}, which is halved"
                if scale <= recipes.MIN_SCALE:
                    raise FloatingPointError(
                        f"step {flight.step}: loss or gradient not finite at the smallest loss "
                        f"scale, {scale:g}: the model overflows in float16 by itself. Train in "
                        "bfloat16, or with a smaller learning rate."
                    )
            self.progress.say(f"step {flight.step}: {why}, step skipped ({self.skipped} so far)")
        rate = self.clock.rate
        shown = {"loss": f"{metrics['loss']:.4f}"}
        if len(self.names) > 1:  # the loss is their weighted sum; the deepest says more
            shown[self.names[-1]] = f"{metrics['exit_losses'][-1]:.4f}"
        shown["tok/s"] = f"{rate:,.0f}" if rate else "-"
        self.progress.update(flight.step, shown)
        if not (_due(flight.step, self.train.log_every) or flight.step == 1):
            if metrics["finite"]:
                return
        values = {"learning_rate": float(metrics["learning_rate"])}
        if metrics["tokens"]:  # a step without a counted token has no loss
            values |= {k: float(metrics[k]) for k in ("loss", "grad_norm")}
            values |= self._exit_values(metrics)
        if "loss_scale" in metrics:
            values["loss_scale"] = float(metrics["loss_scale"])
        values |= {"tokens": int(metrics["tokens"]), "skipped": int(metrics["skipped"])}
        values["tokens_seen"] = self.tokens
        values |= device_memory(self.mesh.local_devices)
        if rate:
            values["tokens_per_second"] = rate
            if self.peak and not self.experiment.exit_weights.sparse:
                values["mfu"] = rate * self.flops_per_token / self.peak
        self.writer.write(flight.step, values)

    def _exit_values(self, metrics: dict[str, np.ndarray]) -> dict[str, float]:
        """Collect the metrics of the exits that had a loss at this step."""
        weights, values = metrics["exit_weights"], {}
        for i, name in enumerate(self.names):
            if weights[i] or not self.experiment.exit_weights.sparse:
                values[f"loss/{name}"] = float(metrics["exit_losses"][i])
                values[f"grad_norm/{name}"] = float(metrics["exit_grad_norms"][i])
                values[f"weight/{name}"] = float(weights[i])
        return values

    def _evaluate(self) -> None:
        if not self.experiment.data.validation_fraction:
            return
        self.evaluation = dataclasses.replace(self._evaluation(self.state.params), step=self.step)
        self.writer.write(self.step, self.evaluation.metrics() | {"tokens_seen": self.tokens})
        self._say_losses("validation loss", self.evaluation)
        if self.state.ema:
            averaged = self._evaluation(self.state.ema)
            self.writer.write(self.step, averaged.metrics("eval_ema"))
            self._say_losses("averaged weights", averaged)

    def _say_losses(self, what: str, evaluation: Evaluation) -> None:
        losses = zip(self.names, evaluation.losses, strict=True)
        shown = "  ".join(f"{name} {loss:.4f}" for name, loss in losses)
        self.progress.say(f"step {self.step}: {what}  {shown}")

    def _evaluation(self, values: Tree) -> Evaluation:
        """Evaluate the trained parameters or their average on the validation split."""
        # Use microbatches to bound memory; the windows are those of whole batches.
        parts = self.train.microbatches // self.program.eval_microbatches
        limit = self.train.eval_batches
        batches = inputs.held_out(
            self.experiment.data,
            self.dataset,
            self.train.batch_size // parts,
            limit and limit * parts,
        )
        return evaluate_mixture(
            self.eval_step,
            join(self.state.frozen, values),
            batches,
            self.mesh,
            self.names,
            self.dataset.tokenizer.byte_lengths,
        )

    def _save(self) -> None:
        state = self.program.to_portable(self.state)
        self.checkpoints.save(self.step, _trees(state), self._metadata())

    def save_whole_model(self, state: states.TrainState) -> None:
        """Save the base with the tuned exits as a complete run, which no longer needs the base."""
        whole = Checkpoints(self.workdir / CHECKPOINTS, keep=self.train.keep_checkpoints)
        try:
            if self.step not in whole.steps():
                state = self.program.to_portable(state)
                tuned = {PARAMS: state.params} | ({EMA: state.ema} if state.ema else {})
                trees = {
                    name: base_weights.complete(self.experiment, tree["exits"], self.mesh)
                    for name, tree in tuned.items()
                }
                whole.save(self.step, trees, self._metadata())
                whole.wait()
        finally:
            whole.close()

    def _metadata(self) -> dict[str, Any]:
        return {
            "version": eejax.__version__,
            "model": self.model.to_dict(),
            "experiment": self.experiment.to_dict(),
            "data": self.loader.state(),
            "tokenizer": self.dataset.tokenizer.fingerprint,
            "tokens": self.tokens,
            "averaged": self.train.ema is not None,
            **self.origin,
        }

    def _announce(self, start: int) -> None:
        begin = f"resuming after step {start}" if start else "starting"
        if self.train.base is not None and not start:
            at = "" if self.train.base_step is None else f", step {self.train.base_step}"
            begin = f"starting with the weights of {self.train.base}{at}"
        sizes = sorted({self.loader.sizes[0], self.loader.sizes[-1]})
        boundaries = tuple(self.model.exit_boundaries[e] for e in self.scope.which)
        self.progress.say(
            f"{begin}: {size(self.program.portable_state.params):,} parameters, exits at "
            f"{boundaries} of {self.model.n_layers} layers, {self.train.steps} steps of "
            f"{' to '.join(map(str, sizes))} x {self.experiment.data.length} tokens, in "
            f"{self.workdir}"
        )
        if self.train.microbatches < self.experiment.mesh.pipe:
            self.progress.say(
                f"{self.train.microbatches} microbatches for {self.experiment.mesh.pipe} stages: "
                "most stages are idle. Set train.microbatches to several times as many"
            )
        if self.experiment.pipeline.fill != "none":
            self.progress.say(
                f"bubbles filled with {self.program.inserted} of {self.train.microbatches} "
                "microbatches; tokens are counted in the others only"
            )
        before = (self.resumed_from or {}).get("batch_size", self.train.batch_size)
        if before != self.train.batch_size:
            self.progress.say(
                f"batches of {self.train.batch_size} instead of {before} sequences, from sequence "
                f"{self.loader.samples:,} on"
            )

    def _say_goodbye(self, stopped: signal.Signals | None) -> None:
        if stopped is None:
            self.progress.say(f"done: step {self.step} in {duration(self.clock.total)}")
        else:
            self.progress.say(
                f"stopped by {stopped.name} after step {self.step}: checkpoint saved, the same "
                "command resumes"
            )


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _trees(state: states.TrainState) -> dict[str, Any]:
    """Split a state into the items of a checkpoint; parameters can then be read alone."""
    rest = {"step": state.step, "opt_state": state.opt_state, "skipped": state.skipped}
    if state.loss_scale is not None:
        rest |= {"scale": state.loss_scale.value, "clean": state.loss_scale.clean}
    return {PARAMS: state.params, TRAINING: rest} | ({EMA: state.ema} if state.ema else {})


def _scale_of(training: dict[str, Any]) -> dict[str, Any]:
    """Restore the fields of a state from the training item that `_trees` made."""
    if "scale" not in training:
        return training
    rest = {k: v for k, v in training.items() if k not in ("scale", "clean")}
    return rest | {"loss_scale": recipes.LossScale(training["scale"], training["clean"])}
