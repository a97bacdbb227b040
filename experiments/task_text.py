"""Write training text of the kinds that mixed prompts are of, without those prompts.

    EEJAX_DATA=DATA eejax task-text --output=runs/tasks.jsonl

It reads the task sets and books of $EEJAX_DATA. Text that shares its question, passage or program
with a record of mixed_prompts is left out, so that those prompts are unseen in a benchmark.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

from absl import flags

from eejax.checkpoint.files import write_text
from eejax.common.errors import ConfigError, require
from eejax.common.paths import expanded
from eejax.experiments import launch

_OUTPUT = flags.DEFINE_string("output", None, "The file to write, in JSON lines.", required=True)

BOOKS = (
    "books/moby_dick.txt",
    "books/pride_and_prejudice.txt",
    "books/two_cities.txt",
    "books/great_expectations.txt",
    "wikitext2/valid.txt",
)
PIECE = 4000  # characters of a document from a book
KEY = 60  # characters that two texts must not have in common
SHORT = 24  # the same for a prompt of fewer characters


def main() -> None:
    folder = os.environ.get("EEJAX_DATA")
    if not folder:
        raise ConfigError("$EEJAX_DATA: must name the folder of the task sets; it is not set.")
    path = expanded(_OUTPUT.value)
    fix = "Name another, or remove it."
    require(not path.exists(), "--output", _OUTPUT.value, "must be a new file", fix)
    unseen, left = HeldOutTexts(prompts(folder)), 0
    lines = []
    for key, text in documents(folder):
        if unseen.has(key):
            left += 1
        else:
            lines.append(json.dumps({"text": text}) + "\n")
    try:
        write_text(path, "".join(lines))
    except OSError as error:
        raise ConfigError(f"--output = {_OUTPUT.value!r}: cannot be written ({error}).") from error
    launch.say(f"{len(lines)} documents; {left} left out, of which mixed prompts are")


def prompts(folder: str) -> list[dict]:
    """Read the records of mixed_prompts."""
    return list(read(folder, "mixed_prompts/mixed_prompts.jsonl"))


def read(folder: str, name: str) -> Iterator[dict]:
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise ConfigError(f"$EEJAX_DATA: {name} cannot be read ({error}).") from error


def plain(text: str) -> str:
    """Return only the letters and digits, so that quotes and spaces do not make texts different."""
    return re.sub(r"\W+", "", text.lower())


class HeldOutTexts:
    """Texts that must not be learned.

    `has` returns whether another text begins as one of them does, continues one of them, or
    contains the beginning of one, even without a label ("Smoking: ...").
    """

    def __init__(self, records: list[dict]):
        prompts = [record["prompt"] for record in records]
        self._texts = "\n".join(map(plain, prompts))
        begins = [plain(p)[:KEY] for prompt in prompts for p in (prompt, prompt.partition(": ")[2])]
        self._begins = sorted({begin for begin in begins if len(begin) >= SHORT})

    def has(self, key: str) -> bool:
        text = plain(key)
        return text[:KEY] in self._texts or any(begin in text for begin in self._begins)


def documents(folder: str) -> Iterator[tuple[str, str]]:
    """Yield (the key that identifies a text, the text), written as the prompts are."""
    for name in ("train_500", "test"):
        for row in read(folder, f"gsm8k/{name}.jsonl"):
            question = row["question"]
            yield question, f"Question: {question}\nAnswer: {row['answer']}\n"
    for row in read(folder, "truthfulqa/truthfulqa.jsonl"):
        question = row["question"]
        yield question, f"Q: {question}\nA: {row['best_answer']}\n"
    for row in read(folder, "nq_open/dev.jsonl"):
        question = row["question"]
        yield question, f"Q: {question}?\nA: {row['answer'][0]}\n"
    for row in read(folder, "hellaswag/val.jsonl"):
        key = f"{row['activity_label']}: {row['ctx']}"
        yield row["ctx"], f"{key} {row['endings'][int(row['label'])]}\n"
    for name in ("boolq/val.jsonl", "openbookqa/test.jsonl"):
        for row in read(folder, name):
            yield row["query"], f"{row['query']} {row['choices'][row['gold']]}\n"
    for row in read(folder, "lambada/lambada_openai.jsonl"):
        yield row["context"], f"{row['context']} {row['continuation']}\n"
    for row in read(folder, "mbpp/mbpp.jsonl"):
        tests = "\n".join(row["test_list"])
        begin = f"{row['text']}\nYour code should pass these tests:\n{tests}\n"
        yield row["text"], begin + row["code"].replace("\r\n", "\n") + "\n"
    for row in read(folder, "humaneval/humaneval.jsonl"):
        yield row["prompt"], row["prompt"] + row["canonical_solution"] + "\n"
    for name in BOOKS:
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise ConfigError(f"$EEJAX_DATA: {name} cannot be read ({error}).") from error
        for i in range(0, len(text), PIECE):
            yield text[i : i + PIECE], text[i : i + PIECE]


if __name__ == "__main__":
    launch.run(main)
