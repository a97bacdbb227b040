"""Tokenizers in the metadata of GGUF files, written as the files that `load_tokenizer` reads."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from eejax.common.errors import DataError, is_integer
from eejax.data.sentencepiece import parse_model
from eejax.data.tokenizer_settings import CONFIG
from eejax.data.tokenizers import JSON, MODEL, write_json

# Types of tokens (llama.cpp's llama_token_type, which are those of SentencePiece).
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_NAMED = ("unk", "bos", "eos", "pad")  # special tokens that tokenizers' files name
_SPACE = "\u2581"
_BPE = 2  # SentencePiece's type of model
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_PATTERNS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "tekken": _TEKKEN,
}
"""Patterns of pre-tokenizers by `tokenizer.ggml.pre`; None for GPT-2's."""
_IGNORE_MERGES = ("llama-bpe", "tekken")  # a word that is a token is taken without merges
_ADD_BOS = ("llama-bpe", "tekken")  # texts begin with `bos` if the file does not say


def write_tokenizer(metadata: Mapping[str, Any], folder: str | os.PathLike) -> None:
    """Write a GGUF file's tokenizer into a folder, with its special tokens and chat template.

    Args:
      metadata: key-value pairs of the file; those called `tokenizer.*` are read.
      folder: an existing folder.

    Raises:
      DataError: a tokenizer of another kind.
      ImportError: sentencepiece or protobuf is missing for a tokenizer that needs it.
    """
    folder, own = pathlib.Path(folder), _Fields(metadata)
    kind, tokens, types = own("model"), own("tokens"), own("token_type")
    if own("add_eos_token", False):
        raise DataError("tokenizer.ggml.add_eos_token = True: no token is added behind a text.")
    if kind not in ("gpt2", "llama"):
        raise DataError(f"tokenizer.ggml.model = {kind!r}: must be 'gpt2' or 'llama'.")
    if not isinstance(tokens, list) or (types and len(types) != len(tokens)):
        raise DataError("tokenizer.ggml.tokens: must be a list, with a token_type for each.")
    types = types or [1] * len(tokens)
    if kind == "gpt2":
        (folder / JSON).write_text(_json_definition(own, tokens, types), encoding="utf-8")
        begins = own("add_bos_token", own("pre") in _ADD_BOS)
    else:
        ids = special_ids(metadata)
        (folder / MODEL).write_bytes(_sentencepiece_model(own, tokens, types, ids))
        begins = own("add_bos_token", True)
    settings: dict[str, Any] = {
        f"{name}_token": tokens[i] for name, i in special_ids(metadata).items() if name in _NAMED
    }
    settings["add_bos_token"] = bool(begins)
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        settings["chat_template"] = template
    write_json(os.fspath(folder / CONFIG), settings)


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of special tokens by name: bos, eos, unk, pad, eot and eom, where they are.

    Defaults are llama.cpp's, which has them for SentencePiece.
    """
    own = _Fields(metadata)
    usual = dict(bos=1, eos=2, unknown=0) if own("model") == "llama" else {}
    keys = dict(bos="bos", eos="eos", unk="unknown", pad="padding", eot="eot", eom="eom")
    ids = {name: own(f"{key}_token_id", usual.get(key)) for name, key in keys.items()}
    tokens = own("tokens") or []
    return {name: i for name, i in ids.items() if is_integer(i) and 0 <= i < len(tokens)}


class _Fields:
    """The fields `tokenizer.ggml.*`."""

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata

    def __call__(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)


def _json_definition(own: _Fields, tokens: Sequence[str], types: Sequence[int]) -> str:
    """Return the contents of a tokenizer.json."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )

    pre = own("pre")
    if pre not in _PATTERNS:
        raise DataError(
            f"tokenizer.ggml.pre = {pre!r}: must be among {', '.join(_PATTERNS)}. Name the model's "
            "own tokenizer, or a folder that has it."
        )
    vocabulary = {t: i for i, t in enumerate(tokens) if types[i] != _UNUSED}
    merges = [(a, b) for a, _, b in (merge.partition(" ") for merge in own("merges", []))]
    try:
        made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _IGNORE_MERGES))
    except Exception as error:  # of the library, which has no class of its own
        raise DataError(f"tokenizer.ggml.merges: do not fit the tokens ({error}).") from error
    pattern = _PATTERNS[pre]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    for kind, add in ((_CONTROL, made.add_special_tokens), (_USER_DEFINED, made.add_tokens)):
        names = (t for t, own_kind in zip(tokens, types, strict=True) if own_kind == kind)
        add([AddedToken(name, normalized=False, special=kind == _CONTROL) for name in names])
    return made.to_str()


def _sentencepiece_model(
    own: _Fields, tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int]
) -> bytes:
    """Return the contents of a SentencePiece model.

    llama.cpp writes the unknown token as a control token, and spaces in user-defined tokens as
    spaces (convert_hf_to_gguf.py); SentencePiece wants a token of the type unknown, and U+2581.
    """
    from sentencepiece.sentencepiece_model_pb2 import (
        ModelProto,  # pyright: ignore[reportAttributeAccessIssue]
    )

    scores = own("scores") or [-float(i) for i in range(len(tokens))]
    model = ModelProto()
    for i, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True)):
        kind = _UNKNOWN if i == ids.get("unk") else _CONTROL if kind == _UNKNOWN else int(kind)
        piece = token.replace(" ", _SPACE) if kind == _USER_DEFINED else token
        model.pieces.add(piece=piece, score=score, type=kind)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.vocab_size = _BPE, len(tokens)
    trainer.byte_fallback = _BYTE in types
    for name in _NAMED:
        setattr(trainer, f"{name}_id", ids.get(name, -1))
        if name in ids:
            setattr(trainer, f"{name}_piece", tokens[ids[name]])
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = bool(own("add_space_prefix", True))
    normalizer.remove_extra_whitespaces = bool(own("remove_extra_whitespaces", False))
    content = model.SerializeToString()
    parse_model(content)  # raises DataError for a model that the library does not take
    return content
