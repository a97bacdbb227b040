"""Tasks that a model answers in its own words, and the scores of its answers.

They are those of EE-LLM's Figure 8 and more: BoolQ, TruthfulQA, NaturalQuestions closed-book,
GSM8K, LAMBADA, HumanEval and CNN/DailyMail. Questions go through the model's chat template if it
has one; LAMBADA's texts are continued.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from eejax.experiments import data_sets
from eejax.experiments.reproduce.inference_tasks import MIXED, metrics

SECONDS = 10  # that a program of an answer may run
MEMORY = 2 << 30  # bytes that it may take
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
WORDS = re.compile(r"\w+")
CODE = re.compile(r"```(?:python)?\n(.*?)(?:```|\Z)", re.DOTALL)


class TaskRecord(NamedTuple):
    """A question and how its answer is scored.

    Attributes:
      text: what the model is given.
      score: returns a score in [0, 1] for an answer.
    """

    text: str
    score: Callable[[str], float]


@dataclasses.dataclass(frozen=True)
class AnsweredTask:
    """A task.

    Attributes:
      title: its name.
      metric: what the score is.
      file: file of its records in the folder of data sets, without .jsonl.
      new: most tokens of an answer.
      record: makes a record of a line, None for a line of another task.
      continues: whether the text is continued, and not a user's message.
      ends: texts that end an answer.
      binary: whether scores are 0 or 1.
    """

    title: str
    metric: str
    file: str
    new: int
    record: Callable[[Mapping[str, Any]], TaskRecord | None]
    continues: bool = False
    ends: tuple[str, ...] = ()
    binary: bool = True


def read(task: AnsweredTask, limit: int) -> list[TaskRecord]:
    """Return records of a task, drawn from its file in the folder $EEJAX_DATA.

    Raises:
      DataError: without the folder or the file.
    """
    rows = data_sets.records(f"{task.file}.jsonl")
    random.Random(0).shuffle(rows)  # some files are sorted by answer
    drawn = (task.record(row) for row in rows)
    return list(itertools.islice((record for record in drawn if record is not None), limit))


def boolq(row: Mapping[str, Any]) -> TaskRecord:
    gold = row["choices"][row["gold"]].strip().lower()
    text = row["query"].removesuffix("Answer:").strip()
    return TaskRecord(
        f"{text}\nAnswer with yes or no.", lambda answer: float(_words(answer)[:1] == [gold])
    )


def truthfulqa(row: Mapping[str, Any]) -> TaskRecord:
    """Score whether an answer is nearer to a correct one than to every incorrect one (ROUGE-L)."""
    rouge = metrics()["ROUGE-L"]

    def nearer(answer: str) -> float:
        best = [
            max((rouge(answer, one) for one in row[f"{kind}_answers"]), default=0.0)
            for kind in ("correct", "incorrect")
        ]
        return float(best[0] > best[1])

    return TaskRecord(f"{row['question']} Answer in one sentence.", nearer)


def nq_open(row: Mapping[str, Any]) -> TaskRecord:
    f1 = metrics()["F1"]
    asked = f"{row['question']}? Answer in a few words."
    return TaskRecord(asked, lambda answer: max(f1(answer, one) for one in row["answer"]))


def gsm8k(row: Mapping[str, Any]) -> TaskRecord:
    gold = float(row["answer"].rpartition("####")[2].replace(",", ""))

    def right(answer: str) -> float:
        found = NUMBER.findall(answer)
        return float(bool(found) and float(found[-1].replace(",", "")) == gold)

    return TaskRecord(f"{row['question']}\nThink step by step and end with the number.", right)


def lambada(row: Mapping[str, Any]) -> TaskRecord:
    gold = _words(row["continuation"])
    return TaskRecord(row["context"], lambda answer: float(_words(answer)[: len(gold)] == gold))


def humaneval(row: Mapping[str, Any]) -> TaskRecord:
    check, name = f"{row['test']}\ncheck({row['entry_point']})\n", row["entry_point"]

    def right(answer: str) -> float:
        code = CODE.search(answer)
        body = code[1] if code else answer
        begin = f"{row['prompt']}\n" if f"def {name}" in body else row["prompt"]
        return float(passes(f"{begin}{body}\n\n{check}"))

    asked = "Complete this Python function. Answer with the whole function.\n\n"
    return TaskRecord(f"{asked}{row['prompt']}", right)


def summarization(row: Mapping[str, Any]) -> TaskRecord | None:
    if row["task"] != "summarization":
        return None
    rouge = metrics()["ROUGE-L"]
    return TaskRecord(
        row["prompt"], lambda answer: max(rouge(answer, one) for one in row["references"])
    )


def passes(program: str) -> bool:
    """Return whether a program ends without an error.

    It runs in a process of its own, in which time, memory and the size of files are limited. This
    is no sandbox: run answers of models that you trust, or in a container.
    """
    limited = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))\n"
        f"resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", limited + program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=2 * SECONDS,
            cwd=os.path.abspath(os.sep),
            env={},
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _words(text: str) -> list[str]:
    return WORDS.findall(text.lower())


CODE_ENDS = ("\nprint(", "\nassert ", "\nif __name__", "\n# Example", "\n# Test")
TASKS: Mapping[str, AnsweredTask] = {
    "boolq": AnsweredTask("BoolQ", "accuracy", "boolq/val", 8, boolq),
    "truthfulqa": AnsweredTask(
        "TruthfulQA", "ROUGE-L accuracy", "truthfulqa/truthfulqa", 48, truthfulqa
    ),
    "nq_open": AnsweredTask(
        "NaturalQuestions closed-book", "F1", "nq_open/dev", 24, nq_open, binary=False
    ),
    "gsm8k": AnsweredTask("GSM8K", "accuracy", "gsm8k/test", 160, gsm8k),
    "lambada": AnsweredTask(
        "LAMBADA", "accuracy", "lambada/lambada_openai", 6, lambada, continues=True
    ),
    "humaneval": AnsweredTask(
        "HumanEval", "pass@1", "humaneval/humaneval", 200, humaneval, ends=CODE_ENDS
    ),
    "summarization": AnsweredTask(
        "CNN/DailyMail",
        "ROUGE-L",
        MIXED.removesuffix(".jsonl"),
        80,
        summarization,
        binary=False,
    ),
}
