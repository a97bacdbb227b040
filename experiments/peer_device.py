"""PyTorch beside JAX: on the kind of device that JAX is on, and greedy texts of transformers."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable

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


def greedy(model, ids, new: int) -> list[int]:
    """Return `new` tokens that a transformers model generates after ids [1, t], ends or not."""
    import torch

    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
    return out[0, ids.shape[1] :].tolist()


def generator_of_gguf(path: pathlib.Path, threads: int) -> Callable[[list[int], int], list[int]]:
    """Return transformers' greedy generation with the weights of a GGUF file, in float32.

    It takes the token ids of a prompt and the number of tokens to return. Threads are PyTorch's.
    """
    import torch
    import transformers

    device = torch_device()
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    peer = peer.eval().to(device)
    peer.generation_config = transformers.GenerationConfig()

    def generate(ids: list[int], new: int) -> list[int]:
        return greedy(peer, torch.tensor([ids], device=device), new)

    generate(list(range(8)), 8)
    return generate


def exact_products() -> contextlib.AbstractContextManager:
    """Make JAX multiply float32 as PyTorch does by default, which is not in TF32.

    On a CPU both do so anyway.
    """
    import jax

    if jax.default_backend() != "gpu":
        return contextlib.nullcontext()
    return jax.default_matmul_precision("highest")
