"""The command `eejax` and the wheel that brings it."""

from __future__ import annotations

import ast
import configparser
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from eejax.experiments import command, config_files

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ("eejax", "kernels", "configs", "experiments")
# Started by `gpu-check` alone.
NO_COMMAND = {"gpu_check.child"}


def test_every_launcher_is_a_command():
    folder = ROOT / "experiments"
    launchers = {
        ".".join(file.relative_to(folder).with_suffix("").parts)
        for file in folder.rglob("*.py")
        if 'if __name__ == "__main__":' in file.read_text()
    }
    modules = [module for module, _ in command.COMMANDS.values()]
    assert len(modules) == len(set(modules))
    assert set(modules) == launchers - NO_COMMAND


def test_every_command_shows_how_it_is_typed():
    for name, (module, line) in command.COMMANDS.items():
        file = ROOT / "experiments" / f"{module.replace('.', '/')}.py"
        docstring = ast.get_docstring(ast.parse(file.read_text()))
        assert f"eejax {name} " in f"{docstring} ".replace("\n", " "), file
        assert line.endswith(".") and len(line) < 70, name


def run(monkeypatch, capsys, *arguments):
    """Return the exit status or error of the command in this process, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["eejax", *arguments])
    monkeypatch.setattr(command.interrupts, "install", lambda: None)
    status = None
    try:
        command.main()
    except SystemExit as end:
        status = end.code
    return status, capsys.readouterr().out


def test_help_lists_the_commands(monkeypatch, capsys):
    for arguments in ([], ["--help"], ["-h"]):
        status, out = run(monkeypatch, capsys, *arguments)
        assert status is None and all(f"\n  {name} " in out for name in command.COMMANDS)
    status, out = run(monkeypatch, capsys, "bench")
    assert status is None and out.startswith("Usage: eejax bench COMMAND ")
    assert "\n  decode " in out and "\n  generate " not in out


@pytest.mark.parametrize(
    "given, near",
    [
        ("tran", "train"),
        ("tune_exits", "tune"),
        ("score_tasks", "score-tasks"),
        ("generate_batch", "generate-batch"),
        ("bench_decode", "bench decode"),
        ("bench decod", "bench decode"),
        ("reproduce.helios", "reproduce helios"),
    ],
)
def test_an_unknown_command_names_the_near_ones(given, near, monkeypatch, capsys):
    status, out = run(monkeypatch, capsys, *given.split())
    assert status.startswith(f"error: there is no command {given!r}. Did you mean {near}")
    assert status.endswith("`eejax --help` lists all commands.") and out == ""


def unread(*arguments, unbuffered=""):
    """Return what Python writes to stderr, and its status, where nobody reads its output."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    os.close(write)
    return done.stderr, done.returncode


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "module, arguments",
    [
        ("eejax", ["--help"]),
        ("eejax", ["bench"]),
        ("eejax", ["generate", "--help"]),
        ("eejax", ["describe", "--config=tiny"]),
        ("eejax.experiments.plan", ["--helpfull"]),
    ],
)
def test_a_command_whose_output_is_closed_ends_quietly(module, arguments, unbuffered):
    error, status = unread("-m", module, *arguments, unbuffered=unbuffered)
    assert error == b"" and status in (0, 1)  # 0 where all was written before it was flushed


def test_an_error_is_told_though_the_output_is_closed():
    program = (
        "import sys\n"
        "from eejax.experiments import closed_output\n"
        "with closed_output.ends_quietly():\n"
        "    print('text')\n"
        "    sys.exit('error: said')\n"
    )
    assert unread("-c", program) == (b"error: said\n", 1)


def test_a_word_like_no_command(monkeypatch, capsys):
    status, _ = run(monkeypatch, capsys, "xyzzy", "--flag")
    assert status == "error: there is no command 'xyzzy'. `eejax --help` lists all commands."


def test_a_command_is_run_as_python_m_does(tmp_path):
    """Its module is `__main__`, which child processes find by its name, and --help its own."""
    program = (
        "import sys\n"
        "from eejax.experiments import command\n"
        "command.run('plan', ['--config=tiny', '--help'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert "\neejax plan:\n" in done.stdout and "--[no]measure" in done.stdout, done.stderr
    assert "jax" not in done.stderr
    listed = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", "-m", "eejax", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "Commands:" in listed.stdout
    imported = {line.split("|")[-1].strip() for line in listed.stderr.splitlines()}
    assert "eejax.experiments.command" in imported
    assert not imported & {"jax", "numpy", "absl"}


def test_config_files_are_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = str(ROOT / "configs" / "layerskip.py")
    for name in ("layerskip", "layerskip.py", "configs/layerskip.py", "configs/layerskip"):
        assert config_files.path_of(name) == file
        assert config_files.path_of(f"{name}:12,tied") == f"{file}:12,tied"
    for name in ("other", "common", "__init__", "runs/layerskip.py", "", "/configs/layerskip.py"):
        assert config_files.path_of(name) == name
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "layerskip.py").touch()
    assert config_files.path_of("configs/layerskip.py") == "configs/layerskip.py"
    assert config_files.path_of("layerskip") == file
    assert "tiny" in config_files.names() and "common" not in config_files.names()


def test_the_distribution_has_one_top_level_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    packages = config["options"]["packages"].split()
    assert {package.split(".")[0] for package in packages} == {"eejax"}
    assert config["options.entry_points"]["console_scripts"].split() == [
        "eejax",
        "=",
        "eejax.experiments.command:main",
    ]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of an environment with the wheel, beside the packages of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, source]
    subprocess.run([sys.executable, "-P", "-m", "pip", *build], check=True)
    (wheel,) = folder.glob("eejax-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"eejax"}
    assert {"eejax/py.typed", "eejax/serving/dashboard.html"} <= set(names)
    environment = folder / "environment"
    venv.create(environment, symlinks=True, with_pip=True)
    python = environment / "bin" / "python"
    install = ["install", "--no-deps", "--no-index", wheel]
    subprocess.run([python, "-m", "pip", *install], check=True)
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip()
    # A path alone: .pth files there, such as that of an editable installation, are not read.
    (pathlib.Path(site) / "others.pth").write_text(sysconfig.get_path("purelib"))
    return environment


@pytest.mark.slow
def test_the_wheel_works_outside_of_a_clone(installed, small_run, tmp_path):
    own = ("PYTHONPATH", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in own}

    def eejax(*arguments):
        done = subprocess.run(
            [installed / "bin" / "eejax", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "import eejax.configs, eejax.kernels; print(eejax.__file__, eejax.configs.__file__)"
    done = subprocess.run(
        [installed / "bin" / "python", "-c", where], cwd=tmp_path, capture_output=True, text=True
    )
    files = done.stdout.split()
    assert len(files) == 2 and all(f.startswith(str(installed)) for f in files), done.stderr
    assert "Commands:" in eejax("--help")
    text = eejax("generate", f"--workdir={small_run}", "--prompt=exit ", "--max_new_tokens=8")
    assert "exit" in text
    train = ("--config=tiny", "--config.train.steps=2", "--config.data.max_bytes=100000")
    eejax("train", *train, "--workdir=run")
    assert (tmp_path / "run" / "config.json").is_file()
    with pytest.raises(AssertionError, match="no such file. Give the path .* demo_wide"):
        eejax("train", "--config=none", "--workdir=run")
