"""The whole demo on a tiny budget, and generation from the run it leaves."""

import io
import json
import os
import re
import subprocess
import sys

import pytest
from endings import ended
from launchers import call
from matplotlib.image import imread

from eejax.experiments.launch import MISTAKES

ASKED = ("--max_new_tokens=20", "--cap=1", "--json")
SAMPLED = ("--temperature=1", "--top_k=40", "--top_p=0.95", "--min_p=0.01", "--seed=3")


def launch(name, *arguments):
    return ended(f"eejax.experiments.{name}", *arguments)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("demo")
    code, out, err = launch("train_demo", "--tiny", "--json", f"--workdir={workdir}")
    assert code == 0, err
    return workdir, out


@pytest.fixture
def generate(demo, capsys, monkeypatch):
    """Runs `eejax generate` in this process: (its requests, what it printed)."""

    def run(*arguments, text=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        capsys.readouterr()
        call("eejax.experiments.generate", f"--workdir={demo[0]}", *ASKED, *arguments)
        out = capsys.readouterr().out
        return json.loads(out.splitlines()[-1])["requests"], out

    return run


def test_it_leaves_what_it_promises(demo):
    workdir, out = demo
    for name in ("loss.png", "quality_speed.png", "exits.png"):
        assert imread(workdir / name).std() > 0.02
        assert str(workdir / name) in out
    assert (workdir / "checkpoints").is_dir() and (workdir / "metrics.jsonl").exists()
    assert (workdir / "sample.txt").read_text().strip()


def test_its_summary_is_consistent(demo):
    workdir, out = demo
    summary = json.loads((workdir / "summary.json").read_text())
    printed = json.loads(out.splitlines()[-1])
    assert printed["bits_per_byte"] == summary["bits_per_byte"]
    quality = summary["bits_per_byte"]
    assert set(quality) == {"exit_1", "exit_2", "final", "trigram", "zlib"}
    assert all(1.0 < v < 8.0 for v in quality.values())
    assert quality["trigram"] < quality["final"], "30 steps must not beat a trigram"
    full = summary["sweep"][-1]
    assert (full["threshold"], full["agreement"], full["depth"]) == (1.0, 1.0, 4.0)
    assert full["bits_per_byte"] == pytest.approx(quality["final"])
    for m in summary["measured"]:
        assert m["agreement"] >= 0.95 and m["low"] <= m["speedup"] <= m["high"]
        assert 1 <= m["executed_layers"] <= 4 and sum(m["shares"]) == pytest.approx(1)


def test_a_second_run_only_measures(demo):
    workdir, _ = demo
    steps = (workdir / "metrics.jsonl").read_text()
    code, out, err = launch("train_demo", "--tiny", f"--workdir={workdir}")
    assert code == 0 and "resuming after step 30" in err
    assert steps.splitlines()[0] in (workdir / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_engines_agree_where_they_must(generate):
    results = {}
    for engine, threshold in [
        ("full", 0.0),
        ("recompute", 1.0),
        ("posthoc", 0.3),
        ("recompute", 0.3),
    ]:
        requests, out = generate(
            "--prompt=def f(", f"--engine={engine}", f"--threshold={threshold}"
        )
        assert "tokens/s with engine " + engine in out and "layers each" in out
        results[engine, threshold] = requests[0]
    assert results["full", 0.0]["tokens"] == results["recompute", 1.0]["tokens"]
    assert results["posthoc", 0.3]["boundaries"] == results["recompute", 0.3]["boundaries"]
    assert set(results["full", 0.0]["boundaries"]) == {4}
    assert min(results["recompute", 0.3]["boundaries"]) < 4


@pytest.mark.slow
def test_batch_from_file_and_standard_input_with_sampling(generate, tmp_path):
    (tmp_path / "a.txt").write_text("import os\n")
    requests, out = generate(
        "--prompt=class A:",
        f"--prompt_file={tmp_path / 'a.txt'}",
        "--exits=2",
        "--threshold=0.2",
        "--color=always",
        *SAMPLED,
    )
    assert [r["prompt"] for r in requests] == ["class A:", "import os\n"]
    assert all(set(r["boundaries"]) <= {2, 4} and len(r["tokens"]) == 20 for r in requests)
    assert "\x1b[38;5;" in out

    typed, _ = generate(*SAMPLED, text="x = ")
    given, _ = generate(*SAMPLED, "--prompt=x = ")
    assert [r["tokens"] for r in typed] == [r["tokens"] for r in given]
    assert typed[0]["prompt"] == given[0]["prompt"] == "x = "


@pytest.mark.slow
def test_processes_of_their_own_do_the_same(generate, demo, repo_root, one_device):
    def start(name, *arguments, text=None):
        return subprocess.run(
            [sys.executable, "-m", f"eejax.experiments.{name}", *arguments],
            cwd=repo_root,
            capture_output=True,
            text=True,
            input=text,
            timeout=600,
            env=os.environ | {"XLA_FLAGS": one_device, "COLUMNS": "100"},
        )

    workdir = f"--workdir={demo[0]}"
    again = start("train_demo", "--tiny", workdir)
    assert again.returncode == 0 and "resuming after step 30" in again.stderr
    here, _ = generate(*SAMPLED, text="x = ")
    done = start("generate", workdir, *ASKED, *SAMPLED, text="x = ")
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout.splitlines()[-1])["requests"]
    assert [r["tokens"] for r in here] == [r["tokens"] for r in there]
    assert here[0]["prompt"] == there[0]["prompt"] == "x = "


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt=x", "--threshold=high"], "--threshold = 'high': must be numbers"),
        (["--prompt=x", "--threshold=1.5"], "threshold = 1.5: must lie in [0, 1]"),
        (["--prompt=x", "--exits=3"], "must be among this model's exit boundaries [1, 2]"),
        (["--prompt=" + "x" * 500], "fewer than the context (128)"),
        (["--prompt="], "must have at least"),
        (["--prompt_file=absent.txt"], "absent.txt"),
    ],
)
def test_bad_input_is_named(generate, arguments, message):
    with pytest.raises(MISTAKES, match=re.escape(message)):
        generate(*arguments)


def test_a_folder_without_a_run(tmp_path):
    code, _, err = launch("generate", f"--workdir={tmp_path}", "--prompt=x")
    assert code == 1 and "holds no checkpoints" in err and "Traceback" not in err
