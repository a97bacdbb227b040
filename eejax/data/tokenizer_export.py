"""Export tokenizers for transformers: a `tokenizer.json` and the files beside it."""

from __future__ import annotations

import os
from typing import Any

from absl import logging

from eejax.data.sentencepiece import SentencePieceTokenizer
from eejax.data.tokenizer_settings import CONFIG
from eejax.data.tokenizers import (
    CHAT,
    END_OF_TEXT,
    JSON,
    LETTERS,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    write_json,
)

_SPACE = "\u2581"
# Texts that reveal a wrong conversion: outer and repeated spaces, characters that NFKC changes,
# bytes.
_ODD = (
    "",
    " ",
    "  a",
    "a ",
    "a  b",
    "a\n\tb",
    "\u2581a",
    "\ufb01\u2460\uff21",
    "\u00e9\U0001f642",
    "the king of the world, and 1234 more.",
    "\ufffd\0",
    "x" * 40,
)


def save_for_transformers(tokenizer: Tokenizer, path: str | os.PathLike, context: int) -> None:
    """Write a tokenizer into the folder `path`, for `load_tokenizer` and for transformers.

    transformers then gives texts the same ids; if the pieces of a `.model` cannot be written for
    it, a warning is logged. `context` is the maximum number of tokens in a text.
    """
    tokenizer.save(path)
    definition = _definition(tokenizer)
    values: dict[str, Any] = {"model_max_length": context, "clean_up_tokenization_spaces": False}
    if definition is not None:
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
        definition = _beginning(definition, tokenizer)
        with open(os.path.join(path, JSON), "w", encoding="utf-8") as file:
            file.write(definition)
    special = dict(tokenizer.special)
    if isinstance(tokenizer, ByteTokenizer):  # which has no names
        special = {"eos_token": _end_of(tokenizer)}
    names: dict[str, Any] = {
        name: special.pop(name) for name in [*special] if name.endswith("_token")
    }
    if special:
        names["extra_special_tokens"] = special
    write_json(os.path.join(path, CONFIG), values | names)
    if tokenizer.chat is not None:
        with open(os.path.join(path, CHAT), "w", encoding="utf-8") as file:
            file.write(tokenizer.chat)


def _beginning(definition: str, tokenizer: Tokenizer) -> str:
    """Make a `tokenizer.json`'s template begin texts with the same tokens as the tokenizer."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import processors

    inner = Inner.from_str(definition)
    want = [tokenizer.bos_id] if tokenizer.adds_bos else []
    if inner.encode("").ids == want:
        return definition
    bos = tokenizer.special.get("bos_token")
    inner.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A" if want else "$A",
        special_tokens=[(bos, tokenizer.bos_id)] if want else [],
    )
    return inner.to_str()


def _definition(tokenizer: Tokenizer) -> str | None:
    """Make a `tokenizer.json` that gives texts the same ids; None if there is no such file."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.definition
    if isinstance(tokenizer, ByteTokenizer):
        return bytes_definition(tokenizer)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    try:
        definition = _of_pieces(tokenizer)
    except ImportError as error:
        logging.warning("no tokenizer.json is written for transformers: %s", error)
        return None
    other = JsonTokenizer(definition, eos=tokenizer.eos, bos=tokenizer.bos, adds_bos=False)
    names = {*tokenizer.control, *(token["content"] for token in tokenizer.added.values())}
    for text in [*_ODD, *(f"a{name} b" for name in sorted(names))]:
        ours, theirs = (
            t.encode(text, allow_special=True, begins=False).tolist() for t in (tokenizer, other)
        )
        if ours != theirs:
            logging.warning(
                "no tokenizer.json is written for transformers: its ids of %r would be %s, not %s",
                text,
                theirs,
                ours,
            )
            return None
    return definition


def _end_of(tokenizer: ByteTokenizer) -> str:
    letters = {byte: letter for letter, byte in LETTERS.items()}
    return letters.get(tokenizer.eos_id, END_OF_TEXT)


def bytes_definition(tokenizer: ByteTokenizer) -> str:
    """Make a `tokenizer.json` of byte-level BPE without merges, in which token ids are bytes."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    inner = Inner(models.BPE(vocab=dict(LETTERS), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(_end_of(tokenizer), normalized=False)])
    return inner.to_str()


def _of_pieces(tokenizer: SentencePieceTokenizer) -> str:
    """Convert the pieces and options of a `.model` for the library `tokenizers`."""
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    # Protocol Buffers make the class at run time.
    message = sentencepiece_model_pb2.ModelProto  # pyright: ignore[reportAttributeAccessIssue]
    proto = message.FromString(tokenizer.model)
    spec, options = proto.normalizer_spec, proto.trainer_spec
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    if options.model_type == options.BPE:
        number = {name: i for i, (name, _) in enumerate(pieces)}
        model = models.BPE(
            vocab=number,
            merges=_merges(pieces, number),
            unk_token=pieces[options.unk_id][0],
            fuse_unk=True,
            byte_fallback=options.byte_fallback,
        )
    else:
        model = models.Unigram(pieces, options.unk_id, options.byte_fallback)
    inner, steps = Inner(model), []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if tokenizer.space is None:
        spaced = spec.add_dummy_prefix
        steps += [normalizers.Prepend(_SPACE)] if spaced else []
        steps.append(normalizers.Replace(" ", _SPACE))
    else:
        spaced = tokenizer.space != "never"
        inner.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, tokenizer.space, split=False)
    if steps:
        inner.normalizer = normalizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if spaced else []
    whole = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    inner.decoder = decoders.Sequence(whole)
    kinds = proto.SentencePiece
    added: dict[int, dict[str, Any]] = {
        i: dict(content=piece.piece, special=piece.type == kinds.CONTROL, normalized=False)
        for i, piece in enumerate(proto.pieces)
        if piece.type in (kinds.CONTROL, kinds.USER_DEFINED)
    } | {i: token | {"normalized": False} for i, token in tokenizer.added.items()}
    inner.add_tokens([AddedToken(**added[i]) for i in sorted(added)])
    return inner.to_str()


def _merges(pieces: list[tuple[str, float]], number: dict[str, int]) -> list[tuple[str, str]]:
    """List merges of two pieces in the order in which SentencePiece prefers their results."""
    found: list[tuple[Any, ...]] = []
    for name, score in pieces:
        for i in range(1, len(name)):
            if name[:i] in number and name[i:] in number:
                found.append((-score, number[name[:i]], number[name[i:]], name[:i], name[i:]))
    return [(left, right) for *_, left, right in sorted(found)]
