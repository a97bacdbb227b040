"""Documents: the same ones on every pass, within the budget, and clear errors for the rest."""

from __future__ import annotations

import io
import os
import pathlib
import sysconfig

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError, DataError
from eejax.data import Document, PythonStdlib, TextFiles, pack, source, train_bpe
from eejax.data.sources import cut


def write(folder: pathlib.Path, **texts: str) -> None:
    for name, text in texts.items():
        path = folder / (name.replace("__", "/") + ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())


def test_globs_are_sorted_and_each_file_is_read_once(tmp_path):
    write(tmp_path, b="bee", a="ay", sub__c="sea\r\n")
    files = TextFiles((str(tmp_path / "b.txt"), str(tmp_path / "**" / "*.txt")))
    found = list(files.documents())
    assert found == [("b.txt", "bee"), ("a.txt", "ay"), ("sub/c.txt", "sea\r\n")]
    assert list(files.documents()) == found


def test_names_survive_moving_the_folder(tmp_path):
    for folder in ("one", "two"):
        write(tmp_path / folder, x="text", y__z="more")
    names = [
        [d.name for d in source(str(tmp_path / folder / "**" / "*.txt")).documents()]
        for folder in ("one", "two")
    ]
    assert names[0] == names[1] == ["x.txt", "y/z.txt"]


@settings(max_examples=200)
@given(
    st.text("ab\n|", max_size=60),
    st.sampled_from([None, "|", "\n\n", "|a"]),
    st.integers(1, 12),
)
@example("qqq|ab\nc|a", "|a", 3)  # half a separator at the end of what was read
def test_cutting_a_stream_equals_cutting_the_whole_text(text, separator, limit):
    wanted = []
    for piece in text.split(separator) if separator else [text]:
        while piece:
            lines = piece[:limit].rfind("\n") + 1 if len(piece) > limit else len(piece)
            wanted.append(piece[: lines or limit])
            piece = piece[lines or limit :]
    pieces = list(cut(io.StringIO(text, newline=""), separator, limit))
    assert pieces == [p for p in wanted if p.strip()]


def test_long_files_are_cut_at_line_ends(tmp_path):
    lines = [f"line {i}\n" for i in range(100)]
    write(tmp_path, long="".join(lines))
    files = TextFiles((str(tmp_path / "long.txt"),), document_chars=64)
    documents = list(files.documents())
    assert len(documents) > 5
    assert all(d.text.endswith("\n") and len(d.text) <= 64 for d in documents)
    assert "".join(d.text for d in documents) == "".join(lines)
    assert len({d.name for d in documents}) == len(documents)


def test_budget_of_files_is_exact_and_does_not_split_characters(tmp_path):
    write(tmp_path, a="é" * 10, b="x" * 10)
    pattern = str(tmp_path / "*.txt")
    texts = [d.text for d in source(pattern, max_bytes=24).documents()]
    assert texts == ["é" * 10, "xxxx"]
    assert [d.text for d in source(pattern, max_bytes=5).documents()] == ["éé"]


def test_describe_changes_with_the_files_and_only_then(tmp_path):
    write(tmp_path, a="one", b="two")
    files = source(str(tmp_path / "*.txt"))
    before = files.describe()
    assert files.describe() == before
    write(tmp_path, b="three")
    assert files.describe() != before


def test_several_kinds_keep_the_order_they_are_listed_in(tmp_path):
    write(tmp_path, a="one", b="two")
    files = [str(tmp_path / f"{name}.txt") for name in "ab"]
    lines = tmp_path / "c.jsonl"
    lines.write_text('{"text": "three"}\n', encoding="utf-8")
    library = list(source("python-stdlib").documents())
    mixed = source((files[1], str(lines), "python-stdlib", files[0], files[0]))
    found = list(mixed.documents())
    assert found == [("b.txt", "two"), ("c.jsonl#1", "three"), *library, ("a.txt", "one")]
    two = (files[0], "python-stdlib")
    assert [d.text for d in source(two, 5).documents()] == ["one", library[0].text[:2]]
    before = source(two).describe()
    assert source(two).describe() == before != source(two, 5).describe()
    assert before != source(two[::-1]).describe()
    write(tmp_path, a="changed")
    assert source(two).describe() != before
    assert source(("python-stdlib",), 200_000) == PythonStdlib(200_000)


def test_what_lies_behind_the_budget_is_not_read(tmp_path):
    write(tmp_path, a="one")
    (tmp_path / "bad.jsonl").write_text("no json\n", encoding="utf-8")
    specs = (str(tmp_path / "a.txt"), str(tmp_path / "bad.jsonl"))
    assert [d.text for d in source(specs, 3).documents()] == ["one"]
    with pytest.raises(DataError, match=r"bad.jsonl, line 1 is not JSON"):
        list(source(specs, 4).documents())


def test_a_mixed_source_is_packed_and_found_again(tmp_path):
    write(tmp_path, a="one", b="two")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n{"text": "four"}\n', encoding="utf-8")
    text = source((str(tmp_path / "*.txt"), str(tmp_path / "c.jsonl")))
    tokenizer = train_bpe(text.documents(), 300)
    packed = pack(text, tokenizer, tmp_path / "packed", validation_fraction=0)
    assert packed.names == ["a.txt", "b.txt", "c.jsonl#1", "c.jsonl#2"]
    assert pack(text, tokenizer, tmp_path / "packed", validation_fraction=0).path == packed.path


def test_stdlib_is_real_text_in_a_fixed_order():
    documents = list(source("python-stdlib").documents())
    names = [d.name for d in documents]
    assert names == sorted(set(names))
    assert "lib/argparse.py" in names and "lib/asyncio/tasks.py" in names
    assert not [n for n in names if "/test" in n or "site-packages" in n or "sysconfigdata" in n]
    by_name = dict(documents)
    path = os.path.join(sysconfig.get_path("stdlib"), "argparse.py")
    assert by_name["lib/argparse.py"].encode() == pathlib.Path(path).read_bytes()
    assert sum(len(d.text) for d in documents) > 5_000_000
    assert "exception" in by_name["topics/try"]


def test_stdlib_budget_is_a_spread_sample_of_whole_documents():
    whole = dict(source("python-stdlib").documents())
    sample = list(PythonStdlib(max_bytes=500_000).documents())
    size = sum(len(d.text.encode()) for d in sample)
    assert 400_000 < size <= 500_000
    assert all(whole[d.name] == d.text for d in sample)
    assert len({d.name[:5] for d in sample}) > 10
    assert PythonStdlib(500_000).describe() != PythonStdlib(400_000).describe()


def bad_folder(tmp_path: pathlib.Path) -> str:
    (tmp_path / "d").mkdir()
    return str(tmp_path / "d")


def bad_latin1(tmp_path: pathlib.Path) -> str:
    (tmp_path / "l.txt").write_bytes("caf\u00e9 au lait".encode("latin-1"))
    return str(tmp_path / "l.txt")


def bad_empty(tmp_path: pathlib.Path) -> str:
    write(tmp_path, e="")
    return str(tmp_path / "e.txt")


def bad_all_blank(tmp_path: pathlib.Path) -> str:
    write(tmp_path, e="", f=" \n")
    return str(tmp_path / "*.txt")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: str(p / "no.txt"), "no.txt does not exist: check the path"),
        (lambda p: str(p / "*.md"), r"\*.md matches no file"),
        (bad_folder, "is a folder: name its files"),
        (bad_latin1, "l.txt is not UTF-8 text .* 0xe9.*iconv"),
        (bad_empty, "e.txt is empty"),
        (bad_all_blank, "every file of .* is empty"),
    ],
)
def test_bad_files_are_named_with_the_fix(tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        list(source(make(tmp_path)).documents())


def test_an_empty_file_under_a_wildcard_is_skipped(tmp_path):
    write(tmp_path, a="", b="text")
    assert list(source(str(tmp_path / "*.txt")).documents()) == [Document("b.txt", "text")]


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="max_bytes = 0"):
        source("python-stdlib", max_bytes=0)
    with pytest.raises(ConfigError, match="document_chars"):
        TextFiles(("a.txt",), document_chars=0)
    for nothing in ([], "", ["a.txt", ""]):
        with pytest.raises(ConfigError, match="patterns|source"):
            source(nothing)
    with pytest.raises(ConfigError, match="text_field = ''"):
        source("a.jsonl", text_field="")


def test_a_budget_below_every_document_says_so():
    with pytest.raises(DataError, match=r"max_bytes = 1 .*raise it"):
        list(source("python-stdlib", max_bytes=1).documents())
