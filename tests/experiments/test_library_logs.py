"""Libraries' tracebacks do not bury the line that says what is wrong."""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys
import threading

import pytest
from absl import logging

from eejax.experiments import library_logs

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOM = 24_000  # bytes of a file: enough for the text, too few for the embedding


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(library_logs, "_texts", [])
    monkeypatch.setattr(library_logs, "_file", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    yield
    logging.get_absl_handler().removeFilter(library_logs._passes)


def test_a_checkpoint_that_cannot_be_written(tmp_path, one_device):
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "eejax.experiments.train",
            "--config=configs/tiny.py",
            "--config.data.max_bytes=8000",
            "--config.train.steps=2",
            "--config.train.eval_every=0",
            f"--workdir={tmp_path / 'run'}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ
        | {
            "XLA_FLAGS": one_device,
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "TMPDIR": str(tmp_path),
            # Python 3.11 cuts off what it compiles at the limit, and the next process to import a
            # module that was edited since ends with "EOFError: marshal data too short".
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM)),
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert last.startswith("error: saving the checkpoint of step 2 in "), done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") < 8, done.stderr


LEFT = """
import sys
from eejax.experiments import library_logs

async def write():
    pass

if "redirect" in sys.argv:
    library_logs.redirect()
left = write()  # found when the interpreter ends
sys.exit("error: the last line")
"""


@pytest.mark.parametrize("redirect, lines", [(True, 1), (False, 2)])
def test_a_coroutine_that_a_library_left_is_no_last_line(redirect, lines):
    command = [sys.executable, "-P", "-c", LEFT, *["redirect"] * redirect]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    said = done.stderr.splitlines()
    assert said[0] == "error: the last line" and min(len(said), 2) == lines, done.stderr


def test_errors_of_threads_and_of_libraries_are_kept(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(library_logs.tempfile, "tempdir", str(tmp_path))

    def fails():
        raise RuntimeError("in a thread")

    library_logs.redirect()
    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    logger = logging.get_absl_logger()
    for path in ("/site-packages/library/module.py", f"{ROOT}/eejax/checkpoint/manager.py"):
        error = (ValueError, ValueError(f"of {path}"), None)
        record = logger.makeRecord("absl", logging.ERROR, path, 1, "failed", (), error)
        if library_logs._passes(record):
            assert path.endswith("manager.py")
    assert library_logs.report() == library_logs.report()  # one file, told twice
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert str(file) in library_logs.report()
    assert "in a thread" in text and "of /site-packages" in text and "manager.py" not in text
    assert capfd.readouterr().err == ""


def test_where_nothing_failed_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(library_logs.tempfile, "tempdir", str(tmp_path))
    library_logs.redirect()
    assert library_logs.report() == "" and not list(tmp_path.iterdir())
