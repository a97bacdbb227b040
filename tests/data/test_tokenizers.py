"""Round trips, streaming that shows whole characters, saving, and broken definitions."""

from __future__ import annotations

import errno
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError, DataError
from eejax.data import (
    ByteTokenizer,
    Document,
    JsonTokenizer,
    check_vocabulary,
    load_tokenizer,
    save_tokenizer,
    source,
    train_bpe,
)
from eejax.data.tokenizers import CHAT, MARKER

END = "<|endoftext|>"
# Text without lone surrogates, rich in characters of several bytes.
TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("é🙂\ufffd<|e \n"))


@pytest.fixture(scope="module")
def bpe() -> JsonTokenizer:
    return train_bpe(source("python-stdlib", max_bytes=100_000).documents(), 512)


@pytest.fixture(scope="module")
def gpt2(eejax_data) -> JsonTokenizer:
    return load_tokenizer(eejax_data / "tokenizers" / "gpt2" / "tokenizer.json")


def streamed(tokenizer, ids, sizes) -> list[str]:
    stream, out, ids = tokenizer.stream(), [], list(ids)
    while ids:
        n = sizes.pop() if sizes else 1
        out.append(stream.push(ids[:n]))
        ids = ids[n:]
    return [*out, stream.flush()]


@given(TEXT)
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.tolist() == list(text.encode())
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text


@given(st.lists(st.integers(-1, 300)), st.lists(st.integers(1, 4)))
def test_bytes_stream_equals_decoding_at_once(ids, sizes):
    tokenizer = ByteTokenizer()
    text = bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")
    assert tokenizer.decode(ids) == text
    assert "".join(streamed(tokenizer, ids, sizes)) == text


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_streams_never_show_half_a_character(kind, bpe):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe
    text = "naïve 🙂 日本語 end"
    ids = tokenizer.encode(text)
    parts = streamed(tokenizer, ids, [])
    assert "".join(parts) == text
    assert not any("\ufffd" in p for p in parts)
    assert sum(bool(p) for p in parts) > 5  # it does not wait for the end
    broken = streamed(tokenizer, tokenizer.encode("ab🙂")[:-1], [])
    assert "".join(broken) == "ab\ufffd" and broken[-1] == "\ufffd"


@settings(max_examples=50)
@given(TEXT, st.lists(st.integers(1, 4)))
def test_trained_bpe_round_trips_any_text(bpe, text, sizes):
    ids = bpe.encode(text)
    assert ids.dtype == np.int32 and (ids.size == 0 or ids.max() < bpe.vocab_size)
    assert bpe.decode(ids) == text
    assert "".join(streamed(bpe, ids, sizes)) == text


@settings(max_examples=50)
@given(st.lists(st.integers(0, 511)), st.lists(st.integers(1, 4)))
def test_bpe_stream_of_any_ids_equals_decoding_at_once(bpe, ids, sizes):
    assert "".join(streamed(bpe, ids, sizes)) == bpe.decode(ids)


def test_trained_bpe_is_reproducible_and_compresses(bpe):
    documents = list(source("python-stdlib", max_bytes=100_000).documents())
    again = train_bpe(documents, 512)
    assert again.fingerprint == bpe.fingerprint and bpe.vocab_size == 512
    assert bpe.eos == END and bpe.decode([bpe.eos_id]) == ""
    text = documents[0].text
    assert len(bpe.encode(text)) < 0.7 * len(text.encode())
    assert train_bpe([Document("a", "aaaa")], 400).vocab_size < 300  # no more pairs to merge
    with pytest.raises(ConfigError, match="vocab_size = 256"):
        train_bpe(["a"], 256)


def test_text_never_becomes_a_special_token_unless_asked(bpe):
    text = f"a{END}b"
    assert bpe.eos_id not in bpe.encode(text)
    assert bpe.decode(bpe.encode(text)) == text
    assert bpe.encode(text, allow_special=True).tolist().count(bpe.eos_id) == 1


@settings(max_examples=50)
@given(text=TEXT)
def test_gpt2_round_trips(gpt2, text):
    assert gpt2.decode(gpt2.encode(text)) == text


def test_gpt2_known_ids(gpt2, tmp_path):
    # OpenAI's published example of its encoder.
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert (gpt2.vocab_size, gpt2.eos_id) == (50257, 50256)
    save_tokenizer(gpt2, tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == gpt2.fingerprint


def test_a_tokenizer_is_saved_whole_or_not_at_all(tmp_path, bpe, monkeypatch):
    def full(self, path):
        pathlib.Path(path).mkdir()
        (pathlib.Path(path) / "tokenizer.json").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    save_tokenizer(ByteTokenizer(), tmp_path / "old")
    (tmp_path / "old" / "model.bin").touch()
    with monkeypatch.context() as patch:
        patch.setattr(type(bpe), "save", full)
        for name in ("new", "old"):
            with pytest.raises(OSError, match=f"No space.*{name}"):
                save_tokenizer(bpe, tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert load_tokenizer(tmp_path / "old").fingerprint == ByteTokenizer().fingerprint
    save_tokenizer(bpe, tmp_path / "old")  # into a folder with other files, which stay
    assert load_tokenizer(tmp_path / "old").fingerprint == bpe.fingerprint
    assert (tmp_path / "old" / "model.bin").exists()


def test_saving_and_loading(tmp_path, bpe):
    save_tokenizer(ByteTokenizer(), tmp_path / "bytes")
    save_tokenizer(bpe, tmp_path / "bpe")
    assert load_tokenizer(tmp_path / "bytes").fingerprint == load_tokenizer("bytes").fingerprint
    loaded = load_tokenizer(tmp_path / "bpe")
    assert loaded.fingerprint == bpe.fingerprint != ByteTokenizer().fingerprint
    assert (loaded.vocab_size, loaded.eos_id, loaded.bos_id) == (512, bpe.eos_id, None)


def test_end_token_comes_from_caller_then_config_then_usual_names(tmp_path, bpe):
    definition = json.loads(bpe.definition)
    extra = dict(definition["added_tokens"][0], id=512, content="<stop>")
    definition["added_tokens"].append(extra)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(definition))
    assert load_tokenizer(file).eos == END
    config = {"eos_token": {"content": "<stop>"}, "bos_token": END}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for spec in (file, tmp_path):
        assert (load_tokenizer(spec).eos_id, load_tokenizer(spec).bos) == (512, END)
    assert load_tokenizer(file, eos=END).eos == END
    with pytest.raises(DataError, match=r"eos = '<none>' is not in the vocabulary; it has <\|end"):
        load_tokenizer(file, eos="<none>")


def test_chat_templates_go_with_the_tokenizer(tmp_path, bpe):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    bpe.save(theirs)
    (theirs / MARKER).unlink()
    config = theirs / "tokenizer_config.json"
    assert load_tokenizer(theirs).chat is None
    config.write_text(
        json.dumps(
            {
                "chat_template": [
                    {"name": "tool_use", "template": "no"},
                    {"name": "default", "template": "{{ several }}"},
                ]
            }
        )
    )
    assert load_tokenizer(theirs).chat == "{{ several }}"
    config.write_text(json.dumps({"chat_template": "{{ one }}"}))
    assert load_tokenizer(theirs).chat == "{{ one }}"
    (theirs / CHAT).write_text("{{ own }} é")
    assert load_tokenizer(theirs).chat == "{{ own }} é"
    load_tokenizer(theirs).save(ours)
    assert load_tokenizer(ours).chat == "{{ own }} é"
    assert load_tokenizer(ours).fingerprint == bpe.fingerprint
    (theirs / CHAT).write_bytes(b"\xff")
    with pytest.raises(DataError, match="chat_template.jinja cannot be read"):
        load_tokenizer(theirs)


@pytest.fixture(scope="module")
def begins(bpe):
    """The definition of a tokenizer whose template puts a token before every text."""
    from tokenizers import Tokenizer, processors

    inner = Tokenizer.from_str(bpe.definition)
    inner.add_special_tokens(["<s>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    return inner.to_str()


def test_texts_begin_as_the_models_did(begins, bpe, tmp_path):
    from tokenizers import Tokenizer

    tokenizer, library = JsonTokenizer(begins), Tokenizer.from_str(begins)
    for text in ("def f(x):", "", " and so on"):
        assert tokenizer.encode(text).tolist() == library.encode(text).ids
        bare = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, begins=False).tolist() == bare
    once = tokenizer.encode("<s>def", allow_special=True).tolist()
    assert once == tokenizer.encode("def").tolist() and once[0] == tokenizer.bos_id == 512
    assert tokenizer.decode(once) == "def"
    assert tokenizer.fingerprint != JsonTokenizer(begins, adds_bos=False).fingerprint
    assert not bpe.adds_bos and bpe.end_ids == (bpe.eos_id,)
    # Kept in a folder; a config.json beside the file has the last word.
    save_tokenizer(JsonTokenizer(begins, ends=(7, bpe.eos_id)), tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.fingerprint == tokenizer.fingerprint and again.encode("a")[0] == 512
    assert again.end_ids == (bpe.eos_id, 7)
    (tmp_path / "tokenizer.json").write_text(begins)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert not load_tokenizer(tmp_path).adds_bos


def test_truncation_and_padding_of_the_file_are_ignored(bpe):
    definition = json.loads(bpe.definition)
    definition["truncation"] = {
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    text = "def function(argument): return argument"
    limited = JsonTokenizer(json.dumps(definition))
    assert limited.decode(limited.encode(text)) == text


@given(TEXT)
def test_byte_lengths_of_bytes(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.byte_lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert len(tokenizer.byte_lengths) == 257 and tokenizer.byte_lengths[tokenizer.eos_id] == 0


@settings(max_examples=50)
@given(TEXT)
def test_byte_lengths_of_bpe_add_up_to_the_text(bpe, text):
    ids = bpe.encode(text)
    assert b"".join(map(bpe.token_bytes, ids.tolist())) == text.encode()
    assert bpe.byte_lengths[ids].sum() == len(text.encode())
    assert bpe.byte_lengths[[*ids, bpe.eos_id]].sum() == len(text.encode())


def test_byte_lengths_of_bpe_are_those_of_each_piece(bpe):
    whole = 0
    for i, n in enumerate(bpe.byte_lengths):
        text = bpe.decode([i])
        if "\ufffd" in text:  # part of a character
            assert n >= 1
        else:
            assert n == len(text.encode())
            whole += 1
    assert len(bpe.byte_lengths) == 512 and whole > 300


def test_byte_lengths_of_gpt2(gpt2):
    text = "naïve 🙂 日本語, and the end"
    assert gpt2.byte_lengths[gpt2.encode(text)].sum() == len(text.encode())
    assert b"".join(map(gpt2.token_bytes, gpt2.encode(text).tolist())) == text.encode()
    assert gpt2.byte_lengths[[15496, 995]].tolist() == [len("Hello"), len(" world")]


def test_byte_lengths_where_pieces_carry_spaces_and_bytes_fall_back():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = {"<unk>": 0, "</s>": 1, "▁the": 2, "▁end": 3, "é": 4, "<0xF0>": 5, "s": 6, "▁": 7}
    inner = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    inner.add_special_tokens(["</s>", "<unk>"])
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    got = JsonTokenizer(inner.to_str()).byte_lengths
    assert got.tolist() == [0, 0, 4, 4, 2, 1, 1, 1]


def test_bad_tokenizers_are_named_with_the_fix(tmp_path):
    with pytest.raises(DataError, match="no file .*nothing.*Give 'bytes'"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(DataError, match="no file .*tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(DataError, match="tokenizer.json: not a tokenizer.json of the tokenizers"):
        load_tokenizer(tmp_path)
    (tmp_path / "eejax_tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="eejax_tokenizer.json cannot be read as JSON"):
        load_tokenizer(tmp_path)


def test_lone_surrogates_are_refused(bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        with pytest.raises(DataError, match="lone surrogate at character 1"):
            tokenizer.encode("a\ud800")


def test_vocabulary_must_fit_the_model():
    check_vocabulary(ByteTokenizer(), 257)
    check_vocabulary(ByteTokenizer(), 300)
    with pytest.raises(DataError, match="257 tokens but the model's vocab_size is 256"):
        check_vocabulary(ByteTokenizer(), 256)
