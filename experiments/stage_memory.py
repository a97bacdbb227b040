"""EE-LLM's formulas of time and memory, and the memory of a model's stages by them.

Appendix A.3 of the paper writes f_o and b_o for the time of a forward and of a backward pass of one
microbatch, m_o for the memory of parameters and m_o^+ for that of activations, where o is IN (the
input embedding), BB (a stage's layers), EE (an early exit) or FE (the final exit). `StageCosts`
holds the times and `Sizes` the memory of each stage, so that exits may differ. Tests compare both
formulas with those of the paper, and with the simulators.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eejax.common.trees import nbytes
from eejax.experiments.async_1f1b import at_end
from eejax.losses.cross_entropy import chunk_size
from eejax.models import params
from eejax.models.config import ModelConfig
from eejax.models.transformer import layer_residuals
from eejax.pipeline.costs import exit_places
from eejax.pipeline.schedule import one_f_one_b, rings
from eejax.pipeline.simulate import NO_WORK, StageCosts

# Bytes of a parameter in float32 with its gradient and Adam's two moments.
STATE_BYTES = 16


def iteration_time(costs: StageCosts, microbatches: int, *, exits_at_end: bool = False) -> float:
    """Bound the time of `async_1f1b` by sum_i T_i + (M - 1) max_i T_i, T_i being a stage's work.

    EE-LLM's bound (Appendix A.3.1, step 3) is sum_{i < P} T_i + M max_i T_i, which is larger by
    max_i T_i - T_P. If the last stage is the slowest, both are the exact time, to which an early
    exit adds its own f_EE + b_EE once, whatever M is. Deferring exits changes nothing
    (Remark A.2), unless their forward passes fill bubbles.
    """
    entry = at_end(costs.entry, NO_WORK) if exits_at_end else costs.entry
    times = [sum(w.total for w in ws) for ws in zip(costs.layers, entry, costs.inner, strict=True)]
    times[-1] += costs.final.total
    return sum(times) + (microbatches - 1) * max(times)


class Size(NamedTuple):
    """Memory in bytes.

    Attributes:
      state: of parameters with their gradients and moments.
      kept: of one microbatch, between its forward and its backward pass.
    """

    state: float = 0.0
    kept: float = 0.0

    def plus(self, other: Size) -> Size:
        return Size(self.state + other.state, self.kept + other.kept)


NOTHING = Size()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The `Size` of each stage's parts, in the form of `StageCosts`.

    The embedding belongs to the layers of stage 0.
    """

    layers: tuple[Size, ...]
    entry: tuple[Size, ...]
    inner: tuple[Size, ...]
    final: Size = NOTHING


def peak_memory(
    sizes: Sizes, microbatches: int, *, deferred: bool = True, exits_at_end: bool = False
) -> np.ndarray:
    """Return the bytes [stages] at the peak of `async_1f1b` (EE-LLM, Eq. 4 to 6).

    Stage i (from 0) keeps the activations of the layers for P - i microbatches, fewer if there are
    fewer microbatches, and those of the exits for as many, or for one alone if exits are deferred.
    `state` is the paper's alpha m_o, and `kept` its m_o^+.
    """
    p = len(sizes.layers)
    entry = at_end(sizes.entry, NOTHING) if exits_at_end else sizes.entry
    out = np.zeros(p)
    for i in range(p):
        exits = entry[i].plus(sizes.inner[i]).plus(sizes.final if i == p - 1 else NOTHING)
        under_way = min(p - i, microbatches)
        out[i] = sizes.layers[i].state + exits.state + under_way * sizes.layers[i].kept
        out[i] += (1 if deferred else under_way) * exits.kept
    return out


def model_sizes(
    config: ModelConfig,
    layers: Sequence[int],
    *,
    layer_kept: float = 0.0,
    exit_kept: float = 0.0,
    state_bytes: float = STATE_BYTES,
) -> Sizes:
    """Return the `Sizes` of a model, from the bytes that one layer and one exit keep of a
    microbatch.

    A table that several exits of a stage read counts once on each stage that reads it.
    """

    def count(tree):
        return sum(jax.tree.leaves(params.map_params(lambda a: math.prod(a.shape), tree)))

    declared = params.abstract(config)
    table = config.padded_vocab * config.d_model
    there: set[tuple[int, str]] = {(0, "tied")}  # (stage, name) of tables that were counted

    def size(stage: int, tree, head: str, name: str) -> Size:
        own = {k: v for k, v in tree.items() if k != "head"}
        key = (stage, name if head == "own" else head)
        parameters = count(own) + (0 if key in there else table)
        there.add(key)
        return Size(state_bytes * parameters, exit_kept)

    def exits(stage: int, numbers: Sequence[int]) -> Size:
        total = NOTHING
        for e in numbers:
            one = config.exits[e]
            total = total.plus(size(stage, params.exit_(config, one), one.head, one.name))
        return total

    places, last = exit_places(config, layers), len(layers) - 1
    one = count(params.layer(config))
    stages = [Size(state_bytes * one * n, layer_kept * n) for n in layers]
    stages[0] = stages[0].plus(Size(state_bytes * count(declared["embed"])))
    return Sizes(
        tuple(stages),
        tuple(exits(i, numbers) for i, numbers in enumerate(places.entry)),
        tuple(exits(i, numbers) for i, numbers in enumerate(places.inner)),
        size(last, declared["final"], config.head, "final").plus(exits(last, places.final)),
    )


def layer_kept(config: ModelConfig, rows: int, length: int, remat: str) -> int:
    """Return the bytes that the backward pass of one layer needs of a microbatch.

    Parameters and what all layers share are not counted. The number comes from `jax.vjp` on shapes,
    not from a formula for each architecture. With "full" it is the size of the layer's input.
    """
    x = jax.ShapeDtypeStruct((rows, length, config.d_model), config.dtype)

    def structs(a):
        return jax.ShapeDtypeStruct(a.shape, config.dtype if a.decay else jnp.float32)

    def residuals(p, x):
        return layer_residuals(p, x, config, length, remat)

    tree = params.map_params(structs, params.layer(config))
    return nbytes(jax.eval_shape(residuals, tree, x))


class Peak(NamedTuple):
    """Bytes at the peak of an iteration.

    Attributes:
      state: [stages], of parameters, gradients and moments.
      activations: [stages].
      in_flight: [stages], maximum number of microbatches in flight.
    """

    state: np.ndarray
    activations: np.ndarray
    in_flight: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.state + self.activations


def memory_vs_1f1b(
    config: ModelConfig,
    layers: Sequence[int],
    microbatches: int,
    rows: int,
    length: int,
    *,
    remat: str = "dots",
    exits: str = "mixed",
) -> tuple[Peak, Peak]:
    """Return the peak memory of `one_f_one_b` and of EE-LLM's 1F1B for the same model.

    The lockstep program is the same on every stage, so all stages have rings of the largest stage's
    size. Logits of exits come in chunks in both.

    Args:
      config: the model's.
      layers: layers of each stage.
      microbatches: microbatches of a step, each of `rows` sequences of `length` tokens.
      remat: the activation policy; with "full" stages keep only their inputs.
      exits: see `PipelineConfig`.

    Returns:
      (lockstep, asynchronous).
    """
    p = len(layers)
    places = exit_places(config, layers)
    entry = [i for i, found in enumerate(places.entry) if found]
    recompute = remat == "full"
    schedule = one_f_one_b(p, microbatches, exit_stages=entry, exits=exits, recompute=recompute)
    ring = rings(schedule, entry)
    x = rows * length * config.d_model * jnp.dtype(config.dtype).itemsize
    one = layer_kept(config, rows, length, remat)
    kept = np.array([n * one for n in layers], float)
    chunk = 2 * 4 * chunk_size(rows * length, config.padded_vocab) * config.padded_vocab
    sizes = model_sizes(config, layers)
    state = peak_memory(sizes, microbatches)
    copies = 1 if recompute else ring.n_residuals
    lockstep = np.full(p, ring.n_states * x + copies * kept.max() + chunk)
    under_way = np.array([min(p - i, microbatches) for i in range(p)])
    ours = np.array([schedule.in_flight(i) for i in range(p)])
    asynchronous = under_way * x + (1 if recompute else under_way) * kept + chunk
    return Peak(state, lockstep, ours), Peak(state, asynchronous, under_way)
