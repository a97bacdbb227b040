"""What is learned shares nothing with a benchmark's prompts, and everything else is learned."""

from __future__ import annotations

import json

import pytest
from launchers import call, functions_of

from eejax.common.errors import ConfigError

task_text = functions_of("eejax.experiments.task_text")

# A record of each task set, by its file; what it is written as; and its question, passage or
# program. Questions of another record are of other words.
OTHER = "An entirely different matter, about which nobody has ever been asked: number {}."
SETS = {
    "gsm8k/train_500": (
        lambda t: dict(question=t, answer="#### 1"),
        "Question: {}\nAnswer: #### 1\n",
    ),
    "gsm8k/test": (lambda t: dict(question=t, answer="#### 2"), "Question: {}\nAnswer: #### 2\n"),
    "truthfulqa/truthfulqa": (lambda t: dict(question=t, best_answer="No"), "Q: {}\nA: No\n"),
    "nq_open/dev": (lambda t: dict(question=t, answer=["Bob", "Al"]), "Q: {}?\nA: Bob\n"),
    "hellaswag/val": (
        lambda t: dict(activity_label="Pole vault", ctx=t, label="1", endings=["runs.", "jumps."]),
        "Pole vault: {} jumps.\n",
    ),
    "boolq/val": (lambda t: dict(query=t, choices=["no", "yes"], gold=1), "{} yes\n"),
    "openbookqa/test": (lambda t: dict(query=t, choices=["a cat", "a dog"], gold=0), "{} a cat\n"),
    "lambada/lambada_openai": (lambda t: dict(context=t, continuation="Gabriel"), "{} Gabriel\n"),
    "mbpp/mbpp": (
        lambda t: dict(text=t, code="def f():\r\n  pass", test_list=["assert f()", "assert g()"]),
        "{}\nYour code should pass these tests:\nassert f()\nassert g()\ndef f():\n  pass\n",
    ),
    "humaneval/humaneval": (
        lambda t: dict(prompt=t, canonical_solution="    return 1"),
        "{}    return 1\n",
    ),
}
# As it is in its set, and as a prompt has it: another case, quotes, spaces, and what is around it.
PLANTED = {
    "gsm8k/train_500": (
        "Jo has 3 apples.  She's given 'two' more; how many are that, all in all?",
        "JO has 3 apples. She’s given “two” more; how many are that,\n all in all?\nAnswer:",
    ),
    "gsm8k/test": ("How many legs have 12 spiders?", "How many  legs have 12 Spiders"),
    "truthfulqa/truthfulqa": (
        "What if you swallow gum?",
        "Q: Is it so?\nA: Yes.\nQ: what if you swallow “gum”?\nA:",
    ),
    "nq_open/dev": ("who sang he's my brother", "Q: Who sang 'He's my brother'?\nA:"),
    "hellaswag/val": ("A man runs with a pole. he", "Pole vault: a man runs, with a pole. He"),
    "boolq/val": (
        "Passage: Milk -- ``Milk'' is white.\nQuestion: is it?",
        'passage: Milk - "Milk" is white. Question: is it?\nAnswer:',
    ),
    "openbookqa/test": ("Predators eat", "PREDATORS   EAT"),
    "lambada/lambada_openai": ("“Why?” said\nthe other one to", '"Why?" said the other one to'),
    "mbpp/mbpp": (
        "Write a function to swap.",
        "Write a function to swap\nYour code should pass these tests:\nassert f()\n",
    ),
    "humaneval/humaneval": (
        'def f(x):\n    """ Adds 1 to what it is given.\n',
        "def f( x ):\n  ''' adds 1 to what it is given.",
    ),
}


def write(folder, name: str, rows: list[dict]) -> None:
    path = folder / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder of all sets, each with a text that a prompt has and one that none has, and books."""
    for i, (name, (row, _)) in enumerate(SETS.items()):
        write(tmp_path, name, [row(PLANTED[name][0]), row(OTHER.format(i))])
    write(tmp_path, "mixed_prompts/mixed_prompts", [{"prompt": p} for _, p in PLANTED.values()])
    for i, name in enumerate(task_text.BOOKS):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"Book {i}. " + "x" * task_text.PIECE)
    monkeypatch.setenv("EEJAX_DATA", str(tmp_path))
    return tmp_path


def written(folder) -> list[str]:
    call("eejax.experiments.task_text", f"--output={folder / 'out.jsonl'}")
    return [json.loads(line)["text"] for line in (folder / "out.jsonl").read_text().splitlines()]


def test_what_prompts_have_is_left_out_and_all_else_is_kept(data, capsys):
    got = written(data)
    kept = [form.format(OTHER.format(i)) for i, (_, form) in enumerate(SETS.values())]
    books = [f"Book {i}. " + "x" * (task_text.PIECE - 8) for i in range(len(task_text.BOOKS))]
    ends = ["x" * 8] * len(task_text.BOOKS)
    assert sorted(got) == sorted([*kept, *books, *ends])
    assert f"{len(got)} documents; {len(SETS)} left out" in capsys.readouterr().err


def test_a_file_that_is_there_stays(data, tmp_path):
    path = data / "out.jsonl"
    path.write_text("kept")
    with pytest.raises(ConfigError, match="^--output = .*: must be a new file. Name another"):
        written(data)
    assert path.read_text() == "kept"
    path.unlink()
    (data / task_text.BOOKS[-1]).unlink()
    with pytest.raises(ConfigError, match=task_text.BOOKS[-1]):
        written(data)
    assert not path.exists()  # nothing is written where not all could be read


def test_without_prompts_nothing_is_left_out(data):
    """So that it is they for which it was."""
    write(data, "mixed_prompts/mixed_prompts", [{"prompt": "Something else altogether."}])
    got = written(data)
    for name, (_, form) in SETS.items():
        assert form.format(PLANTED[name][0]) in got, name


def test_long_texts_are_the_same_where_they_begin_alike():
    """By 60 letters and digits; and by all of a shorter one."""
    begin = "The quick brown fox, which nobody has ever seen, jumps over the lazy dog's kennel "
    held = task_text.HeldOutTexts([{"prompt": f"Read this: {begin} and goes home."}])
    assert held.has(begin + "but never comes back")
    assert held.has("the quick brown fox")
    assert held.has("The slow brown fox: " + begin)  # which has it, but for the label
    assert not held.has("The slow brown fox, which nobody has ever seen, jumps over a kennel")
    assert not held.has("and goes home again")
    # Two prompts, one after the other, are no text.
    held = task_text.HeldOutTexts([{"prompt": "first half"}, {"prompt": "second half"}])
    assert held.has("Second half") and not held.has("first half second half")


def test_a_text_that_goes_on_from_a_short_prompt_is_left_out():
    """HellaSwag has one scene twice, of which the longer text tells how the shorter one ends."""
    held = task_text.HeldOutTexts([{"prompt": "Smoking: A young woman is smoking a pipe. she"}])
    assert held.has("A young woman is smoking a pipe. She exhales a lot of smoke. The camera")
    assert held.has("Earlier on: a young woman is smoking a pipe - she coughs.")
    assert not held.has("A young woman is smoking. She exhales a lot of smoke. The camera")
    assert not task_text.HeldOutTexts([{"prompt": "Smoking: A woman"}]).has(
        "A woman is smoking a pipe."
    )


def test_what_cannot_be_read_or_written_is_told(data, monkeypatch):
    with pytest.raises(ConfigError, match="--output"):
        call("eejax.experiments.task_text", f"--output={data / 'no' / 'folder'}")
    (data / task_text.BOOKS[0]).unlink()
    with pytest.raises(ConfigError, match=r"EEJAX_DATA.*moby_dick\.txt cannot be read"):
        written(data)
    (data / "mbpp" / "mbpp.jsonl").write_text("{")
    with pytest.raises(ConfigError, match=r"EEJAX_DATA.*mbpp\.jsonl cannot be read"):
        written(data)
    monkeypatch.delenv("EEJAX_DATA")
    with pytest.raises(ConfigError, match="EEJAX_DATA"):
        written(data)
