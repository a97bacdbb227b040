"""SentencePiece models against the library itself, on models trained here."""

from __future__ import annotations

import io
import json
import random
import sys

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from splits import document

from eejax.common.errors import DataError
from eejax.data import (
    SentencePieceTokenizer,
    check_vocabulary,
    load_tokenizer,
    pack,
    save_tokenizer,
    source,
    train_bpe,
)

SPACE = "\u2581"
CONTROL = ["<turn>", "<turn>end"]  # one begins with the other
# Rich in spaces, names of pieces, what NFKC changes, and characters of several bytes.
MARKS = st.sampled_from(
    [" ", "  ", "\n", SPACE, "</s>", "<unk>", "<0x41>", "<sep>", "ﬁ①é🙂語\0\ufffd"]
)
TEXT = st.lists(st.text(st.characters(exclude_categories=["Cs"])) | MARKS).map("".join)
KINDS = [(kind, fallback) for kind in ("unigram", "bpe") for fallback in (False, True)]


def trained(kind: str, fallback: bool, **options) -> bytes:
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz" * 3 + "éß日本語🙂"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 7))) for _ in range(200)]
    lines = [" ".join(rng.choices(words, k=8)) for _ in range(300)]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=out,
        model_type=kind,
        byte_fallback=fallback,
        vocab_size=400 if fallback else 150,
        control_symbols=CONTROL,
        user_defined_symbols=["<sep>"],
        minloglevel=2,
        **options,
    )
    return out.getvalue()


@pytest.fixture(scope="module", params=KINDS, ids=lambda p: f"{p[0]}-{'bytes' if p[1] else 'unk'}")
def model(request) -> bytes:
    return trained(*request.param)


@pytest.fixture(scope="module")
def tokenizer(model) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(model)


@pytest.fixture(scope="module")
def library(model) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def exact(request) -> SentencePieceTokenizer:
    """Trained the way of Llama: nothing normalized, a space before every text."""
    return SentencePieceTokenizer(
        trained(
            request.param,
            True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
        )
    )


def streamed(tokenizer, ids, sizes) -> list[str]:
    stream, out, ids, sizes = tokenizer.stream(), [], list(ids), list(sizes)
    while ids:
        n = sizes.pop() if sizes else 1
        out.append(stream.push(ids[:n]))
        ids = ids[n:]
    return [*out, stream.flush()]


@settings(max_examples=50)
@given(TEXT)
def test_ids_and_text_are_the_librarys_own(tokenizer, library, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.tolist() == library.encode(text)
    known = [i for i in ids.tolist() if i != library.unk_id()]
    assert tokenizer.decode(ids) == library.decode(known)
    assert not set(map(library.is_control, ids.tolist())) - {False}


@settings(max_examples=50)
@given(TEXT)
def test_only_the_normalizer_changes_a_text_of_known_characters(tokenizer, library, text):
    text = "".join(c for c in text if library.unk_id() not in library.encode(c))
    normalized = library.normalize(text).replace(SPACE, " ")
    assert tokenizer.decode(tokenizer.encode(text)) == normalized.removeprefix(" ")


@settings(max_examples=100)
@given(TEXT, st.lists(st.integers(1, 4)))
def test_without_a_normalizer_every_text_comes_back(exact, text, sizes):
    text = text.replace(SPACE, "")
    ids = exact.encode(text)
    assert exact.decode(ids) == text
    assert "".join(streamed(exact, ids, sizes)) == text
    # The space that was put in front counts where the text goes on after other text.
    assert exact.byte_lengths[ids].sum() == len(text.encode()) + (len(ids) > 0)


@settings(max_examples=100)
@given(st.lists(st.integers(-2, 402)), st.lists(st.integers(1, 4)))
def test_stream_of_any_ids_equals_decoding_at_once(tokenizer, exact, ids, sizes):
    for each in (tokenizer, exact):
        assert "".join(streamed(each, ids, sizes)) == each.decode(ids)


def test_streams_keep_spaces_that_come_one_by_one(tokenizer, library):
    letter, space = library.piece_to_id("a"), library.piece_to_id(SPACE)
    ids = [letter, space, space, letter]
    assert tokenizer.decode(ids) == "a  a" == "".join(streamed(tokenizer, ids, []))


@settings(max_examples=100)
@given(TEXT)
def test_byte_lengths_add_up_to_the_text_that_is_decoded(tokenizer, text):
    ids = tokenizer.encode(text)
    before = tokenizer.encode("a").tolist()
    grown = tokenizer.decode([*before, *ids]).removeprefix("a")
    assert tokenizer.byte_lengths[ids].sum() == len(grown.encode())


def test_byte_lengths_of_every_piece(tokenizer, library):
    before = tokenizer.encode("a").tolist()
    assert len(tokenizer.byte_lengths) == tokenizer.vocab_size == library.vocab_size()
    for i, size in enumerate(tokenizer.byte_lengths):
        if library.is_control(i) or library.is_unknown(i):
            assert size == 0 and tokenizer.decode([i]) == ""
        elif library.is_byte(i):
            assert size == 1
        else:
            assert size == len(library.decode([*before, i]).removeprefix("a").encode()) > 0


def test_streams_never_show_half_a_character(exact):
    text = "naïve 🙂 日本語 Ω end"
    parts = streamed(exact, exact.encode(text), [])
    assert "".join(parts) == text and not any("\ufffd" in p for p in parts)
    assert sum(bool(p) for p in parts) > 5  # it does not wait for the end
    broken = streamed(exact, exact.encode("abΩ")[:-1], [])
    assert "".join(broken) == "ab\ufffd" and broken[-1] == "\ufffd"


@settings(max_examples=50)
@given(TEXT)
@example("a</s>b")
def test_text_never_becomes_a_special_token_unless_asked(tokenizer, text):
    special = {tokenizer.eos_id, tokenizer.bos_id}
    assert not special & set(tokenizer.encode(text).tolist())
    assert tokenizer.encode(text, allow_special=True).tolist().count(tokenizer.eos_id) == (
        text.count("</s>")
    )


def test_names_of_control_pieces_become_their_ids_when_asked(tokenizer, library):
    got = tokenizer.encode("<s>hello<turn>end<turn> x</s>", allow_special=True).tolist()
    turn, end = map(library.piece_to_id, CONTROL)
    wanted = [1, *library.encode("hello"), end, turn, *library.encode("x"), 2]
    assert got == wanted
    assert tokenizer.decode(got) == library.decode(wanted)
    # A user-defined piece is text, asked or not.
    for allow in (False, True):
        ids = tokenizer.encode("a<sep>b", allow_special=allow)
        assert library.piece_to_id("<sep>") in ids and tokenizer.decode(ids) == "a<sep>b"


def test_saving_and_loading(tmp_path, model, tokenizer):
    file = tmp_path / "x.model"
    file.write_bytes(model)
    save_tokenizer(tokenizer, tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.model").write_bytes(model)
    for spec in (file, tmp_path / "saved", tmp_path / "folder"):
        loaded = load_tokenizer(spec)
        assert isinstance(loaded, SentencePieceTokenizer)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert (loaded.eos_id, loaded.bos_id, loaded.eos, loaded.bos) == (2, 1, "</s>", "<s>")
    named = load_tokenizer(file, eos="<turn>")
    assert named.eos == "<turn>" and named.fingerprint != tokenizer.fingerprint
    save_tokenizer(named, tmp_path / "named")
    assert load_tokenizer(tmp_path / "named").fingerprint == named.fingerprint
    assert load_tokenizer(tmp_path / "named").eos_id == named.eos_id
    assert (tmp_path / "named" / "tokenizer.model").read_bytes() == model
    check_vocabulary(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize(
    "config, begins",
    [
        ({}, False),
        ({"tokenizer_class": "LlamaTokenizer"}, True),
        ({"add_bos_token": True}, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False),
    ],
)
def test_texts_begin_as_the_config_says(tmp_path, model, tokenizer, config, begins):
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path)
    plain = tokenizer.encode("some text").tolist()
    assert loaded.encode("some text").tolist() == [1] * begins + plain
    assert loaded.encode("some text", begins=False).tolist() == plain
    save_tokenizer(loaded, tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").adds_bos is begins


def test_a_folder_with_both_files_is_read_as_before(tmp_path, model):
    save_tokenizer(train_bpe(["some text"], 300), tmp_path)
    (tmp_path / "eejax_tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_bytes(model)
    assert load_tokenizer(tmp_path).fingerprint.startswith("json-")


def test_packed_documents_come_back(tmp_path, exact):
    save_tokenizer(exact, tmp_path / "tokenizer")
    texts = [f"Ein Text {i} mit Ω und 🙂.\n" for i in range(5)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    data = pack(source(str(tmp_path / "*.txt")), load_tokenizer(tmp_path / "tokenizer"), tmp_path)
    found = [
        data.tokenizer.decode(document(split, i))
        for split in map(data.split, ("train", "validation"))
        for i in range(len(split.documents))
    ]
    assert sorted(found) == texts and data.tokenizer.fingerprint == exact.fingerprint


def test_a_model_without_an_end_says_what_packing_needs(tmp_path):
    bare = SentencePieceTokenizer(trained("bpe", False, eos_id=-1, bos_id=-1))
    assert bare.eos_id is bare.bos_id is bare.eos is None
    (tmp_path / "a.txt").write_text("text", encoding="utf-8")
    with pytest.raises(DataError, match="no token that ends a document: load it with eos="):
        pack(source(str(tmp_path / "a.txt")), bare, tmp_path / "packed")
    save_tokenizer(bare, tmp_path / "bare")
    assert load_tokenizer(tmp_path / "bare").eos_id is None
    assert load_tokenizer(tmp_path / "bare", eos="<turn>").eos_id is not None


def test_bad_models_are_named_with_the_fix(tmp_path, model):
    with pytest.raises(DataError, match=r"no file .*no.model.*SentencePiece \.model"):
        load_tokenizer(tmp_path / "no.model")
    for content in (b"", b"IQ== 0\nIg== 1\n", json.dumps({"model": 1}).encode()):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(DataError, match=r"tokenizer\.model: not a model of the sentencepiece"):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(model)
    for name in ("<none>", "<sep>", "a"):  # not there, and pieces that text may become
        with pytest.raises(
            DataError, match=rf"eos = '{name}' is not a control .* has <s>, </s>, <tur"
        ):
            load_tokenizer(tmp_path, eos=name)


def test_lone_surrogates_are_refused(tokenizer):
    with pytest.raises(DataError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")


def test_a_missing_package_says_what_to_install(tmp_path, model, monkeypatch):
    (tmp_path / "x.model").write_bytes(model)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"pip install 'eejax\[data\]'"):
        load_tokenizer(tmp_path / "x.model")
