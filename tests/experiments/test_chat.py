"""Chats with a tiny model: what it is asked, the colors, and the end of a session."""

from __future__ import annotations

import io
import json
import sys

import pytest
from endings import ended
from tiny_chat import tiny_chat

from eejax.common.errors import ConfigError
from eejax.experiments.conversation import Conversation

COMMAND = "eejax.experiments.chat"
SMALL = ("--max_new_tokens=24", "--json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model without exits."""
    path = tmp_path_factory.mktemp("chat") / "model"
    tiny_chat().save(path)
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The same model with two exits."""
    path = tmp_path_factory.mktemp("chat") / "tuned"
    tiny_chat().tune(tokens=400, length=32, passes=1, watch=lambda line: None).save(path)
    return path


@pytest.fixture
def chat(monkeypatch):
    """Runs the launcher: (its JSON, what it printed, what went to stderr)."""

    def run(*arguments, lines=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        done = ended(COMMAND, *arguments, *SMALL)
        assert done.status == 0, done.err
        return json.loads(done.out.splitlines()[-1]), done.out, done.err

    return run


def test_answers_are_the_full_models_with_and_without_drafts(chat, folder, tuned):
    texts = []
    for model in (folder, tuned):
        for more in ((), ("--nodrafts",)):
            got, out, _ = chat(model, "--prompt=Why?", "--prompt=abab abab", *more)
            assert [a["prompt"] for a in got["answers"]] == ["Why?", "abab abab"]
            assert "> Why?" in out and "ended by: " in out
            texts.append([a["answer"] for a in got["answers"]])
            assert all(set(a["boundaries"]) <= {4} for a in got["answers"])
    assert all(text == texts[0] for text in texts)


def test_early_exits_are_shown_in_colors(chat, tuned):
    got, out, _ = chat(tuned, "--prompt=Why?", "--threshold=0", "--color=always")
    assert 1 in got["answers"][0]["boundaries"]
    assert "\x1b[38;5;196m" in out and "exit 1: " in out


def test_a_session_remembers_until_it_begins_anew(chat, folder):
    lines = ("Why?", "And why that?", "/new", "And why that?", "Why?", "", "x" * 600)
    got, _, err = chat(folder, lines=lines)
    first, second, third, fourth = got["answers"]
    assert second["prompt_tokens"] > third["prompt_tokens"] > first["prompt_tokens"]
    assert fourth["prompt_tokens"] > third["prompt_tokens"]
    assert "error: the message has 6" in err and "shorten it" in err
    alone, _, _ = chat(folder, "--prompt=And why that?", "--prompt=Why?")
    assert third["answer"] == alone["answers"][0]["answer"]
    assert first["answer"] == alone["answers"][1]["answer"]


def test_the_oldest_messages_make_room():
    talk = Conversation("it", tiny_chat(context_length=128), "Be brief.")
    for number in range(9):
        ids = talk.ask(f"question {number}", 24)
        assert len(ids) + 24 <= 128
        talk.answer("yes")
    said = [m["content"] for m in talk.messages]
    assert said[0] == "Be brief." and "question 8" in said and "question 0" not in said
    before = [*talk.messages]
    with pytest.raises(ConfigError, match="must be at most the context"):
        talk.ask("x" * 128, 24)
    assert talk.messages == before


def test_what_is_missing_is_named(folder, small_run):
    done = ended(COMMAND, folder, "--prompt=a", "--threshold=0.5")
    assert done.status == 1 and "must be left out for a model without early exits" in done.err
    done = ended(COMMAND, small_run, "--prompt=a")
    assert done.status == 1 and "has no chat template" in done.err
    done = ended(COMMAND)
    assert done.status == 1 and "must be one model" in done.err
    done = ended(COMMAND, folder, "--prompt= ")
    assert done.status == 1 and "--prompt = ' ': must be a text that is not empty" in done.err
