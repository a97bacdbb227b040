"""Traces: what is recorded of a model is what post-hoc generation says, and files that are none."""

from __future__ import annotations

import dataclasses
import json
import zipfile

import jax
import numpy as np
import pytest

from eejax.common.errors import ConfigError, DataError
from eejax.experiments.helios_simulation import traces
from eejax.experiments.helios_simulation.traces import ModelTrace, PromptTrace
from eejax.helios.pool import FleetMember
from eejax.inference import Generator
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig

NEW = 6
CONFIG = ModelConfig(
    vocab_size=31,
    n_layers=2,
    d_model=16,
    n_heads=2,
    context_length=32,
    head="tied",
    exits=(ExitConfig(1),),
)


@pytest.fixture(scope="module")
def member():
    made = params.init(CONFIG, jax.random.key(3))
    # So that it is sure of some tokens, and not of others.
    sharper = jax.tree.map(lambda a: 20 * a if 31 in a.shape or 32 in a.shape else a, made)
    return FleetMember(sharper, CONFIG, dict(threshold=0.6, prefill_exit=True))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 31, n).tolist() for n in (7, 3, 19, 26, 5, 4, 6, 12)]


@pytest.fixture(scope="module")
def recorded(member, prompts):
    return traces.record(member, prompts, NEW, slots=4)


def test_a_trace_is_the_full_models_text_as_every_exit_has_it(member, prompts, recorded):
    generator = Generator.make(member.params, CONFIG, "posthoc")
    full = generator.generate(prompts, NEW, threshold=1.0)
    assert recorded.tokens.shape == recorded.confidences.shape == (8, NEW, 2)
    np.testing.assert_array_equal(recorded.tokens[..., -1], full.tokens)
    assert recorded.prompts.tolist() == [7, 3, 19, 26, 5, 4, 6, 12]
    assert recorded.exit_boundaries == (1, 2) and recorded.thresholds == pytest.approx((0.6,))
    assert recorded.prefill_exit and recorded.new == NEW and len(recorded) == 8
    np.testing.assert_allclose(recorded.confidences[..., -1], full.confidences, rtol=1e-4)
    assert recorded.same[..., -1].all() and not recorded.same[..., 0].all()
    # Exits are those of post-hoc generation, up to the first token that is not the full model's.
    exits, below = recorded.leaves()
    rules = dict(threshold=member.rules["threshold"], prefill_exit=True)
    early = generator.generate(prompts, NEW, **rules)
    checked = 0
    for i in range(len(prompts)):
        for t in range(NEW):
            assert exits[i, t] == early.exits[i, t] and not below[i, t]
            checked += 1
            assert recorded.tokens[i, t, exits[i, t]] == early.tokens[i, t]
            if early.tokens[i, t] != full.tokens[i, t]:
                break
    assert checked > 8 and 0 < np.mean(exits < 1) < 1


def test_who_else_is_recorded_makes_no_difference(member, prompts, recorded):
    some = [6, 2, 0, 4]
    again = traces.record(member, [prompts[i] for i in some], NEW, slots=4)
    np.testing.assert_array_equal(again.tokens, recorded.tokens[some])
    np.testing.assert_allclose(again.confidences, recorded.confidences[some], rtol=1e-3)
    assert again.prompts.tolist() == [6, 19, 7, 5]


@pytest.mark.parametrize(
    "rules, message",
    [
        (dict(decay=1.0), "decay"),
        (dict(threshold=2.0), "threshold"),
        (dict(gate="patience"), "gate = 'patience': must have a confidence"),
    ],
)
def test_rules_that_cannot_be_recorded(member, prompts, rules, message):
    with pytest.raises(ConfigError, match=message):
        traces.record(dataclasses.replace(member, rules=rules), prompts[:1], 2, slots=4)


def test_prompts_leave_room(member):
    with pytest.raises(ConfigError, match="27 tokens"):
        traces.record(member, [[1] * 27], NEW, slots=4)


def made(**changes) -> ModelTrace:
    """Two prompts of three tokens, at three exits."""
    sure = np.array(
        [
            [[0.9, 0.9, 1.0], [0.4, 0.8, 0.3], [0.1, 0.2, 0.3]],
            [[0.5, 0.1, 0.3], [0.4, 0.4, 0.2], [0.6, 0.1, 0.9]],
        ],
        np.float32,
    )
    own = dict(
        exit_boundaries=(1, 2, 4),
        thresholds=(0.5, 0.5),
        prefill_exit=False,
        prompts=np.array([2, 5], np.int32),
        tokens=np.arange(18, dtype=np.int32).reshape(2, 3, 3),
        confidences=sure,
    )
    return ModelTrace(**(own | changes))


def test_where_tokens_leave():
    exits, below = made().leaves()
    assert exits.tolist() == [[2, 1, 2], [2, 2, 0]] and not below.any()
    # Two exits loaded: the others leave by the second one, below its threshold.
    exits, below = made().leaves(depth=2)
    assert exits.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert below.tolist() == [[False, False, True], [True, True, False]]
    exits, below = made(prefill_exit=True).leaves((0.95, 0.4))
    assert exits.tolist() == [[1, 1, 2], [2, 1, 2]]
    exits, below = made(prefill_exit=True).leaves(1.0, depth=1)
    assert not exits.any() and below.all()
    for bad in ((0.5,), 1.5, (0.1, np.nan)):
        with pytest.raises(ConfigError, match="thresholds"):
            made().leaves(bad)
    with pytest.raises(ConfigError, match="depth = 4"):
        made().leaves(depth=4)


def test_parts_and_orders():
    trace = PromptTrace({"a": made(), "b": made(thresholds=(1.0, 1.0))}, ("one", "two"))
    turned = trace.ordered([1, 0])
    assert turned.kinds == ("two", "one") and turned.models["a"].prompts.tolist() == [5, 2]
    part = turned.part(0, 1)
    assert len(part) == 1 and part.kinds == ("two",)
    np.testing.assert_array_equal(part.models["b"].tokens[0], trace.models["b"].tokens[1])


def test_files(tmp_path):
    trace = PromptTrace({"a/b": made(), "b": made(thresholds=(1.0, 0.3))}, ("one", "é"))
    trace.save(tmp_path / "deep" / "trace.npz")
    again = traces.load(tmp_path / "deep" / "trace.npz")
    assert again.kinds == trace.kinds and [*again.models] == ["a/b", "b"]
    for name, model in trace.models.items():
        for field in dataclasses.fields(ModelTrace):
            one, two = (getattr(m, field.name) for m in (model, again.models[name]))
            np.testing.assert_array_equal(one, two)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["trace.npz"]


def damaged(folder, change, about=None):
    PromptTrace({"a": made()}, ("one", "two")).save(folder / "trace.npz")
    with np.load(folder / "trace.npz") as file:
        arrays = dict(file)
    told = json.loads(str(arrays["about"]))
    (about or (lambda a: None))(told)
    arrays["about"] = np.array(json.dumps(told))
    change(arrays)
    np.savez(folder / "trace.npz", **arrays)
    return folder / "trace.npz"


@pytest.mark.parametrize(
    "change, about, message",
    [
        (lambda a: a.pop("tokens_0"), None, "has no 'tokens_0'"),
        (lambda a: a.update(tokens_0=a["tokens_0"][:1]), None, "tokens = .*must be .2 prompts"),
        (lambda a: a.update(tokens_0=a["tokens_0"] * 0.5), None, "a.tokens = 'f'"),
        (lambda a: a["confidences_0"].fill(np.nan), None, "confidences = 'nan..nan'"),
        (lambda a: a["confidences_0"].fill(1.5), None, "must lie in .0, 1."),
        (lambda a: a["prompts_0"].fill(0), None, "prompts"),
        (lambda a: None, lambda t: t.update(version=7), "version = 7: must be 1"),
        (lambda a: None, lambda t: t.update(kinds=["one"]), "kinds = 1: must be one for each of 2"),
        (lambda a: None, lambda t: t["models"]["a"].update(stops=[3, 2, 4]), "exit_boundaries"),
        (lambda a: None, lambda t: t["models"]["a"].update(thresholds=[2, 0]), "thresholds"),
    ],
)
def test_files_that_are_none(tmp_path, change, about, message):
    path = damaged(tmp_path, change, about)
    with pytest.raises(DataError, match=f"(?s)trace.npz: .*{message}"):
        traces.load(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nothing", b"text", b"array"])
def test_what_is_no_npz(tmp_path, content):
    path = tmp_path / "trace.npz"
    path.write_bytes(content)
    if content == b"array":  # numpy reads it, and finds one in place of several
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    with pytest.raises(DataError, match=r"trace.npz: is not a trace\. Record it again\.$"):
        traces.load(path)


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="none.npz: cannot be read as a trace .*No such file"):
        traces.load(tmp_path / "none.npz")
    with zipfile.ZipFile(tmp_path / "trace.npz", "w") as file:
        file.writestr("about.npy", b"nothing")
    with pytest.raises(DataError, match="trace.npz: "):
        traces.load(tmp_path / "trace.npz")
