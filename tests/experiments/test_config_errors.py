"""Whatever is wrong with a config file is told in one line: the file, the line and the fix."""

from __future__ import annotations

import re

import pytest
from launchers import parse, parsed

from eejax.common.errors import ConfigError
from eejax.experiments import config_errors, launch
from eejax.train.config import Experiment

HEAD = """from eejax.train.config import default_config


def get_config():
    config = default_config()
    config.model.update(vocab_size=257, n_layers=4, d_model=32, n_heads=2, context_length=64)
"""
BODIES = {  # the seventh line, and what is said of it
    "config.train.steps = stepz": "name 'stepz' is not defined. Define it, or import it.",
    "config.train.steps = = 3": "invalid syntax.",
    'config.model.exits = ({"boundary": 1} {"boundary": 2},)': "Perhaps you forgot a comma?",
    "config.exit_weights.weights = (0.5 (0.1),)": "not callable; perhaps a comma is missing.",
    'config.model.exits = {"boundary": 1}': "exits must be of type tuple, not the dict "
    "boundary: 1. Write (VALUE,), with the comma",
    "config.exit_weights.weights = (0.5)": "weights must be of type tuple, not the float 0.5.",
    'config.train.steps = "many"': "steps must be of type int, not the str many.",
    "config.trainn.steps = 3": "there is no field trainn. Did you mean train?",
    "import nosuchmodule": "No module named 'nosuchmodule'. Install it",
    "config.train.steps = 1 // 0": "ZeroDivisionError: integer division",
    "config.model.exits = config.model.exits[3]": "IndexError: tuple index out of range.",
    'open("/nowhere/at/all")': "No such file or directory: '/nowhere/at/all'",
    "from eejax.sharding.mesh import MeshConfig; MeshConfig(data=0)": "MeshConfig.data = 0:",
}
WHOLES = {
    "x = 1\n": "there is no function get_config. Define it without arguments",
    HEAD: "get_config() returns nothing, not a config. Let it end with: return config.",
    HEAD + "    return 3\n": "get_config() returns int, not a config.",
    HEAD.replace("get_config()", "get_config(size)"): "get_config() missing 1 required",
    "\0": "holds null bytes",
}


def said(path, *arguments):
    with pytest.raises(SystemExit) as ended:
        parse("eejax.experiments.train", f"--config={path}", "--workdir=x", *arguments)
    text = ended.value.code
    assert text.startswith("error: ") and "\n" not in text and "Traceback" not in text
    return text.removeprefix("error: ")


@pytest.mark.parametrize("line", BODIES)
def test_the_line_that_raises_is_named(line, tmp_path, capfd):
    path = tmp_path / "config.py"
    path.write_text(f"{HEAD}    {line}\n    return config\n")
    text = said(path)
    assert text.startswith(f"{path}, line 7: ") and text.endswith(f"The line is: {line}")
    assert BODIES[line] in text
    assert capfd.readouterr() == ("", "")  # no warning of Python's beside it


@pytest.mark.parametrize("whole", WHOLES)
@pytest.mark.parametrize("override", [(), ("--config.data.length=32",)], ids=["", "override"])
def test_the_file_is_named_where_no_line_is_wrong(whole, override, tmp_path, capfd):
    path = tmp_path / "config.py"
    path.write_text(whole)
    text = said(path, *override)
    assert text.startswith(f"{path}: ") and WHOLES[whole] in text
    assert capfd.readouterr() == ("", "")


def test_an_error_in_a_module_of_its_own_names_the_line_that_imports_it(tmp_path, monkeypatch):
    (tmp_path / "mine_of_config_errors.py").write_text("x = [\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "config.py"
    path.write_text("import mine_of_config_errors\n")
    text = said(path)
    assert text.startswith(f"{path}, line 1: ") and "mine_of_config_errors.py" in text


def test_a_field_that_cannot_be_used_has_its_line(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(f"{HEAD}    config.train.stepz = 3  # stepz\n    return config\n")
    values = {"model": {"vocab_size": 257}, "train": {"stepz": 3}}
    with pytest.raises(ValueError) as caught:
        Experiment.from_dict(values)
    text = config_errors.with_line(str(caught.value), str(path))
    assert text.startswith(f"{path}, line 7: config.train.stepz = 3: no such field.")


@pytest.mark.parametrize(
    "text, line",
    [
        ("x.steps = 1\n", 1),
        ("x.update(\n    steps=1,\n)\n", 2),
        ('x = {"step": 1,\n     "steps": 2}\n', 2),
        ('"""steps"""\n\ndef f():\n    "steps"\n    x.steps = 1  # steps\n', 5),
        ('"""Run\nfor steps\n"""\n# steps\nx["few steps"] = stepsize\n', None),
        ("x.steps = 1\nx.steps = 2\n", None),  # either may be the cause
        ("x = [\n", None),
        ("", None),
    ],
)
def test_only_a_line_that_sets_the_field_is_named(text, line, tmp_path):
    path, error = tmp_path / "config.py", "train.steps = 0: must be at least 1."
    path.write_text(text)
    expected = error if line is None else f"{path}, line {line}: {error}"
    assert config_errors.with_line(error, str(path)) == expected
    assert config_errors.with_line(error, str(path), ["data.length"]) == expected
    # The command line, not the file, says what is wrong.
    assert config_errors.with_line(error, str(path), ["train.steps"]) == error
    for other in ("steps: missing. Name one.", "no field's name", "it has no steps = 3"):
        assert config_errors.with_line(other, str(path)) == other


def test_a_field_of_the_command_line_has_no_line_of_the_file(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(f"{HEAD}    config.train.steps = 2\n    return config\n")
    flags = (f"--config={path}", "--workdir=x")
    error = ConfigError("train.steps = 0: must be at least 1.")
    with parsed("eejax.experiments.train", *flags, "--config.train.steps=0"):
        assert launch._mistake(error) == str(error)
    with parsed("eejax.experiments.train", *flags):
        assert launch._mistake(error) == f"{path}, line 7: {error}"


def test_a_flag_that_must_be_given_is_named():
    with pytest.raises(SystemExit, match="^error: --workdir: is required. See --help.$"):
        parse("eejax.experiments.evaluate")


def test_of_no_file_nothing_is_said(tmp_path):
    assert config_errors.located(ValueError("x"), str(tmp_path / "other.py")) is None
    assert re.match(r".*no such file\. Give the path", said(tmp_path / "none.py"))
