"""A path with `~` is a home folder's, or an error that names it."""

from __future__ import annotations

import ast
import pathlib

import pytest

from eejax.common.errors import ConfigError
from eejax.common.paths import expanded

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_a_home_folder_takes_the_place_of_its_sign(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/runs/a") == pathlib.Path("/home/me/runs/a")
    for path in ("runs/~", "/a", ".", "/a/~nouser"):
        assert expanded(path) == pathlib.Path(path)


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_a_home_folder_that_is_not_there_is_named(kind):
    with pytest.raises(
        ConfigError, match="'~nouser/x': there is no home folder ~nouser. .*whole path"
    ):
        expanded(kind("~nouser/x"))


def test_every_path_is_expanded_alike():
    """`Path.expanduser` alone raises an error that names no path."""
    files = [f for room in ("eejax", "experiments", "configs") for f in (ROOT / room).rglob("*.py")]
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "expanduser":
                if ast.unparse(node) != "os.path.expanduser":
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert [f.split(":")[0] for f in found] == ["eejax/common/paths.py"], found
