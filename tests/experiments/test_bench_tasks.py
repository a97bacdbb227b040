"""Scores of answered tasks, and the benchmark on a small run and few records."""

from __future__ import annotations

import json

import pytest
from endings import ended
from tiny_chat import tiny_chat

from eejax.experiments import answered_tasks
from eejax.experiments.answered_tasks import TASKS

COMMAND = "eejax.experiments.bench_tasks"
ROWS = {
    "boolq": {
        "query": "Passage: x\nQuestion: is it?\nAnswer:",
        "choices": ["no", "yes"],
        "gold": 1,
    },
    "truthfulqa": {
        "question": "Is it so?",
        "correct_answers": ["It is not so"],
        "incorrect_answers": ["It is always so"],
    },
    "nq_open": {"question": "who was it", "answer": ["Bobby Scott", "Bob Russell"]},
    "gsm8k": {"question": "How many?", "answer": "3 + 4 = 7 thousand\n#### 7,000"},
    "lambada": {"context": "Said", "continuation": "Gabriel"},
    "humaneval": {
        "prompt": "def twice(x):\n    'Twice x.'\n",
        "entry_point": "twice",
        "test": "def check(f):\n    assert f(2) == 4\n",
    },
    "summarization": {"task": "summarization", "prompt": "Summarize: a", "references": ["a b c d"]},
}
ANSWERS = {
    "boolq": [("Yes, it is.", 1), ("No.", 0), ("", 0)],
    "truthfulqa": [("No, it is not so.", 1), ("It is always so.", 0), ("", 0)],
    "nq_open": [("Bob Russell", 1), ("Bob", 0.67), ("nobody", 0)],
    "gsm8k": [("first 3, then 7,000.", 1), ("7000.0", 1), ("7", 0), ("none", 0)],
    "lambada": [(" Gabriel.", 1), (" gabriel said", 1), (" Ann", 0), ("", 0)],
    "humaneval": [
        ("    return 2 * x", 1),
        ("    return x", 0),
        ("    while True: pass", 0),
        ("def twice(x):\n    return x + x", 1),
        ("Here it is:\n```python\ndef twice(x):\n    return 2 * x\n```\nIt doubles x.", 1),
        ("```\ndef twice(x):\n    return 3", 0),
    ],
    "summarization": [("a b c d", 1), ("a b", 2 / 3), ("z", 0)],
}


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_scored(name, monkeypatch):
    monkeypatch.setattr(answered_tasks, "SECONDS", 1)
    record = TASKS[name].record(ROWS[name])
    for answer, score in ANSWERS[name]:
        assert record.score(answer) == pytest.approx(score), answer


def test_programs_have_limits(tmp_path):
    file = tmp_path / "left"
    answered_tasks.passes(f"open({str(file)!r}, 'w').write('x')\n")
    assert not file.exists() or not file.read_text()
    assert not answered_tasks.passes("a = bytearray(1 << 33)\n")
    assert answered_tasks.passes("import sys\nassert sys.stdin.read() == ''\n")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder of data sets: few records of each task, and little text of each kind."""
    for name, task in TASKS.items():
        path = tmp_path / f"{task.file}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{json.dumps(ROWS[name])}\n" * 3)
    for name in ("wikitext2/test_a", "books/great_expectations"):
        path = tmp_path / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("early exits of a model. " * 400)
    rows = [("gsm8k/train_500", ROWS["gsm8k"]), ("mbpp/mbpp", {"text": "a", "code": "b = 1"})]
    for name, row in rows:
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{json.dumps(row)}\n" * 300)
    monkeypatch.setenv("EEJAX_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_scores_and_speeds_stand_beside_thresholds(tmp_path, data):
    folder = tmp_path / "model"
    tiny_chat().tune(tokens=400, length=32, passes=1, watch=lambda line: None).save(folder)
    flags = (f"--model={folder}", "--tasks=boolq,humaneval", "--records=2", "--tokens=8192")
    done = ended(COMMAND, *flags, "--length=32", "--agreements=0.6,0.9", "--json")
    assert done.status == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert [t["target"] for t in result["thresholds"]] == [0.6, 0.9]
    for found in result["thresholds"]:
        assert 0 < found["threshold"] <= 1 and set(found["exits"]) <= {1, 3}
        assert found["threshold"] < 1 or found["agreement"] == 1
        assert len(found["by_kind"]) == 4 and found["windows"] == 128
    for task in result["tasks"].values():
        assert set(task["ways"]) == {"full", "0.6", "0.9"} and task["records"] == 2
        full = task["ways"]["full"]
        assert full["speed"]["ratio"] == 1 and full["early"] == full["change"]["score"] == 0
        for way in task["ways"].values():
            assert way["speed"]["low"] <= way["speed"]["ratio"] <= way["speed"]["high"]
    assert "BoolQ, accuracy" in done.out


def test_what_is_missing_is_named(tmp_path, data, small_run, monkeypatch):
    done = ended(COMMAND, f"--model={small_run}", "--tasks=boolqq")
    assert done.status == 1 and "--tasks = ['boolqq']: must be of boolq, truthfulqa" in done.err
    done = ended(COMMAND, f"--model={small_run}", "--agreements=0.2")
    assert done.status == 1 and "must lie in [0.5, 1)" in done.err
    (data / "mbpp" / "mbpp.jsonl").unlink()
    done = ended(COMMAND, f"--model={small_run}")
    assert done.status == 1 and "mbpp.jsonl does not exist" in done.err
    monkeypatch.delenv("EEJAX_DATA")
    done = ended(COMMAND, f"--model={small_run}")
    assert done.status == 1 and "EEJAX_DATA is not set" in done.err
    tiny_chat().save(tmp_path / "bare")
    done = ended(COMMAND, f"--model={tmp_path / 'bare'}")
    assert done.status == 1 and "has no early exits" in done.err
