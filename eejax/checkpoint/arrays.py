"""Named arrays in one file that is written completely or not at all."""

from __future__ import annotations

import os
import pathlib
import stat
from collections.abc import Mapping

import numpy as np

from eejax.common.errors import CheckpointError, naming_file


class SafeTensors:
    """A .safetensors file, mapped into memory."""

    def __init__(self, path: pathlib.Path):
        from safetensors import SafetensorError, safe_open

        self._path = path
        try:
            self._file = safe_open(path, "np")
            self._names = {
                name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()
            }
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: is missing. Copy or download it.") from error
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}). The file is cut off or not safetensors: copy "
                "or download it again."
            ) from error

    def about(self) -> dict[str, str]:
        """Metadata that was written with the file."""
        return dict(self._file.metadata() or {})

    def names(self) -> Mapping[str, tuple[int, ...]]:
        return self._names

    def read(self, name: str) -> np.ndarray:
        import ml_dtypes  # noqa: F401  numpy's bfloat16, which safetensors looks up

        try:
            return self._file.get_tensor(name)
        except Exception as error:  # of many kinds: dtypes that numpy lacks, unreadable pages
            raise CheckpointError(f"{self._path}: {name} cannot be read ({error}).") from error


def write_arrays(
    path: str | os.PathLike, arrays: Mapping[str, np.ndarray], about: Mapping[str, str] = {}
) -> None:
    """Replace a file atomically: if the process is killed, the old file stays, or none.

    Raises:
      OSError: naming the file.
    """
    from safetensors import SafetensorError

    path = pathlib.Path(path)
    part = path.with_name(f"{path.name}.part")
    try:
        with naming_file(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = {name: np.asarray(a, order="C") for name, a in arrays.items()}
            save(part, whole, about)
        os.replace(part, path)
    except (OSError, SafetensorError):  # SafetensorError for a full disk
        part.unlink(missing_ok=True)
        raise


def save(path: pathlib.Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """Write a file, which is on the disk when this returns."""
    import ml_dtypes  # noqa: F401  numpy's bfloat16
    from safetensors.numpy import save_file

    path.unlink(missing_ok=True)
    with open(path, "wb") as file:  # only to learn the mode: safetensors makes files private
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    save_file(dict(arrays), path, metadata=dict(about))
    path.chmod(mode)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def read_arrays(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays and the metadata. Raises CheckpointError for an incomplete file."""
    file = SafeTensors(pathlib.Path(path))
    return {name: file.read(name) for name in file.names()}, file.about()
