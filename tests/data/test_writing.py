"""However packing ends, the same call goes on, and the result is that of an uninterrupted one."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import DataError
from eejax.data import ByteTokenizer, Document, find_packed, open_packed, pack, packing, writing
from eejax.data import workers as processes


@dataclasses.dataclass
class Texts:
    """Documents given directly; before document `fail`, reading breaks."""

    texts: tuple[str, ...]
    fail: int | None = None
    claim: str | None = None  # what `describe` says instead of the texts

    def documents(self) -> Iterator[Document]:
        for i, text in enumerate(self.texts):
            if i == self.fail:
                raise KeyboardInterrupt
            yield Document(f"doc{i}", text)

    def describe(self) -> dict[str, Any]:
        return {"kind": "texts", "texts": self.claim or list(self.texts), "bytes": 1000}


class Counting(ByteTokenizer):
    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str, *, allow_special: bool = False):
        self.encoded.append(text)
        return super().encode(text)


def files(folder: str | os.PathLike) -> dict[str, bytes]:
    folder = pathlib.Path(folder)
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def small_chunks(patch: pytest.MonkeyPatch, documents: int = 1) -> None:
    """So many documents a chunk, each committed; finished in blocks of three."""
    patch.setattr(processes, "CHUNK_DOCUMENTS", documents)
    patch.setattr(writing, "COMMIT_SHARE", 0)
    patch.setattr(writing, "_BLOCK", 3)


@pytest.fixture
def chunks_of_one(monkeypatch):
    small_chunks(monkeypatch)


def working(root: pathlib.Path) -> pathlib.Path:
    (folder,) = root.glob(f"{writing.PREFIX}*")
    return folder


def interrupted(texts: tuple[str, ...], at: int, root: pathlib.Path, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        pack(Texts(texts, at), ByteTokenizer(), root, **options)


@settings(max_examples=15)  # each waits for the disk a dozen times
@given(
    st.lists(st.text("aé🙂\n", min_size=1, max_size=9), min_size=2, max_size=12),
    st.lists(st.integers(0, 11), max_size=4),
    st.integers(1, 3),
    st.floats(0.0, 0.9),
)
def test_no_document_is_tokenized_twice_and_the_result_is_the_same(texts, ends, chunk, fraction):
    texts = tuple(texts)
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        whole = pack(Texts(texts), ByteTokenizer(), f"{root}/a", validation_fraction=fraction)
        small_chunks(patch, chunk)
        counting, done = Counting(), 0
        for end in sorted({end % len(texts) for end in ends}):
            with pytest.raises(KeyboardInterrupt):
                pack(Texts(texts, end), counting, f"{root}/b", validation_fraction=fraction)
            done += (end - done) // chunk * chunk
            assert len(counting.encoded) == done
        again = pack(Texts(texts), counting, f"{root}/b", validation_fraction=fraction)
        assert counting.encoded == list(texts)
        assert files(again.path) == files(whole.path) and again.fingerprint == whole.fingerprint
        assert os.listdir(f"{root}/b") == [os.path.basename(again.path)]


def test_interrupted_while_finishing(tmp_path, chunks_of_one, monkeypatch):
    texts = tuple("abcdefg")
    whole = pack(Texts(texts), ByteTokenizer(), tmp_path / "a")
    tokenizer = Counting()
    with monkeypatch.context() as patch:

        def broken(*_):
            raise KeyboardInterrupt

        for where in ((writing.PackingFolder, "finish"), (packing, "_fingerprint")):
            patch.setattr(*where, broken)
            with pytest.raises(KeyboardInterrupt):
                pack(Texts(texts), tokenizer, tmp_path / "b")
    assert files(pack(Texts(texts), tokenizer, tmp_path / "b").path) == files(whole.path)
    assert tokenizer.encoded == list(texts)


def test_a_full_disk_keeps_what_was_committed(tmp_path, chunks_of_one):
    texts = tuple(c * 30_000 for c in "abcdef")
    tokenizer = Counting()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, old[1]))  # two and a half documents
        with pytest.raises(DataError, match=r"cannot be written to .*tokens.bin.*call resumes"):
            pack(Texts(texts), tokenizer, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert json.loads((working(tmp_path) / "commit.json").read_text())["documents"] == 2
    dataset = pack(Texts(texts), tokenizer, tmp_path)
    assert tokenizer.encoded == [*texts[:3], *texts[2:]]
    assert files(dataset.path) == files(pack(Texts(texts), ByteTokenizer(), tmp_path / "b").path)


def test_what_lies_behind_the_last_commit_is_cut_off(tmp_path, chunks_of_one, monkeypatch):
    monkeypatch.setattr(writing, "COMMIT_SHARE", 1e9)  # after the first, none is due
    texts = tuple("abcdefg")
    tokenizer = Counting()
    with pytest.raises(KeyboardInterrupt):
        pack(Texts(texts, 5), tokenizer, tmp_path)
    left = {name: len(data) for name, data in files(working(tmp_path)).items()}
    assert left["records.bin"] == 5 * processes.RECORD.itemsize and committed(tmp_path) == 1
    dataset = pack(Texts(texts), tokenizer, tmp_path)
    assert tokenizer.encoded == [*texts[:5], *texts[1:]]
    assert files(dataset.path) == files(pack(Texts(texts), ByteTokenizer(), tmp_path / "b").path)


@pytest.mark.parametrize("file", ["commit.json", *writing.PackCommit().files])
@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_a_damaged_working_folder_is_begun_anew(tmp_path, chunks_of_one, file, damage, caplog):
    texts = tuple("abcdefg")
    interrupted(texts, 4, tmp_path)
    path = working(tmp_path) / file
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        short = data[: len(data) // 2]
        path.write_bytes(short if damage == "short" else bytes([data[0] ^ 1]) + data[1:])
    tokenizer = Counting()
    dataset = pack(Texts(texts), tokenizer, tmp_path)
    assert tokenizer.encoded == list(texts)
    said = "packing begins anew" in caplog.text
    assert said == (file != "commit.json" or damage != "gone")  # no commit: nothing was done
    assert files(dataset.path) == files(pack(Texts(texts), ByteTokenizer(), tmp_path / "b").path)


@pytest.mark.parametrize(
    "change", [{"tokens": 9}, {"bytes": 5}, {"documents": 3}, {"documents": "4"}, {"more": 1}]
)
def test_a_commit_that_does_not_fit_its_files_is_not_believed(tmp_path, chunks_of_one, change):
    texts = tuple("abcdefg")
    interrupted(texts, 4, tmp_path)
    path = working(tmp_path) / "commit.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    tokenizer = Counting()
    pack(Texts(texts), tokenizer, tmp_path)
    assert tokenizer.encoded == list(texts)


@pytest.mark.parametrize("now", ["abcdEfg", "abXdefg", "ab"])
def test_other_text_under_the_same_description_is_noticed(tmp_path, chunks_of_one, now, caplog):
    with pytest.raises(KeyboardInterrupt):
        pack(Texts(tuple("abcdefg"), 4, claim="same"), ByteTokenizer(), tmp_path)
    dataset = pack(Texts(tuple(now), claim="same"), ByteTokenizer(), tmp_path)
    # What is not committed yet may change; that is new text to us.
    assert ("text has changed since packing began" in caplog.text) == (now[:4] != "abcd")
    fresh = pack(Texts(tuple(now), claim="same"), ByteTokenizer(), tmp_path / "b")
    assert files(dataset.path) == files(fresh.path)


def test_what_is_left_of_others_is_cleared_after_a_day_unless_it_is_in_use(tmp_path, chunks_of_one):
    interrupted(tuple("abcd"), 2, tmp_path)
    rest = working(tmp_path)
    day = time.time() - writing.STALE_SECONDS

    def age(seconds: float) -> None:
        for path in (*rest.rglob("*"), rest):
            os.utime(path, (seconds, seconds))

    age(day + 600)
    pack(Texts(("k", "l")), ByteTokenizer(), tmp_path)
    assert rest.exists()
    age(day - 1)
    with writing.hold(str(rest), lambda: False):
        age(day - 1)
        pack(Texts(("m", "n")), ByteTokenizer(), tmp_path)
        assert rest.exists()
    age(day - 1)
    pack(Texts(("o", "p")), ByteTokenizer(), tmp_path)
    assert not rest.exists()


def test_the_rest_of_a_finished_one_is_cleared_at_once(tmp_path, chunks_of_one):
    interrupted(tuple("abcd"), 2, tmp_path)
    rest = working(tmp_path)
    (tmp_path / rest.name.removeprefix(writing.PREFIX)).mkdir()
    (tmp_path / f"{writing.PREFIX}removed-1").mkdir()
    made = pack(Texts(("k", "l")), ByteTokenizer(), tmp_path)
    assert not list(tmp_path.glob(f"{writing.PREFIX}*"))
    (tmp_path / f"{writing.PREFIX}removed-2").mkdir()
    pack(Texts(("k", "l")), ByteTokenizer(), tmp_path)
    assert not list(tmp_path.glob(f"{writing.PREFIX}*")) and open_packed(made.path)


def test_a_lock_in_a_folder_that_was_just_removed_is_none(tmp_path, monkeypatch):
    flock, calls = fcntl.flock, []

    def late(lock: int, how: int) -> None:
        calls.append(lock)
        if len(calls) == 1:  # its last owner is faster
            shutil.rmtree(tmp_path / "work")
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with writing.hold(str(tmp_path / "work"), lambda: False) as work:
        assert os.path.exists(work.path("lock")) and len(calls) == 2


def test_progress_counts_from_what_was_done_and_what_it_raises_ends_packing(
    tmp_path, chunks_of_one
):
    seen = []

    def progress(p):
        seen.append((p.documents, p.bytes, p.tokens))
        assert p.total_bytes == 1000
        if p.documents == 2:
            raise KeyError("enough")

    with pytest.raises(KeyError):
        pack(Texts(("a", "éé", "b")), ByteTokenizer(), tmp_path, progress=progress)
    assert seen == [(0, 0, 0), (1, 1, 2), (2, 5, 7)]
    pack(
        Texts(("a", "éé", "b")),
        ByteTokenizer(),
        tmp_path,
        progress=lambda p: seen.append((p.documents, p.bytes, p.tokens)),
    )
    assert seen[3:] == [(2, 5, 7), (3, 6, 9)]


def test_found_only_when_it_is_whole(tmp_path, chunks_of_one):
    texts = Texts(("ab", "cd"))
    assert find_packed(texts, ByteTokenizer(), tmp_path) is None
    interrupted(texts.texts, 1, tmp_path)
    assert find_packed(texts, ByteTokenizer(), tmp_path) is None
    made = pack(texts, ByteTokenizer(), tmp_path)
    assert find_packed(texts, ByteTokenizer(), tmp_path).path == made.path
    assert find_packed(texts, ByteTokenizer(), tmp_path, seed=1) is None


# A child that packs pseudo-random text, and prints where.
PROGRAM = """
import json, os, pathlib, random, sys, time
from eejax.data import ByteTokenizer, Document, load_tokenizer, pack, writing
from eejax.data import workers as processes
options = json.loads(sys.argv[1])
sys.path.append(options["root"])  # shows in the command lines of the workers
processes.CHUNK_CHARS, writing.COMMIT_SHARE = 3000, 0
writing._SAY_SECONDS = 0.1

class Words:
    def documents(self):
        print("reading", flush=True)
        draw = random.Random(0)
        for i in range(options["documents"]):
            while i == options.get("wait") and not os.path.exists(options["go"]):
                time.sleep(0.01)
            time.sleep(options.get("pause", 0))
            words = (draw.choice(("exit", "layer", "token ", "\\n")) for _ in range(150))
            yield Document(f"{i}.txt", "".join(words))
    def describe(self):
        return {"kind": "words"}

dataset = pack(Words(), ByteTokenizer(), options["root"], workers=options["workers"])
print(dataset.path, 'jax' in sys.modules)
"""


def child(**options: Any) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watch = threading.Timer(100, process.kill)  # a child that waits for ever fails its test
    watch.daemon = True
    watch.start()
    return process


def finished(process: subprocess.Popen) -> list[str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.splitlines()


def committed(root: pathlib.Path) -> int:
    try:
        return json.loads((working(root) / "commit.json").read_text())["documents"]
    except (ValueError, FileNotFoundError):
        return 0


def descendants(mark: str) -> list[str]:
    """Command lines of running processes with this in them."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().decode()
        except OSError:
            continue
        if mark in line and str(os.getpid()) != path.parent.name:
            found.append(line)
    return found


def kill_and_finish(tmp_path: pathlib.Path, kills: int, documents: int, seed: int) -> None:
    whole = finished(child(root=str(tmp_path / "a"), documents=documents, workers=1))[-1].split()[0]
    root, draw, moved = tmp_path / "b", random.Random(seed), 0
    for _ in range(kills):
        before = committed(root)
        process = child(
            root=str(root), documents=documents, workers=draw.randint(1, 3), pause=0.002
        )
        # A random moment; some of them only when there is something new to lose.
        deadline = time.monotonic() + draw.uniform(0.0, 1.5)
        new = draw.random() < 0.6
        while process.poll() is None:
            time.sleep(draw.uniform(0.0, 0.01))
            if time.monotonic() > deadline and (not new or committed(root) > before):
                break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        done = committed(root)
        assert done >= before or process.returncode == 0
        moved += done > before
    assert moved, "no kill came in the middle"
    deadline = time.monotonic() + 20
    while descendants(str(root)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not descendants(str(root)), "workers outlive the process that started them"
    path, jax = finished(child(root=str(root), documents=documents, workers=2))[-1].split()
    assert files(path) == files(whole) and jax == "False"
    assert [p.name for p in root.iterdir()] == [os.path.basename(path)]
    open_packed(path)


def test_killed_several_times(tmp_path):
    kill_and_finish(tmp_path, kills=4, documents=900, seed=0)


# Prints the resident memory at its highest. (ru_maxrss is no use: it begins as the parent's.)
LARGE = """
import sys
from eejax.data import ByteTokenizer, Document, pack

class Large:
    def documents(self):
        for i in range(int(sys.argv[2])):
            yield Document(f"{i}", f"some words, and the number {i}\\n" * 33)  # a kilobyte
    def describe(self):
        return {"kind": "large", "documents": sys.argv[2]}

pack(Large(), ByteTokenizer(), sys.argv[1], workers=int(sys.argv[3]))
print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_resident_memory_does_not_grow_with_the_text(tmp_path, workers):
    def peak(documents: int) -> float:
        arguments = [str(tmp_path), str(documents), str(workers)]
        done = subprocess.run(
            [sys.executable, "-c", LARGE, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=600,
        )
        return int(done.stdout.split()[1]) / 1024  # MB

    base, large = peak(3_000), peak(400_000)  # 3 and 400 MB of text
    # 12 MB: blocks of records, the verified starts and splits (3.6 MB), the allocator's slack.
    assert large < base + 12 and large < 100, (base, large)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_killed_many_times(tmp_path, seed):
    kill_and_finish(tmp_path, kills=25, documents=6000, seed=seed)


def test_a_second_process_waits_for_the_first_and_takes_what_it_made(tmp_path):
    options = {"root": str(tmp_path), "documents": 20, "workers": 1, "wait": 10}
    options["go"] = str(tmp_path / "go")
    first = child(**options)
    assert first.stdout.readline() == "reading\n"
    second = child(**options)
    assert "another process is packing the same text" in second.stderr.readline()
    (tmp_path / "go").touch()
    (path,), (other,) = finished(first), finished(second)  # the second did not read
    assert path == other and len(list(tmp_path.iterdir())) == 2


def test_of_a_killed_process_that_was_waited_for_the_waiting_one_goes_on(tmp_path):
    options = {"root": str(tmp_path), "documents": 200, "workers": 2, "wait": 150}
    options["go"] = str(tmp_path / "go")
    first = child(**options)
    deadline = time.monotonic() + 60
    while not committed(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    second = child(**options)
    assert "another process is packing" in second.stderr.readline()
    first.kill()
    first.communicate()
    (tmp_path / "go").touch()
    reading, path = finished(second)
    assert reading == "reading" and open_packed(path.split()[0]).meta["documents"] == 200
