"""Parts and position of a training run, and the hooks that its loop calls."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping

import jax
import numpy as np

from eejax.data import Loader
from eejax.train.config import Experiment
from eejax.train.evaluate import Evaluation
from eejax.train.inputs import Dataset
from eejax.train.metrics import exit_names
from eejax.train.program import Program
from eejax.train.state import TrainState


@dataclasses.dataclass(frozen=True)
class RunParts:
    """Parts of a run that stay the same from its first step to its last.

    Attributes:
      program: the compiled steps, and what they need.
      experiment: the program's, with the step of its base's checkpoint filled in.
      workdir: where everything is written.
      dataset: the packed text.
      loader: the batches of this process.
    """

    program: Program
    experiment: Experiment
    workdir: pathlib.Path
    dataset: Dataset
    loader: Loader

    @property
    def names(self) -> list[str]:
        """Names of the exits that have a loss, in their order."""
        names = exit_names(self.experiment.model)
        return [names[e] for e in self.program.scope.which]


@dataclasses.dataclass
class RunPosition:
    """Position of a run, which the loop moves on.

    Attributes:
      state: the state after `step` steps.
      step: steps that were dispatched.
      tokens: labels counted in the steps whose metrics were fetched.
      evaluation: the last evaluation, or None.
    """

    state: TrainState
    step: int = 0
    tokens: int = 0
    evaluation: Evaluation | None = None


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Functions that the loop calls, on the host.

    Attributes:
      before_step: called with a step's number and the state before it is dispatched.
      after_step: called with a step's number and its metrics, on the device, once dispatched.
      on_metrics: called with a step's number, its metrics on the host, and the tokens of all steps
        so far. A step is fetched while the next one runs.
      at_intervals: (every, hook): `hook` is called with the position after each multiple of `every`
        steps, if that is not 0, and after the last step. No step is in flight then.
    """

    before_step: Callable[[int, TrainState], None]
    after_step: Callable[[int, Mapping[str, jax.Array]], None]
    on_metrics: Callable[[int, Mapping[str, np.ndarray], int], None]
    at_intervals: tuple[tuple[int, Callable[[RunPosition], None]], ...]


def is_due(step: int, every: int) -> bool:
    """Return whether a step is a multiple of `every`; never if `every` is 0."""
    return bool(every) and step % every == 0
