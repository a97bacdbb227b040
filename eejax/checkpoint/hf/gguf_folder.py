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
from eejax.data.tokenizer_settings import CONFIG as TOKENIZER_CONFIG

CACHE = "EEJAX_CACHE"
"""Environment variable of the folder for files that can be made again."""
_FORM = 1  # of the folders: a change of what is written needs another number


def gguf_folder(path: pathlib.Path) -> pathlib.Path:
    """Return a folder that holds a GGUF file's model: its settings, its tokenizer, and a link.

    It is made once for a file, in `$EEJAX_CACHE` (by default ~/.cache/eejax). Weights are not
    copied: they are dequantised whenever they are loaded.

    Raises:
      CheckpointError: the file cannot be read, or holds a model that cannot be represented.
    """
    path = path.resolve()
    facts = path.stat()
    key = f"{_FORM} {path} {facts.st_size} {facts.st_mtime_ns}"
    name = f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    folder = expanded(os.environ.get(CACHE) or "~/.cache/eejax") / "gguf" / name
    if (folder / TOKENIZER_CONFIG).is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = pathlib.Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    except OSError as error:
        raise CheckpointError(
            f"{path}: its settings cannot be written to {folder.parent} ({error}). Name another "
            f"folder in ${CACHE}."
        ) from error
    try:
        _write(path, made)
        if folder.exists():  # without a tokenizer, or another process made it meanwhile
            shutil.rmtree(folder, ignore_errors=True)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / CONFIG).is_file():
                raise
        return folder
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
        warnings.warn(f"{path}: its tokenizer is not read: {error}", stacklevel=4)
