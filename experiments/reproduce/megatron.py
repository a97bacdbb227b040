"""Time and memory of EE-LLM's training on A100 GPUs, counted from the authors' code.

The paper measured on A100-80GB GPUs with Megatron-LM. Matrix products take operations at one rate,
which is fitted to the paper's model without exits and to nothing else. Everything else takes the
bytes that PyTorch's kernels read and write, at the full bandwidth of the memory: elementwise
operations of a layer, softmax and cross entropy on float32 logits, the embedding and its gradient,
the optimizer. So these are lower bounds, and what is not counted (launches, sends between stages,
sorting tokens for the embedding's gradient) is missing.

Bytes are those of github.com/pan-x-c/EE-LLM as its scripts run it: bf16 with float32 gradients,
RMSNorm in float32 (megatron/model/rms_norm.py), rotary positions, SwiGLU, dropout 0.1,
FlashAttention, gradients of matrices accumulated by the matrix product itself, cross entropy as in
megatron/core/tensor_parallel/cross_entropy.py, no recomputation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from eejax.models.config import ModelConfig
from eejax.pipeline.simulate import NO_WORK, PassTime, StageCosts

# Bytes that are read and written, forward and backward, for each element of [tokens, d].
NORM = PassTime(36, 84)
ROTARY = PassTime(48, 48)  # queries and keys
LAYOUT = PassTime(16, 16)  # of queries, keys, values and the output, for FlashAttention
DROPOUT_ADD = PassTime(14, 10)  # both, with the residual stream
RESIDUAL_GRADIENTS = PassTime(0, 12)
SWIGLU = PassTime(10, 26)  # for each element of [tokens, d_ff]
EMBEDDING = PassTime(13, 11)
EMBEDDING_GRADIENT = PassTime(0, 12)  # for each element of the table
LOGITS = PassTime(38, 14)  # for each logit
# Eq. 2: the inner product of a stage's output with its gradient, and the sum of two gradients.
AUXILIARY_LOSS = PassTime(0, 18)
OPTIMIZER_BYTES = 50  # for each parameter: norm and clipping of gradients, Adam, zeros

# Bytes that are there.
STATE_BYTES = 18  # for each parameter: bf16, float32 gradient, master copy, Adam's two moments
LAYER_KEPT, GATE_KEPT = 28, 8  # for each element of [tokens, d] and of [tokens, d_ff]
LOGIT_KEPT, LOGIT_TEMPORARY = 4, 6  # for each logit: the softmax; while an exit is computed


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU's speed.

    Attributes:
      flops: rate of matrix products, FLOP/s.
      bandwidth: bandwidth of its memory, bytes/s; NVIDIA's figure for the A100-80GB (SXM).
      link: rate to another GPU of the same host in one direction, bytes/s; NVLink of the A100.
      embedding: share of the bandwidth that the gradient of the input embedding reaches.
    """

    flops: float
    bandwidth: float = 2.039e12
    link: float = 300e9
    embedding: float = 1.0


@dataclasses.dataclass(frozen=True)
class ReplicaRun:
    """A model on the GPUs of one replica.

    Attributes:
      model: the model with its early exits, all of them minimalistic.
      stages: pipeline parallelism.
      shards: tensor (and sequence) parallelism.
      rows: sequences in a microbatch.
      length: tokens in a sequence.
      microbatches: microbatches of an iteration.
    """

    model: ModelConfig
    stages: int
    shards: int
    rows: int
    length: int
    microbatches: int

    @property
    def layers(self) -> list[int]:
        return [self.model.n_layers // self.stages] * self.stages

    @property
    def states(self) -> int:
        """Return the number of elements of [tokens, d] of a microbatch."""
        return self.rows * self.length * self.model.d_model

    @property
    def logits(self) -> int:
        return self.rows * self.length * self.model.padded_vocab

    @property
    def table(self) -> int:
        return self.model.padded_vocab * self.model.d_model


def costs(run: ReplicaRun, gpu: Gpu) -> StageCosts:
    """Return the seconds of the parts of each stage for a microbatch."""
    from eejax.pipeline.costs import exit_places, model_costs

    model, layers, t = run.model, run.layers, run.shards
    counted = model_costs(model, layers, run.rows, run.length)
    places = exit_places(model, layers)
    states, logits = run.states, run.logits
    # All-gathers and reduce-scatters of states: what each shard receives.
    sent = 2 * states * (t - 1) / t / gpu.link

    def seconds(flops: PassTime, nbytes: PassTime, exchanges: float) -> PassTime:
        def one(f, n):
            return f / t / gpu.flops + n / t / gpu.bandwidth + exchanges * sent

        return PassTime(*map(one, flops, nbytes))

    parts = (NORM * 2, ROTARY, LAYOUT, DROPOUT_ADD, RESIDUAL_GRADIENTS)
    layer = _total([part * states for part in parts])
    layer = layer.plus(SWIGLU * (run.rows * run.length * model.d_ff))
    embedding = (EMBEDDING * states).plus(EMBEDDING_GRADIENT * (run.table / gpu.embedding))

    def exit(flops: PassTime, numbers: Sequence[int]) -> PassTime:
        norms = sum(model.exits[e].norm for e in numbers)
        each = (LOGITS * logits).plus(AUXILIARY_LOSS * states) * len(numbers)
        return seconds(flops, each.plus(NORM * (norms * states)), len(numbers))

    stages = [seconds(f, layer * n, 4 * n) for f, n in zip(counted.layers, layers, strict=True)]
    stages[0] = stages[0].plus(seconds(NO_WORK, embedding, 1))
    final = (LOGITS * logits).plus(NORM * states)
    return StageCosts(
        tuple(stages),
        tuple(map(exit, counted.entry, places.entry)),
        tuple(map(exit, counted.inner, places.inner)),
        seconds(counted.final, final, 1),
    )


def _total(parts: Sequence[PassTime]) -> PassTime:
    return PassTime(*(sum(x) for x in zip(*parts, strict=True)))


def stage_seconds(
    run: ReplicaRun, gpu: Gpu, *, deferred: bool = True, exits_at_end: bool = False
) -> list[dict[str, float]]:
    """Return the seconds of a microbatch's forward and backward pass on each stage (Figure 9)."""
    from eejax.experiments.async_1f1b import at_end

    found = costs(run, gpu)
    entry = at_end(found.entry, NO_WORK) if exits_at_end else found.entry
    out = []
    for i, layers in enumerate(found.layers):
        exits, final = entry[i].plus(found.inner[i]), NO_WORK
        if i == run.stages - 1:
            final = found.final
        early = PassTime(0, exits.total) if deferred else exits
        whole = layers.plus(final).plus(early)
        out.append({"forward": whole.forward, "backward": whole.backward})
    return out


def peak_bytes(run: ReplicaRun, *, deferred: bool = True, exits_at_end: bool = False) -> np.ndarray:
    """Return the bytes [stages] at the peak on a GPU of each stage (Eq. 4 to 6)."""
    from eejax.experiments.stage_memory import model_sizes, peak_memory

    gates = run.rows * run.length * run.model.d_ff
    sizes = model_sizes(
        run.model,
        run.layers,
        layer_kept=LAYER_KEPT * run.states + GATE_KEPT * gates,
        exit_kept=LOGIT_KEPT * run.logits,
        state_bytes=STATE_BYTES,
    )
    kept = peak_memory(sizes, run.microbatches, deferred=deferred, exits_at_end=exits_at_end)
    marks = model_sizes(run.model, run.layers, exit_kept=1, state_bytes=0)
    has_exit = peak_memory(marks, 1, exits_at_end=exits_at_end) > 0
    return (kept + has_exit * LOGIT_TEMPORARY * run.logits) / run.shards


def optimizer_seconds(run: ReplicaRun, gpu: Gpu, exits_at_end: bool = False) -> float:
    """Return the seconds of the optimizer on the GPU with the most parameters."""
    from eejax.experiments.stage_memory import model_sizes, peak_memory

    parameters = model_sizes(run.model, run.layers, state_bytes=OPTIMIZER_BYTES)
    return float(peak_memory(parameters, 1, exits_at_end=exits_at_end).max()) / (
        run.shards * gpu.bandwidth
    )


def iteration_seconds(
    run: ReplicaRun,
    gpu: Gpu,
    *,
    deferred: bool = True,
    exits_at_end: bool = False,
    exits_in_bubbles: bool = False,
) -> float:
    """Return the seconds of an iteration, as `async_1f1b` schedules it, and the optimizer's."""
    from eejax.experiments.async_1f1b import async_1f1b

    line = async_1f1b(
        costs(run, gpu),
        run.microbatches,
        deferred=deferred,
        exits_at_end=exits_at_end,
        exits_in_bubbles=exits_in_bubbles,
    )
    return line.time + optimizer_seconds(run, gpu, exits_at_end)


def fitted(run: ReplicaRun, seconds: float, embedding: float = 1.0) -> Gpu:
    """Fit the rate of matrix products, so that an iteration takes so many seconds."""
    from scipy.optimize import brentq

    def gpu(rate):
        return Gpu(rate, embedding=embedding)

    def late(rate):
        return iteration_seconds(run, gpu(rate)) - seconds

    return gpu(brentq(late, 1e13, 312e12, rtol=1e-6))
