"""Many prompts through one launcher: every line's own text, and every bad line told."""

from __future__ import annotations

import io
import json
import shutil
import sys

import pytest
from launchers import call

from eejax.checkpoint.manager import Checkpoints
from eejax.checkpoint.model import CHECKPOINTS
from eejax.common.errors import ConfigError, DataError
from eejax.inference import Generator
from eejax.train.runs import open_run


@pytest.fixture(scope="module")
def workdir(small_run, tmp_path_factory):
    """The small run with its first exit alone: an engine of two segments is compiled sooner."""
    folder = tmp_path_factory.mktemp("one_exit") / "run"
    shutil.copytree(small_run, folder, ignore=shutil.ignore_patterns(CHECKPOINTS))
    model = open_run(small_run).model
    config = model.config.replace(exits=model.config.exits[:1])
    values = {"model": config.to_dict(), "experiment": dict(model.metadata["experiment"])}
    values["experiment"] |= {"model": config.to_dict(), "exit_weights": {"weights": [0.5]}}
    params = model.params | {"exits": {"exit_1": model.params["exits"]["exit_1"]}}
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    checkpoints.save(0, {"params": params}, model.metadata | values)
    checkpoints.close()
    return folder


@pytest.fixture
def batch(workdir, capsys, tmp_path):
    """Runs the launcher on lines: ({line: its JSON}, in the order they came, stderr, status)."""

    def run(lines, *arguments, data=None):
        source = tmp_path / "in.txt"
        source.write_bytes("\n".join(lines).encode() if data is None else data)
        capsys.readouterr()
        status = 0
        try:
            call(
                "eejax.experiments.generate_batch",
                f"--workdir={workdir}",
                f"--input={source}",
                "--slots=2",
                "--cap=1",  # few row counts to compile
                "--max_new_tokens=20",
                "--drafts=1",
                *arguments,
            )
        except SystemExit as end:
            status = end.code or 0
        out, err = capsys.readouterr()
        told = [json.loads(line) for line in out.splitlines()]
        return {t["line"]: t for t in told}, [t["line"] for t in told], err, status

    return run


@pytest.mark.parametrize(
    "engine, given",
    [
        ("recompute", ()),
        ("full", ()),
        pytest.param("recompute", ("--lookup=3", "--cap=4"), marks=pytest.mark.slow),
    ],
)
def test_every_line_gets_its_own_text(batch, workdir, engine, given):
    model = open_run(workdir).model
    lines = ["exit layer", "token early ", json.dumps({"prompt": "gate", "threshold": 1}), "", "x"]
    asked = {1: 0.5, 2: 0.5, 3: 1.0, 5: 0.5}
    flags = f"--engine={engine}", "--threshold=0.5", "--notune"
    told, _, err, status = batch(lines, *flags, *given)
    assert set(told) == set(asked) and status == 0 and "4 texts" in err
    oracle = Generator.make(model.params, model.config, "full" if engine == "full" else "posthoc")
    for line, threshold in asked.items():
        prompt = told[line]["prompt"]
        ids = model.tokenizer.encode(prompt).tolist()
        more = {} if engine == "full" else {"threshold": threshold}
        want = oracle.generate([ids], 20, stop_token_ids=[model.tokenizer.eos_id], **more)
        assert told[line]["text"] == model.tokenizer.decode(want.ids(0))
        n = int(want.lengths[0])
        assert (told[line]["finish"], told[line]["tokens"]) == (want.finish[0], n)
        assert sum(told[line]["exits"]) == n
    if engine == "recompute":
        assert told[3]["exits"][0] == 0 < told[1]["exits"][0]


@pytest.mark.slow
def test_planned_and_with_exits_turned_off_and_on(batch):
    told, _, err, status = batch(["exit layer token"] * 5, "--engine=auto", "--threshold=0.4")
    assert set(told) == {1, 2, 3, 4, 5} and status == 0
    assert "measuring and planning" in err and "plan: " in err


def test_bad_lines_are_told_and_the_others_run(batch):
    lines = [
        "exit",
        "{oops",
        '{"prompt": 3}',
        '{"prompt": "a", "treshold": 1}',
        '{"prompt": "a", "threshold": 7}',
        '{"prompt": "a", "max_new_tokens": 0}',
        "a" * 200,
        r'{"prompt": "\ud800"}',
        "a line\u2028that goes on",
        '{"prompt": "a", "drafts": [[1], [2, 3]]}',
        '{"prompt": "a", "temperature": [1, [2]]}',
        '{"prompt": "a", "seed": ' + "9" * 5000 + "}",
        '{"prompt": ' + "[" * 100_000,
        '{"prompt": "a", "threshold": 1' + "0" * 400 + "}",
        '{"prompt": "a", "drafts": 2}',
        '{"prompt": "a", "temperature": [0.5]}',
    ]
    told, order, _, status = batch(lines, "--notune")
    assert status == 1 and sorted(order) == [*range(1, 17)]
    assert told[1]["finish"] == "length"
    for line, what in {
        2: "JSON",
        3: "prompt",
        4: "treshold",
        5: "threshold",
        6: "max_new_tokens = 0",
        7: "prompt = '200 tokens'",
        10: "drafts",
        11: "temperature",
        12: "JSON",
        13: "JSON",
        14: "threshold",
        15: "drafts = 2: must be at most --drafts",
        16: "has a list for ['temperature']",
    }.items():
        assert told[line]["finish"].startswith("error: ") and what in told[line]["finish"]


@pytest.mark.parametrize(
    "arguments, data, what",
    [
        ((), b"\xff\xfe", "UTF-8"),
        ((), b"\n\n", "input"),
        (("--input=/no/such",), b"a", "/no/such"),
        (("--output=/no/such/x",), b"a", "/no/such/x"),
        (("--drafts=1000000000",), b"a", "--drafts"),
        (("--context=9999",), b"a", "--context"),
        (("--cap=9999",), b"a", "--cap"),
        (("--lookup=2", "--notune"), b"a", r"--lookup = 2: must be below cap \(1\)"),
        (("--lookup=2", "--cap=4"), b"a", "--lookup = 2: must be 0 .* Add --notune"),
        (("--gate=nope",), b"a", "--gate"),
        (("--threshold=nan",), b"a", "--threshold"),
        (("--stop_token=999",), b"a", "--stop_token"),
        (tuple(f"--stop_token={i}" for i in range(8)), b"a", "--stop_token"),
        (("--seed=-1",), b"a", "--seed"),
        (("--temperature=inf",), b"a", "--temperature"),
    ],
)
def test_files_and_flags_that_cannot_be_used(batch, tmp_path, arguments, data, what):
    output = tmp_path / "untouched"
    with pytest.raises((ConfigError, DataError), match=what):
        batch([], f"--output={output}", *arguments, data=data)
    assert not output.exists()


def test_from_standard_input_to_a_file(batch, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"exit\nlayer\n")))
    output = tmp_path / "out.jsonl"
    told, *_, status = batch([], "--input=-", f"--output={output}", "--notune")
    assert not told and status == 0
    assert sorted(json.loads(line)["line"] for line in output.read_text().splitlines()) == [1, 2]


def test_an_output_is_gone_on_with_and_never_lost(batch, tmp_path):
    output = tmp_path / "out.jsonl"
    arguments = (f"--output={output}", "--notune", "--max_new_tokens=3")
    lines = ["exit", "layer", "token"]
    assert batch(lines, *arguments)[3] == 0
    whole = output.read_text().splitlines(keepends=True)
    with pytest.raises(ConfigError, match="--resume"):
        batch(lines, *arguments)
    assert output.read_text() == "".join(whole)
    failed = json.dumps({"line": 3, "prompt": None, "finish": "error: line 3"}) + "\n"
    output.write_text(whole[0] + failed + whole[1][:9])  # as after a kill
    assert batch(lines, "--resume", *arguments)[3] == 0
    assert sorted(output.read_text().splitlines(keepends=True)) == sorted(whole)
    with pytest.raises(ConfigError, match="--output"):
        batch(lines, "--resume")
    for other, data in ((["other"] * 3, whole[0]), (lines, "no text\n"), (lines, "[]\n")):
        output.write_text(data)
        with pytest.raises(DataError, match="line 1"):
            batch(other, "--resume", *arguments)
        assert output.read_text() == data
