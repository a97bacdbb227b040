"""Checkpoints of a run: begin or resume from them, and save them."""

from __future__ import annotations

import pathlib
from typing import Any

import jax

from eejax.checkpoint.manager import Checkpoints, Restored
from eejax.checkpoint.model import CHECKPOINTS, EMA, PARAMS
from eejax.train import base as bases
from eejax.train import base_weights, recipes
from eejax.train.hooks import RunParts, RunPosition
from eejax.train.runs import check_same_run, run_metadata
from eejax.train.state import TrainState

TRAINING = "training"


class RunCheckpoints:
    """Checkpoints that a run resumes from, in `checkpoints`.

    Attributes:
      batch_before: batch size of the checkpoint that the run was resumed from, or None.
    """

    def __init__(self, run: RunParts, checkpoints: Checkpoints):
        self._run, self._checkpoints = run, checkpoints
        self.batch_before: int | None = None
        self._origin: dict[str, Any] = {}

    def begin_or_resume(self, base: base_weights.BaseWeights | None) -> RunPosition:
        """Return the position to continue from: that of the newest usable checkpoint, or the start.

        Raises:
          CheckpointError: the checkpoints are of another run, or none is usable.
        """
        run = self._run
        if run.program.scope.tuned and (run.workdir / CHECKPOINTS).is_dir():
            # They are of this run, or of another one that owns the workdir.
            whole = Checkpoints(run.workdir / CHECKPOINTS, read_only=True)
            try:
                whole.restore(lambda metadata: self._check(metadata, whole.folder) or {})
            finally:
                whole.close()
        restored = self._checkpoints.restore(self._targets, set_aside=True)
        position = self._begin(base) if restored is None else self._resume(restored, base)
        if run.experiment.train.base is not None:
            self._origin = bases.metadata_of(run.workdir)
        return position

    def save(self, position: RunPosition) -> None:
        """Save the state; it is on its way to the disk when this returns (`wait`)."""
        state = self._run.program.to_portable(position.state)
        self._checkpoints.save(position.step, _trees(state), self._metadata(position))

    def wait(self) -> None:
        """Wait until all saved checkpoints are on the disk."""
        self._checkpoints.wait()

    def save_whole_model(self, position: RunPosition) -> None:
        """Save the base with the tuned exits as a complete run, which no longer needs the base."""
        e, program = self._run.experiment, self._run.program
        whole = Checkpoints(self._run.workdir / CHECKPOINTS, keep=e.train.keep_checkpoints)
        try:
            if position.step not in whole.steps():
                state = program.to_portable(position.state)
                tuned = {PARAMS: state.params} | ({EMA: state.ema} if state.ema else {})
                trees = {
                    name: base_weights.complete(e, tree["exits"], program.device_mesh)
                    for name, tree in tuned.items()
                }
                whole.save(position.step, trees, self._metadata(position))
                whole.wait()
        finally:
            whole.close()

    def _check(self, metadata: dict[str, Any], folder: pathlib.Path) -> None:
        check_same_run(metadata, self._run.experiment, self._run.dataset.fingerprint, folder)

    def _targets(self, metadata: dict[str, Any]) -> dict[str, Any]:
        self._check(metadata, self._checkpoints.folder)
        return _trees(self._run.program.portable_state)

    def _begin(self, base: base_weights.BaseWeights | None) -> RunPosition:
        program = self._run.program
        if base is None:
            return RunPosition(program.create())
        bases.remember(self._run.workdir, base.facts)
        placed = program.abstract_state.replace(frozen={})
        placed = jax.tree.map(lambda a: a.sharding, placed)
        begin = jax.jit(program.begin, out_shardings=placed)
        return RunPosition(begin(base.first).replace(frozen=base.frozen))

    def _resume(self, restored: Restored, base: base_weights.BaseWeights | None) -> RunPosition:
        run, metadata = self._run, restored.metadata
        if run.experiment.train.base is not None:
            base_weights.same_base(run.workdir, metadata, base and base.facts)
        run.loader.restore(metadata["data"])
        self.batch_before = metadata["experiment"]["train"].get("batch_size")
        saved = TrainState(
            params=restored.trees[PARAMS],
            ema=restored.trees.get(EMA, {}),
            **_scale_of(restored.trees[TRAINING]),
        )
        state = run.program.from_portable(saved)
        state = state.replace(frozen={} if base is None else base.frozen)
        return RunPosition(state, restored.step, metadata["tokens"])

    def _metadata(self, position: RunPosition) -> dict[str, Any]:
        run = self._run
        about = run_metadata(
            run.experiment,
            run.dataset.tokenizer.fingerprint,
            tokens=position.tokens,
            data=run.loader.state(),
        )
        return about | self._origin


def _trees(state: TrainState) -> dict[str, Any]:
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
