"""Device of PyTorch when it is timed beside JAX: the kind of device that JAX is on."""

from __future__ import annotations

import contextlib

from eejax.common.errors import ConfigError


def torch_device() -> str:
    """Return PyTorch's name of the device that JAX computes on: "cuda" or "cpu".

    Raises:
      ConfigError: if JAX is on a GPU and PyTorch cannot use one.
    """
    import jax

    if jax.default_backend() != "gpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    raise ConfigError(
        f"JAX computes on {jax.devices()[0].device_kind}, and this PyTorch ({torch.__version__}) "
        "has no CUDA: a GPU beside a CPU compares nothing. Install PyTorch for CUDA, set "
        "JAX_PLATFORMS=cpu, or leave the peer out where the command has a flag for that."
    )


def described(device: str) -> str:
    """Name a PyTorch device for a result."""
    if device != "cuda":
        return device
    import torch

    return torch.cuda.get_device_name()


def exact_products() -> contextlib.AbstractContextManager:
    """Make JAX multiply float32 as PyTorch does by default, which is not in TF32.

    On a CPU both do so anyway.
    """
    import jax

    if jax.default_backend() != "gpu":
        return contextlib.nullcontext()
    return jax.default_matmul_precision("highest")
