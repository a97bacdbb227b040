"""Text that is shown while it comes: whole characters, and no piece of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eejax.data import text_behind
from eejax.data.tokenizers import ByteTokenizer, JsonTokenizer
from eejax.serving.text import (
    StreamingDetokenizer,
    TokenOffsets,
    find_stop_string,
    partial_stop_length,
)

TOKENIZER = ByteTokenizer()
PIECES = st.text(alphabet="abé€😀\n", max_size=12)
STOPS = st.lists(st.text(alphabet="abé\n", min_size=1, max_size=4), max_size=3)


def expected(text: str, stops) -> str:
    """Up to the stop string that is complete first, in a text that comes byte by byte."""
    for end in range(len(text) + 1):
        found = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if found:
            return text[: min(found)]
    return text


@given(PIECES, STOPS, st.lists(st.integers(1, 5), max_size=60))
def test_however_it_comes_it_is_the_text_up_to_a_stop(text, stops, sizes):
    ids = list(text.encode())
    shown, revealed, at = "", StreamingDetokenizer(TOKENIZER, stops), 0
    want = expected(text, stops)
    for size in [*sizes, len(ids)]:
        part = revealed.push(ids[at : at + size])
        at += size
        shown += part.text
        # What is shown is never taken back, and is no part of a stop string that is to come.
        assert want.startswith(shown)
        assert part.stopped == revealed.stopped
    last = revealed.finish()
    assert shown + last.text == want
    assert last.stopped == any(stop in text for stop in stops)


@given(PIECES, st.lists(st.integers(1, 5), max_size=60))
def test_tokens_are_counted_once_a_character_of_theirs_shows(text, sizes):
    ids, revealed, at = list(text.encode()), StreamingDetokenizer(TOKENIZER), 0
    for size in [*sizes, len(ids)]:
        part = revealed.push(ids[at : at + size])
        at += size
        whole = len(bytes(ids[:at]).decode(errors="ignore").encode())
        assert part.tokens == whole  # bytes are tokens
    assert revealed.finish().tokens == len(ids)


def test_what_waits_for_a_stop_string_is_shown_at_the_end():
    revealed = StreamingDetokenizer(TOKENIZER, ["</s>"])
    assert revealed.push(list(b"a</s")).text == "a"
    assert revealed.finish().text == "</s"


def test_half_a_character_at_the_end_is_shown_as_unknown():
    revealed = StreamingDetokenizer(TOKENIZER)
    assert revealed.push(list("é".encode())[:1]).text == ""
    assert revealed.finish().text == "�"


@given(st.text(alphabet="ab", max_size=9), st.lists(st.text(alphabet="ab", min_size=1, max_size=4)))
def test_what_could_begin_a_stop(text, stops):
    ends = [
        n
        for n in range(len(text) + 1)
        if any(s != text[len(text) - n :] and s.startswith(text[len(text) - n :]) for s in stops)
    ]
    if find_stop_string(text, stops) is None:
        assert partial_stop_length(text, stops) == max(ends, default=0)


def spaced() -> JsonTokenizer:
    """One whose pieces carry the spaces before them, which its decoder drops at the beginning."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = {"<unk>": 0, "</s>": 1, "▁hello": 2, "▁world": 3, "▁": 4, "s": 5}
    inner = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return JsonTokenizer(inner.to_str(), eos="</s>")


def test_an_answer_keeps_the_space_between_it_and_its_prompt():
    tokenizer = spaced()
    for prompt, want in (([2], " world worlds"), ([], "world worlds")):
        revealed = StreamingDetokenizer(tokenizer, prompt=prompt)
        text = "".join(revealed.push([token]).text for token in (3, 3, 5)) + revealed.finish().text
        assert text == want
    revealed = StreamingDetokenizer(tokenizer, [" world"], [2])
    assert (
        revealed.push([5]).text == "s"
        and revealed.push([3, 3]).stopped
        and revealed.num_tokens == 2
    )


@given(
    st.lists(st.sampled_from(list("aé€😀".encode()) + [255, 256])),
    st.integers(0, 40),
    st.booleans(),
)
def test_offsets_index_the_text_that_is_returned(ids, cut, echo):
    """Of texts that hold bytes that are no UTF-8, and of answers behind them."""
    cut = 0 if echo else min(cut, len(ids))
    offsets = TokenOffsets(TOKENIZER, ids[:cut])
    found = [offsets.push(i) for i in ids[cut:]]
    text = text_behind(TOKENIZER.decode, ids[:cut], ids[cut:])
    assert found == sorted(found)
    for i, at in zip(ids[cut:], found, strict=True):
        assert 0 <= at <= len(text)
        if i < 128:
            assert text[at] == chr(i)


@pytest.mark.parametrize("prompt", [[], [2], [2, 3, 5]])
def test_offsets_where_decoders_drop_a_space(prompt):
    tokenizer, ids = spaced(), [3, 3, 5, 4, 2]
    offsets, text = TokenOffsets(tokenizer, prompt), text_behind(tokenizer.decode, prompt, ids)
    for n, i in enumerate(ids):
        own, at = tokenizer.token_bytes(i).decode(), offsets.push(i)
        if n or prompt:
            assert text[at : at + len(own)] == own
        else:
            assert at == 0 and text.startswith(own.lstrip())


def test_a_prompt_that_ends_within_a_character():
    prompt = list("ab\N{EURO SIGN}".encode())
    revealed = StreamingDetokenizer(TOKENIZER, prompt=prompt[:-1])
    shown = revealed.push([prompt[-1], *b"cd"]).text
    assert shown.endswith("cd") and "ab" not in shown
