"""The checkpoint that TIDE's reproduction tunes, trained here where there is none."""

from __future__ import annotations

import os
import pathlib

from eejax.experiments import launch
from eejax.experiments.windows import model_and_text

BYTES = 1_500_000  # of Python's standard library, which a model of its own learns
STEPS = 600


def checkpoint(
    model: str | None, text: str | None, workdir: pathlib.Path, unseen: int
) -> tuple[pathlib.Path, pathlib.Path, str | None]:
    """Return a checkpoint whose tokens are bytes, its text, and the tokenizer to load it with.

    It is that of the flags, or tinylm of $EEJAX_DATA, or one that is trained in `workdir` on the
    standard library except its last `unseen` bytes.
    """
    data = os.environ.get("EEJAX_DATA")
    if model or text or (data and (pathlib.Path(data) / "models" / "tinylm").is_dir()):
        return *model_and_text(model, text), "bytes"
    return *trained(workdir, unseen), None


def trained(workdir: pathlib.Path, unseen: int) -> tuple[pathlib.Path, pathlib.Path]:
    """Return the run of a plain model of bytes, and its text; a stopped run is resumed."""
    from eejax.configs import demo
    from eejax.data import PythonStdlib
    from eejax.train.config import Experiment
    from eejax.train.loop import fit

    workdir = workdir.absolute()
    workdir.mkdir(parents=True, exist_ok=True)
    text, earlier = workdir / "text.txt", workdir / "earlier.txt"
    if not earlier.exists():
        whole = "".join(each.text for each in PythonStdlib(max_bytes=BYTES).documents())
        text.write_bytes(whole.encode())
        earlier.write_bytes(whole.encode()[:-unseen])
    config = demo.get_config()
    config.model.update(exits=())
    config.exit_weights.update(weights=())
    config.data.update(source=str(earlier), length=256, validation_fraction=0.0)
    config.optimizer.warmup_steps = min(60, STEPS // 4)
    config.train.update(steps=STEPS, eval_every=0)
    launch.say("no checkpoint is given: training one ...")
    result = fit(Experiment.from_dict(config), workdir / "model")
    launch.end_if_stopped(result)
    return workdir / "model", text
