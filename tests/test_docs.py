"""README and documentation: commands, flags, names, files and links that they mention exist."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import pathlib
import re
import shlex
import subprocess
import textwrap
import warnings

import launchers
import pytest

from eejax.experiments import command, config_files
from eejax.train.config import default_config

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
# CHANGELOG.md names what is gone: only its links are followed.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
# The op that a tutorial writes.
OP = "swiglu"
WRITTEN = f"eejax.kernels.{OP}"
EVERYWHERE = {"help", "helpshort", "helpfull", "v", "version"}
# Flags of other programs that pages mention by themselves.
FOREIGN = {"scores", "xla_gpu_enable_command_buffer"}


def named(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda p: str(p.relative_to(ROOT)))


def split(text: str) -> tuple[list[tuple[str, str]], str]:
    """Return the code blocks of a page as (language, source), and the page without them."""
    blocks, rest = [], []
    lines = iter(text.splitlines())
    for line in lines:
        if fence := re.match(r"( *)```(\w*)", line):
            block = list(itertools.takewhile(lambda x: x.strip() != "```", lines))
            blocks.append((fence[2], textwrap.dedent("\n".join(block))))
        elif line.startswith("    "):
            blocks.append(("", line[4:]))
        else:
            rest.append(line)
    return blocks, "\n".join(rest)


def spans(page: pathlib.Path) -> list[str]:
    """Return the code spans of a page, each on one line."""
    _, rest = split(page.read_text())
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]


def commands(page: pathlib.Path) -> list[tuple[str, list[str]]]:
    """Return (command, arguments) of every `eejax ...` in code blocks and spans of a page."""
    blocks, _ = split(page.read_text())
    shell = "\n".join(source for language, source in blocks if language != "python")
    found = []
    for line in [*shell.replace("\\\n", " ").splitlines(), *spans(page)]:
        for typed in re.findall(r"(?:^|[ /$;(])eejax ([a-z].*)", line.replace("\\|", "|")):
            typed = re.split(r"&&|[|;)]| & *$", typed)[0]
            words = shlex.split(re.sub(r"'|\.\.\.", "", typed), comments=True)
            name = " ".join(words[:2]) if words[0] in ("bench", "reproduce") else words[0]
            found.append((name, words[len(name.split()) :]))
    return found


@functools.cache
def flags_of(name: str) -> frozenset[str]:
    return launchers.flags_of(f"eejax.experiments.{command.COMMANDS[name][0]}")


@functools.cache
def fields() -> frozenset[str]:
    """Return the names of all settings, as --config.NAME sets them."""

    def walk(tree, before):
        for key, value in tree.items():
            yield f"{before}{key}"
            if hasattr(value, "items"):
                yield from walk(value, f"{before}{key}.")

    return frozenset(walk(default_config(), ""))


def check_flag(argument: str, known: frozenset[str]) -> None:
    flag, _, value = re.match(r"--([\w.-]+)(=?)(.*)", argument).groups()
    if flag.startswith("config."):
        assert flag.removeprefix("config.") in fields(), argument
        return
    assert flag in known | EVERYWHERE or flag.removeprefix("no") in known, argument
    if flag == "config" and re.fullmatch(r"configs/\w+\.py(:[\w,]+)?|\w+", value):
        path = value.partition(":")[0]
        assert config_files.path_of(path) != path or (ROOT / path).is_file(), argument


@named(PAGES)
def test_commands_and_their_flags_exist(page):
    for name, arguments in commands(page):
        if name in ("bench", "reproduce"):
            continue
        assert name in command.COMMANDS, (name, arguments)
        for argument in arguments:
            if re.match(r"\[?--\w", argument):
                check_flag(argument.strip("[]"), flags_of(name))


@named(PAGES)
def test_flags_by_themselves_are_flags_of_some_command(page):
    known = frozenset().union(*map(flags_of, command.COMMANDS), FOREIGN)
    for span in spans(page):
        if span.startswith("--"):
            for argument in re.findall(r"(?:^| )(--\w[\w.=-]*)", span):
                check_flag(argument, known)


def resolved(dotted: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        try:
            with warnings.catch_warnings():  # Ray's, of its own
                warnings.simplefilter("ignore")
                value = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            # A field without a default is known by its annotation alone.
            if not hasattr(value, part):
                return part in getattr(value, "__annotations__", {}) and part == parts[-1]
            value = getattr(value, part)
        return True
    return False


@named(PAGES)
def test_python_compiles_and_its_imports_exist(page):
    for language, source in split(page.read_text())[0]:
        if language != "python":
            continue
        if re.match(r'"\w', source):  # an entry of a dict
            source = f"{{{source}}}"
        tree = ast.parse(source)
        compile(source, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        modules = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules |= {a.asname or a.name: a.name for a in node.names if not a.asname}
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    ours = node.module.startswith("eejax") and not node.module.startswith(WRITTEN)
                    assert not ours or resolved(name), name
                    assert not alias.name.startswith("_"), name
                    modules[alias.asname or alias.name] = name
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{modules.get(node.value.id, '')}.{node.attr}"
                ours = name.startswith("eejax") and not name.startswith(WRITTEN)
                assert not ours or resolved(name), name


@named(PAGES)
def test_dotted_names_exist(page):
    for span in spans(page):
        name = re.match(r"eejax(\.\w+)+", span)
        if name and not span.startswith(WRITTEN) and "<" not in span:
            assert resolved(name[0]), span


@named(PAGES)
def test_files_exist(page):
    folders = "eejax|kernels|configs|experiments|tests|docs"
    for span in spans(page):
        if re.fullmatch(rf"({folders})/[\w./]*", span) and OP not in span:
            assert (ROOT / span).exists(), span


def anchors(page: pathlib.Path) -> set[str]:
    """Return the anchors of a page's headings."""
    heads = re.findall(r"(?m)^#+ (.*)", split(page.read_text())[1])
    plain = (re.sub(r"[^\w\s-]", "", head.replace("`", "")) for head in heads)
    return {re.sub(r"[-\s]+", "-", head.strip().lower()) for head in plain}


@named([*PAGES, ROOT / "CHANGELOG.md"])
def test_links_are_alive(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", split(page.read_text())[1]):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        if anchor and other.parent.name != "reference":  # there they are names of Python objects
            assert anchor in anchors(other), target


def test_names_that_are_found_on_the_way_exist():
    """The page for newcomers names functions and classes; each occurs in the source."""
    source = "\n".join(
        file.read_text()
        for folder in ("eejax", "kernels", "experiments", "tests")
        for file in (ROOT / folder).rglob("*.py")
        if file != pathlib.Path(__file__).resolve()
    )
    for span in spans(ROOT / "docs" / "FINDING_YOUR_WAY.md"):
        name = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", span)
        if name and not span.endswith((".md", ".py")):
            for part in span.split("."):
                assert re.search(rf"\b{part}\b", source), span


def test_the_reference_has_a_page_for_every_room():
    rooms = {p.parent.name for p in (ROOT / "eejax").glob("*/__init__.py")}
    pages = {p.stem for p in (ROOT / "docs" / "reference").glob("*.md")} - {"index", "eejax"}
    assert pages == rooms | {"kernels", "configs", "experiments"}


def test_readme_is_short_and_has_two_commands():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 90
    made = re.findall(r"\bmake ([a-z-]+)", text)
    assert set(made) == {"quickstart", "test"}


def test_make_runs_what_its_comments_name():
    named = re.findall(r"^# make ([a-z-]+) ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"env", "quickstart", "train-demo", "test"} <= {*named}
    for target in named:
        # A make that runs these tests would add the names of the folders it enters.
        command = ["make", "-n", "--no-print-directory", "-W", "pyproject.toml", target]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert shown.returncode == 0, shown.stderr
        if target in ("quickstart", "train-demo"):
            assert shown.stdout.rstrip().endswith(f"/eejax {target}")


@pytest.mark.parametrize("script", ["Makefile", "tests/stacks.sh"])
def test_tests_that_scripts_name_are_there(script):
    """`$(addprefix tests/train/test_, a.py b.py)` names two."""
    text = (ROOT / script).read_text().replace("\\\n", " ")
    named = set(re.findall(r"(?<![\w/])tests/[\w/]+(?:\.py|\.sh)?(?![\w/,])", text))
    for prefix, rest in re.findall(r"addprefix (tests/[\w/]+),([^()]*)\)", text):
        named |= {prefix + name for name in rest.split() if name.endswith(".py")}
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]
