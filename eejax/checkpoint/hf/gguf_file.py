"""GGUF files of llama.cpp: their settings and tensors, in the form of a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from eejax.common.errors import CheckpointError

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Form in which llama.cpp writes the models of a family.

    Attributes:
      family: `model_type` of the family.
      names: names of a layer's tensors in the family by their names in the file.
      interleaved: whether the rows of queries and keys are ordered by rotary pairs, and not by
        halves of a head.
      norms_plus_one: whether norm scales have 1 added.
    """

    family: str
    names: Mapping[str, str]
    interleaved: bool = False
    norms_plus_one: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", _LAYER, interleaved=True),
    "qwen2": Architecture("qwen2", _LAYER),
    "qwen3": Architecture("qwen3", _LAYER | _QK_NORMS),
    "gemma": Architecture("gemma", _LAYER, norms_plus_one=True),
    "gemma2": Architecture("gemma2", _LAYER | _FOUR_NORMS, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", _LAYER | _FOUR_NORMS | _QK_NORMS, norms_plus_one=True),
    "phi3": Architecture("phi3", _LAYER | _PHI3),
}
ROPE_FACTORS = "rope_freqs.weight"


class GgufFile:
    """A GGUF file.

    Tensors have the names and layouts of the model's family on the Hub, and are dequantised to
    float32 when they are read.

    Attributes:
      path: path of the file.
      metadata: its key-value pairs.
      architecture: how its tensors are written.

    Raises:
      CheckpointError: the file cannot be read, is of another architecture, or the package gguf is
        not installed.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        try:
            reader = _reader(self.path)
            self.metadata = {name: _value(field) for name, field in reader.fields.items()}
        except ImportError as error:
            raise CheckpointError(
                f"{self.path}: reading GGUF needs the package gguf: pip install 'eejax[gguf]'."
            ) from error
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise CheckpointError(
                f"{self.path}: cannot be read as GGUF ({error}). It is cut off or another kind of "
                "file: copy or download it again."
            ) from error
        kind = self.metadata.get("general.architecture")
        if kind not in ARCHITECTURES:
            raise self.refuse(
                "general.architecture", kind, f"must be among {', '.join(ARCHITECTURES)}"
            )
        self.kind, self.architecture = str(kind), ARCHITECTURES[kind]
        self._tensors = {self._name(t.name): t for t in reader.tensors}
        self._shapes = {name: tuple(t.shape.tolist()[::-1]) for name, t in self._tensors.items()}
        self._shapes.pop(ROPE_FACTORS, None)

    def refuse(self, name: str, value: Any, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} = {value!r}: {why}.")

    def names(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        import gguf

        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise self.refuse(
                tensor.name, tensor.tensor_type.name, "cannot be dequantised by the package gguf"
            ) from error
        values = np.asarray(values, np.float32).reshape(tensor.shape.tolist()[::-1])
        if self.architecture.interleaved and (part := re.search(r"\.([qk])_proj\.", name)):
            return _by_halves(values, self._heads(part[1]))
        if self.architecture.norms_plus_one and name.endswith("norm.weight"):
            return values - 1
        return values

    def rope_factors(self) -> np.ndarray | None:
        """Return [pairs], the divisors of a head's rotary frequencies, None if it has none."""
        return self.read(ROPE_FACTORS) if ROPE_FACTORS in self._tensors else None

    def _name(self, theirs: str) -> str:
        """Return a tensor's name in the family; a name without one stays, and is refused later."""
        stem, _, suffix = theirs.rpartition(".")
        if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
            part = self.architecture.names.get(match[2])
            return theirs if part is None else f"model.layers.{match[1]}.{part}.{suffix}"
        return f"{_ENDS[stem]}.{suffix}" if stem in _ENDS else theirs

    def _heads(self, part: str) -> int:
        heads = self.metadata[f"{self.kind}.attention.head_count"]
        own = heads if part == "q" else self.metadata.get(f"{self.kind}.attention.head_count_kv")
        return int(heads if own is None else own)


def _reader(path: pathlib.Path) -> Any:
    """Open a file with gguf's reader, which slices the file several times for each token.

    Slices of a memory map take ten times as long as those of an array that shares its memory.
    """
    import gguf

    class ArrayReader(gguf.GGUFReader):
        def _get(self, *args, **kwargs):
            self.data = self.data.view(np.ndarray)
            return super()._get(*args, **kwargs)

    return ArrayReader(path)


def _value(field: Any) -> Any:
    """Return a field's value; float32 numbers as the shortest decimals that stand for them."""
    value = field.contents()
    single = isinstance(value, float) and value == np.float32(value)
    return float(str(np.float32(value))) if single else value


def _by_halves(a: np.ndarray, heads: int) -> np.ndarray:
    """Order the rows [heads pairs 2, ...] of rotary pairs by halves, [heads 2 pairs, ...]."""
    return a.reshape(heads, -1, 2, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)
