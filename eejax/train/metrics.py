"""Metrics writers: metrics.jsonl, TensorBoard, and a progress bar or plain lines."""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from absl import logging
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (  # Protocol Buffers make the classes at run time
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tqdm import tqdm

from eejax.checkpoint.files import write_text
from eejax.common.errors import naming_file
from eejax.models.config import ModelConfig

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


def exit_names(config: ModelConfig) -> list[str]:
    """Return the names of the exits in metrics, in their order: 'exit_3', ..., 'final'."""
    return [*(e.name for e in config.exits), "final"]


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Read the records of a run, in order.

    Lines that are not records, such as a last one cut off by a kill, are left out.
    """
    try:
        lines = (pathlib.Path(workdir) / METRICS).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [record for line in lines if (record := _record(line)) is not None]


def _unreadable(path: pathlib.Path) -> int:
    """Count the lines that are not records, except the last, which a kill may cut off."""
    lines = path.read_bytes().splitlines()[:-1] if path.exists() else []
    return sum(_record(line) is None for line in lines)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # also what is not UTF-8
        return None
    usable = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if usable else None


class MetricsWriter:
    """Writer of records {"step": n, name: number, ...} to metrics.jsonl and TensorBoard.

    A run that resumes after step `resumed` drops later records, so that no step appears twice. One
    that begins, with `resumed` 0, drops all. Numbers that are not finite become null, and are not
    drawn. If a write fails, `OSError` names the file.
    """

    def __init__(self, workdir: str | os.PathLike, *, resumed: int = 0):
        workdir = pathlib.Path(workdir)
        path = workdir / METRICS
        kept = [r for r in read_metrics(workdir) if resumed and r["step"] <= resumed]
        if bad := _unreadable(path):
            logging.warning("%s: %d lines are not records and are dropped", path, bad)
        write_text(path, "".join(json.dumps(r) + "\n" for r in kept))
        self._path, self._file = path, open(path, "a", encoding="utf-8")
        self._board = _Board(workdir / TENSORBOARD, resumed)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one record; it is on its way to the disk when this returns."""

        def finite(v):
            return v if not isinstance(v, float) or math.isfinite(v) else None

        written = {k: finite(v) for k, v in values.items()}
        with naming_file(self._path):
            self._file.write(json.dumps({"step": step} | written) + "\n")
            self._file.flush()
        self._board.write(step, {k: v for k, v in written.items() if v is not None})

    def close(self) -> None:
        try:
            with naming_file(self._path):
                self._file.close()
        finally:
            self._board.close()


class NoMetrics:
    """A `MetricsWriter` for processes that write nothing."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _Board:
    """TensorBoard's event file, written in this thread.

    tensorboardX's own SummaryWriter writes in another thread, which dies unnoticed on a full disk
    and leaves the run waiting for it forever.
    """

    def __init__(self, folder: pathlib.Path, resumed: int, *, flush_seconds: float = 10.0):
        self._folder, self._every = folder, flush_seconds
        self._flushed = time.monotonic()
        with naming_file(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._events = EventsWriter(str(folder / "events"))
            if resumed:  # TensorBoard itself hides what was recorded from this step on
                begin = SessionLog(status=SessionLog.START)
                self._events.write_event(
                    Event(wall_time=time.time(), step=resumed + 1, session_log=begin)
                )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = time.time()
        with naming_file(self._folder):
            for name, value in values.items():
                scalar = summary.scalar(name, value)
                self._events.write_event(Event(wall_time=now, step=step, summary=scalar))
            if time.monotonic() - self._flushed > self._every:
                self._events.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        with naming_file(self._folder):
            self._events.close()


class ProgressBar:
    """Progress bar with loss, tokens/s and time left; lines at intervals without a terminal.

    It shows nothing unless `shown`.
    """

    def __init__(self, start: int, steps: int, *, every_seconds: float = 10.0, shown: bool = True):
        self._shown, self._terminal = shown, shown and sys.stderr.isatty()
        self._steps, self._every, self._last = steps, every_seconds, -math.inf
        self._begin: float | None = None
        self._start = start
        self._bar = tqdm(
            total=steps, initial=start, unit="step", dynamic_ncols=True, disable=not self._terminal
        )

    def update(self, step: int, values: Mapping[str, str]) -> None:
        """Show that step `step` is done; `values` are shown as they are."""
        if self._terminal:
            self._bar.set_postfix(values, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if self._begin is None:  # the first step compiles: the time left is judged by the others
            self._begin, self._start = now, step
        if now - self._last >= self._every or step == self._steps:
            self._last = now
            shown = "  ".join(f"{k} {v}" for k, v in values.items())
            if step > self._start:
                left = (now - self._begin) / (step - self._start) * (self._steps - step)
                shown += f"  {duration(left)} left"
            self.say(f"step {step}/{self._steps}  {shown}")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if not self._shown:
            return
        tqdm.write(line, file=sys.stderr)
        sys.stderr.flush()

    def close(self) -> None:
        self._bar.close()


def duration(seconds: float) -> str:
    """Format seconds as '42 s', '3 min 20 s' or '2 h 05 min'."""
    s = int(round(seconds))
    if s < 60:
        return f"{s} s"
    return (
        f"{s // 60} min {s % 60:02d} s" if s < 3600 else f"{s // 3600} h {s % 3600 // 60:02d} min"
    )
