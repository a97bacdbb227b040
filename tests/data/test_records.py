"""Records of JSON lines and Parquet: the texts, in bounded memory, and what can be wrong."""

from __future__ import annotations

import gzip
import json
import pathlib
import random
import sys
import tempfile
import tracemalloc

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

from eejax.common.errors import DataError
from eejax.data import TextFiles, records, source

# Some have line ends of other kinds than a line of JSON ends with, and some are blank.
TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\n\r\u2028\x85 é🙂"))
KINDS = ("jsonl", "jsonl.gz", "json.gz", "parquet")


def write(path: pathlib.Path, rows: list[dict], *, group: int = 3, ascii: bool = True) -> str:
    if path.name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
        return str(path)
    data = "".join(json.dumps(row, ensure_ascii=ascii) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return str(path)


def texts(*args, **options) -> list[str]:
    return [d.text for d in source(*args, **options).documents()]


@settings(max_examples=40)
@given(st.lists(TEXT, min_size=1), st.integers(1, 5), st.booleans(), st.sampled_from(KINDS))
def test_each_record_with_text_is_one_document(found, group, ascii, kind):
    rows = [{"id": i, "text": text} for i, text in enumerate(found)]
    wanted = [(f"a.{kind}#{i}", text) for i, text in enumerate(found, 1) if text.strip()]
    with tempfile.TemporaryDirectory() as folder:
        path = write(pathlib.Path(folder, f"a.{kind}"), rows, group=group, ascii=ascii)
        if wanted:
            assert list(source(path).documents()) == wanted
        else:
            with pytest.raises(DataError, match="is empty"):
                list(source(path).documents())


def test_a_real_file(eejax_data):
    path = eejax_data / "gsm8k" / "test.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    wanted = [json.loads(line)["question"] for line in lines]
    assert len(wanted) > 500 and texts(str(path), text_field="question") == wanted


def test_kinds_are_told_by_each_files_ending(tmp_path):
    write(tmp_path / "a.jsonl", [{"text": "one"}])
    write(tmp_path / "b.PARQUET".lower(), [{"text": "two"}])
    (tmp_path / "c.json").write_text('{"text": "three"}', encoding="utf-8")  # plain text, as named
    write(tmp_path / "d.jsonl.gz", [{"text": "four"}])
    wanted = ["one", "two", '{"text": "three"}', "four"]
    assert texts(str(tmp_path / "*")) == wanted
    files = sorted(map(str, tmp_path.iterdir()), reverse=True)
    assert texts(tuple(files)) == wanted[::-1]
    assert records.reader("X.JSONL.GZ") is records.json_lines


@pytest.mark.parametrize("kind", KINDS)
def test_fields_in_fields_and_names_with_dots(tmp_path, kind):
    rows = [{"a": {"b": {"c": f"deep {i}"}, "d": i}, "x.y": f"flat {i}"} for i in range(7)]
    path = write(tmp_path / f"a.{kind}", rows)
    assert texts(path, text_field="a.b.c") == [f"deep {i}" for i in range(7)]
    assert texts(path, text_field="x.y") == [f"flat {i}" for i in range(7)]


@pytest.mark.parametrize("kind", KINDS)
def test_long_records_stay_whole_and_the_budget_is_exact(tmp_path, kind):
    long = "line\n" * 100_000
    path = write(tmp_path / f"a.{kind}", [{"text": "é" * 3}, {"text": long}, {"text": "x"}])
    assert texts(path) == ["ééé", long, "x"]
    assert TextFiles((path,), document_chars=10) and texts(path, 10) == ["ééé", "line"]
    assert texts(path, 3) == ["é"]


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n \t\n{"text": "two"}')
    assert list(source(str(path)).documents()) == [("a.jsonl#1", "one"), ("a.jsonl#4", "two")]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
)
def test_every_string_type_of_parquet_is_text(tmp_path, kind):
    column = pa.array(["one", "two", "one"]).cast(kind)
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert texts(str(tmp_path / "a.parquet")) == ["one", "two", "one"]


def test_no_other_column_of_parquet_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"other": ["z" * 100] * 9, "text": [f"text {i}" for i in range(9)]})
    pq.write_table(table, path, row_group_size=4, use_dictionary=False, compression="none")
    meta, data = pq.read_metadata(path), bytearray(path.read_bytes())
    for group in range(meta.num_row_groups):
        other = meta.row_group(group).column(0)
        start = other.data_page_offset
        data[start : start + other.total_compressed_size] = (
            bytes([255]) * other.total_compressed_size
        )
    path.write_bytes(data)
    assert texts(str(path)) == [f"text {i}" for i in range(9)]
    with pytest.raises(DataError, match="a.parquet cannot be read"):  # it is broken indeed
        texts(str(path), text_field="other")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_lines_are_read_in_bounded_memory(tmp_path, kind):
    rng = random.Random(0)
    path = write(
        tmp_path / f"a.{kind}", [{"text": rng.randbytes(20_000).hex()} for _ in range(400)]
    )
    tracemalloc.start()
    try:
        size = sum(len(d.text) for d in source(path).documents())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 400 * 40_000 and peak < size / 16


@pytest.mark.parametrize("group", [400, 8000])
def test_parquet_is_read_in_bounded_memory(tmp_path, group):
    rng = random.Random(0)
    rows = [{"text": rng.randbytes(2_000).hex()} for _ in range(8000)]
    path = write(tmp_path / "a.parquet", rows, group=group)
    del rows
    before, peak, size = pa.total_allocated_bytes(), 0, 0
    for document in source(path).documents():
        size += len(document.text)
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert size == 8000 * 4_000
    assert peak < size / 3  # 9 MB of 32, and of any larger file; without buffering 40 MB


def test_describe_changes_with_the_field_and_the_file(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "one", "title": "1"}])
    before = source(path).describe()
    assert source(path).describe() == before
    assert source(path, text_field="title").describe() != before
    write(tmp_path / "a.jsonl", [{"text": "other", "title": "1"}])
    assert source(path).describe() != before
    # Plain text has no field, and what was packed of it stays in use.
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    plain = str(tmp_path / "a.txt")
    assert source(plain).describe() == source(plain, text_field="title").describe()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": \n', r"a.jsonl, line 2 is not JSON \(Expecting value\).*each"),
        ("[" * 100_000 + "\n", "line 1 is not JSON"),
        ('{"text": "é"}\n'.encode("latin-1"), "line 1 is not JSON .*utf-8.*invalid"),
        ('\n["text"]\n', "line 2 is a value of type list, not a JSON object"),
        (
            '{"id": 1, "title": "t", "meta": {"body": "b", "n": 2}}\n',
            r"line 1 has no field 'text' \(its fields with text are title, meta.body\): set text_",
        ),
        ('{"text": null}\n', r"line 1 has null in the field 'text', not text \(no field"),
        ('{"text": ["a"], "b": "c"}\n', r"has a value of type list in .*fields with text are b\)"),
        ('{"text": "a\\ud800"}\n', "line 1: the field 'text' has a lone surrogate at character 1"),
        ("\n", "a.jsonl is empty"),
    ],
    ids=["json", "deep", "latin1", "list", "field", "null", "type", "surrogate", "blank"],
)
def test_bad_lines_are_named_with_the_fix(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message):
        texts(str(path))


def test_a_path_that_ends_in_a_string_is_no_field(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match=r"line 1 has no field 'text.more' .*with text are text\)"):
        texts(path, text_field="text.more")


def test_an_endless_line_is_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 1 << 20)
    path = write(tmp_path / "a.jsonl", [{"text": "a" * (1 << 20)}])
    with pytest.raises(DataError, match="line 1 is longer than 1 MiB: .* each line"):
        texts(path)


def bad_schema(path: pathlib.Path) -> None:
    write(path, [{"id": 1, "meta": {"body": "b"}, "title": "t"}])


def bad_type(path: pathlib.Path) -> None:
    write(path, [{"text": 1, "title": "t"}])


def bad_null(path: pathlib.Path) -> None:
    write(path, [{"text": "a"}] * 4 + [{"text": None}])


def bad_parent(path: pathlib.Path) -> None:
    write(path, [{"text": {"b": "x"}}])


def bad_utf8(path: pathlib.Path) -> None:
    column = pa.array([b"fine", b"\xff"])
    column = pa.StringArray.from_buffers(2, *column.buffers()[1:])
    pq.write_table(pa.table({"text": column}), path)


def bad_file(path: pathlib.Path) -> None:
    path.write_bytes(b"text")


def bad_half(path: pathlib.Path) -> None:
    write(path, [{"text": "a" * 1000}] * 10)
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            bad_schema,
            r"a.parquet has no field 'text' \(its fields with text are meta.body, title\)",
        ),
        (bad_type, r"a.parquet has values of type int64 in the field 'text'.*are title\)"),
        (bad_parent, r"values of type struct.* in the field 'text'.*are text.b\)"),
        (bad_null, "a.parquet, row 5 has null in the field 'text'"),
        (bad_utf8, "a.parquet, after row 0: the field 'text' is not UTF-8"),
        (bad_file, "a.parquet cannot be read: .*whole"),
        (bad_half, "a.parquet cannot be read: .*whole"),
    ],
)
def test_bad_parquet_is_named_with_the_fix(tmp_path, make, message):
    make(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        texts(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    "damage", [lambda d: d[:-12], lambda d: b"text", lambda d: d[:40] + d[60:]]
)
def test_broken_gzip_is_named(tmp_path, damage):
    path = pathlib.Path(write(tmp_path / "a.jsonl.gz", [{"text": str(i)} for i in range(999)]))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match="a.jsonl.gz cannot be read: .*whole|a.jsonl.gz, line"):
        texts(str(path))


def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", [{"text": "a"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'eejax\[data\]'"):
        texts(path)
