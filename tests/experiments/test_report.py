"""The report says what the runs recorded; whatever state they are in, it is written."""

import json
import re

import numpy as np
import pytest
import small_runs
from endings import ended
from matplotlib.image import imread

from eejax.train.config import Experiment
from eejax.train.loop import fit
from eejax.train.metrics import read_metrics


def report(*arguments):
    done = ended("eejax.experiments.report", "--json", *arguments)
    assert done.status == 0, done.err
    assert not done.err.strip(), "warnings"
    return json.loads(done.out.splitlines()[-1])


def tables(path):
    """The tables of a report: lists of rows of cells, headers first."""
    found, last = [], None
    for line in path.read_text().splitlines():
        if line.startswith("|"):
            if last is None:
                found.append(last := [])
            cells = re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
            last.append([re.sub(r"\\(.)", r"\1", c) for c in cells])
        else:
            last = None
    return [[rows[0], *rows[2:]] for rows in found]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two runs that differ, in folders of one name."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text").mkdir()
    small_runs.write_text(folder / "text")
    for name, seed in (("one", 0), ("two", 1)):
        config = small_runs.config(folder / "text", seed=seed)
        if name == "two":
            config["model"]["exits"] = []
            config["exit_weights"]["weights"] = []
        fit(Experiment.from_dict(config), folder / name / "run")
    return folder


def test_a_report_on_real_runs(trained, tmp_path):
    folders = [trained / "one" / "run", trained / "two" / "run"]
    got = report(*folders, f"--out={tmp_path}")
    assert [r["name"] for r in got["runs"]] == ["one/run", "two/run"]
    for run, folder in zip(got["runs"], folders, strict=True):
        records = read_metrics(folder)
        steps = [r for r in records if "loss" in r]
        assert len(steps) == small_runs.STEPS, "every step is logged"
        assert run["step"] == run["steps"] == small_runs.STEPS
        assert run["tokens"] == sum(r["tokens"] for r in steps)
        rates = [r["tokens_per_second"] for r in steps if "tokens_per_second" in r]
        assert run["tokens_per_second"] == pytest.approx(np.median(rates))
        last = [r for r in records if "eval/loss/final" in r][-1]
        assert {f"eval/{k}": v for k, v in run["eval"].items() if k != "step"} == {
            k: v for k, v in last.items() if k.startswith("eval/")
        }
    assert set(got["differ"]) == {"train.seed", "model.exits", "exit_weights.weights"}
    assert got["differ"]["train.seed"] == {"one/run": 0, "two/run": 1}
    overview, bits, nats, differ, where = tables(tmp_path / "report.md")
    assert [row[0] for row in overview] == ["run", "one/run", "two/run"]
    assert bits[0] == nats[0] == ["run", "step", "exit_1", "final"]
    one, two = (run["eval"] for run in got["runs"])
    assert nats[1][2:] == [f"{one['loss/exit_1']:.4f}", f"{one['loss/final']:.4f}"]
    assert bits[2][2:] == ["-", f"{two['bits_per_byte/final']:.4f}"]
    assert ["train.seed", "0", "1"] in differ
    assert where[1][1] == str(folders[0])
    text = (tmp_path / "report.md").read_text()
    pictures = re.findall(r"!\[.*\]\((.*)\)", text)
    assert (
        pictures == got["pictures"] and "training_loss.png" in pictures and "eval.png" in pictures
    )
    for name in pictures:
        image = imread(tmp_path / name)
        assert image.shape[0] > 400 and image.std() > 0.02


def write_run(folder, records, config=None, end=""):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"train": {"steps": 100}} | (config or {})))
    lines = "".join(json.dumps(r) + "\n" for r in records)
    (folder / "metrics.jsonl").write_text(lines + end)
    return folder


def records(exits, steps=40, every=10, extra=False):
    found = []
    for s in [1, *range(every, steps + 1, every)]:
        step = {"step": s, "learning_rate": 0.1, "loss": 1.0, "grad_norm": 2.0, "tokens": 100}
        step["tokens_seen"] = 100 * s
        step |= {"skipped": 0, **{f"loss/{e}": 5 / s for e in exits}}
        if extra:
            step |= {f"grad_norm/{e}": 1 / s for e in exits} | {"loss_scale": 2.0**s, "mfu": 0.4}
            step |= {f"weight/{e}": s / 100 for e in exits} | {"tokens_per_second": 5e5}
            step |= {f"eval_ema/loss/{e}": 4 / s for e in exits}
        found.append(step)
    return found


def test_runs_in_every_state(tmp_path):
    """Unfinished, empty, cut off, without metrics, fields or numbers, and twelve of them."""
    none = [{"step": 3, "loss/final": None, "grad_norm": None, "eval/loss/final": None}]
    averaged = {"step": 1, "eval_ema/loss/exit_3": 2.0, "tokens": 0}
    odd = {"model": {"exits": "new | kind"}, "train": 3}
    runs = [
        write_run(tmp_path / "empty", []),
        write_run(tmp_path / "cut", records(["exit_2", "final"]), end='{"step": 41, "lo'),
        write_run(tmp_path / "full", records(["exit_10", "exit_2", "final"], extra=True)),
        write_run(tmp_path / "not_finite", none, odd),
        write_run(tmp_path / "_ $x$ | name", records(["final"], steps=100)),
        write_run(tmp_path / "one_step", [*records(["final"], steps=1), averaged]),
        *(write_run(tmp_path / f"seed_{i}" / "run", records(["final"])) for i in range(6)),
    ]
    (tmp_path / "empty" / "metrics.jsonl").unlink()
    out = tmp_path / "new" / "folder"
    out.mkdir(parents=True)
    got = report(*runs, f"--out={out}")
    names = ["empty", "cut", "full", "not_finite", "_ $x$ | name", "one_step"]
    names += [f"seed_{i}/run" for i in range(6)]
    assert [r["name"] for r in got["runs"]] == names
    by = {r["name"]: r for r in got["runs"]}
    assert by["empty"]["step"] == 0 and by["empty"]["tokens"] is None
    assert by["cut"]["step"] == 40 and by["cut"]["steps"] == 100
    assert by["cut"]["tokens"] == 4000
    assert by["not_finite"]["eval"] == {} and by["not_finite"]["steps"] is None
    assert by["full"]["eval_ema"]["loss/exit_10"] == pytest.approx(0.1)
    assert set(got["pictures"]) == {
        "training_loss.png",
        "eval_ema.png",
        "gradients.png",
        "throughput.png",
        "schedule.png",
    }
    overview, nats, differ, _ = tables(out / "report.md")
    assert [row[0] for row in overview[1:]] == names
    assert overview[2][1:5] == ["40", "100", "4,000", "0"] and overview[1][3:] == ["-"] * 4
    assert nats[0] == ["run", "step", "exit_2", "exit_3", "exit_10", "final"]
    assert nats[2] == ["one_step, averaged weights", "1", "-", "2.0000", "-", "-"]
    assert len(differ) == 1 + len(names) and '"new | kind"' in sum(differ, [])

    # The pictures of a report on other runs do not stay.
    got = report(tmp_path / "empty", f"--out={out}")
    assert got["pictures"] == [] and [p.name for p in out.iterdir()] == ["report.md"]


def test_tokens_between_logged_steps_and_after_the_last(tmp_path):
    """Step 7 was skipped; the evaluation behind the last step that was logged knows of it."""
    lines = [{"step": 4, "tokens_seen": 40}, {"step": 7, "tokens_seen": 60}]
    end = {"step": 12, "eval/loss/final": 1.0, "tokens_seen": 280}
    run = write_run(tmp_path / "a", [*lines, end])
    got = report(run, f"--out={tmp_path / 'out'}")
    assert got["runs"][0]["tokens"] == 280


def test_a_run_given_twice_is_drawn_once_and_names_are_as_short_as_they_can_be(tmp_path):
    folders = ["a/x/run", "a/y/run", "b/y/run", "b/other"]
    runs = [write_run(tmp_path / f, records(["final"])) for f in folders]
    (tmp_path / "latest").symlink_to(runs[0])
    got = report(*runs, f"{runs[0]}/", tmp_path / "latest", f"--out={tmp_path / 'out'}")
    assert [r["name"] for r in got["runs"]] == ["x/run", "a/y/run", "b/y/run", "other"]


def test_runs_whose_losses_do_not_compare_are_said_to_be(tmp_path):
    def data(**c):
        return {"data": {"tokenizer": "bytes", "source": "x", "length": 1} | c}

    a = write_run(tmp_path / "a", records(["final"]), data())
    b = write_run(tmp_path / "b", records(["final"]), data(tokenizer="bpe"))
    c = write_run(tmp_path / "c", records(["final"]), data(source="y"))
    said = []
    for other in (b, c):
        report(a, other, f"--out={tmp_path / 'out'}")
        text = (tmp_path / "out" / "report.md").read_text()
        said.append(("differ in their tokenizer" in text, "differ in data.source" in text))
    assert said == [(True, False), (False, True)]


@pytest.mark.parametrize("what", ["none", "folder", "broken", "list"])
def test_what_is_no_run_is_named_in_one_line(tmp_path, what):
    good = write_run(tmp_path / "good", [])
    bad = tmp_path / "bad"
    bad.mkdir()
    if what in ("broken", "list"):
        (bad / "config.json").write_text("{" if what == "broken" else "[]")
    given = [] if what == "none" else [good, bad]
    done = ended("eejax.experiments.report", *given, f"--out={tmp_path / 'out'}")
    (line,) = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert done.status == 1 and "Traceback" not in done.err
    assert ("no run given" if what == "none" else str(bad)) in line
    assert not (tmp_path / "out").exists()
