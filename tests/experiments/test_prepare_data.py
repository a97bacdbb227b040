"""Preparing data as a user does it, with whatever may end it on the way."""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from endings import ended

from eejax.data import PackedDataset, load_tokenizer, pack, save_tokenizer, source, train_bpe
from eejax.train import inputs
from eejax.train.config import DataConfig


def launch(root, *arguments):
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "eejax.experiments.prepare_data",
            "--config=configs/tiny.py",
            *arguments,
        ],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "100"},
    )


def run(root, *arguments):
    """The command in this process: (exit status, standard output, errors)."""
    return ended("eejax.experiments.prepare_data", f"--config={root}/configs/tiny.py", *arguments)


def finish(process, timeout=600):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def files(folder) -> dict[str, bytes]:
    folder = pathlib.Path(folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[pathlib.Path, PackedDataset]:
    """A folder with 5 MB of text, a tokenizer that takes seconds for it, and what must come out."""
    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(5000)]
    for i in range(4):
        (folder / f"{i}.txt").write_text(" ".join(draw.choices(words, k=200_000)))
    save_tokenizer(train_bpe([" ".join(words)], 600), folder / "tokenizer")
    whole = pack(
        source(str(folder / "*.txt")), load_tokenizer(folder / "tokenizer"), folder / "whole"
    )
    return folder, whole


def flags(folder, workdir):
    return (
        f"--config.data.source={folder}/*.txt",
        f"--config.data.tokenizer={folder}/tokenizer",
        "--config.data.max_bytes=None",
        "--config.model.vocab_size=600",
        f"--workdir={workdir}",
    )


def committed(workdir) -> int:
    for path in pathlib.Path(workdir).glob("data/.packing-*/commit.json"):
        try:
            return json.loads(path.read_text())["documents"]
        except (FileNotFoundError, ValueError):
            pass
    return 0


def until(workdir, process, more_than: int) -> None:
    deadline = time.monotonic() + 120
    while committed(workdir) <= more_than and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_table_json_and_the_checksum(repo_root, corpus, tmp_path):
    folder, whole = corpus
    code, out, err = run(repo_root, *flags(folder, tmp_path), "--workers=2")
    assert code == 0, err
    (path,) = (tmp_path / "data").iterdir()
    assert files(path) == files(whole.path)
    lines = out.splitlines()
    counts = whole.meta["splits"]["train"]
    shown = [f"{counts[k]:,}" for k in ("documents", "tokens", "bytes")]
    assert lines[2].split() == ["train", *shown, f"{counts['bytes'] / counts['tokens']:.3f}"]
    assert lines[-2].split() == ["folder", str(path)]
    assert lines[-1].split() == ["fingerprint", whole.fingerprint]

    # What a training run in this workdir takes.
    config = DataConfig(source=f"{folder}/*.txt", tokenizer=str(folder / "tokenizer"))
    taken = inputs.prepare(config, 600, tmp_path, "tokenizer")
    assert taken.path == str(path) and len(list((tmp_path / "data").iterdir())) == 1

    code, out, err = run(repo_root, *flags(folder, tmp_path), "--verify", "--json")
    assert code == 0 and "the checksum holds" in err, err
    result = json.loads(out)
    assert result["fingerprint"] == whole.fingerprint and result["folder"] == str(path)
    assert result["splits"]["train"]["tokens"] == counts["tokens"]

    with open(path / "tokens.bin", "r+b") as file:
        file.write(b"\xff")
    code, out, err = run(repo_root, *flags(folder, tmp_path), "--verify")
    assert code == 1 and out == "" and f"error: {path} is damaged" in err


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--verify", "error: nothing is packed for this configuration and"),
        ("--workers=0", "flag --workers=0"),
    ],
)
def test_mistakes_are_one_clear_line(repo_root, corpus, tmp_path, argument, message):
    code, _, err = run(repo_root, *flags(corpus[0], tmp_path), argument)
    assert code == 1 and message in err and "Traceback" not in err


def test_stopped_politely_it_goes_on(repo_root, corpus, tmp_path):
    folder, whole = corpus
    done = 0
    for number in (signal.SIGTERM, signal.SIGINT):
        process = launch(repo_root, *flags(folder, tmp_path), "--workers=2")
        until(tmp_path, process, done)
        process.send_signal(number)
        code, _, err = finish(process)
        assert code == 128 + number, err
        assert "stopped: the same command resumes" in err and "Traceback" not in err
        assert committed(tmp_path) > done
        done = committed(tmp_path)
    code, _, err = run(repo_root, *flags(folder, tmp_path), "--workers=1")
    assert code == 0, err
    (path,) = (tmp_path / "data").iterdir()
    assert files(path) == files(whole.path)


def kill_and_finish(repo_root, corpus, workdir, kills: int, seed: int) -> None:
    folder, whole = corpus
    draw = random.Random(seed)
    for _ in range(kills):
        process = launch(repo_root, *flags(folder, workdir), f"--workers={draw.randint(1, 3)}")
        if draw.random() < 0.7:
            until(workdir, process, committed(workdir))
        time.sleep(draw.uniform(0.0, 0.3))
        process.kill()
        process.communicate()
    code, _, err = run(repo_root, *flags(folder, workdir), "--workers=2")
    assert code == 0, err
    (path,) = (workdir / "data").iterdir()
    assert files(path) == files(whole.path)


def test_killed_it_goes_on(repo_root, corpus, tmp_path):
    kill_and_finish(repo_root, corpus, tmp_path, kills=3, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_killed_many_times_it_goes_on(repo_root, corpus, tmp_path, seed):
    kill_and_finish(repo_root, corpus, tmp_path, kills=12, seed=seed)
