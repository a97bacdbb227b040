import errno
import os
import subprocess
import sys

import pytest

from eejax.checkpoint.files import only_user, unwritable, write_text
from eejax.common.errors import ConfigError


def test_a_file_is_replaced_at_once_or_stays(tmp_path, monkeypatch):
    write_text(tmp_path / "a.json", "old")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError) as error:
            write_text(tmp_path / "a.json", "new")
    assert error.value.filename == str(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == "old"
    write_text(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_the_newest_finished_checkpoint_is_named(tmp_path):
    error = OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl")
    assert "There is no checkpoint yet" in str(unwritable(error, tmp_path / "checkpoints"))
    for name in ("9", "100", "200.orbax-checkpoint-tmp-1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    message = str(unwritable(error, tmp_path / "checkpoints"))
    assert message.startswith("runs/x/metrics.jsonl could not be written: No space left on device")
    assert f"The checkpoint {tmp_path / 'checkpoints' / '100'} stays usable" in message


@pytest.mark.parametrize(
    "number, fix",
    [
        (errno.ENOSPC, "make room, or give another folder"),
        (errno.EDQUOT, "make room, or give another folder"),
        (errno.EFBIG, "make room, or give another folder"),
        (errno.EIO, "; give another path, and"),
        (errno.EEXIST, "this is a file"),
        (errno.ENOTDIR, "this is a file"),
        (errno.EACCES, "a path that this user may use"),
        (errno.EROFS, "a path that this user may use"),
    ],
)
def test_the_fix_is_that_of_the_error(number, fix, tmp_path):
    assert fix in str(unwritable(OSError(number, os.strerror(number), "x"), tmp_path))


def test_one_process_at_a_time_uses_a_folder(tmp_path):
    held = f"""
import os, time
from eejax.checkpoint.files import only_user
with only_user({str(tmp_path)!r}):
    print(os.getpid(), flush=True)
    time.sleep(100)
"""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", held], stdout=subprocess.PIPE, text=True
    ) as other:
        number = other.stdout.readline().strip()
        with pytest.raises(ConfigError, match=f"in use by process {number}: wait"):
            with only_user(tmp_path):
                pass
        other.kill()
    with only_user(tmp_path):  # a killed process lets go
        pass
