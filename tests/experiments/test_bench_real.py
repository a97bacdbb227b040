"""The benchmark of lossless decoding, on a small run and on files like those of $EEJAX_DATA."""

import json

import pytest
from endings import ended
from launchers import functions_of

COMMAND = "eejax.experiments.bench_real"


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    """A folder of prompts, of two of Spec-Bench's categories and of HumanEval."""
    spec = [("writing", "abab" * 3), ("roleplay", "other"), ("qa", "what?"), ("qa", "x" * 300)]
    lines = [json.dumps({"category": c, "turns": [text, "more"]}) for c, text in spec]
    for name, text in (
        ("spec_bench/question", "\n".join(lines)),
        ("humaneval/humaneval", json.dumps({"prompt": "def f(x):"})),
    ):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir()
        path.write_text(f"{text}\n")
    monkeypatch.setenv("EEJAX_DATA", str(tmp_path))
    return tmp_path


def test_speeds_are_those_of_the_same_texts(small_run, prompts):
    flags = (f"--model={small_run}", f"--tuned={small_run}", "--nopeer", "--json")
    done = ended(COMMAND, *flags, "--new=8", "--runs=2", "--longest=30")
    assert done.status == 0, done.err
    result = json.loads(done.out.splitlines()[-1])
    assert set(result["greedy"]) == set(result["sampled"]) == {"mt_bench", "qa", "humaneval"}
    assert result["tokens_differ"] == 0 and result["draft_exit"] == 1
    assert result["default"] == "exit_and_text"  # its acceptance is not known
    speeds = []
    for ways in result["greedy"].values():
        rate = ways.pop("full_tokens_per_second")
        assert rate > 0 and set(ways) == {"exit_and_text", "exit", "text", "untuned"}
        for way in ways.values():
            low, high = way["interval"]
            assert low <= way["speedup"] <= high and way["tokens_per_pass"] >= 1
        speeds.append(ways["exit_and_text"]["speedup"])
    assert result["lossless_speedup"] == pytest.approx(sum(speeds) / 3)
    assert result["lowest_speedup"] == min(speeds)


def test_what_is_missing_is_named(small_run, prompts, monkeypatch):
    flags = (f"--model={small_run}", "--nopeer", "--new=8", "--longest=30")
    done = ended(COMMAND, *flags, "--categories=rag,qa")
    assert done.status == 1 and "--categories = ['rag']: must be of mt_bench, qa," in done.err
    (prompts / "humaneval" / "humaneval.jsonl").unlink()
    done = ended(COMMAND, *flags)
    assert done.status == 1 and "humaneval.jsonl does not exist" in done.err
    monkeypatch.delenv("EEJAX_DATA")
    done = ended(COMMAND, *flags)
    assert done.status == 1 and "EEJAX_DATA is not set" in done.err


def test_tokens_that_differ_are_counted():
    unequal = functions_of(COMMAND).unequal
    assert unequal([1, 2, 3], [1, 2, 3]) == 0
    assert unequal([1, 2, 3], [1, 5, 3]) == 1
    assert unequal([1, 2, 3], [1]) == 2 == unequal([1], [1, 2, 3])
