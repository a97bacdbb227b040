"""Facts that a run remembers of its base, and settings that are read before the base is."""

from __future__ import annotations

import json
import pathlib

import pytest

from eejax.common.errors import CheckpointError, ConfigError
from eejax.data import ByteTokenizer, save_tokenizer
from eejax.models.config import ModelConfig
from eejax.train import base as bases
from eejax.train.config import SECTIONS, default_config

FACTS = bases.FixedFields(
    "", 6, ModelConfig(23, 2, 16, 2, 16), ByteTokenizer().fingerprint, "0" * 32
)


def resumable(workdir, source=None, begun=FACTS):
    """Make `workdir` that of a run with a checkpoint; `source`: of the base that it began with."""
    (workdir / "checkpoints" / "2").mkdir(parents=True)
    save_tokenizer(ByteTokenizer(), workdir / "tokenizer")
    if source is not None:
        bases.remember(workdir, begun._replace(source=bases._located(source)))


def on(source, **sections):
    """Configure a run with this `train.base`, and these fields of sections."""
    config = default_config()
    config.train.base, config.data.length = source, 16
    values = config.to_dict()
    return values | {name: values[name] | fields for name, fields in sections.items()}


@pytest.mark.parametrize(
    "begun, change, resumed",
    [
        ("a:base", None, "b:../a/base"),
        ("a:base", "base", "a:base"),
        ("a:base", "base", "b:../a/base"),
        ("a:link", None, "a:base"),
        ("a:base", None, "a:link"),
        ("a:link", "link", "a:link"),
        ("a:link", "link", "b:../a/link"),
        ("a:link", "base", "a:link"),
        ("a:far/../base", "far", "b:base"),  # behind a link, ".." is of the folder it leads to
        ("a:owner/name", None, "b:owner/name"),
    ],
)
def test_a_base_is_known_by_its_path_however_it_is_written(
    tmp_path, monkeypatch, begun, change, resumed
):
    for folder in ("a/base", "b/base", "b/near"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "a" / "link").symlink_to("base")
    (tmp_path / "a" / "far").symlink_to("../b/near")
    folder, source = begun.split(":")
    monkeypatch.chdir(tmp_path / folder)
    resumable(tmp_path / "run", source)
    if change is not None:
        path = tmp_path / "a" / change
        path.unlink() if path.is_symlink() else path.rmdir()
    folder, source = resumed.split(":")
    monkeypatch.chdir(tmp_path / folder)
    found = bases.with_base(on(source), tmp_path / "run")
    assert found.train.base == bases.remembered(tmp_path / "run").source
    assert found.model == FACTS.config


@pytest.mark.parametrize(
    "section, field, value, message",
    [
        ("model", "exits", (1,), r"config.model.exits = \(1,\): must be a tuple"),
        ("model", "exits", 5, "config.model.exits = 5: must be a tuple"),
        ("model", "exits", "abc", "config.model.exits = 'abc': must be a tuple"),
        (
            "model",
            "exits",
            {"boundary": 0},
            "config.model.exits = {'boundary': 0}: must be a tuple",
        ),
        ("model", "exits", ({"boundary": [1]},), r"ExitConfig.boundary = \(1,\): must be an int"),
        ("model", "exits", ({"boundary": {}},), "ExitConfig.boundary = {}: must be an int"),
        ("model", "exits", ({},), "ExitConfig: missing boundary"),
        ("tune", "exits", 1, "config.tune.exits = 1: must be a tuple"),
        ("data", "tokenizer", 5, "config.data.tokenizer = 5: must be a string"),
        ("train", "base", 5, "config.train.base = 5: must be a string"),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path, section, field, value, message):
    resumable(tmp_path, "a")
    with pytest.raises(ConfigError, match=message):
        bases.with_base(on("a", **{section: {field: value}}), tmp_path)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_type_of_every_field_is_checked_before_a_base_is_read(section):
    values = on("a")
    with pytest.raises(ConfigError, match=f"config.{section} = 5: must be a section"):
        bases.with_base(values | {section: 5})
    for field in values[section]:
        with pytest.raises(ConfigError, match=rf"config.{section}.{field} = <object"):
            bases.with_base(values | {section: values[section] | {field: object()}})


KEPT = json.loads(json.dumps(FACTS._asdict() | {"source": "/a", "config": FACTS.config.to_dict()}))


@pytest.mark.parametrize(
    "text",
    [
        *(
            json.dumps(KEPT | {field: value})
            for field, values in {
                "source": (None, 5, "a\0b", ["/a"]),
                "step": ("x", -1, 1.5, True),
                "digest": (5, ["0"]),
                "tokenizer": (None, 5),
                "pretrained": (5, "llama"),
                "config": (None, 5, [], {}, KEPT["config"] | {"exits": [1]}),
                "other": (1,),
            }.items()
            for value in values
        ),
        *(
            json.dumps({k: v for k, v in KEPT.items() if k != field})
            for field in KEPT
            if field != "pretrained"  # files of before have none
        ),
        *("", "[]", "5", "null", '"/a"', "\udcff"),
        pytest.param("[" * 100_000, id="deep"),
    ],
)
@pytest.mark.parametrize("source", [None, "/a"])
def test_a_file_of_facts_that_is_not_one_is_named(tmp_path, text, source):
    (tmp_path / "base.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(CheckpointError, match="base.json: cannot be read"):
        bases.remembered(tmp_path, source)


@pytest.mark.parametrize("make", [pathlib.Path.mkdir, lambda p: p.symlink_to("nowhere")])
def test_facts_that_are_no_file_are_not_passed_over(tmp_path, make):
    make(tmp_path / "base.json")
    with pytest.raises(CheckpointError, match="base.json: cannot be read"):
        bases.remembered(tmp_path)
