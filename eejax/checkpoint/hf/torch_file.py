"""Weights of a PyTorch .bin file, read without PyTorch and without running anything in the file."""

from __future__ import annotations

import collections
import pathlib
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from eejax.common.errors import CheckpointError

DTYPES = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


class _Storage(NamedTuple):
    """A file of numbers within the zip."""

    key: str
    dtype: np.dtype
    size: int


class _Tensor(NamedTuple):
    """A view of a storage; offset and strides in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(storage, offset, shape, strides, *_) -> _Tensor:
    return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)))


class _Unpickler(pickle.Unpickler):
    """Unpickler that allows only the types of a dict of tensors."""

    ALLOWED = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in DTYPES:
            return DTYPES[name]
        try:
            return self.ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _, size = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError(f"it asks for {pid!r}")
        return _Storage(str(key), dtype, int(size))


class TorchFile:
    """A file of `torch.save` (its zip form, since PyTorch 1.6) that holds a dict of tensors.

    Raises CheckpointError for any other content; no other object is created.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        try:
            self._zip = zipfile.ZipFile(path)
            pickled = [n for n in self._zip.namelist() if n.rsplit("/", 1)[-1] == "data.pkl"]
            if len(pickled) != 1:
                raise pickle.UnpicklingError("it has no data.pkl")
            self._root = pickled[0].removesuffix("data.pkl")
            order = f"{self._root}byteorder"
            if order in self._zip.namelist() and self._zip.read(order) != b"little":
                raise pickle.UnpicklingError("its numbers are big-endian")
            with self._zip.open(pickled[0]) as file:
                values = _Unpickler(file).load()
        except zipfile.BadZipFile as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}). The file is cut off, or from before PyTorch "
                "1.6: download it again, or save it as safetensors."
            ) from error
        except Exception as error:  # a pickle of something else may fail in any way
            raise CheckpointError(
                f"{path}: is not a file of weights alone ({error}). Nothing of it was run: save "
                "its weights as safetensors."
            ) from error
        if isinstance(values, dict) and isinstance(values.get("state_dict"), dict):
            values = values["state_dict"]
        if not isinstance(values, dict) or not values:
            raise CheckpointError(f"{path}: must hold a dict of tensors by name.")
        wrong = [n for n, t in values.items() if not isinstance(t, _Tensor)]
        if wrong:
            raise CheckpointError(f"{path}: {wrong[0]!r} is not a tensor.")
        self._tensors: dict[str, _Tensor] = values

    def names(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        storage, offset, shape, strides = self._tensors[name]
        try:
            data = self._zip.read(f"{self._root}data/{storage.key}")
        except (KeyError, OSError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{self._path}: {name} cannot be read ({error}).") from error
        last = offset + sum(s * (n - 1) for n, s in zip(shape, strides, strict=True))
        held = len(data) // storage.dtype.itemsize
        empty = 0 in shape
        if min((offset, *shape, *strides)) < 0 or not (empty or last < held):
            raise CheckpointError(
                f"{self._path}: {name} of shape {shape} does not lie in its {held} numbers."
            )
        flat = np.frombuffer(data, storage.dtype, held)
        steps = tuple(s * storage.dtype.itemsize for s in strides)
        return np.lib.stride_tricks.as_strided(flat[offset:], shape, steps, writeable=False)
