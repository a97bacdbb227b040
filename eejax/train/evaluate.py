"""Loss, perplexity and bits per byte of every exit on held-out text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.sharding import Mesh

from eejax.common.errors import DataError
from eejax.common.tables import table
from eejax.common.trees import Tree
from eejax.data import IGNORE, Batch
from eejax.models.config import ModelConfig
from eejax.train.step import put_batch


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Losses of every exit on held-out text, the final exit's last.

    Attributes:
      names: names of the exits.
      losses: nats per token.
      tokens: number of counted labels.
      nbytes: UTF-8 bytes of text that these labels stand for (`Tokenizer.byte_lengths`). An end of
        a document is a token without bytes, whose prediction still counts.
      step: step of the run that was evaluated, or None.
    """

    names: tuple[str, ...]
    losses: tuple[float, ...]
    tokens: int
    nbytes: int
    step: int | None = None

    @property
    def perplexities(self) -> tuple[float, ...]:
        """Perplexity per token, exp(loss)."""
        return tuple(math.exp(min(loss, 700.0)) for loss in self.losses)

    @property
    def bits_per_byte(self) -> tuple[float, ...]:
        """Total bits divided by the total bytes of text; infinite if the labels have no bytes."""
        scale = self.tokens / self.nbytes / math.log(2) if self.nbytes else math.inf
        return tuple(loss * scale for loss in self.losses)

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """Return metrics with names such as 'eval/loss/exit_3'."""
        tables = {
            "loss": self.losses,
            "perplexity": self.perplexities,
            "bits_per_byte": self.bits_per_byte,
        }
        return {
            f"{prefix}/{what}/{name}": value
            for what, values in tables.items()
            for name, value in zip(self.names, values, strict=True)
        }

    def table(self) -> str:
        """Format the numbers of every exit as a table."""
        lines = [] if self.step is None else [f"last evaluation: step {self.step}"]
        rows = zip(self.names, self.losses, self.perplexities, self.bits_per_byte, strict=True)
        cells = [[n, f"{x:.4f}", f"{p:.3f}", f"{b:.4f}"] for n, x, p, b in rows]
        lines.append(table(["exit", "loss", "perplexity", "bits/byte"], cells))
        return "\n".join([*lines, f"{self.tokens} tokens"])


def of_all_tokens(params: Tree, config: ModelConfig) -> tuple[Tree, ModelConfig]:
    """Leave out exits of a smaller vocabulary (`ExitConfig.vocabulary`).

    They give some labels no probability, so that their mean loss would be infinite.
    """
    kept = tuple(e for e in config.exits if not e.vocabulary)
    if len(kept) == config.n_exits:
        return params, config
    trees = {e.name: params["exits"][e.name] for e in kept}
    return params | {"exits": trees}, config.replace(exits=kept)


def evaluate(
    eval_step: Callable,
    params: Tree,
    batches: Iterable[Batch],
    mesh: Mesh,
    names: Iterable[str],
    byte_lengths: np.ndarray,
) -> Evaluation:
    """Run `eval_step` of `train.step.make_eval_step` over the batches.

    Sums are taken over all tokens, so batches of different sizes are weighted correctly.
    `byte_lengths` [v] is the tokenizer's.

    Raises:
      DataError: if no token is counted.
    """
    sums, count, nbytes, pending = np.zeros((), np.float64), 0, 0, None
    for batch in batches:
        labels = batch["labels"]
        nbytes += int(byte_lengths[labels[labels != IGNORE]].sum())
        result = eval_step(params, put_batch(batch, mesh))
        if pending is not None:  # fetched while the next batch runs
            sums, count = _add(sums, count, pending)
        pending = result
    if pending is not None:
        sums, count = _add(sums, count, pending)
    if not count:
        raise DataError(
            "no token to evaluate: the validation split is empty, or none of the windows that were "
            "chosen has a token that counts. Raise data.validation_fraction or train.eval_batches."
        )
    losses = tuple(float(s) / count for s in sums)
    return Evaluation(tuple(names), losses, count, nbytes)


def evaluate_mixture(
    eval_step: Callable,
    params: Tree,
    parts: Iterable[tuple[float, Iterable[Batch]]],
    mesh: Mesh,
    names: Iterable[str],
    byte_lengths: np.ndarray,
) -> Evaluation:
    """Evaluate each (weight, batches), and return the mean of the losses by weight.

    A token of a part counts as many bytes as it has there, so that bits per byte are also those of
    text mixed by these weights.
    """
    names, found = tuple(names), []
    for weight, batches in parts:
        found.append((weight, evaluate(eval_step, params, batches, mesh, names, byte_lengths)))
    if len(found) == 1:
        return found[0][1]
    total = sum(weight for weight, _ in found)

    def mean(of):
        return sum(weight * of(e) for weight, e in found) / total

    losses = tuple(mean(lambda e, i=i: e.losses[i]) for i in range(len(names)))
    tokens = sum(e.tokens for _, e in found)
    return Evaluation(names, losses, tokens, round(tokens * mean(lambda e: e.nbytes / e.tokens)))


def _add(sums: np.ndarray, count: int, result) -> tuple[np.ndarray, int]:
    result = jax.device_get(result)
    return sums + result.sums.astype(np.float64), count + int(result.num_tokens)
