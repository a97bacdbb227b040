"""Training steps with up to three exits, against PyTorch's: time, use of the card, memory.

Each size is a process of its own, as JAX counts the peak memory of a process. Exits come in
ascending order, so that the peak so far is that of the last step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from eejax.experiments import card_programs
from eejax.experiments.gpu_check import torch_peer
from eejax.experiments.gpu_check.check import StageCheck, on_gpu, product_rate


@dataclasses.dataclass(frozen=True)
class TrainSizes:
    """Models, batch and steps of the stage.

    Attributes:
      models: models by their names.
      batch: sequences of a batch.
      length: tokens of a sequence.
      repeats: timed steps.
      max_exits: maximum number of exits.
    """

    models: dict[str, card_programs.ModelSize]
    batch: int = 8
    length: int = 2048
    repeats: int = 8
    max_exits: int = 3


BILLIONS = {"350M": card_programs.MEDIUM, "1.3B": card_programs.BILLION}


def sizes(check: StageCheck) -> TrainSizes:
    if not check.small:
        return TrainSizes(BILLIONS)
    tiny = dataclasses.replace(card_programs.SMALL, width=64, inner=176, vocabulary=256)
    return TrainSizes(dict.fromkeys(BILLIONS, tiny), batch=2, length=64, repeats=2, max_exits=1)


def run(check: StageCheck) -> None:
    setup = sizes(check)
    if check.part == "torch":
        why = torch_peer.unavailable(cuda=not check.small)
        if why:
            check.figures["torch"] = why
            return
        if torch_device(check) == "cpu" and on_gpu():
            raise RuntimeError("JAX is on a GPU and PyTorch is not: they cannot be compared")
        for name, size in setup.models.items():
            one = partial(torch_peer.trained, size, setup.batch, setup.length, setup.repeats)
            check.measure(name, partial(one, torch_device(check)))
        return
    size = setup.models[check.part]
    products = check.measure("product_flops_per_second", lambda: product_rate(check))
    plain = None
    for exits in range(setup.max_exits + 1):
        one = partial(step, size, setup, exits, products or float("nan"), plain)
        found = check.measure(f"{exits} exits", one)
        plain = plain or found


def torch_device(check: StageCheck) -> str:
    """Return PyTorch's device: that of JAX, or the CPU in a trial without a GPU."""
    return "cpu" if torch_peer.unavailable() and check.small else "cuda"


def programs(check: StageCheck) -> Iterator[tuple[str, Callable]]:
    """Yield the training steps."""
    setup = sizes(check)
    for name, size in setup.models.items():
        for exits in range(setup.max_exits + 1) if check.part in ("", name) else ():
            config = configured(size, setup.length, exits)
            one = partial(card_programs.training, config=config, batch=setup.batch)
            yield f"{name} {exits} exits", one


def configured(size: card_programs.ModelSize, length: int, exits: int):
    """Return a model's configuration with `exits` exits, evenly spread."""
    return size.config(length, tuple(size.layers * (i + 1) // 4 for i in range(exits)))


def step(
    size: card_programs.ModelSize,
    setup: TrainSizes,
    exits: int,
    products: float,
    plain: dict[str, Any] | None,
) -> dict[str, Any]:
    """Time training steps.

    Returns:
      ms; tokens_per_second; mfu, of the card's peak, and share_of_products, of the product that was
      measured; peak and temporary bytes; overhead of the exits, in time and in temporary bytes;
      losses.
    """
    import jax

    from eejax.sharding.mesh import MeshConfig, make_mesh
    from eejax.train import state
    from eejax.train import step as steps
    from eejax.train.flops import model_flops_per_token, peak_flops

    config, mesh = configured(size, setup.length, exits), make_mesh(MeshConfig())
    program, adamw = card_programs.train_step(config, mesh)
    train_state = state.create(config, adamw, 0, mesh)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (setup.batch, setup.length))
    tokens = tokens.astype(np.int32)
    batch = steps.put_batch({"tokens": tokens, "labels": np.roll(tokens, -1, 1)}, mesh)
    begin, losses = time.perf_counter(), []
    made = program.lower(train_state, batch).compile()
    compiled = time.perf_counter() - begin
    seconds = []
    for _ in range(setup.repeats + 2):
        begin = time.perf_counter()
        train_state, metrics = made(train_state, batch)
        losses.append(float(metrics["loss"]))  # waits for the device
        seconds.append(time.perf_counter() - begin)
    took = float(np.median(seconds[2:]))
    flops = setup.batch * setup.length * model_flops_per_token(config, setup.length)
    stats = jax.devices()[0].memory_stats() or {}
    temporary = made.memory_analysis().temp_size_in_bytes
    found = dict(
        ms=1e3 * took,
        tokens_per_second=setup.batch * setup.length / took,
        flops=flops,
        share_of_products=flops / took / products,
        peak_bytes=stats.get("peak_bytes_in_use"),
        temporary_bytes=temporary,
        compile_seconds=compiled,
        losses=losses,
    )
    if peak := peak_flops(jax.devices()[:1]):
        found["mfu"] = flops / took / peak
    if plain is not None:
        found["time_over_no_exits"] = found["ms"] / plain["ms"]
        found["temporary_over_no_exits"] = temporary / max(1, plain["temporary_bytes"])
    return found
