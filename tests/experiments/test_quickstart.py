"""The quickstart on a tiny model: what it leaves, that it continues, and what it says."""

from __future__ import annotations

import functools
import json
from unittest import mock

import launchers
import pytest
from endings import ended
from matplotlib.image import imread
from tiny_chat import tiny_chat

import eejax

COMMAND = "eejax.experiments.quickstart"
SMALL = ("--tokens=2048", "--passes=1", "--new=12", "--rounds=2", "--nopeer", "--json")


SENTENCE = "Early exit pays."


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """(workdir, how it ended, a function that runs it again). A grade is there already."""
    folder = tmp_path_factory.mktemp("quickstart")
    tiny_chat().save(folder / "tiny")
    (folder / "run").mkdir()
    (folder / "run" / "grade.json").write_text(json.dumps({"verdict": {"sentence": SENTENCE}}))
    (folder / "run" / "grade.html").touch()
    run = functools.partial(launch, folder)
    module = launchers.functions_of(COMMAND)
    # Two of one length: each length of a prompt has programs of its own.
    with mock.patch.object(module, "QUESTIONS", module.QUESTIONS[2:4]):
        done = run()
        assert done.status == 0, done.err
        yield folder / "run", done, run


def launch(folder, *flags):
    own = (f"--model={folder / 'tiny'}", f"--workdir={folder / 'run'}")
    return ended(COMMAND, *own, *SMALL, *flags)


def test_it_leaves_what_it_promises(quickstart):
    workdir, done, _ = quickstart
    assert imread(workdir / "quickstart.png").std() > 0.02
    for name in ("grade.html", "quickstart.png", "chat.txt"):
        assert (workdir / name).is_file() and str(workdir / name) in done.out
    assert f"chat {workdir / 'model'}" in done.out
    model = eejax.load(workdir / "model")
    assert [e.boundary for e in model.config.exits] == [1, 3]


def test_its_summary_is_consistent(quickstart):
    workdir, done, _ = quickstart
    summary = json.loads(done.out.splitlines()[-1])
    assert summary == json.loads((workdir / "summary.json").read_text())
    assert summary["answers_differ"] == 0 and set(summary["ways"]) == {"full", "drafts", "exits"}
    assert summary["ways"]["full"]["speed"] == summary["ways"]["drafts"]["same"] == 1
    for way in summary["ways"].values():
        assert way["low"] <= way["speed"] <= way["high"] and 0 <= way["same"] <= 1
    assert summary["verdict"] == SENTENCE
    exit = summary["draft_exit"]
    drafts = "Drafts from the text" if exit is None else f"Drafts of the exit after layer {exit}"
    assert exit in (None, 1, 3) and drafts in done.out
    assert "all tokens are the full model's" in done.out


def test_a_second_run_only_measures(quickstart):
    workdir, _, run = quickstart
    kept = [workdir / name for name in ("text.jsonl", "grade.json", "tuning.json")]
    before = [path.stat().st_mtime_ns for path in kept]
    again = run()
    assert again.status == 0, again.err
    assert [path.stat().st_mtime_ns for path in kept] == before
    assert "the model wrote" not in again.out
    other = run("--tokens=512")
    assert other.status == 1 and "of other settings: tokens = 512, there 2048" in other.err


def test_a_run_that_was_stopped_while_it_saved_goes_on(quickstart):
    workdir, _, run = quickstart
    (workdir / "tuning.json").unlink()
    assert (workdir / "model").is_dir()
    again = run()
    assert again.status == 0, again.err
    assert (workdir / "tuning.json").is_file() and "pass 1 of 1" in again.out


@pytest.mark.slow
def test_the_grade_is_of_the_models_own_text(tmp_path):
    tiny_chat().save(tmp_path / "tiny")
    done = launch(tmp_path)
    assert done.status == 0, done.err
    grade = json.loads((tmp_path / "run" / "grade.json").read_text())
    assert grade["verdict"]["sentence"] in done.out and grade["text"]["source"] == "text of its own"
    assert [d["boundary"] for d in grade["depths"]] == [1, 2, 3, 4]
    assert "<h2>Recipe</h2>" in (tmp_path / "run" / "grade.html").read_text()


def test_a_model_without_a_chat_template_is_refused_before_any_work(small_run, tmp_path):
    done = ended(COMMAND, f"--model={small_run}", f"--workdir={tmp_path / 'run'}")
    assert done.status == 1 and "has no chat template" in done.err
    assert not (tmp_path / "run").exists()
