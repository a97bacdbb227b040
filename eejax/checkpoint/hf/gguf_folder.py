"""GGUF files as Hugging Face folders, which all other readers of a model take."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import warnings

from eejax.checkpoint.hf.folder import CONFIG, GGUF
from eejax.checkpoint.hf.gguf_config import config_json
from eejax.checkpoint.hf.gguf_file import GgufFile
from eejax.common.errors import CheckpointError, DataError
from eejax.common.paths import expanded
from eejax.data.gguf_tokenizer import write_tokenizer

CACHE = "EEJAX_CACHE"
"""Environment variable of the folder for files that can be made again."""
_PROBLEM = "tokenizer_problem.txt"
_FORM = 1  # of the folders: a change of what is written needs another number


def gguf_folder(path: pathlib.Path) -> pathlib.Path:
    """Return a folder that holds a GGUF file's model: its settings, its tokenizer, and a link.

    It is made once for a file, in `$EEJAX_CACHE` (by default ~/.cache/eejax). Weights are not
    copied: they are dequantised whenever they are loaded.

    Raises:
      CheckpointError: the file cannot be read, or holds a model that cannot be represented.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file.")
    try:
        path = path.resolve()
        facts = path.stat()
        key = f"{_FORM} {path} {facts.st_size} {facts.st_mtime_ns}"
        name = f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        folder = expanded(os.environ.get(CACHE) or "~/.cache/eejax") / "gguf" / name
        if not (folder / CONFIG).is_file():
            _make(path, folder)
    except OSError as error:
        raise CheckpointError(
            f"{path}: its settings cannot be written to a folder ({error}). Name another folder in "
            f"${CACHE}."
        ) from error
    if (why := folder / _PROBLEM).is_file():
        warnings.warn(f"{path}: its tokenizer is not read: {why.read_text()}", stacklevel=4)
    return folder


def _make(path: pathlib.Path, folder: pathlib.Path) -> None:
    """Make a file's folder beside its place, and move it there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        made.chmod(0o755)
        _write(path, made)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not (folder / CONFIG).is_file():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write(path: pathlib.Path, folder: pathlib.Path) -> None:
    file = GgufFile(path)
    config = json.dumps(config_json(file), indent=1)
    (folder / CONFIG).write_text(config + "\n", encoding="utf-8")
    (folder / GGUF).symlink_to(path)
    if "tokenizer.ggml.model" not in file.metadata:
        return
    try:
        write_tokenizer(file.metadata, folder)
    except DataError as error:
        (folder / _PROBLEM).write_text(str(error), encoding="utf-8")
    except ImportError as error:
        raise CheckpointError(
            f"{path}: its tokenizer needs sentencepiece and protobuf: pip install 'eejax[gguf]'."
        ) from error
