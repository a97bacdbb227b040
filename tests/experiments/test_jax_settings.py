"""Launchers choose a folder of compiled programs, and CUDA graphs where JAX has a GPU's plugin."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time

import pytest

from eejax.experiments import jax_settings


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A folder on the path with JAX's plugin for CUDA 13, as far as its name goes."""
    folder = tmp_path / "jax_plugins" / "xla_cuda13"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    importlib.invalidate_caches()


def test_no_flag_of_gpus_is_set_without_a_plugin(tmp_path, monkeypatch):
    monkeypatch.setattr(jax_settings, "PLUGINS", ("jax_plugins.of_nobody",))
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    jax_settings.apply(environ)
    assert "XLA_FLAGS" not in environ
    assert environ["JAX_COMPILATION_CACHE_DIR"] == f"{tmp_path}/eejax/compiled"


@pytest.mark.parametrize("platforms", [{}, {"JAX_PLATFORMS": ""}, {"JAX_PLATFORMS": "cuda,cpu"}])
def test_graphs_and_the_folder_are_set(plugin, platforms, tmp_path):
    environ = {"XLA_FLAGS": "--xla_a=1", "XDG_CACHE_HOME": str(tmp_path), **platforms}
    jax_settings.apply(environ)
    assert environ["XLA_FLAGS"] == "--xla_a=1 --xla_gpu_enable_command_buffer=+WHILE"
    assert environ["JAX_COMPILATION_CACHE_DIR"] == f"{tmp_path}/eejax/compiled"
    assert environ["JAX_COMPILATION_CACHE_MAX_SIZE"] == "4294967296"


def test_a_limit_that_the_user_says_stays(tmp_path):
    own = {"JAX_COMPILATION_CACHE_MAX_SIZE": "-1"}
    environ = {"XDG_CACHE_HOME": str(tmp_path), **own}
    jax_settings.apply(environ)
    assert environ.items() > own.items() and "JAX_COMPILATION_CACHE_DIR" in environ


def test_programs_that_are_half_written_are_deleted(tmp_path):
    folder = tmp_path / "eejax" / "compiled"
    folder.mkdir(parents=True)
    old = time.time() - 3600
    for name, text, timed, written in (
        ("whole", "a", True, old),
        ("empty", "", True, old),
        ("without_time", "a", False, old),
        ("written_now", "a", False, time.time()),
    ):
        path = folder / f"{name}-cache"
        path.write_text(text)
        os.utime(path, (written, written))
        if timed:
            (folder / f"{name}-atime").write_text("")
    own = {"XDG_CACHE_HOME": str(tmp_path)}
    jax_settings.apply(own | {"JAX_COMPILATION_CACHE_MAX_SIZE": "-1"})  # JAX writes no times
    left = {"whole-cache", "without_time-cache", "written_now-cache"}
    assert {p.name for p in folder.glob("*-cache")} == left
    jax_settings.apply(dict(own))
    assert {p.name for p in folder.glob("*-cache")} == left - {"without_time-cache"}


SECOND = """
import os, sys
import jax
from eejax.experiments import jax_settings

jax_settings.apply()
misses = []
jax.monitoring.register_event_listener(
    lambda event, **_: misses.append(event) if event.endswith("/cache_misses") else None
)
jax.jit(lambda x: x * 2 + 1)(jax.numpy.arange(3))
print(len(misses))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    """JAX is imported before the settings, as some launchers do."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMP", "JAX_PERS"))}
    own |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    said = [
        subprocess.run(
            [sys.executable, "-P", "-c", SECOND],
            env=own,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert int(said[0]) > 0 and int(said[1]) == 0


@pytest.mark.parametrize("home", ["~nobody_here", "{tmp_path}/file", "/proc"])
def test_nothing_is_kept_where_there_is_no_folder(plugin, tmp_path, home):
    (tmp_path / "file").write_text("")
    environ = {"XDG_CACHE_HOME": home.format(tmp_path=tmp_path)}
    jax_settings.apply(environ)
    assert "JAX_COMPILATION_CACHE_DIR" not in environ


@pytest.mark.parametrize(
    "given",
    [
        {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=", "JAX_COMPILATION_CACHE_DIR": "mine"},
        {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": ""},
        {"XLA_FLAGS": "/etc/flags", "JAX_COMPILATION_CACHE_DIR": "mine"},
    ],
)
def test_what_the_user_says_stays(plugin, given):
    environ = dict(given)
    jax_settings.apply(environ)
    assert environ == given
