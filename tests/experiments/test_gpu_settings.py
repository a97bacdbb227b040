"""Launchers choose CUDA graphs and a folder of compiled programs where JAX finds a GPU's plugin."""

from __future__ import annotations

import importlib
import sys

import pytest

from eejax.experiments import gpu_settings


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A folder on the path with JAX's plugin for CUDA 13, as far as its name goes."""
    folder = tmp_path / "jax_plugins" / "xla_cuda13"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    importlib.invalidate_caches()


def test_nothing_is_set_without_a_plugin(monkeypatch):
    monkeypatch.setattr(gpu_settings, "PLUGINS", ("jax_plugins.of_nobody",))
    environ = {"HOME": "/home/ada"}
    gpu_settings.apply(environ)
    assert environ == {"HOME": "/home/ada"}


@pytest.mark.parametrize("platforms", [{}, {"JAX_PLATFORMS": ""}, {"JAX_PLATFORMS": "cuda,cpu"}])
def test_graphs_and_the_folder_are_set(plugin, platforms, tmp_path):
    environ = {"XLA_FLAGS": "--xla_a=1", "XDG_CACHE_HOME": str(tmp_path), **platforms}
    gpu_settings.apply(environ)
    assert environ["XLA_FLAGS"] == "--xla_a=1 --xla_gpu_enable_command_buffer=+WHILE"
    assert environ["JAX_COMPILATION_CACHE_DIR"] == f"{tmp_path}/eejax/compiled"


@pytest.mark.parametrize("home", ["~nobody_here", "{tmp_path}/file", "/proc"])
def test_nothing_is_kept_where_there_is_no_folder(plugin, tmp_path, home):
    (tmp_path / "file").write_text("")
    environ = {"XDG_CACHE_HOME": home.format(tmp_path=tmp_path)}
    gpu_settings.apply(environ)
    assert "JAX_COMPILATION_CACHE_DIR" not in environ


@pytest.mark.parametrize(
    "given",
    [
        {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=", "JAX_COMPILATION_CACHE_DIR": "mine"},
        {"JAX_PLATFORMS": "cpu"},
        {"XLA_FLAGS": "/etc/flags", "JAX_COMPILATION_CACHE_DIR": "mine"},
    ],
)
def test_what_the_user_says_stays(plugin, given):
    environ = dict(given)
    gpu_settings.apply(environ)
    assert environ == given
