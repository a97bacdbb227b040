"""What a model writes itself: conversations in its template's form, or continued texts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_chat import tiny_chat

import eejax
from eejax import data
from eejax.common.errors import ConfigError, DataError
from eejax.data.tokenizers import ByteTokenizer
from eejax.interop import api
from eejax.tuning import own_text


@pytest.fixture(scope="module")
def model():
    return tiny_chat()


@pytest.fixture(scope="module")
def written(model):
    return eejax.own_text(model, 1500, watch=None)


def test_a_model_with_a_template_writes_conversations(written):
    found = [json.loads(d.text)["messages"] for d in written.documents()]
    assert len(found) >= 10 and all(d.form == "chat" for d in written.listed)
    for asked, answered in found:
        assert (asked["role"], answered["role"]) == ("user", "assistant")
        assert asked["content"].strip() and answered["content"].strip()
    assert len({d.name for d in written.listed}) == len(found)
    assert written.describe()["form"] == "chat"  # so that answers alone are learned


def test_answers_are_those_of_the_model_and_alone_are_learned(model, written, tmp_path):
    packed = data.pack(written, model.tokenizer, tmp_path, validation_fraction=0.0)
    split = packed.split("train")
    ids, counted = split.counted(0, len(split))
    text = model.tokenizer.decode(ids[np.asarray(counted)])
    answers = [json.loads(d.text)["messages"][1]["content"] for d in written.listed]
    # Ends of turns are learned too; the byte tokenizer has them as text.
    learned = [f"{answer}<|im_end|>\n" for answer in answers]
    assert text == "".join(learned)
    assert int(np.sum(counted)) == sum(len(text.encode()) for text in learned)


def test_the_seed_decides_the_text(model, written):
    again, other = (eejax.own_text(model, 200, seed=n, watch=None) for n in (0, 5))
    assert again.listed == written.listed[: len(again.listed)]
    assert other.describe() != again.describe()
    first, rest = written.split(0.25)
    assert first.listed + rest.listed == written.listed
    assert len(rest.listed) == round(0.25 * len(written.listed))


def test_any_other_model_continues_texts():
    model = tiny_chat()
    model = eejax.LanguageModel(model.config, model.params, ByteTokenizer())
    lines = []
    text = eejax.own_text(model, 300, watch=lines.append)
    assert all(d.form == "text" and d.text for d in text.documents())
    assert "form" not in text.describe() and "the model wrote" in lines[0]


def test_exits_are_tuned_on_it_by_default(model):
    lines = []
    tuned = model.tune(tokens=400, length=32, passes=1, watch=lines.append)
    assert [e.boundary for e in tuned.config.exits] == [1, 3]
    assert "answers to questions" in lines[0] and len(tuned.tuning.after) == 2


def test_what_cannot_be_written_is_refused(model, monkeypatch):
    with pytest.raises(ConfigError, match="tokens = 0: must be an integer of at least 1"):
        eejax.own_text(model, 0)
    monkeypatch.setattr(own_text, "TEMPERATURE", 0.0)  # which never ends
    with pytest.raises(DataError, match="the model wrote 0 different questions in 64 attempts"):
        eejax.own_text(model, 10)


@pytest.mark.parametrize("layers, exits", [(1, (0,)), (2, (1,)), (4, (1, 3)), (30, (3, 20))])
def test_exits_lie_below_the_last_layer(layers, exits):
    assert api.default_exits(layers) == exits


def test_tuning_says_how_often_drafts_are_right(model, tmp_path):
    tuned = model.tune(tokens=400, length=32, passes=1, watch=lambda line: None)
    shares = [round(q.agreement, 3) for q in tuned.tuning.after]
    assert [e.acceptance for e in tuned.config.exits] == shares != [0.5, 0.5]
    tuned.save(tmp_path / "tuned")
    assert eejax.load(tmp_path / "tuned").config.exits == tuned.config.exits
