"""Sources of text: iterators of named documents over files and the standard library."""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import io
import itertools
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from eejax.common.errors import DataError, require, require_one_of
from eejax.data import records
from eejax.data.records import CHAT, COMPLETION, FORMS, TEXT

PYTHON_STDLIB = "python-stdlib"

# A file longer than this becomes several documents, so that one large file can still be split
# into train and validation, and is never held in memory whole.
DOCUMENT_CHARS = 1 << 18

# Tests and bundled code are not the library's own prose; codec tables are numbers.
_SKIPPED_FOLDERS = frozenset(
    "__pycache__ site-packages dist-packages test tests idle_test encodings lib-dynload "
    "_bundled pydoc_data".split()
)


class Document(NamedTuple):
    """Text that belongs together; its name decides its split."""

    name: str
    text: str
    form = TEXT

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts that a tokenizer is trained on."""
        return (self.text,)


class FieldDocument(NamedTuple):
    """A `Document` of another form than text: `text` is the JSON that `records.fields_of` makes."""

    name: str
    text: str
    form: str

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts in the fields, without the JSON around them."""
        return records.texts_in(self.text, self.form)


class Source(Protocol):
    """Documents in an order that is the same on every pass."""

    def documents(self) -> Iterator[Document | FieldDocument]:
        """Iterate over the documents. Raises `DataError` for text that cannot be read."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return JSON that changes whenever the documents do; until then packed data is reused.

        A source may also have `settings`, the part of the description that does not depend on the
        text: it identifies the packed data of text that is gone.

        Raises:
          DataError: if the text does not exist.
        """
        ...


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Files named by paths or globs (`**` descends): JSON lines, Parquet, else UTF-8 text.

    A text file is one document. With `separator`, it holds several with that string between
    them. Documents longer than `document_chars` characters are cut at line ends. A document's
    name is its path below its pattern's fixed part, so that the split survives moving the folder.

    Files that end in .jsonl, .jsonl.gz, .json.gz (lines too) or .parquet hold one document for
    each record, in its `text_field` ("meta.text" is the field text of the field meta); its name
    is the file's and the number of its line or row. These are never cut: a record is held whole
    anyway, and its parts could fall into different splits.

    Text of white space alone is passed over. `max_bytes` keeps that many bytes of text from the
    beginning. With another `form` than "text", files hold records of that form alone
    (`records.fields_of`).
    """

    patterns: tuple[str, ...]
    separator: str | None = None
    document_chars: int = DOCUMENT_CHARS
    max_bytes: int | None = None
    text_field: str = "text"
    form: str = TEXT

    def __post_init__(self) -> None:
        require_one_of("form", self.form, FORMS)
        named = len(self.patterns) > 0 and all(self.patterns)
        require(named, "patterns", self.patterns, "must name at least one file, and none be empty")
        require(self.separator != "", "separator", self.separator, "must be None or not empty")
        require(self.document_chars > 0, "document_chars", self.document_chars, "must be > 0")
        require(bool(self.text_field), "text_field", self.text_field, "must name a field")
        check_budget(self.max_bytes)

    def documents(self) -> Iterator[Document | FieldDocument]:
        return limited(self._documents(), self.max_bytes)

    def _documents(self) -> Iterator[Document | FieldDocument]:
        any_text = False
        for name, path, explicit in self._files():
            in_file = False
            for document in self._read(name, path):
                in_file = True
                yield document
            if explicit and not in_file:
                raise DataError(f"{path} is empty: give a file with text, or leave it out.")
            any_text |= in_file
        if not any_text:
            raise DataError(f"every file of {', '.join(self.patterns)} is empty: nothing to read.")

    def describe(self) -> dict[str, Any]:
        digest, total, count, unused = hashlib.sha256(), 0, 0, {"text_field"}
        for name, path, _ in self._files():
            if records.reader(path) and self.form == TEXT:
                unused = set()
            stat = os.stat(path)
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
            total, count = total + stat.st_size, count + 1
        settings = {k: v for k, v in self.settings().items() if k not in unused}
        return settings | {"files": count, "bytes": total, "digest": digest.hexdigest()}

    def settings(self) -> dict[str, Any]:
        return {
            "kind": "text",
            "patterns": list(self.patterns),
            "separator": self.separator,
            "document_chars": self.document_chars,
            "max_bytes": self.max_bytes,
            "text_field": self.text_field,
            **({} if self.form == TEXT else {"form": self.form}),
        }

    def _files(self) -> list[tuple[str, str, bool]]:
        """Return (document name, path, whether it was named without a wildcard) of every file."""
        found: dict[str, tuple[str, str, bool]] = {}
        for pattern in self.patterns:
            pattern = os.path.expanduser(pattern)
            if os.path.exists(pattern) or not glob.has_magic(pattern):
                paths, root, explicit = [pattern], os.path.dirname(pattern), True
            else:
                paths, root, explicit = glob.glob(pattern, recursive=True), pattern, False
                while glob.has_magic(root):
                    root = os.path.dirname(root)
                paths = sorted(path for path in paths if os.path.isfile(path))
                if not paths:
                    raise DataError(
                        f"{pattern} matches no file: check the folder and the wildcard "
                        f"(the working directory is {os.getcwd()})."
                    )
            for path in paths:
                if os.path.isdir(path):
                    fix = os.path.join(path, "**", "*.txt")
                    raise DataError(f"{path} is a folder: name its files, for example {fix}.")
                if not os.path.isfile(path):
                    raise DataError(
                        f"{path} does not exist: check the path "
                        f"(the working directory is {os.getcwd()})."
                    )
                name = os.path.relpath(path, root or ".").replace(os.sep, "/")
                found.setdefault(os.path.realpath(path), (name, path, explicit))
        return list(found.values())

    def _read(self, name: str, path: str) -> Iterator[Document | FieldDocument]:
        """Yield the documents of one file that hold more than white space."""
        if read := records.reader(path):
            texts = read(path, self.text_field, self.form)
            made = (
                Document if self.form == TEXT else functools.partial(FieldDocument, form=self.form)
            )
            yield from (made(f"{name}#{i}", text) for i, text in texts if text.strip())
            return
        if self.form != TEXT:
            raise DataError(
                f"{path}: is not a file of records, which {self.form}: requires. Give JSON lines "
                "(.jsonl) or Parquet."
            )
        try:
            with open(path, encoding="utf-8-sig", newline="") as file:
                for i, text in enumerate(cut(file, self.separator, self.document_chars)):
                    yield Document(f"{name}#{i}" if i else name, text)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not UTF-8 text ({error.reason}, byte 0x{error.object[error.start]:02x}"
                "): convert it, for example with `iconv -t utf-8`, or leave it out."
            ) from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


@dataclasses.dataclass(frozen=True)
class PythonStdlib:
    """The running interpreter's own standard library and documentation topics.

    Code with its docstrings and comments, and about 80 pages of reference prose: 9 MB of real
    text that is wherever Python is. With `max_bytes`, a sample of whole documents spread over
    the library (in the order of a hash of their names), never more than that many bytes.
    """

    max_bytes: int | None = None

    def __post_init__(self) -> None:
        check_budget(self.max_bytes)

    def documents(self) -> Iterator[Document | FieldDocument]:
        for name, _, read in self._chosen():
            text = read()
            if text is not None and text.strip():
                yield Document(name, text)

    def describe(self) -> dict[str, Any]:
        digest, total, count = hashlib.sha256(), 0, 0
        for name, size, _ in self._chosen():
            digest.update(f"{name}\0{size}\n".encode())
            total, count = total + size, count + 1
        return {
            "kind": PYTHON_STDLIB,
            "version": sys.version.split()[0],
            "max_bytes": self.max_bytes,
            "files": count,
            "bytes": total,
            "digest": digest.hexdigest(),
        }

    def _chosen(self) -> list[tuple[str, int, Callable[[], str | None]]]:
        """Return (name, bytes, reader) of the documents within the budget, sorted by name."""
        entries = sorted(_stdlib_files() + _stdlib_topics(), key=lambda entry: entry[0])
        if not entries:
            raise DataError(
                f"no standard library source under {sysconfig.get_path('stdlib')}: this "
                "interpreter ships compiled files only; give text files instead."
            )
        if self.max_bytes is None:
            return entries
        left, chosen = self.max_bytes, []
        for entry in sorted(entries, key=lambda entry: name_hash(entry[0], "sample")):
            if 0 < entry[1] <= left:
                left -= entry[1]
                chosen.append(entry)
        if not chosen:
            raise DataError(
                f"max_bytes = {self.max_bytes} is less than the smallest document of "
                f"{PYTHON_STDLIB}: raise it to at least 100000."
            )
        return sorted(chosen, key=lambda entry: entry[0])


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents that are in memory.

    Attributes:
      listed: the documents.
    """

    listed: tuple[Document | FieldDocument, ...]

    def documents(self) -> Iterator[Document | FieldDocument]:
        return iter(self.listed)

    def split(self, share: float) -> tuple[Documents, Documents]:
        """Return (the first documents, the other ones, about `share` of all)."""
        first = max(1, round((1 - share) * len(self.listed)))
        return Documents(self.listed[:first]), Documents(self.listed[first:])

    def describe(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for document in self.listed:
            digest.update(json.dumps([document.name, document.form, document.text]).encode())
        forms = {document.form for document in self.listed} - {TEXT}
        found = {"kind": "documents", "count": len(self.listed), "digest": digest.hexdigest()}
        return found | ({"form": "+".join(sorted(forms))} if forms else {})


@dataclasses.dataclass(frozen=True)
class Chain:
    """The documents of several sources, one source after the other.

    `max_bytes` keeps that many bytes of text from the beginning; the rest is not read.
    """

    sources: tuple[Source, ...]
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        check_budget(self.max_bytes)

    def documents(self) -> Iterator[Document | FieldDocument]:
        parts = (each.documents() for each in self.sources)
        return limited(itertools.chain.from_iterable(parts), self.max_bytes)

    def describe(self) -> dict[str, Any]:
        parts = [each.describe() for each in self.sources]
        return {"kind": "several", "sources": parts, "max_bytes": self.max_bytes}


def source(
    spec: str | Sequence[str], max_bytes: int | None = None, text_field: str = "text"
) -> Source:
    """Return the source that `spec` names, or a sequence of them, in that order.

    A source is `"python-stdlib"`; `hf:NAME`, `hf:NAME:CONFIG` or `hf:NAME:CONFIG:SPLIT` (train by
    default; CONFIG may be empty) for a data set of the Hugging Face Hub or a local folder of that
    form; or files by path or glob. The prefix `chat:` before files or `hf:` says that records are
    conversations, `completion:` that they are prompts and completions (`records.fields_of`).
    `text_field` is the field of a record's text (`TextFiles`). No file of neighbouring entries of
    the sequence is read twice.

    Raises:
      ConfigError: an empty or misspelt `spec`. Missing text is found only in reading.
    """
    # Here, because that module builds on this one.
    from eejax.data import hub

    specs = (spec,) if isinstance(spec, str) else tuple(spec)
    require(len(specs) > 0, "source", spec, "must name at least one")
    parts: list[TextFiles | PythonStdlib | hub.HubDataset] = []
    for (other, form), group in itertools.groupby(map(_form, specs), lambda one: one[:2]):
        names = [name for *_, name in group]
        if not other:
            parts.append(TextFiles(tuple(names), text_field=text_field, form=form))
            continue
        for one in names:
            stdlib = one == PYTHON_STDLIB
            require(
                not stdlib or form == TEXT, "source", f"{form}:{one}", "must name files of records"
            )
            parts.append(PythonStdlib() if stdlib else hub.HubDataset.parse(one, text_field, form))
    if len(parts) == 1:
        return dataclasses.replace(parts[0], max_bytes=max_bytes)
    return Chain(tuple(parts), max_bytes)


def _form(spec: str) -> tuple[bool, str, str]:
    """Return (whether it is not a file, form, name) of an argument of `source`."""
    from eejax.data import hub

    form, colon, name = spec.partition(":")
    form, name = (form, name) if colon and form in (CHAT, COMPLETION) else (TEXT, spec)
    return name == PYTHON_STDLIB or name.startswith(hub.PREFIX), form, name


def is_supervised(described: Any) -> bool:
    """Return whether some documents of a source, by its own description, are not plain text."""
    if isinstance(described, dict):
        return "form" in described or any(map(is_supervised, described.get("sources", ())))
    return False


def limited(
    documents: Iterator[Document | FieldDocument], max_bytes: int | None
) -> Iterator[Document | FieldDocument]:
    """Yield the first `max_bytes` bytes of text, cut between characters; all text for None."""
    left = sys.maxsize if max_bytes is None else max_bytes
    for document in documents:
        data = document.text.encode()
        if len(data) > left:
            if document.form != TEXT:  # a part of a record is none
                return
            document = Document(document.name, data[:left].decode(errors="ignore"))
        if document.text:
            yield document
        left -= min(left, len(data))
        if left == 0:
            return


def cut(file: io.TextIOBase, separator: str | None, limit: int) -> Iterator[str]:
    """Split a text stream at `separator`, and pieces longer than `limit` at line ends.

    Pieces of white space alone are dropped. At most a few times `limit` characters are held.
    """
    pending, margin = "", len(separator or "")
    while True:
        chunk = file.read(limit)
        pending += chunk
        done = pending.split(separator) if separator else [pending]
        pending = done.pop() if chunk else ""
        for piece in done:
            yield from _shorten(piece, limit)
        # A separator may still be arriving at the end: cut only in front of it.
        while len(pending) > limit + margin:
            end = pending.rfind("\n", 0, limit) + 1 or limit
            if pending[:end].strip():
                yield pending[:end]
            pending = pending[end:]
        if not chunk:
            return


def name_hash(name: str, key: int | str) -> int:
    """Return a 64-bit hash of a name, the same on every machine and run.

    Independent choices, such as those of a sample and of a split, need different keys.
    """
    digest = hashlib.blake2b(f"{key}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _shorten(text: str, limit: int) -> Iterator[str]:
    while text:
        end = len(text) if len(text) <= limit else text.rfind("\n", 0, limit) + 1 or limit
        if text[:end].strip():
            yield text[:end]
        text = text[end:]


def check_budget(max_bytes: int | None) -> None:
    require(max_bytes is None or max_bytes > 0, "max_bytes", max_bytes, "must be None or > 0")


def _stdlib_files() -> list[tuple[str, int, Callable[[], str | None]]]:
    root, entries = sysconfig.get_path("stdlib"), []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and "config-" not in f]
        for file in files:
            # _sysconfigdata is this machine's build settings, not text.
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = os.path.join(folder, file)
                name = "lib/" + os.path.relpath(path, root).replace(os.sep, "/")
                entries.append((name, os.path.getsize(path), lambda p=path: _stdlib_text(p)))
    return entries


def _stdlib_text(path: str) -> str | None:
    """Return the text of a file, None for one in another encoding, which users cannot fix."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except (UnicodeDecodeError, OSError):
        return None


def _stdlib_topics() -> list[tuple[str, int, Callable[[], str | None]]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package the documentation apart
        return []
    return [(f"topics/{k}", len(v.encode()), lambda v=v: v) for k, v in topics.items()]
