"""Models that HELIOS' reproduction serves, and the one that judges their text.

Two early-exit models of different size stand for OPT-1.3B and OPT-6.7B. As in the paper (Table 2,
section 4.1) each has two early exits, at about a quarter and a half of its depth, and each exit's
loss has weight 1.0. They learn text of the same tasks as the prompts, without the prompts.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

from eejax.common.errors import require
from eejax.experiments import launch

EXITS = {"small": (2, 4), "large": (3, 6), "judge": ()}
"""Boundaries of each model's early exits: of 8, 12 and 10 layers."""
EXIT_WEIGHT = 1.0  # HELIOS, section 4.1


def experiment(name: str, folder: pathlib.Path, share: float, tiny: bool = False):
    """Return the training run of a model: configs/mixed_`name`.py with the paper's exits.

    Args:
      name: one of `EXITS`.
      folder: holds the text, and the tokenizer once the small model is trained.
      share: share of the configuration's training steps.
      tiny: whether to use a size for tests, which shows nothing.
    """
    from eejax.configs import mixed_judge, mixed_large, mixed_small
    from eejax.train.config import Experiment

    files = {"small": mixed_small, "large": mixed_large, "judge": mixed_judge}
    config = files[name].get_config()
    config.model.exits = tuple({"boundary": b} for b in EXITS[name])
    config.exit_weights.weights = (EXIT_WEIGHT,) * len(EXITS[name])
    config.data.source = str(folder / "tasks.jsonl")
    config.data.tokenizer = "bpe" if name == "small" else str(folder / "small" / "tokenizer")
    config.train.steps = max(1, round(share * config.train.steps))
    config.train.checkpoint_every = 200
    config.optimizer.warmup_steps = min(config.optimizer.warmup_steps, config.train.steps // 4)
    if tiny:
        config.model.update(d_model=32, n_heads=2, d_ff=64, vocab_size=512, context_length=128)
        config.data.length = 128
        config.train.update(steps=2, batch_size=1, eval_batches=1)
    return Experiment.from_dict(config)


def train(folder: pathlib.Path, share: float, tiny: bool = False) -> dict[str, pathlib.Path]:
    """Train what is not there yet, and continue what was stopped.

    Returns:
      The folder of each model's run, by its name.

    Raises:
      ConfigError: without $EEJAX_DATA, where the task sets lie.
    """
    from eejax.train.loop import fit

    require(0 < share <= 1, "--train", share, "must be a share of the steps in (0, 1]")
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "tasks.jsonl"
    if not text.exists():
        part = text.with_suffix(".part")
        module = ("-P", "-m", "eejax.experiments.task_text", f"--output={part}")
        if subprocess.run([sys.executable, *module]).returncode:
            sys.exit(1)  # it said why
        part.rename(text)
    found = {}
    for name in EXITS:
        run = folder / name
        launch.say(f"training {name} ...")
        result = fit(experiment(name, folder.absolute(), share, tiny), run)
        launch.end_if_stopped(result)
        found[name] = run
    return found
