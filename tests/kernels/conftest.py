"""Where tests of kernels run: in Triton's interpreter, or in processes that compile."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest


@pytest.fixture(scope="session")
def interpreted():
    """Triton's interpreter, in this process; the test skips where kernels are compiled."""
    pytest.importorskip("triton", reason="needs Triton, which is for Linux alone")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1, which is not set where there is a GPU")


@pytest.fixture(scope="session")
def for_cuda() -> dict[str, str]:
    """An environment in which programs can be lowered for CUDA: JAX's CUDA plugin lies apart from
    other packages, as JAX would try to start it wherever it found it."""
    folder = pathlib.Path(sys.prefix) / "lowering"
    if not folder.is_dir():
        pytest.skip(f"needs JAX's CUDA plugin in {folder}, where `make env` puts it")
    own = ("TRITON_INTERPRET", "XLA_FLAGS")
    environment = {k: v for k, v in os.environ.items() if k not in own}
    paths = [str(folder), environment.get("PYTHONPATH")]
    return environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
