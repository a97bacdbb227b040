import errno
import io
import json
import math
import os
import struct
import sys
import types

import pytest
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from eejax.train.metrics import (
    METRICS,
    TENSORBOARD,
    MetricsWriter,
    NoMetrics,
    ProgressBar,
    duration,
    read_metrics,
)


def test_a_resumed_run_forgets_what_it_will_do_again(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in range(1, 8):
        writer.write(step, {"loss": float(step)})
    writer.close()
    with open(tmp_path / METRICS, "a") as file:
        file.write('{"step": 8, "lo')  # a kill in the middle of a line
    assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, 8))
    writer = MetricsWriter(tmp_path, resumed=4)
    writer.write(5, {"loss": 50.0})
    writer.close()
    records = read_metrics(tmp_path)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5]
    assert records[-1]["loss"] == 50.0


def test_a_new_run_begins_an_empty_file(tmp_path):
    for _ in range(2):
        writer = MetricsWriter(tmp_path)
        writer.write(0, {"loss": 2.0})  # of a run with a base
        writer.write(1, {"loss": 1.0})
        writer.close()
    assert read_metrics(tmp_path) == [{"step": 0, "loss": 2.0}, {"step": 1, "loss": 1.0}]


def test_lines_are_json_whatever_the_numbers(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "skipped": 1})
    line = (tmp_path / METRICS).read_text()  # flushed before the file is closed
    writer.close()
    parsed = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert parsed == {"step": 1, "loss": None, "grad_norm": None, "skipped": 1}


def test_tensorboard_reads_what_was_written(tmp_path):
    for resumed in (0, 2):
        (tmp_path / str(resumed)).mkdir()
        writer = MetricsWriter(tmp_path / str(resumed), resumed=resumed)
        writer.write(3, {"loss": 2.5, "tokens": 7})
        writer.close()
        (file,) = (tmp_path / str(resumed) / TENSORBOARD).iterdir()
        events = list(stored(file))
        assert events[0].file_version == "brain.Event:2"
        if resumed:
            assert (events[1].step, events[1].session_log.status) == (3, SessionLog.START)
        values = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
        assert values == [(3, "loss", 2.5), (3, "tokens", 7.0)]


def stored(file):
    """The records of an event file: 8 bytes of length, 4 of checksum, the event, 4 of checksum."""
    content, at = file.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        yield Event.FromString(content[at + 12 : at + 12 + length])
        at += length + 16


@pytest.mark.parametrize("name", [METRICS, TENSORBOARD])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch, name):
    writer = MetricsWriter(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if name == METRICS:
        writer._file = types.SimpleNamespace(write=full, close=writer._file.close)
    else:
        monkeypatch.setattr(EventsWriter, "write_event", full)
    with pytest.raises(OSError) as error:
        writer.write(1, {"loss": 1.0})
    assert error.value.filename == str(tmp_path / name) and error.value.errno == errno.ENOSPC
    writer.close()


def test_without_a_terminal_progress_is_lines(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = ProgressBar(0, 3, every_seconds=0.0)
    for step in (1, 2, 3):
        progress.update(step, {"loss": "1.0", "tok/s": "5"})
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 1/3  loss 1.0  tok/s 5"
    assert lines[1].startswith("step 2/3  loss 1.0") and lines[1].endswith("left")


@pytest.mark.parametrize(
    "seconds, text",
    [(4.4, "4 s"), (200, "3 min 20 s"), (3599.6, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


def test_a_line_that_is_no_record_costs_only_itself(tmp_path, caplog):
    good = [{"step": n, "loss": 1.0} for n in (1, 2, 3)]
    bad = [b"", b"garbage", b"\x00\x00\xff\xfe", b"[]", b'{"loss": 1}', b'{"step": "x"}']
    lines = [json.dumps(r).encode() for r in good]
    (tmp_path / METRICS).write_bytes(b"\n".join([lines[0], *bad, *lines[1:]]) + b"\n")
    with caplog.at_level("WARNING"):
        MetricsWriter(tmp_path, resumed=3).close()
    assert "6 lines are not records" in caplog.text
    assert read_metrics(tmp_path) == good


def test_a_process_that_does_not_speak_says_and_writes_nothing(tmp_path, capfd):
    progress, writer = ProgressBar(0, 3, every_seconds=0.0, shown=False), NoMetrics()
    for step in (1, 2, 3):
        progress.update(step, {"loss": "1"})
        writer.write(step, {"loss": 1.0})
    progress.say("a line")
    progress.close()
    writer.close()
    out = capfd.readouterr()
    assert out.out + out.err == ""
