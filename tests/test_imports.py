"""Rooms import one way, and every package is installed."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import inspect
import pathlib
import subprocess
import sys

import pytest

from eejax.checkpoint.language_model import LanguageModel
from eejax.interop import api

ROOT = pathlib.Path(__file__).resolve().parent.parent

# A module may import from its own room and from the rooms before it.
ROOMS = (
    "common",
    "sharding",
    "kernels",
    "models",
    "gates",
    "losses",
    "data",
    "checkpoint",
    "pipeline",
    "train",
    "inference",
    "calibration",
    "tuning",
    "helios",
    "serving",
    "analysis",
    "interop",
)
# Rooms that may import only these, whatever their place in the list.
ONLY = {"analysis": {"common"}}
# Packages, in folders beside eejax/, that import anything and that no room imports.
EDGE = ("configs", "experiments")
# Modules that may import these: `python -m eejax` is the command, whose name is fixed by Python.
MAY_IMPORT_EDGE = {"eejax/__main__.py"}


# Modules of the public functions, which belong to the last room: they import it where it is used,
# and its types for type checkers.
FACADES = {"eejax/__init__.py", "eejax/checkpoint/language_model.py"}


class _WithoutTypes(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        of_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if of_types else self.generic_visit(node)


def without_types(source: str) -> str:
    """Return a module without what only type checkers read."""
    return ast.unparse(_WithoutTypes().visit(ast.parse(source)))


def imported(source: str, package: tuple[str, ...]) -> set[tuple[str, ...]]:
    """Dotted names, as tuples, that a module of `package` imports; relative ones resolved."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            # `from eejax import models` names a room in its alias.
            found |= {(*base, alias.name) for alias in node.names}
    return found


def wrong_arrows(source: str, package: tuple[str, ...]) -> list[str]:
    """What a module of `package` ('eejax', room, ...) imports but may not."""
    room = package[1] if len(package) > 1 else None
    if room is not None and room not in ROOMS:
        return [f"{room} is not a room"]
    wrong = []
    for name in sorted(imported(source, package)):
        dotted = ".".join(name)
        if name[0] in (*EDGE, "kernels", "tests"):
            wrong.append(f"{dotted}: there is no top-level package {name[0]}")
        elif name[0] == "eejax" and len(name) > 1 and name[1] in EDGE:
            wrong.append(f"{dotted}: nothing in eejax imports {name[1]}")
        elif name[:2] == ("jax", "_src"):
            wrong.append(f"{dotted}: private to jax")
        elif name[0] == "eejax" and len(name) > 1 and name[1] in ROOMS:
            other = name[1]
            allowed = (
                ONLY.get(room)
                if room in ONLY
                else set(ROOMS[: ROOMS.index(room) + 1 if room else 0])
            )
            if other != room and other not in allowed:
                wrong.append(f"{dotted}: {room or 'eejax'} may not import {other}")
    return wrong


def package_of(file: pathlib.Path) -> tuple[str, ...]:
    """Return the dotted package that a source file is installed in."""
    folders = file.relative_to(ROOT).parts[:-1]
    return folders if folders[0] in ("eejax", "tests") else ("eejax", *folders)


def sources(*folders: str) -> list[pathlib.Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def modules() -> list[tuple[pathlib.Path, tuple[str, ...]]]:
    """Every source file of the library, with the dotted package it belongs to."""
    files = sources("eejax", "kernels")
    return [(f, package_of(f)) for f in files if str(f.relative_to(ROOT)) not in MAY_IMPORT_EDGE]


@pytest.mark.parametrize(
    "path, package", modules(), ids=lambda v: v.stem if isinstance(v, pathlib.Path) else ".".join(v)
)
def test_imports_go_one_way(path, package):
    source = path.read_text(encoding="utf-8")
    if str(path.relative_to(ROOT)) in FACADES:
        source = without_types(source)
    else:
        assert "import_module" not in source and "__import__" not in source, path
    assert wrong_arrows(source, package) == [], path


def test_methods_of_a_model_are_those_of_the_public_functions():
    for name in ("generate", "calibrate", "tune", "grade"):
        method = inspect.signature(getattr(LanguageModel, name)).parameters
        function = inspect.signature(getattr(api, name)).parameters
        (own, *mine), (model, *theirs) = method.values(), function.values()
        assert (own.name, model.name) == ("self", "model") and mine == theirs, name


@pytest.mark.parametrize(
    "source, package",
    [
        ("import eejax.train.loop", ("eejax", "models")),
        ("from eejax import inference", ("eejax", "train")),
        ("from eejax.models import config", ("eejax", "kernels")),
        ("from eejax.models.params import init", ("eejax", "sharding")),
        ("from ..train import step", ("eejax", "losses")),
        ("def f():\n    from eejax.pipeline import costs", ("eejax", "data")),
        ("from eejax.models import config", ("eejax", "analysis")),
        ("from eejax.interop import flax", ("eejax", "serving")),
        ("import eejax.experiments.train", ("eejax", "interop")),
        ("from eejax import configs", ("eejax", "train")),
        ("from eejax.experiments.command import main", ("eejax",)),
        ("import experiments.train", ("eejax", "interop")),
        ("import kernels", ("eejax", "models")),
        ("from eejax.common import errors", ("eejax",)),
        ("from jax._src import core", ("eejax", "train")),
        ("import eejax.common.errors", ("eejax", "newroom")),
    ],
)
def test_a_wrong_arrow_is_found(source, package):
    assert wrong_arrows(source, package) != []


@pytest.mark.parametrize(
    "source, package",
    [
        ("from eejax.common.errors import require", ("eejax", "sharding")),
        ("from eejax.kernels import attention", ("eejax", "models")),
        ("from . import step\nfrom .state import TrainState", ("eejax", "train")),
        ("import jax\nimport numpy as np", ("eejax", "common")),
        ("from eejax.common import axes", ("eejax", "analysis")),
    ],
)
def test_a_right_arrow_passes(source, package):
    assert wrong_arrows(source, package) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised as Ray is imported
def test_every_name_that_is_imported_from_eejax_exists():
    """Launchers import most names where they use them, so that a test may never come by."""
    missing = []
    files = sources("eejax", "kernels", *EDGE, "tests")
    for file in files:
        for name in imported(file.read_text(), package_of(file)):
            if name[0] == "eejax" and len(name) > 1 and not exists(name):
                missing.append(f"{file.relative_to(ROOT)}: {'.'.join(name)}")
    assert files and not missing


def test_no_launcher_is_imported():
    """A launcher defines flags, and absl has one set of them in a process."""
    texts = {f: f.read_text() for f in sources("experiments", "tests")}
    launchers = {
        (*package_of(f), f.stem)
        for f, text in texts.items()
        if "launch.run(main" in text and package_of(f)[0] == "eejax"
    }
    wrong = [
        f"{file.relative_to(ROOT)}: {'.'.join(name)}"
        for file, text in texts.items()
        for name in imported(text, package_of(file))
        if name in launchers or name[:-1] in launchers
    ]
    assert len(launchers) > 20 and not wrong


def exists(name: tuple[str, ...]) -> bool:
    """Return whether a dotted name is a module, or a value in one."""
    module = importlib.import_module(".".join(name[:-1]))
    if hasattr(module, name[-1]):
        return True
    return hasattr(module, "__path__") and importlib.util.find_spec(".".join(name)) is not None


def test_every_package_is_installed():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    present = {
        ".".join(package_of(file))
        for file in sources("eejax", "kernels", *EDGE)
        if file.name == "__init__.py"
    }
    assert listed == present, "setup.cfg lists the packages by name; add or remove the difference"


def test_folders_beside_eejax_are_found_without_the_repository_on_the_path(tmp_path):
    code = (
        "import eejax.configs, eejax.experiments, eejax.kernels, importlib.util as u;"
        "seen = [n for n in ('configs', 'experiments', 'kernels') if u.find_spec(n)];"
        "assert not seen, f'top-level packages of these names are visible: {seen}'"
    )
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True)
