"""Programs for a GPU, compiled without one.

They need the compiler in JAX's CUDA plugin. `card_figures` reads them, `gpu_programs` prints their
figures, `gpu_check` runs similar ones on a card.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,"
    "DYNAMIC_SLICE_FUSION,WHILE"
}
"""XLA's option that makes loops, too, parts of CUDA graphs."""


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """A model's size and its exits.

    Attributes:
      layers: `ModelConfig`'s n_layers.
      width: `ModelConfig`'s d_model.
      heads: `ModelConfig`'s n_heads.
      inner: `ModelConfig`'s d_ff.
      vocabulary: `ModelConfig`'s vocab_size.
      exits: boundaries of the early exits.
      kv_heads: heads of keys and values; None for as many as heads.
    """

    layers: int = 24
    width: int = 2048
    heads: int = 16
    inner: int = 5464
    vocabulary: int = 50304
    exits: tuple[int, ...] = (6, 12)
    kv_heads: int | None = None

    def config(self, context: int, exits: tuple[int, ...] | None = None, dtype: str = "bfloat16"):
        from eejax.models.config import ExitConfig, ModelConfig

        exits = self.exits if exits is None else exits
        return ModelConfig(
            vocab_size=self.vocabulary,
            n_layers=self.layers,
            d_model=self.width,
            n_heads=self.heads,
            n_kv_heads=self.kv_heads,
            d_ff=self.inner,
            context_length=context,
            dtype=dtype,
            head="tied",
            exits=tuple(ExitConfig(n) for n in exits),
        )


BILLION = ModelSize()
SMALL = ModelSize(layers=4, width=256, heads=4, inner=696, vocabulary=1024, exits=(1, 2))
MEDIUM = ModelSize(layers=24, width=1024, heads=16, inner=2816)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program compiled for a card.

    Attributes:
      text: text of the compiled program.
      memory: XLA's figures.
      floor: bytes that a step must move: weights, keys and values once.
      flops: operations that a training step must do.
      config: the model's configuration.
      length: positions that attention reads, of texts or of a cache.
    """

    text: str
    memory: Any
    floor: float
    flops: float
    config: Any
    length: int


def decoding(
    card,
    config,
    *,
    batch: int,
    cache: int,
    engine: str = "full",
    options: Any = None,
    prompt: int = 0,
    steps: int = 16,
    threshold: float = 0.5,
):
    """Compile a decoding loop, or the pass of prompts of `prompt` tokens if that is given.

    Args:
      card: the card.
      config: the model.
      batch: number of sequences.
      cache: positions of the caches.
      engine: name of an engine; without effect if `options` are given.
      options: `EngineOptions` in place of an engine's name.
      prompt: tokens of a prompt, 0 for a decoding loop.
      steps: steps of the loop.
      threshold: threshold of the exits.
    """
    import jax
    import jax.numpy as jnp

    from eejax.experiments import aot
    from eejax.inference import decoding, generate
    from eejax.inference.options import EngineOptions, engine_config
    from eejax.inference.policy import ExitPolicy
    from eejax.inference.sampling import SamplingParams
    from eejax.inference.state import RequestRows
    from eejax.inference.weights import prepare
    from eejax.kernels import call
    from eejax.models import params

    options = EngineOptions(engine) if options is None else options
    config = engine_config(config, options)
    with call.compute_capability(card.capability):
        own = jax.eval_shape(partial(params.init, config), jax.random.key(0))
        weights = jax.eval_shape(partial(prepare, config=config), own)
        options = options.resolved(config, batch)
        plan = decoding.default_plan(config, options, batch)
        rule = threshold if config.n_exits else 1.0
        policy = ExitPolicy.make(config, batch, rule, drafts=options.max_drafts)
        tokens = jax.ShapeDtypeStruct((batch, prompt or 16), jnp.int32)
        given = RequestRows.make(
            config, [tokens.shape[1]] * batch, [64] * batch, policy, SamplingParams.make(batch)
        )
        static = dict(config=config, options=options)
        first = partial(generate.prefill, length=cache, **static)
        state = jax.eval_shape(first, weights, plan, tokens, given)[0]
    place = partial(aot.shapes, card)
    if prompt:
        run, args = generate.prefill, (weights, plan, tokens, given)
        static |= dict(length=cache)
    else:
        n = jax.ShapeDtypeStruct((), jnp.int32)
        run, args = decoding.decode, (weights, state, n)
        static |= dict(size=steps)
    made = aot.compiled(card, run, *map(place, args), compiler_options=GRAPHS, **static)
    floor = step_bytes(weights, state)
    return Compiled(made.as_text(), made.memory_analysis(), floor, 0.0, config, cache)


def step_bytes(weights, state) -> float:
    """Return the bytes that a step at full depth must read: layers, whole caches and the head."""
    from eejax.common.trees import nbytes

    head = weights.params["embed"]["tokens"]  # which the final exit reads, as it is tied
    return float(nbytes(weights.segments) + nbytes(state.cache) + nbytes(head))


def slot_shapes(card, config, slots: int, context: int, options: Any) -> tuple[Any, Any, Any]:
    """Return the weights and the state of an engine with slots as shapes, and its options.

    Args:
      card: the card.
      config: the model.
      slots: number of slots.
      context: maximum tokens of a request.
      options: `EngineOptions`; settings that depend on slots, model and card may be open.
    """
    import jax

    from eejax.inference.decoding import default_plan
    from eejax.inference.engine import slot_cache_length
    from eejax.inference.options import engine_config
    from eejax.inference.state import blank
    from eejax.inference.weights import prepare
    from eejax.kernels import call
    from eejax.models import params

    config = engine_config(config, options)
    with call.compute_capability(card.capability):
        options = options.resolved(config, slots)
        own = jax.eval_shape(partial(params.init, config), jax.random.key(0))
        prepared = partial(prepare, config=config, num_segments=options.num_segments)
        weights = jax.eval_shape(prepared, own)
        start = partial(
            blank,
            plan=default_plan(config, options, slots),
            config=config,
            options=options,
            slots=slots,
            length=slot_cache_length(context, options),
            context=context,
        )
        return weights, jax.eval_shape(start, weights), options


def slots(card, config, *, slots: int, cache: int, options: Any = None):
    """Compile the loop of an engine whose requests join and leave.

    Args:
      card: the card.
      config: the model.
      slots: number of slots.
      cache: maximum tokens of a request.
      options: `EngineOptions`; None for the default ones.
    """
    import jax
    import jax.numpy as jnp

    from eejax.experiments import aot
    from eejax.inference import decoding
    from eejax.inference.options import EngineOptions, engine_config

    options = EngineOptions() if options is None else options
    weights, state, options = slot_shapes(card, config, slots, cache, options)
    args = aot.shapes(card, (weights, state, jax.ShapeDtypeStruct((), jnp.int32)))
    static = dict(config=engine_config(config, options), options=options, size=8, prompts=True)
    made = aot.compiled(card, decoding.decode, *args, compiler_options=GRAPHS, **static)
    floor, length = step_bytes(weights, state), state.cache.length
    return Compiled(made.as_text(), made.memory_analysis(), floor, 0.0, config, length)


def train_step(config, mesh, remat: str = "dots", microbatches: int = 1):
    """Return a step of AdamW: (function of a state and a batch, optimiser)."""
    from eejax.losses import schedules
    from eejax.models import params
    from eejax.train import optimizer, step

    settings = optimizer.OptimizerConfig(
        learning_rate=3e-4,
        schedule="constant",
        warmup_steps=0,
        b1=0.9,
        b2=0.95,
        eps=1e-8,
        weight_decay=0.1,
    )
    adamw = optimizer.transformation(settings, params.decays(config))
    run = step.make_train_step(
        config,
        adamw,
        optimizer.learning_rate(settings, 1),
        schedules.constant((0.5,) * config.n_exits),
        mesh,
        clip_norm=1.0,
        remat=remat,
        microbatches=microbatches,
    )
    return run, adamw


def training(card, config, *, batch: int, remat: str = "dots", microbatches: int = 1):
    """Compile a training step of AdamW."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from eejax.experiments import aot
    from eejax.sharding import mesh as meshes
    from eejax.train import state
    from eejax.train.flops import model_flops_per_token

    mesh = aot.mesh(card, meshes.known_mesh(meshes.MeshConfig()))
    run, adamw = train_step(config, mesh, remat, microbatches)
    length = config.context_length
    tokens = jax.ShapeDtypeStruct(
        (batch, length), np.int32, sharding=NamedSharding(mesh, P("data"))
    )
    given = state.abstract(config, adamw, mesh)
    made = aot.compiled(card, run, given, {"tokens": tokens, "labels": tokens})
    flops = batch * length * model_flops_per_token(config, length)
    return Compiled(made.as_text(), made.memory_analysis(), 0.0, flops, config, length)


def documents(card, config, *, batch: int):
    """Compile the gradient of the loss of texts that hold several documents (`segment_ids`)."""
    import jax
    import jax.numpy as jnp

    from eejax.experiments import aot
    from eejax.losses.multi_exit import multi_exit_loss
    from eejax.models import params

    length = config.context_length

    def loss(own, tokens, labels, segment_ids):
        weights = jnp.ones(config.n_exits + 1)
        return multi_exit_loss(
            own, config, tokens, labels, weights, segment_ids=segment_ids, remat="dots"
        )[0]

    own = jax.eval_shape(partial(params.init, config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    args = aot.shapes(card, (own, tokens, tokens, tokens))
    made = aot.compiled(card, jax.jit(jax.grad(loss)), *args)
    return Compiled(made.as_text(), made.memory_analysis(), 0.0, 0.0, config, length)


@dataclasses.dataclass(frozen=True)
class CardProgram:
    """A program to compile for a card.

    Attributes:
      name: its displayed name.
      kind: an engine's name for its decoding loop, "slots", "prompts" or "training".
      batch: sequences, or slots.
      build: function of the card that compiles it.
    """

    name: str
    kind: str
    batch: int
    build: Callable[[Any], Compiled]


def programs(small: bool) -> Iterator[CardProgram]:
    """Yield the programs of full-size models, or of small ones."""
    model, medium = (SMALL, SMALL) if small else (BILLION, MEDIUM)
    config = model.config(2048)
    cache, prompt, length = (640, 512, 2048) if not small else (176, 48, 352)

    def loop(engine: str, batch: int, config: Any = config, of: str = "") -> CardProgram:
        run = partial(decoding, config=config, engine=engine, batch=batch, cache=cache)
        return CardProgram(f"{engine}{of} batch {batch}", engine, batch, run)

    for batch in (1, 8, 64):
        yield from (loop(engine, batch) for engine in ("full", "recompute"))
    yield from (loop("propagate", batch) for batch in (1, 8))
    yield loop("speculative", 1)
    own = tuple(dataclasses.replace(e, mlp=True) for e in config.exits)
    with_mlps = dataclasses.replace(config, exits=own)
    yield from (loop("recompute", batch, with_mlps, " with MLPs") for batch in (1, 8))
    for n in (8, 64):
        run = partial(slots, config=config, slots=n, cache=cache)
        yield CardProgram(f"recompute {n} slots", "slots", n, run)
    run = partial(decoding, config=config, engine="full", batch=8, cache=cache, prompt=prompt)
    yield CardProgram(f"prompts of {prompt} batch 8", "prompts", 8, run)
    for name, size in (("1.3B", model), ("350M", medium)):
        for exits in range(4):
            at = tuple(size.layers * (i + 1) // 4 for i in range(exits))
            run = partial(training, config=size.config(length, at), batch=8)
            yield CardProgram(f"training {name} {exits} exits", "training", 8, run)
    config = medium.config(length, ())
    run = partial(documents, config=config, batch=8)
    yield CardProgram("training 350M of documents", "training", 8, run)
    windows = tuple(length // 4 if i % 2 else None for i in range(config.n_layers))
    run = partial(training, config=dataclasses.replace(config, sliding_window=windows), batch=8)
    yield CardProgram("training 350M of windows", "training", 8, run)
