"""Tokenizing in several processes gives what one gives, in the same order."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from eejax.common.errors import DataError
from eejax.data import ByteTokenizer, Document, pack, train_bpe, writing
from eejax.data import workers as processes


@dataclasses.dataclass(frozen=True)
class Texts:
    texts: tuple[str, ...]

    def documents(self) -> Iterator[Document]:
        for i, text in enumerate(self.texts):
            yield Document(f"doc{i}é", text)

    def describe(self) -> dict[str, Any]:
        return {"kind": "texts", "count": len(self.texts)}


WORDS = Texts(tuple(f"the {i}th é🙂 of many texts\n" * (i % 7) or " " for i in range(50)))


def files(folder: str) -> dict[str, bytes]:
    root = pathlib.Path(folder)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(processes, "CHUNK_CHARS", 200)
    monkeypatch.setattr(writing, "COMMIT_SHARE", 0)


@pytest.mark.parametrize("bpe", [False, True])
def test_any_number_of_workers_gives_the_same_bytes(tmp_path, small_chunks, bpe):
    tokenizer = train_bpe(WORDS.documents(), 300) if bpe else ByteTokenizer()
    results = [pack(WORDS, tokenizer, tmp_path / str(n), workers=n).path for n in (1, 2, 3)]
    one, two, three = map(files, results)
    assert one == two == three and len(one) >= 7


def test_at_most_two_chunks_for_each_worker_are_held():
    taken = 0

    def chunks():
        nonlocal taken
        for i in range(40):
            taken += 1
            yield processes.Chunk([Document(str(i), "abc")], str(i))

    given = 0
    encoding = processes.Encoding("bytes-257", 0, "<u2")
    for chunk in processes.encoded(chunks(), ByteTokenizer(), encoding, 2, "bytes"):
        assert chunk.digest == str(given) and taken - given <= 4
        given += 1
    assert given == 40


@pytest.mark.parametrize("workers", [1, 2])
def test_text_that_is_no_unicode_is_reported_and_the_text_before_it_kept(
    tmp_path, small_chunks, workers
):
    bad = Texts((*WORDS.texts[:30], "half a pair: \ud83d", "more"))
    with pytest.raises(DataError, match="lone surrogate at character 13"):
        pack(bad, ByteTokenizer(), tmp_path, workers=workers)
    (folder,) = tmp_path.iterdir()
    assert (folder / "commit.json").exists()


def test_a_killed_worker_is_reported_and_the_rest_is_kept(tmp_path, small_chunks, monkeypatch):
    started = []

    class Watched(processes._Worker):
        def __init__(self):
            super().__init__()
            started.append(self.process)

    monkeypatch.setattr(processes, "_Worker", Watched)

    def progress(p):
        if p.documents > 10:
            started[0].kill()

    many = Texts(WORDS.texts * 4)
    with pytest.raises(
        DataError, match=f"worker process ended with status {-signal.SIGKILL}.*kept"
    ):
        pack(many, ByteTokenizer(), tmp_path / "a", workers=2, progress=progress)
    assert all(process.poll() is not None for process in started)
    seen = []
    again = pack(many, ByteTokenizer(), tmp_path / "a", workers=2, progress=seen.append)
    assert seen[0].documents > 0
    assert files(again.path) == files(pack(many, ByteTokenizer(), tmp_path / "b").path)


def test_a_tokenizer_that_cannot_be_saved_stays_in_one_process(tmp_path):
    class Mine(ByteTokenizer):
        fingerprint = "mine"

    with pytest.raises(DataError, match="tokenizer mine changes to bytes-257 when it.*= 1"):
        pack(WORDS, Mine(), tmp_path, workers=2)
    assert pack(WORDS, Mine(), tmp_path).meta["documents"] == 50


def test_workers_run_nothing_of_the_caller_and_no_jax(tmp_path):
    # No guard around the call; and a tokenizer that tells what its process has imported.
    (tmp_path / "tellers.py").write_text(
        """
import sys
from eejax.data import tokenizers
print("noise on standard output", flush=True)
encode = tokenizers.ByteTokenizer.encode
def tell(self, text, **_):
    loaded = {m.split(".")[0] for m in sys.modules}
    return encode(self, " ".join(sorted(loaded & {"jax", "script", "tellers"})))
tokenizers.ByteTokenizer.encode = tell
"""
    )
    (tmp_path / "script.py").write_text(
        f"""
import sys
import jax
sys.path.insert(0, {str(tmp_path)!r})
from eejax.data import ByteTokenizer, TextFiles, pack
from eejax.data import workers
workers._PROGRAM = workers._PROGRAM.replace("workers.main", "import tellers; workers.main")
data = pack(TextFiles(("script.py", "tellers.py")), ByteTokenizer(), "packed", workers=2)
for split in data.splits.values():
    print(data.tokenizer.decode(split.read(0, int(split.starts[1]))))
"""
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["tellers", "tellers"], done.stderr
    assert "noise" in done.stderr and "Traceback" not in done.stderr


def test_interrupts_of_a_terminal_are_left_to_the_first_process(tmp_path):
    worker = processes._Worker()
    worker.send(("bytes", processes.Encoding("bytes-257", 0, "<u2")))
    worker.send(processes.Chunk([Document("a", "xy")], "1"))
    assert worker.receive().digest == "1"
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.process.pid, number)
    worker.send(processes.Chunk([Document("b", "z")], "2"))
    assert worker.receive().digest == "2"
    worker.process.stdin.close()
    assert worker.process.wait(30) == 0  # its input ended
    worker.close()
