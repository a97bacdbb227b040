"""Data sets of the Hugging Face Hub, or local folders of the same form, as a source."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator
from typing import Any

from eejax.common.errors import DataError, require, require_one_of
from eejax.data import records
from eejax.data.sources import Document, FieldDocument, check_budget, limited

PREFIX = "hf:"


@dataclasses.dataclass(frozen=True)
class HubDataset:
    """One split of a data set that the `datasets` package reads; each row is one document.

    Rows are streamed: nothing is downloaded ahead and only a few of them are held. The revision is
    looked up once for each object, and everything that it reads and describes is of that revision.

    Attributes:
      name: a name on the Hub ("user/name") or a local folder.
      config: configuration of the data set.
      split: name of the split.
      text_field: field of the text, as in `TextFiles`.
      max_bytes: maximum bytes of text, as in `TextFiles`.
      form: form of the records, as in `TextFiles`.
    """

    name: str
    config: str | None = None
    split: str = "train"
    text_field: str = "text"
    max_bytes: int | None = None
    form: str = records.TEXT

    def __post_init__(self) -> None:
        require_one_of("form", self.form, records.FORMS)
        require(bool(self.name), "name", self.name, "must name a data set or a folder")
        require(bool(self.split), "split", self.split, "must name a split")
        require(bool(self.text_field), "text_field", self.text_field, "must name a field")
        check_budget(self.max_bytes)

    @classmethod
    def parse(cls, spec: str, text_field: str = "text", form: str = records.TEXT) -> HubDataset:
        """Parse `hf:NAME`, `hf:NAME:CONFIG` or `hf:NAME:CONFIG:SPLIT`; CONFIG may be empty."""
        name, *rest = spec.removeprefix(PREFIX).split(":")
        ok = len(rest) <= 2 and name != ""
        require(ok, "source", spec, "must be hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
        config, split = (*rest, "", "")[:2]
        return cls(name, config or None, split or "train", text_field, form=form)

    def documents(self) -> Iterator[Document | FieldDocument]:
        return limited(self._documents(), self.max_bytes)

    def describe(self) -> dict[str, Any]:
        files = self._files()
        # Files on the Hub have the revision in their paths. Local ones may have changed since.
        known = [] if self._local else [repr(each) for each in files.origin_metadata]
        for path in map(str, files):
            if os.path.exists(path):
                stat = os.stat(path)
                path = os.path.relpath(path, os.path.realpath(self._path))
                path = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}"
            known.append(path)
        digest = hashlib.sha256("\n".join(known).encode()).hexdigest()
        return self.settings() | {"files": len(files), "digest": digest}

    def settings(self) -> dict[str, Any]:
        """Return the settings that decide which texts are read."""
        return {
            "kind": "hf",
            "name": self.name,
            "config": self.config,
            "split": self.split,
            "text_field": self.text_field,
            "max_bytes": self.max_bytes,
            **({} if self.form == records.TEXT else {"form": self.form}),
        }

    @property
    def _path(self) -> str:
        return os.path.expanduser(self.name)

    @property
    def _local(self) -> bool:
        return os.path.isdir(self._path)

    @functools.cached_property
    def _builder(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise DataError(
                f"source {PREFIX}{self.name} needs the package datasets: pip install 'eejax[data]'."
            ) from error
        with self._naming():
            return datasets.load_dataset_builder(self._path, self.config)

    def _files(self) -> Any:
        """Return the split's files, a list that also has their `origin_metadata`."""
        found = {str(split): files for split, files in self._builder.config.data_files.items()}
        if self.split not in found:
            raise DataError(
                f"data set {self.name!r} has no split {self.split!r} but {', '.join(found)}: name "
                f"one of these, as in {PREFIX}{self.name}:{self.config or ''}:{next(iter(found))}."
            )
        return found[self.split]

    def _documents(self) -> Iterator[Document | FieldDocument]:
        self._files()  # says so where the split is not there
        # The last part of a folder's path, so that the split survives moving the folder.
        name = os.path.basename(os.path.abspath(self._path)) if self._local else self.name
        name, any_text = f"{name}:{self.config or ''}:{self.split}", False
        with self._naming():
            rows = self._builder.as_streaming_dataset(split=self.split)
            columns, column = rows.column_names or (), self.text_field
            column = column if column in columns else column.split(".")[0]
            wanted = [c for c in records.COLUMNS.get(self.form, (column,)) if c in columns]
            if wanted:  # others may be images, costly to read and to decode
                rows = rows.select_columns(wanted)
            for number, row in enumerate(rows, 1):
                where = f"data set {self.name!r}, split {self.split}, row {number}"
                row = row if self.form == records.TEXT else records.without_nulls(row)
                text = records.content_of(row, self.text_field, where, self.form)
                if text.strip():
                    any_text, called = True, f"{name}#{number}"
                    plain = self.form == records.TEXT
                    yield (
                        Document(called, text) if plain else FieldDocument(called, text, self.form)
                    )
        if not any_text:
            raise DataError(f"data set {self.name!r}, split {self.split}, has no text.")

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Turn the library's various errors into one that names the data set and the fix."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:
            cause = " ".join(str(error).split())[:400] or type(error).__name__
            raise DataError(
                f"data set {self.name!r} cannot be read: {cause.removesuffix('.')}. Check the "
                "name, the configuration and the network, or download it and name its folder "
                f"({PREFIX}FOLDER) or its .parquet or .jsonl files."
            ) from error
