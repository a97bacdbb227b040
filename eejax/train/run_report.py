"""Reports of a run: metrics.jsonl, TensorBoard, and lines on the terminal."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import numpy as np

from eejax.common.trees import size
from eejax.sharding import distributed
from eejax.train import flops, recipes
from eejax.train.clock import StepClock
from eejax.train.evaluate import Evaluation
from eejax.train.hooks import RunParts, is_due
from eejax.train.metrics import MetricsWriter, NoMetrics, ProgressBar, duration
from eejax.train.profile import device_memory


class RunReport:
    """Reports of a run that begins after step `start`; process 0 alone writes them.

    Attributes:
      clock: the run's, for tokens per second.
    """

    def __init__(self, run: RunParts, start: int):
        self._run, self._experiment, self._train = run, run.experiment, run.experiment.train
        self._mesh = run.program.device_mesh
        model, data = self._experiment.model, self._experiment.data
        self._flops_per_token = flops.model_flops_per_token(
            model, data.length, self._experiment.loss.exit_tokens
        )
        # The FLOPs are those of training a whole model, with all of its exits at every step.
        devices = list(self._mesh.devices.flat)
        partial = run.program.scope.tuned or self._experiment.exit_weights.sparse
        self._peak = None if partial else flops.peak_flops(devices)
        self.clock = StepClock()
        speaks = distributed.is_first()
        self._writer = MetricsWriter(run.workdir, resumed=start) if speaks else NoMetrics()
        self._bar = ProgressBar(start, self._train.steps, shown=speaks)

    def begin(self, start: int, batch_before: int | None) -> None:
        """Announce the run; `batch_before` is the batch size of the checkpoint it resumes from."""
        run, train, e = self._run, self._train, self._experiment
        begin = f"resuming after step {start}" if start else "starting"
        if train.base is not None and not start:
            at = "" if train.base_step is None else f", step {train.base_step}"
            begin = f"starting with the weights of {train.base}{at}"
        sizes = sorted({run.loader.sizes[0], run.loader.sizes[-1]})
        boundaries = tuple(e.model.exit_boundaries[x] for x in run.program.scope.which)
        self._bar.say(
            f"{begin}: {size(run.program.portable_state.params):,} parameters, exits at "
            f"{boundaries} of {e.model.n_layers} layers, {train.steps} steps of "
            f"{' to '.join(map(str, sizes))} x {e.data.length} tokens, in {run.workdir}"
        )
        if train.microbatches < e.mesh.pipe:
            self._bar.say(
                f"{train.microbatches} microbatches for {e.mesh.pipe} stages: "
                "most stages are idle. Set train.microbatches to several times as many"
            )
        if e.pipeline.fill != "none":
            self._bar.say(
                f"bubbles filled with {run.program.inserted} of {train.microbatches} "
                "microbatches; tokens are counted in the others only"
            )
        if batch_before not in (None, train.batch_size):
            self._bar.say(
                f"batches of {train.batch_size} instead of {batch_before} sequences, from sequence "
                f"{run.loader.samples:,} on"
            )

    def on_metrics(self, step: int, metrics: Mapping[str, np.ndarray], tokens: int) -> None:
        """Report a step's metrics; `tokens` are those of all steps so far.

        Raises:
          FloatingPointError: the loss overflows at the smallest loss scale.
        """
        self.clock.tick(int(metrics["tokens"]))
        if not metrics["finite"]:
            self._say_skipped(step, metrics)
        rate, names = self.clock.rate, self._run.names
        shown = {"loss": f"{metrics['loss']:.4f}"}
        if len(names) > 1:  # the loss is their weighted sum; the deepest says more
            shown[names[-1]] = f"{metrics['exit_losses'][-1]:.4f}"
        shown["tok/s"] = f"{rate:,.0f}" if rate else "-"
        self._bar.update(step, shown)
        if is_due(step, self._train.log_every) or step == 1 or not metrics["finite"]:
            self._writer.write(step, self._values(metrics, tokens, rate))

    def evaluation(self, step: int, tokens: int, result: Evaluation) -> None:
        """Report an evaluation of the parameters."""
        self._writer.write(step, result.metrics() | {"tokens_seen": tokens})
        self._say_losses(step, "validation loss", result)

    def averaged(self, step: int, result: Evaluation) -> None:
        """Report an evaluation of the averaged parameters."""
        self._writer.write(step, result.metrics("eval_ema"))
        self._say_losses(step, "averaged weights", result)

    def end(self, step: int, stopped: signal.Signals | None) -> None:
        """Report that the run is done, or which signal stopped it."""
        if stopped is None:
            self._bar.say(f"done: step {step} in {duration(self.clock.total)}")
        else:
            self._bar.say(
                f"stopped by {stopped.name} after step {step}: checkpoint saved, the same "
                "command resumes"
            )

    def close(self) -> None:
        """Close files and the progress bar."""
        self._bar.close()
        self._writer.close()

    def _say_skipped(self, step: int, metrics: Mapping[str, np.ndarray]) -> None:
        why = "loss or gradient not finite" if metrics["tokens"] else "no token counted"
        if "loss_scale" in metrics and metrics["tokens"]:
            scale = float(metrics["loss_scale"])
            why += f" at a loss scale of {scale:g}, which is halved"
            if scale <= recipes.MIN_SCALE:
                raise FloatingPointError(
                    f"step {step}: loss or gradient not finite at the smallest loss "
                    f"scale, {scale:g}: the model overflows in float16 by itself. Train in "
                    "bfloat16, or with a smaller learning rate."
                )
        self._bar.say(f"step {step}: {why}, step skipped ({int(metrics['skipped'])} so far)")

    def _values(
        self, metrics: Mapping[str, np.ndarray], tokens: int, rate: float | None
    ) -> dict[str, float]:
        """Collect the values that are recorded for a step."""
        values = {"learning_rate": float(metrics["learning_rate"])}
        if metrics["tokens"]:  # a step without a counted token has no loss
            values |= {k: float(metrics[k]) for k in ("loss", "grad_norm")}
            values |= self._exit_values(metrics)
        if "loss_scale" in metrics:
            values["loss_scale"] = float(metrics["loss_scale"])
        values |= {"tokens": int(metrics["tokens"]), "skipped": int(metrics["skipped"])}
        values["tokens_seen"] = tokens
        values |= device_memory(self._mesh.local_devices)
        if rate:
            values["tokens_per_second"] = rate
            if self._peak:
                values["mfu"] = rate * self._flops_per_token / self._peak
        return values

    def _exit_values(self, metrics: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Collect the metrics of the exits that had a loss at this step."""
        weights, values = metrics["exit_weights"], {}
        for i, name in enumerate(self._run.names):
            if weights[i] or not self._experiment.exit_weights.sparse:
                values[f"loss/{name}"] = float(metrics["exit_losses"][i])
                values[f"grad_norm/{name}"] = float(metrics["exit_grad_norms"][i])
                values[f"weight/{name}"] = float(weights[i])
        return values

    def _say_losses(self, step: int, what: str, result: Evaluation) -> None:
        losses = zip(result.names, result.losses, strict=True)
        shown = "  ".join(f"{name} {loss:.4f}" for name, loss in losses)
        self._bar.say(f"step {step}: {what}  {shown}")
