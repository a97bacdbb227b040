"""Set CUDA graphs and a folder of compiled programs, before JAX starts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import sys
import time
from collections.abc import MutableMapping

from eejax.common.errors import ConfigError
from eejax.common.paths import expanded

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
GRAPHS_FLAG = "--xla_gpu_enable_command_buffer"
"""XLA's flag in `$XLA_FLAGS` for the operations that may become part of CUDA graphs."""

CACHE = "JAX_COMPILATION_CACHE_DIR"
MAX_SIZE = "JAX_COMPILATION_CACHE_MAX_SIZE"
LIMITS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": ("0", float),  # short compilations are many
    MAX_SIZE: (str(4 * 2**30), int),  # bytes; then the oldest are deleted
}
"""Settings of the folder that eejax chooses, each with its type."""
WRITING = 60.0  # seconds in which another process may write a program


def apply(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make loops parts of CUDA graphs, and keep compiled programs, unless the user says otherwise.

    Where JAX has a plugin for NVIDIA GPUs and may use it, `$XLA_FLAGS` gains
    `--xla_gpu_enable_command_buffer=+WHILE`, which makes a decoding loop one graph without
    decisions of the host. `$XLA_FLAGS` that names a file of flags stays as it is.

    Compiled programs go to `$JAX_COMPILATION_CACHE_DIR`, by default `eejax/compiled` below
    `$XDG_CACHE_HOME` or `~/.cache`, which holds up to 4 GiB. If that folder cannot be made, or the
    variable is empty, they are not kept.
    """
    platforms = (environ.get("JAX_PLATFORMS") or "cuda").split(",")
    given = environ.get("XLA_FLAGS", "").strip()
    in_a_file = given and not given.startswith("--")  # a file's name must stand alone
    gpu = {"cuda", "gpu"} & {*platforms} and any(map(_found, PLUGINS))
    if gpu and GRAPHS_FLAG not in given and not in_a_file:
        environ["XLA_FLAGS"] = f"{given} {GRAPHS_FLAG}=+WHILE".strip()
    if CACHE in environ or not (folder := _folder(environ.get("XDG_CACHE_HOME") or "~/.cache")):
        return
    chosen = {CACHE: (folder, str)} | {k: v for k, v in LIMITS.items() if k not in environ}
    for name, (value, kind) in chosen.items():
        environ[name] = value
        if environ is os.environ and "jax" in sys.modules:  # JAX has already read the environment
            sys.modules["jax"].config.update(name.lower(), kind(value))
    _mend(pathlib.Path(folder), limited=environ.get(MAX_SIZE) != "-1")


def _folder(home: str) -> str | None:
    """Make a folder of compiled programs; return None if it cannot be made or written to."""
    try:
        folder = expanded(home) / "eejax" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError):
        return None
    return str(folder) if os.access(folder, os.W_OK) else None


def _mend(folder: pathlib.Path, limited: bool) -> None:
    """Delete programs that a full disk or an end of a process left half written.

    JAX would not replace them. In a folder of `limited` size it has a file with the time of every
    program, and would write no other program while one of these is missing.
    """
    for path in folder.glob("*-cache"):
        with contextlib.suppress(OSError):  # another process may delete it
            about = path.stat()
            timed = path.with_name(path.name.removesuffix("-cache") + "-atime").exists()
            whole = about.st_size > 0 and (timed or not limited)
            if time.time() - about.st_mtime > WRITING and not whole:
                path.unlink()


def _found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False
