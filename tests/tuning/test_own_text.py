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
from eejax.tuning import own_text, write_own_text


@pytest.fixture(scope="module")
def model():
    return tiny_chat()


@pytest.fixture(scope="module")
def written(model):
    return write_own_text(model, 1500)


def test_a_model_with_a_template_writes_conversations(written):
    found = [json.loads(d.text)["messages"] for d in written.documents()]
    assert len(found) >= 10 and all(d.form == "chat" for d in written.written)
    for asked, answered in found:
        assert (asked["role"], answered["role"]) == ("user", "assistant")
        assert asked["content"].strip() and answered["content"].strip()
    assert len({d.name for d in written.written}) == len(found)
    assert written.describe()["form"] == "chat"  # so that answers alone are learned


def test_answers_are_those_of_the_model_and_alone_are_learned(model, written, tmp_path):
    packed = data.pack(written, model.tokenizer, tmp_path, validation_fraction=0.0)
    split = packed.split("train")
    ids, counted = split.counted(0, len(split))
    text = model.tokenizer.decode(ids[np.asarray(counted)])
    answers = [json.loads(d.text)["messages"][1]["content"] for d in written.written]
    # Ends of turns are learned too; the byte tokenizer has them as text.
    learned = [f"{answer}<|im_end|>\n" for answer in answers]
    assert text == "".join(learned)
    assert int(np.sum(counted)) == sum(len(text.encode()) for text in learned)


def test_the_seed_decides_the_text(model, written):
    again, other = write_own_text(model, 200), write_own_text(model, 200, seed=5)
    assert again.written == written.written[: len(again.written)]
    assert other.describe() != again.describe()
    first, rest = written.split(0.25)
    assert first.written + rest.written == written.written
    assert len(rest.written) == round(0.25 * len(written.written))


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
        write_own_text(model, 0)
    monkeypatch.setattr(own_text, "TEMPERATURE", 0.0)  # which never ends
    with pytest.raises(DataError, match="the model wrote 0 different questions in 64 attempts"):
        write_own_text(model, 10)
