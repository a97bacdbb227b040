"""One word a meaning: class names are unique, and words of an earlier dialect stay out."""

from __future__ import annotations

import ast
import collections
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("eejax", "kernels", "configs", "experiments")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))

# docs/GLOSSARY.md has the terms.
REPLACED = {
    "Aims": "FleetConfig",
    "Ask": "EngineRequest",
    "Chosen": "SegmentBatch",
    "Desk": "StageProgress",
    "Joining": "PromptRows",
    "LEAST_JAX": "MIN_JAX",
    "Left": "ClientDisconnected",
    "Likely": "TopLogprobs",
    "MOST_ROWS": "MAX_ROWS",
    "MOST_WIDTH": "MAX_WIDTH",
    "OLDEST": "MIN_CAPABILITY",
    "Revealed": "StreamingDetokenizer",
    "Shaping": "LogitsParams",
    "Shown": "TextDelta",
    "Standing": "SlotProgress",
    "Traveller": "InFlightToken",
    "Wish": "SegmentDemand",
    "Wishes": "GenerationRequest",
    "aims": "config",
    "auditor": "verifier",
    "by_first": "broadcast_from_process_zero",
    "max_depth": "num_segments",
    "min_depth": "min_exit_layer",
    "misshapen": "validation_error",
    "most_drafts": "max_drafts",
    "most_inserted": "max_inserted",
    "most_kept": "max_kept",
    "of_slots": "select_slots",
    "sealed": "sanitize_kv",
    "settle": "commit_tokens",
    "several": "is_multiprocess",
    "shaping": "logits_params",
    "standing": "progress",
    "stops": "exit_boundaries, stop_token_ids or stop_strings",
    "taken_along": "moved",
    "untold": "ambiguities",
    "wished": "demand",
    "wishes": "body",
}

# A docstring begins with an imperative or a noun phrase.
NO_BEGINNINGS = {
    *("As", "By", "How", "Of", "Until", "Up", "What", "When", "Where", "Whether", "Who", "With"),
    *("Returns", "Raises", "Yields", "Makes", "Takes", "Gives", "Runs", "Reads", "Writes"),
}


def names(source: str) -> set[str]:
    """Return every name that a module defines, reads or passes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.Name(id=name):
                found.add(name)
            case ast.AsyncFunctionDef(name=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.keyword(arg=str(name)) | ast.alias(name=name):
                found.add(name)
    return found


def test_names_of_classes_and_aliases_are_unique():
    files = collections.defaultdict(list)
    for file in FILES:
        module = ast.parse(file.read_text())
        found = [node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
        for node in module.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]) if re.match("[A-Z].*[a-z]", name):
                    found.append(name)
        for name in found:
            files[name].append(str(file.relative_to(ROOT)))
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_replaced_words_are_not_used(file):
    used = names(file.read_text()) & REPLACED.keys()
    assert {word: REPLACED[word] for word in used} == {}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_begin_with_an_imperative_or_a_noun_phrase(file):
    wrong = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if first.split(" ")[0] in NO_BEGINNINGS:
                wrong.append(first)
    assert wrong == []


def test_names_of_every_kind_are_found():
    source = "class A: b: int\ndef c(d, *, e=1): return f.g(h=1)\nfrom i import j\n"
    assert names(source + "async def k(): l = 1") == {*"Abcdefghjkl", "int"}
