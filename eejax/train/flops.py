"""Floating-point operations that training needs, and that devices can do."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from eejax.models import work
from eejax.models.config import ModelConfig

# Dense bf16 peaks per device from the vendors' data sheets, by a part of `device_kind`. The first
# match counts, so longer names come first.
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "TPU v6 lite": 918e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v4": 275e12,
}


def model_flops_per_token(config: ModelConfig, length: int, exit_tokens: float = 1.0) -> float:
    """Return the model FLOPs of one training token (forward and backward) in sequences of `length`.

    They are 6 N + 12 * sum over layers of n * h * s, the count of PaLM (Chowdhery et al. 2022,
    Appendix B). N is the number of weights that a token is multiplied with: it includes every
    exit's parameters and counts a head's v * d once per exit that uses it, but not the embedding
    look-up. s is the mean number of positions that a query attends to, (length + 1) / 2 under a
    causal mask or less in a sliding window. Rematerialisation does not count, as it is not the
    model's work. `exit_tokens` is the share of the tokens at which early exits have a loss
    (`losses.objective`).
    """
    exits = range(config.n_exits)
    weights = work.head_weights(config, config.n_exits)
    weights += config.n_layers * work.layer_weights(config)
    weights += sum(work.exit_weights(config, e) for e in exits)
    windows = [config.window(i) for i in range(config.n_layers)]
    windows += [config.exit_window(e) for e in exits if config.exits[e].block]
    forward = 2.0 * (weights + work.causal_attention(config, length, windows))
    return 3 * forward + exit_heads_flops_per_token(config, exit_tokens)


def exit_heads_flops_per_token(config: ModelConfig, exit_tokens: float = 1.0) -> float:
    """Return the part of `model_flops_per_token` that the heads of early exits take."""
    return 6.0 * exit_tokens * sum(work.head_weights(config, e) for e in range(config.n_exits))


def peak_flops(
    # To type checkers `jax.Device` is a variable, here and below.
    devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
) -> float | None:
    """Return the FLOPs per second of all `devices` together; None if they are unknown.

    For accelerators it is the dense bf16 rate of the data sheet. For CPUs, which have no useful
    data sheet, the rate of a large float32 matrix product is measured, for all fake devices of the
    machine together.
    """
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        return _measured_peak(devices[0])
    return next((len(devices) * peak for name, peak in PEAKS.items() if name in kind), None)


def _measured_peak(
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
    n: int = 1024,
    repeats: int = 5,
) -> float:
    a = jax.device_put(jnp.full((n, n), 1e-3, jnp.float32), device)
    multiply = jax.jit(jnp.matmul)
    multiply(a, a).block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        multiply(a, a).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2.0 * n**3 / min(times)
