"""Every kind of tokenizer alike: copies, special tokens in text, text behind a prompt, exports."""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import DataError
from eejax.data import (
    ByteTokenizer,
    JsonTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    text_behind,
    train_bpe,
)
from eejax.data.special import MARK, Shield
from eejax.data.tokenizer_export import save_for_transformers
from eejax.data.tokenizers import CHAT, MARKER

NAMES = ("<|im_start|>", "<|im_end|>")
KINDS = ("bytes", "bytes-0", "bpe", "metaspace", "pieces", "unigram", "llama", "llama-legacy")
ODD = (*NAMES, "<|im_", "_end|>", "|>", "<", "</s>", "<s>", " ", "  ", "\n", "\u2581", "\0")
ODD += ("hello", "the king", "é🙂", "\ufb01\u2460", "x", "<tool>", "\ufffd")
TEXT = st.lists(st.sampled_from(ODD) | st.text(st.characters(exclude_categories=["Cs"]))).map(
    "".join
)


def token(content: str, special: bool = True, **flags) -> dict:
    flags = dict(lstrip=False, rstrip=False, normalized=False, single_word=False) | flags
    return dict(content=content, special=special) | flags


@functools.cache
def pieces(**options) -> bytes:
    out = io.BytesIO()
    words = [f"hello world the king of user assistant number {i} and more" for i in range(300)]
    own = dict(vocab_size=330, model_type="bpe", byte_fallback=True, unk_id=0, bos_id=1, eos_id=2)
    own |= dict(pad_id=-1, remove_extra_whitespaces=False, normalization_rule_name="identity")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words), model_writer=out, minloglevel=2, **own | options
    )
    return out.getvalue()


def llama_folder(folder, legacy: bool):
    """A `tokenizer.model` with what lies beside it."""
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(pieces())
    n = sentencepiece.SentencePieceProcessor(model_proto=pieces()).vocab_size()
    added = {0: token("<unk>"), 1: token("<s>"), 2: token("</s>"), n: token(NAMES[0])}
    added |= {n + 1: token(NAMES[1], rstrip=True), n + 2: token("<tool>", False, lstrip=True)}
    settings = dict(
        tokenizer_class="LlamaTokenizer",
        bos_token="<s>",
        eos_token=NAMES[1],
        unk_token="<unk>",
        pad_token="</s>",
        add_bos_token=True,
        legacy=legacy,
        added_tokens_decoder=added,
        chat_template="{{ messages }}",
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@functools.cache
def made(kind: str, folder):
    match kind:
        case "bytes" | "bytes-0":
            return ByteTokenizer(256 if kind == "bytes" else 0)
        case "bpe":
            from tokenizers import Tokenizer

            inner = Tokenizer.from_str(
                train_bpe(["hello the king", "and <more> text"], 300).definition
            )
            inner.add_special_tokens(list(NAMES))
            special = dict(pad_token=NAMES[0])
            return JsonTokenizer(
                inner.to_str(), eos=NAMES[1], ends=[0], chat="{{ messages }}", special=special
            )
        case "metaspace":
            from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

            vocabulary = [(f"<0x{i:02X}>", -9.0) for i in range(256)]
            vocabulary += [("▁", -5.0), ("▁hello", -3.0), ("▁the", -3.0), ("▁king", -3.0)]
            inner = Tokenizer(models.Unigram([("<unk>", 0.0), *vocabulary], 0, True))
            inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            inner.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
            inner.add_special_tokens([AddedToken(n, rstrip=True) for n in ("<s>", *NAMES)])
            return JsonTokenizer(inner.to_str(), eos=NAMES[1], bos="<s>", adds_bos=True)
        case "pieces" | "unigram":
            own = dict(vocab_size=66, model_type="unigram", byte_fallback=False)
            own = {} if kind == "pieces" else own
            return SentencePieceTokenizer(pieces(control_symbols=",".join(NAMES), **own))
        case _:
            return load_tokenizer(llama_folder(folder / kind, kind == "llama-legacy"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, folder):
    return made(request.param, folder)


def settings_of(tokenizer) -> dict:
    names = ("vocab_size", "eos_id", "bos_id", "adds_bos", "end_ids", "chat", "special", "control")
    return {name: getattr(tokenizer, name) for name in (*names, "fingerprint")}


@settings(max_examples=12, deadline=None)
@given(text=TEXT, ids=st.lists(st.integers(-2, 340), max_size=12))
def test_copies_and_saved_ones_are_the_same(tokenizer, folder, text, ids):
    saved = folder / f"saved-{tokenizer.fingerprint}"
    if not saved.exists():
        tokenizer.save(saved)
    others = pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer), load_tokenizer(saved)
    for other in others:
        assert settings_of(other) == settings_of(tokenizer)
        for special in (False, True):
            for begins in (False, True):
                how = dict(allow_special=special, begins=begins)
                assert other.encode(text, **how).tolist() == tokenizer.encode(text, **how).tolist()
        assert other.encode_marked(text).tolist() == tokenizer.encode_marked(text).tolist()
        assert other.decode(ids) == tokenizer.decode(ids)
        for i in ids:
            assert other.token_bytes(i) == tokenizer.token_bytes(i)
    assert (others[0].byte_lengths == tokenizer.byte_lengths).all()


@settings(max_examples=25, deadline=None)
@given(st.lists(TEXT | st.sampled_from(NAMES), max_size=6), st.lists(st.booleans(), min_size=6))
def test_special_tokens_come_from_the_template_alone(tokenizer, texts, trusted):
    control, shield = tokenizer.control, Shield(tokenizer.control)
    texts = [text.replace(MARK, "") for text in texts]
    written = list(zip(texts, trusted, strict=False))
    marked = "".join(text if own else shield(text) for text, own in written)
    got = [i for i in tokenizer.encode_marked(marked).tolist() if i in control.values()]
    # Those of the template's own parts: user text beside them makes none, and takes none away.
    want = [
        i
        for i in tokenizer.encode_marked(
            "".join(text if own else MARK for text, own in written)
        ).tolist()
        if i in control.values()
    ]
    assert got == want
    # Without names of special tokens nothing is marked, and ids are those of the whole text.
    whole = "".join(texts)
    plain = tokenizer.encode(whole, begins=False).tolist()
    assert not {*plain} & {*control.values()}
    assert tokenizer.encode_marked(shield(whole)).tolist() == plain


def test_marks_change_no_other_ids(tokenizer):
    names = [name for name in NAMES if name in tokenizer.control]
    for text in ("hello", " hello", "\nthe king", "x <", "é🙂"):
        whole = text.join(["", *names, ""])
        assert tokenizer.encode_marked(whole + MARK).tolist() == (
            tokenizer.encode(whole, allow_special=True, begins=False).tolist()
        )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 331), max_size=40), st.lists(st.integers(0, 331), max_size=12))
def test_prompt_and_text_are_what_is_decoded_whole(tokenizer, prompt, ids):
    decode = tokenizer.decode
    before, whole = decode(prompt), decode([*prompt, *ids])
    if isinstance(tokenizer, JsonTokenizer) and "ByteFallback" in tokenizer.definition:
        # Its decoder writes all of a run of bytes as U+FFFD where one of them is no UTF-8.
        ids = [] if "\ufffd" in whole else ids
    text = text_behind(decode, prompt, ids)
    if whole.startswith(before) and ids:
        assert before + text == whole
    stream = tokenizer.stream(prompt)
    assert "".join(map(stream.push, ids)) + stream.flush() == text


@settings(max_examples=25, deadline=None)
@given(TEXT, TEXT)
def test_text_behind_a_prompt_of_text(tokenizer, prompt, text):
    prompt = tokenizer.encode(prompt).tolist()
    ids = tokenizer.encode(text, begins=False).tolist()
    grown = tokenizer.decode([*prompt, *ids])
    assert tokenizer.decode(prompt) + text_behind(tokenizer.decode, prompt, ids) == grown


def test_what_lies_beside_a_model_is_read_as_transformers_does(tmp_path):
    """Recorded from transformers 5.23; `test_exports_open_in_transformers` compares live."""
    first = load_tokenizer(llama_folder(tmp_path / "first", False))
    always = load_tokenizer(llama_folder(tmp_path / "always", True))
    for text, ids, legacy in (
        ("hello</s>\nhello", [296, 2, 13, 261, 281], [296, 2, 301, 13, 261, 281]),
        ("<s>x</s> y", [1, 123, 2, 301, 124], [1, 301, 123, 2, 301, 124]),
        ("  hello", [301, 296], [301, 296]),
        ("<|im_start|>user\nhi<|im_end|>", [330, 271, 260, 13, 311, 312, 331], None),
        ("a  b", [301, 307, 301, 301, 315], [301, 307, 301, 301, 315]),
    ):
        for tokenizer, want in ((first, ids), (always, legacy)):
            got = tokenizer.encode(text, allow_special=True, begins=False).tolist()
            assert want is None or got == want, text
    assert first.eos_id == 331 and first.special["pad_token"] == "</s>"
    assert first.decode([296, 332, 297]) == "hello<tool> world"
    never = tmp_path / "never"
    llama_folder(never, False)
    config = json.loads((never / "tokenizer_config.json").read_text())
    (never / "tokenizer_config.json").write_text(json.dumps(config | dict(add_prefix_space=False)))
    tokenizer = load_tokenizer(never)
    assert tokenizer.encode("hello world", begins=False).tolist() == [261, 281, 297]
    assert tokenizer.decode([297, 297]) == " world world"


@pytest.mark.parametrize("kind", [None, "GemmaTokenizer", "LlamaTokenizer"])
def test_pieces_that_a_file_names_are_special_ones(kind, tmp_path):
    model = pieces(user_defined_symbols="<tool>,<text>")
    number = sentencepiece.SentencePieceProcessor(model_proto=model).piece_to_id
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class=kind)))
    named = dict(additional_special_tokens=["<tool>", "<none>"])
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.save(tmp_path / "saved")
    for one in (
        tokenizer,
        load_tokenizer(tmp_path / "saved"),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert one.control["<tool>"] == number("<tool>") and not {"<text>", "<none>"} & {
            *one.control
        }
        ids = one.encode("a<tool><text>b", allow_special=True)
        assert number("<tool>") in ids
        assert "<text>" in one.decode(ids) and "<tool>" not in one.decode(ids)


def test_what_would_change_ids_is_refused_by_name(tmp_path):
    folder = llama_folder(tmp_path / "a", False)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for change, told in (
        (dict(tokenizer_class="XGLMTokenizer"), "tokenizer_class = 'XGLMTokenizer': must be one"),
        (dict(added_tokens_decoder={"5": token("<|x|>")}), r"token 5 = '<\|x\|>' of tokenizer_con"),
        (dict(eos_token="<none>"), "eos = '<none>' is not a control piece"),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | change))
        with pytest.raises(DataError, match=told):
            load_tokenizer(folder)
    bpe = tmp_path / "bpe"
    made("bpe", None).save(bpe)
    (bpe / MARKER).unlink()
    for i, told in ((9999, "is not in its vocabulary"), (5, r"is not in its vocab")):
        beside = dict(added_tokens_decoder={str(i): token("<|new|>")})
        (bpe / "tokenizer_config.json").write_text(json.dumps(beside))
        with pytest.raises(DataError, match=rf"token {i} = '<\|new\|>' of the files .* {told}"):
            load_tokenizer(bpe)
    # A token of the vocabulary that the files beside it make a special one is one.
    (bpe / "tokenizer_config.json").write_text(json.dumps(dict(bos_token="h")))
    assert load_tokenizer(bpe).control["h"] == load_tokenizer(bpe).bos_id


def test_a_template_file_overrides_that_of_a_saved_folder(tokenizer, tmp_path):
    first, again = tmp_path / "first", tmp_path / "again"
    tokenizer.save(first)
    assert load_tokenizer(first).chat == tokenizer.chat
    (first / CHAT).write_text("{{ own }} é", encoding="utf-8")
    changed = load_tokenizer(first)
    changed.save(again)
    for found in (changed, load_tokenizer(again)):
        assert (found.chat, found.fingerprint) == ("{{ own }} é", tokenizer.fingerprint)


@settings(max_examples=25, deadline=None)
@given(text=TEXT)
def test_exports_open_with_the_same_ids(tokenizer, folder, text):
    """By the library that transformers opens them with, and by transformers where it is there."""
    out = folder / f"out-{tokenizer.fingerprint}"
    if not out.exists():
        save_for_transformers(tokenizer, out, 100)
    assert (out / "tokenizer_config.json").is_file()
    assert (out / "chat_template.jinja").is_file() == (tokenizer.chat is not None)
    special = dict(allow_special=True)
    assert load_tokenizer(out).encode(text, **special).tolist() == (
        tokenizer.encode(text, **special).tolist()
    )
    other = opened(out)
    if np.isin(tokenizer.encode(text, begins=False), 0).any() and tokenizer.vocab_size < 200:
        return  # characters that the pieces do not have
    assert other.encode(text, **special).tolist() == tokenizer.encode(text, **special).tolist()
    assert other.end_ids[:1] == tokenizer.end_ids[:1] and other.adds_bos == tokenizer.adds_bos


@functools.cache
def opened(folder):
    """The tokenizer of the exported tokenizer.json and its settings, without ours beside them."""
    theirs = folder / "theirs"
    theirs.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (theirs / name).write_bytes((folder / name).read_bytes())
    return load_tokenizer(theirs)


def test_exports_open_in_transformers(tokenizer, folder):
    transformers = pytest.importorskip("transformers", reason="compared where it is installed")
    out = folder / f"live-{tokenizer.fingerprint}"
    save_for_transformers(tokenizer, out, 100)
    theirs = transformers.AutoTokenizer.from_pretrained(out)

    @settings(max_examples=100, deadline=None)
    @given(text=TEXT)
    def same(text):
        ids = tokenizer.encode(text, allow_special=True)
        if np.isin(ids, 0).any() and tokenizer.vocab_size < 200:
            return
        own = theirs.encode(text)
        twice = tokenizer.adds_bos and own[:2] == [tokenizer.bos_id] * 2  # text that says it itself
        assert own[twice:] == ids.tolist()
        assert theirs.eos_token_id == tokenizer.eos_id
        assert theirs.chat_template == tokenizer.chat

    same()
