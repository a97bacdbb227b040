"""A peer in PyTorch runs where JAX does, or not at all."""

from __future__ import annotations

import sys
import types

import jax
import pytest

from eejax.common.errors import ConfigError
from eejax.experiments import peer_device


def torch_with(monkeypatch, *, cuda: bool) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    own = types.SimpleNamespace(
        is_available=lambda: cuda, get_device_name=lambda: "NVIDIA H100 80GB HBM3"
    )
    torch = types.SimpleNamespace(cuda=own, __version__="2.11.0")
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_beside_jax_on_a_cpu():
    assert peer_device.torch_device() == peer_device.described("cpu") == "cpu"
    with peer_device.exact_products():
        assert jax.config.jax_default_matmul_precision is None


def test_beside_jax_on_a_gpu(monkeypatch):
    torch_with(monkeypatch, cuda=True)
    assert peer_device.torch_device() == "cuda"
    assert peer_device.described("cuda") == "NVIDIA H100 80GB HBM3"
    with peer_device.exact_products():
        assert jax.config.jax_default_matmul_precision == "highest"


def test_a_gpu_is_not_compared_with_a_cpu(monkeypatch):
    torch_with(monkeypatch, cuda=False)
    with pytest.raises(ConfigError, match=r"2\.11\.0.* has no CUDA.*JAX_PLATFORMS=cpu"):
        peer_device.torch_device()
