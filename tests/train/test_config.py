"""Config files begin with every field, and a field or value that cannot be is named."""

import dataclasses
import runpy
import typing

import pytest

from eejax.common.errors import ConfigError
from eejax.train.config import SECTIONS, Experiment, check_field, default_config

SIZES = {"vocab_size": 257, "n_layers": 2, "d_model": 16, "n_heads": 2, "context_length": 256}


def configured(**model):
    config = default_config()
    config.model.update(SIZES | model)
    return config


def test_defaults_are_those_of_the_dataclasses():
    values = default_config().to_dict()
    assert set(values) == {f.name for f in dataclasses.fields(Experiment)}
    for name, cls in SECTIONS.items():
        assert set(values[name]) == {f.name for f in dataclasses.fields(cls)}
    built = Experiment.from_dict(configured())
    assert built == Experiment(model=SECTIONS["model"](**SIZES))
    assert Experiment.from_dict(built.to_dict()) == built


def test_a_field_that_must_be_given_is_missed():
    with pytest.raises(ConfigError, match="missing vocab_size"):
        config = configured()
        config.model.vocab_size = None
        Experiment.from_dict(config)
    with pytest.raises(ConfigError, match="config.model: missing"):
        Experiment.from_dict({"train": {"steps": 3}})
    with pytest.raises(ConfigError, match="config.model: missing.*--config.train.base=RUN"):
        Experiment.from_dict(default_config())  # as configs/finetune.py has it without a base
    with pytest.raises(ConfigError, match=r"data.length = 512: .* --config.data.length to at most"):
        config = configured()
        config.data.length = 512
        Experiment.from_dict(config)


def test_optional_fields_take_their_type_and_none():
    config = configured()
    config.optimizer.clip_norm = None
    config.train.eval_batches = None
    config.model.sliding_window = (None, 4)
    config.data.source = ("a", "b")
    built = Experiment.from_dict(config)
    assert built.optimizer.clip_norm is None and built.train.eval_batches is None
    assert built.model.sliding_window == (None, 4) and built.data.source == ("a", "b")


@pytest.mark.parametrize(
    "section, field, value, allowed",
    [
        ("optimizer", "clip_norm", "abc", "must be a number or None"),
        ("optimizer", "b1", True, "must be a number"),
        ("train", "steps", 1.5, "must be an integer"),
        ("train", "remat", 3, "must be one of 'none', 'dots', 'full'"),
        ("data", "source", 7, "must be a string"),
        ("data", "document_masks", 1, "must be True or False"),
        ("exit_weights", "weights", ("a",), "must be a tuple"),
        ("mesh", "pipe", None, "must be an integer"),
    ],
)
def test_values_of_another_type_are_named(section, field, value, allowed):
    values = {"model": SIZES, section: {field: value}}
    with pytest.raises(ConfigError) as error:
        Experiment.from_dict(values)
    assert f"config.{section}.{field} = {value!r}: {allowed}" in str(error.value)


@pytest.mark.parametrize("field", ["begin", "steps"])
def test_a_constant_schedule_has_no_beginning_and_no_end(field):
    with pytest.raises(ConfigError, match=f"{field} = 5: has no meaning in a constant schedule"):
        Experiment.from_dict({"model": SIZES, "exit_weights": {field: 5}})


def test_a_sequence_that_the_shards_cannot_cut_is_named():
    values = {"model": SIZES, "data": {"length": 30}, "mesh": {"model": 4, "sequence": True}}
    with pytest.raises(ConfigError, match="data.length = 30: must divide by mesh.model = 4"):
        Experiment.from_dict(values)
    Experiment.from_dict(values | {"mesh": {"model": 4}})
    Experiment.from_dict(values | {"mesh": {"sequence": True}})


@pytest.mark.parametrize(
    "field, value", [("exits", "aligned"), ("fill", "part1"), ("fill", "both")]
)
def test_exits_are_not_distilled_before_the_final_one_is_known(field, value):
    pipeline = {field: value}
    values = {"model": SIZES, "loss": {"distillation": 0.5}, "pipeline": pipeline}
    with pytest.raises(
        ConfigError, match=f"pipeline.{field} = {value!r}: must be .*loss.distillation"
    ):
        Experiment.from_dict(values | {"mesh": {"pipe": 2}})
    Experiment.from_dict(values)
    filled = values | {"mesh": {"pipe": 2}, "pipeline": {"fill": "part2"}}
    Experiment.from_dict(filled)
    for source in ("completion:a.jsonl", ["a.txt", "chat:hf:b"]):
        with pytest.raises(ConfigError, match="fill = 'part2': must be 'none' where some tokens"):
            Experiment.from_dict(filled | {"data": {"source": source}})


def test_tokens_of_exits_are_not_drawn_on_several_stages():
    values = {"model": SIZES, "loss": {"exit_tokens": 0.5}}
    Experiment.from_dict(values)
    with pytest.raises(ConfigError, match=r"loss.exit_tokens = 0.5: must be 1 on several stages"):
        Experiment.from_dict(values | {"mesh": {"pipe": 2}})
    with pytest.raises(ConfigError, match=r"exit_tokens = 0: must be in \(0, 1\]"):
        Experiment.from_dict(values | {"loss": {"exit_tokens": 0}})


def test_a_section_must_have_fields():
    with pytest.raises(ConfigError, match="config.train = 3: must be a section"):
        Experiment.from_dict({"model": SIZES, "train": 3})


@pytest.mark.parametrize("path", ["train.steps", "model.rotary.theta", "model.exits[0].head"])
def test_fields_are_found(path):
    check_field(path)


@pytest.mark.parametrize(
    "path, message",
    [
        ("train.stepz", "config.train.stepz: no such field. Did you mean steps? Known: steps,"),
        ("trian.steps", "config.trian: no such section. Did you mean train?"),
        ("model.rotary.tehta", "config.model.rotary.tehta: no such field. Did you mean theta?"),
        (
            "mesh.qqqq",
            "config.mesh.qqqq: no such field. Known: sequence, shard_optimizer, shard_params",
        ),
    ],
)
def test_what_is_no_field_is_named_with_what_is_close(path, message):
    with pytest.raises(ConfigError) as error:
        check_field(path)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("name", ["tiny", "demo", "gpt2_small_ee"])
def test_every_config_file_names_every_field(repo_root, name):
    config = runpy.run_path(str(repo_root / f"configs/{name}.py"))["get_config"]()
    for section, cls in SECTIONS.items():
        assert set(config[section]) == set(typing.get_type_hints(cls))
    Experiment.from_dict(config)
