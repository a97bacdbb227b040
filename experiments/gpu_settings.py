"""Set CUDA graphs and a folder of compiled programs, before JAX starts."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import MutableMapping

from eejax.common.errors import ConfigError
from eejax.common.paths import expanded

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
GRAPHS_FLAG = "--xla_gpu_enable_command_buffer"
"""XLA's flag in `$XLA_FLAGS` for the operations that may become part of CUDA graphs."""

CACHE = "JAX_COMPILATION_CACHE_DIR"


def apply(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make loops parts of CUDA graphs, and keep compiled programs, unless the user says otherwise.

    Nothing is set where JAX has no plugin for NVIDIA GPUs, or is set to another platform.
    `$XLA_FLAGS` gains `--xla_gpu_enable_command_buffer=+WHILE`, which makes a decoding loop one
    graph without decisions of the host. Compiled programs go to `$JAX_COMPILATION_CACHE_DIR`, by
    default `eejax/compiled` below `$XDG_CACHE_HOME` or `~/.cache`: an engine for many slots
    compiles for minutes. If that folder cannot be made, they are not kept. `$XLA_FLAGS` that names
    a file of flags stays as it is.
    """
    platforms = (environ.get("JAX_PLATFORMS") or "cuda").split(",")
    if not {"cuda", "gpu"} & {*platforms} or not any(map(_found, PLUGINS)):
        return
    given = environ.get("XLA_FLAGS", "").strip()
    in_a_file = given and not given.startswith("--")  # a file's name must stand alone
    if GRAPHS_FLAG not in given and not in_a_file:
        environ["XLA_FLAGS"] = f"{given} {GRAPHS_FLAG}=+WHILE".strip()
    if CACHE not in environ and (folder := _folder(environ.get("XDG_CACHE_HOME") or "~/.cache")):
        environ[CACHE] = folder
        if environ is os.environ and "jax" in sys.modules:  # JAX has already read the environment
            sys.modules["jax"].config.update("jax_compilation_cache_dir", environ[CACHE])


def _folder(home: str) -> str | None:
    """Make a folder of compiled programs; return None if it cannot be made or written to."""
    try:
        folder = expanded(home) / "eejax" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError):
        return None
    return str(folder) if os.access(folder, os.W_OK) else None


def _found(plugin: str) -> bool:
    try:
        return importlib.util.find_spec(plugin) is not None
    except ModuleNotFoundError:  # no plugin at all
        return False
