"""Records of files that hold one for each document: JSON lines and Parquet."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from eejax.common.errors import DataError

# A longer line is not JSON lines (one JSON array, say), and would have to be held whole.
MAX_LINE_BYTES = 1 << 28

# Parquet is decoded in pieces of this size, whatever the size of its row groups.
_ROWS = 128
_BUFFER_BYTES = 1 << 20

TEXT, CHAT, COMPLETION = FORMS = ("text", "chat", "completion")
"""Forms of a record: text, a conversation, or a prompt and its completion."""
COLUMNS = {CHAT: ("messages", "tools"), COMPLETION: ("prompt", "completion")}
"""Fields of the other forms than text; `tools` may be left out."""

_NOTHING = object()

Texts = Iterator[tuple[int, str]]


def reader(path: str) -> Callable[[str, str, str], Texts] | None:
    """Return `json_lines` or `parquet` by the suffix of the file's name, None for other files."""
    name = path.lower()
    if name.endswith((".jsonl", ".jsonl.gz", ".json.gz")):
        return json_lines
    return parquet if name.endswith(".parquet") else None


def json_lines(path: str, field: str, form: str = TEXT) -> Texts:
    """Yield (number, text) of each line, numbered from 1; blank lines are skipped.

    One line is held at a time. A name that ends in .gz is unpacked on the way.

    Raises:
      DataError: for a file that cannot be read, a line that is not a JSON object, or one without a
        string in `field`, or without the fields of a form other than "text".
    """
    try:
        with gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb") as file:
            for number in itertools.count(1):
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if line.strip():
                    where = f"{path}, line {number}"
                    yield number, content_of(_json(line, where), field, where, form)
    except (OSError, EOFError, zlib.error) as error:  # the last two are broken gzip
        raise unreadable(path, error) from error


def parquet(path: str, field: str, form: str = TEXT) -> Texts:
    """Yield (number, text) of each row, numbered from 1, reading only the needed column.

    A few pages of one row group are held at a time.

    Raises:
      DataError: for a file that is not Parquet, a field that does not exist or does not hold
        strings, or a row without one.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet as pq
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet needs the package pyarrow: pip install 'eejax[data]'."
        ) from error
    number = 0
    try:
        # pre_buffer would load the column of the whole file ahead.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            columns = [field]
            if form == TEXT:
                _check_schema(file.schema_arrow, field, path)
            else:
                columns = [c for c in COLUMNS[form] if c in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                rows = file.iter_batches(
                    _ROWS, row_groups=[group], columns=columns, use_threads=False
                )
                for batch in rows:
                    for row in batch.to_pylist():
                        number += 1
                        row = row if form == TEXT else without_nulls(row)
                        where = f"{path}, row {number}"
                        yield number, content_of(row, field, where, form)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, after row {number}: the field {field!r} is not UTF-8 ({error.reason}): write "
            "the file again with valid strings."
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise unreadable(path, error) from error


def content_of(record: Any, field: str, where: str, form: str = TEXT) -> str:
    """Return the text of a record (`text_of`), or the fields of another form (`fields_of`)."""
    return text_of(record, field, where) if form == TEXT else fields_of(record, form, where)


def fields_of(record: Any, form: str, where: str) -> str:
    """Return the fields of a record of `form`, as JSON.

    "chat" has `messages`, a list of objects with a `role` and a `content`, and optionally `tools`,
    a list of objects. "completion" has the strings `prompt` and `completion`.

    Raises:
      DataError: for a record without these fields; the message begins with `where`.
    """
    found = {name: record.get(name) for name in COLUMNS[form]}
    if form == COMPLETION:
        wrong = [name for name, value in found.items() if not isinstance(value, str)]
        problem = f"the field {wrong[0]!r} is {_kind(found[wrong[0]])}, not text" if wrong else ""
    else:
        problem = _misshapen(found["messages"]) or _misshapen_tools(found["tools"])
        if found["tools"] is None:
            del found["tools"]
    text = json.dumps(found, ensure_ascii=False)
    if not problem and any("\ud800" <= c <= "\udfff" for c in text):
        problem = "a text has a lone surrogate, which is not Unicode text"
    if problem:
        raise DataError(f"{where}: {problem} ({form}: must be {_WANTED[form]}).")
    return text


def without_nulls(value: Any) -> Any:
    """Return a row without its null fields, at every depth.

    The structs of a table have every field that any row has; nulls would appear in the text that a
    template makes of `tools`.
    """
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def texts_in(record: str, form: str) -> tuple[str, ...]:
    """Return the texts in a record from `fields_of`.

    They are the contents of messages, or the prompt and the completion.
    """
    fields = json.loads(record)
    if form == COMPLETION:
        return fields["prompt"], fields["completion"]
    contents = [message.get("content") for message in fields["messages"]]
    parts = itertools.chain.from_iterable(c if isinstance(c, list) else [c] for c in contents)
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return tuple(text for text in texts if isinstance(text, str))


_WANTED = {
    CHAT: '{"messages": [{"role": "user", "content": "..."}, ...]}, "tools" beside them if any',
    COMPLETION: '{"prompt": "...", "completion": "..."}',
}


def _misshapen_tools(tools: Any) -> str:
    """Return the problem with the functions that a conversation may call, "" for none."""
    if tools is None or (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        return ""
    return f"the field 'tools' is {_kind(tools)}, not a list of objects"


def _misshapen(messages: Any) -> str:
    """Return the problem with a conversation, "" for none."""
    if not isinstance(messages, list) or not messages:
        return f"the field 'messages' is {_kind(messages)}, not a list of messages"
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"messages[{i}] has no role"
        if not isinstance(message.get("content"), str | list | None):
            return f"messages[{i}].content is {_kind(message['content'])}, not text"
        if message["role"] == "assistant" and not (
            isinstance(message.get("content"), str | list) or message.get("tool_calls")
        ):
            return f"messages[{i}] is an assistant's, and has no content"
    return ""


def text_of(record: Any, field: str, where: str) -> str:
    """Return the string in `field` of a record: a key, or several joined by dots.

    Raises `DataError`, beginning with `where`, unless there is one that is Unicode text.
    """
    value = record.get(field, _NOTHING)
    if value is _NOTHING:
        value = record
        for key in field.split("."):
            value = value.get(key, _NOTHING) if isinstance(value, dict) else _NOTHING
    if not isinstance(value, str):
        raise missing(field, None if value is _NOTHING else _kind(value), _strings(record), where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the field {field!r} has a lone surrogate at character {error.start}, which "
            "is not Unicode text: remove the record, or write it again."
        ) from error
    return value


def missing(field: str, kind: str | None, strings: list[str], where: str) -> DataError:
    """Return the error for a record or a table that has no string in `field`.

    `kind` is the type of the value there, None without one. `strings` are the fields that do hold
    text.
    """
    problem = f"no field {field!r}" if kind is None else f"{kind} in the field {field!r}, not text"
    shown = ", ".join(strings[:20]) + (", ..." if len(strings) > 20 else "")
    have = f"its fields with text are {shown}" if strings else "no field of it holds text"
    return DataError(
        f"{where} has {problem} ({have}): set text_field to the one that is the text of every "
        "record, or leave out records without text."
    )


def unreadable(path: str, error: Exception) -> DataError:
    cause = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split())
    return DataError(f"{path} cannot be read: {cause}. Check that the file is whole.")


def _json(line: bytes, where: str) -> dict[str, Any]:
    fix = "a file with this suffix has one JSON object on each line; rename it if it is plain text."
    if len(line) > MAX_LINE_BYTES:
        raise DataError(f"{where} is longer than {MAX_LINE_BYTES >> 20} MiB: {fix}")
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({getattr(error, 'msg', error)}): {fix}") from error
    if not isinstance(record, dict):
        raise DataError(f"{where} is {_kind(record)}, not a JSON object: {fix}")
    return record


def _kind(value: Any) -> str:
    return "null" if value is None else f"a value of type {type(value).__name__}"


def _strings(record: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in record.items():
        if isinstance(value, str):
            found.append(prefix + key)
        elif isinstance(value, dict):
            found += _strings(value, f"{prefix}{key}.")
    return found


def _check_schema(schema: Any, field: str, path: str) -> None:
    """Raise `DataError` unless `field` is a column of strings."""
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)

    columns: dict[str, Any] = {}

    def walk(fields: Any, prefix: str) -> None:
        for each in fields:
            columns[prefix + each.name] = each.type
            if types.is_struct(each.type):
                walk(each.type, f"{prefix}{each.name}.")

    walk(schema, "")
    kind = columns.get(field)
    if kind is None or not is_text(kind):
        strings = [name for name, each in columns.items() if is_text(each)]
        raise missing(field, None if kind is None else f"values of type {kind}", strings, path)
