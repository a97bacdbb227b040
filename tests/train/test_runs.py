"""What makes a configuration another run, setting by setting."""

import pytest

from eejax.common.errors import CheckpointError
from eejax.train.config import Experiment
from eejax.train.runs import check_same_run, saved_experiment

VALUES = {
    "model": {
        "vocab_size": 257,
        "n_layers": 2,
        "d_model": 16,
        "n_heads": 2,
        "context_length": 16,
        "exits": [{"boundary": 1}],
    },
    "exit_weights": {"weights": [0.5]},
    "data": {"length": 16},
}


def changed(section, **fields):
    return Experiment.from_dict(VALUES | {section: VALUES.get(section, {}) | fields})


def metadata(experiment):
    return {"experiment": experiment.to_dict(), "data": {"dataset": "abc"}}


SAVED = metadata(Experiment.from_dict(VALUES))


@pytest.mark.parametrize(
    "section, field, value, old",
    [
        ("model", "d_model", 32, "16"),
        ("model", "norm", "layernorm", "'rmsnorm'"),
        ("model", "exits", [{"boundary": 1, "head": "own"}], "[{"),
        ("data", "length", 8, "16"),
        ("data", "document_masks", True, "False"),
        ("data", "split_seed", 1, "0"),
        ("train", "seed", 1, "0"),
        ("train", "layer_dropout", 0.1, "0.0"),
        ("train", "ema", 0.9, "None"),
        ("train", "loss_scale", 2.0, "65536.0"),
        ("loss", "distillation", 0.5, "0.0"),
        ("exit_weights", "curriculum", "rotating", "'none'"),
        ("optimizer", "b2", 0.9, "0.95"),
        ("optimizer", "clip_norm", None, "1.0"),
        ("exit_weights", "weights", [0.25], "[0.5]"),
    ],
)
def test_what_moves_the_run_is_refused_by_name(section, field, value, old):
    wanted = changed(section, **{field: value})
    with pytest.raises(CheckpointError) as error:
        check_same_run(SAVED, wanted, "abc", "runs/x")
    message = str(error.value)
    assert f"{section}.{field}: {old}" in message and "in the configuration" in message
    assert "runs/x" in message and "Restore these settings to resume" in message


@pytest.mark.parametrize(
    "section, fields",
    [
        ("train", {"microbatches": 2, "remat": "full"}),
        ("train", {"log_every": 1, "eval_every": 0, "eval_batches": None}),
        ("train", {"checkpoint_every": 7, "keep_checkpoints": 1}),
        ("data", {"source": "elsewhere/*.txt", "packed": "elsewhere"}),
        ("mesh", {"data": 4, "model": 2, "sequence": True, "shard_optimizer": False}),
        ("mesh", {"shard_params": True}),
    ],
)
def test_what_leaves_the_run_as_it_was_may_change(section, fields):
    check_same_run(SAVED, changed(section, **fields), "abc", "runs/x")


def test_other_text_is_refused():
    with pytest.raises(CheckpointError, match="data.source = 'python-stdlib': fingerprint abc"):
        check_same_run(SAVED, Experiment.from_dict(VALUES), "abd", "runs/x")


@pytest.mark.parametrize(
    "sections, allowed",
    [
        ({}, False),  # cosine
        ({"optimizer": {"schedule": "linear"}}, False),
        ({"optimizer": {"schedule": "constant"}}, True),
        ({"optimizer": {"schedule": "inverse_sqrt"}}, True),
        (
            {
                "optimizer": {"schedule": "constant"},
                "exit_weights": {"weights": [0.5], "kind": "linear", "initial": [0.1]},
            },
            False,
        ),
        (
            {
                "optimizer": {"schedule": "constant"},
                "exit_weights": {"weights": [0.5], "kind": "linear", "initial": [0.1], "steps": 9},
            },
            True,
        ),
    ],
)
def test_more_steps_where_no_schedule_ends_with_the_run(sections, allowed):
    saved, wanted = (
        Experiment.from_dict(VALUES | sections | {"train": {"steps": n}}) for n in (100, 200)
    )
    if allowed:
        return check_same_run(metadata(saved), wanted, "abc", "runs/x")
    with pytest.raises(CheckpointError, match="train.steps: 100 in the checkpoint, 200"):
        check_same_run(metadata(saved), wanted, "abc", "runs/x")


def test_a_run_of_another_version_is_named():
    broken = {"experiment": {"model": {"new_field": 1}}, "version": "9.9"}
    for meta in ({}, broken):
        with pytest.raises(CheckpointError, match="another version of eejax"):
            saved_experiment(meta)
