"""Gathering records into results: the same however they are cut, each token looked at once."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.inference.request import FinishReason
from eejax.inference.result import DRAFT_COLOR, Collector, string_end
from eejax.inference.state import DecodeRecord
from eejax.models.config import ExitConfig, ModelConfig

CONFIG = ModelConfig(
    vocab_size=257,
    n_layers=4,
    d_model=16,
    n_heads=2,
    context_length=64,
    exits=(ExitConfig(1), ExitConfig(4)),
)


def text(ids):
    return "".join(chr(97 + i) for i in ids)


def records(tokens):
    """One record [n, b] of all steps, from tokens [b][n]; a request's steps after its own: -1."""
    n = max(map(len, tokens))
    token = np.array([t + [-1] * (n - len(t)) for t in tokens], np.int32).T
    real = token >= 0
    number = np.arange(token.size).reshape(token.shape)

    def value(a, empty):
        return np.where(real, a, empty).astype(np.float32)

    return DecodeRecord(
        token=token,
        logprob=value(-number, 0),
        confidence=value(number / token.size, 0),
        exit=np.where(real, token % 3, -1).astype(np.int32),
        layers=np.where(real, 4, 0).astype(np.int32),
        margin=value(number, np.inf),
        drafted=np.where(real, 2, 0).astype(np.int32),
        accepted=np.where(real, number % 2, 0).astype(np.int32),
    )


def collect(record, cuts, max_new, stop_token_ids=(), stop_strings=(), decode=text):
    b = record.exit.shape[1]
    collector = Collector(
        CONFIG,
        [[0]] * b,
        np.array(max_new),
        [FinishReason.LENGTH] * b,
        stop_token_ids,
        stop_strings,
        decode,
    )
    edges = [0, *cuts, len(record.exit)]
    results = []
    for start, stop in zip(edges, edges[1:], strict=False):
        part = jax.tree.map(lambda a, start=start, stop=stop: a[start:stop], record)
        for a in jax.tree.leaves(part):
            a.flags.writeable = False  # as what comes from a device
        results.append(collector.add(part))
        if results[-1].finished.all():
            break
    return results


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=30, max_size=30), min_size=1, max_size=3),
    st.sets(st.integers(1, 29)),
    st.lists(st.integers(1, 30), min_size=3, max_size=3),
    st.sets(st.integers(0, 3), max_size=1),
    st.lists(st.text("abcd", min_size=1, max_size=6), max_size=2),
)
def test_however_cut_a_request_ends_where_its_text_says(tokens, cuts, max_new, stops, strings):
    max_new = max_new[: len(tokens)]
    tokens = [t[:n] for t, n in zip(tokens, max_new, strict=True)]
    record = records(tokens)
    results = collect(
        record, sorted(c for c in cuts if c < len(record.exit)), max_new, stops, strings
    )
    last = results[-1]
    for i, ids in enumerate(tokens):
        end, finish = len(ids), "length"
        for n in range(1, len(ids) + 1):
            if ids[n - 1] in stops or any(s in text(ids[:n]) for s in strings):
                end, finish = n, "stop"
                break
        assert last.ids(i) == ids[:end] and last.finish[i] == finish
        np.testing.assert_array_equal(last.exits[i, :end], np.array(ids[:end]) % 3)
        np.testing.assert_array_equal(last.logprobs[i, :end], record.logprob[:end, i])
        np.testing.assert_array_equal(last.accepted[i, :end], record.accepted[:end, i])
        assert (last.drafted[i] == np.where(last.exits[i] >= 0, 2, 0)).all()
        assert (last.tokens[i, end:] == -1).all() and (last.exits[i, end:] == -1).all()
        assert (last.boundaries[i, :end] == np.array([1, 4, 4])[last.exits[i, :end]]).all()
        assert (last.boundaries[i, end:] == -1).all() and np.isinf(last.margins[i, end:]).all()
    for earlier in results:  # what was shown before still stands
        n = earlier.tokens.shape[1]
        np.testing.assert_array_equal(earlier.tokens, last.tokens[:, :n])
        np.testing.assert_array_equal(earlier.exits, last.exits[:, :n])


def test_decoding_and_copying_do_not_grow_with_what_is_there():
    n, work = 4096, []

    def decode(ids):
        work.append(len(ids))
        return text(ids)

    record = records([[0, 1] * (n // 2)])
    results = collect(record, range(1, n, 16), [n], stop_strings=["zzzz"], decode=decode)
    assert sum(work) < 8 * n  # each prefix decoded afresh would be 500 n
    assert results[-1].tokens.base is results[0].tokens.base  # one buffer, not a copy each time
    with pytest.raises(ValueError, match="read-only"):
        results[0].tokens[0, 0] = 7


def test_a_stop_string_across_tokens_that_have_no_text():
    def decode(ids):
        return "".join(chr(97 + i) for i in ids if i < 26)

    ids = [0, 1] + [99] * 50 + [2, 3]
    for before in range(len(ids) - 1):
        assert string_end(ids, before, ["abc"], decode) == [len(ids) - 1]

    # What only looks like a match where the text is cut is none.
    def odd(ids):
        return ("#" if ids and ids[0] == 5 else "") + text(ids)

    assert string_end([0] * 40 + [5] * 40 + [1], 80, ["#f"], odd) == []


@settings(max_examples=100)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(0, 3)))
def test_texts_and_stop_strings_go_on_behind_the_prompt(ids, prompt):
    """Of a decoder that drops the space that begins a text, as SentencePiece's."""
    pieces = [" a", " b", "c", ""]

    def decode(ids):
        return "".join(pieces[i] for i in ids).removeprefix(" ")

    one = dict(max_new=np.array([len(ids)]), limits=["length"])
    whole = Collector(CONFIG, [prompt], **one).add(records([ids]))
    want = decode([*prompt, *ids]).removeprefix(decode(prompt))
    assert whole.text(0, decode) == want
    assert "".join(piece for piece, _ in whole.pieces(0, decode)) == want
    cut = Collector(CONFIG, [prompt], **one, stop_strings=[" b"], decode_text=decode)
    found = cut.add(records([ids])).lengths[0]
    texts = [decode([*prompt, *ids[:n]]).removeprefix(decode(prompt)) for n in range(len(ids) + 1)]
    assert found == next((n for n, text in enumerate(texts) if " b" in text), len(ids))


def test_a_log_probability_that_is_no_number_is_an_error():
    record = records([[1, 2, 0, 1], [2, 2, 2, 2]])
    record.logprob[2, 1] = np.nan
    with pytest.raises(FloatingPointError, match="request 1 .* new token 2, exit 4"):
        collect(record, [1], [4, 4])


def test_colors_by_exit_and_their_legend():
    ids = [97, *"é".encode(), 98]  # by exits 1, 0, 1 and the final one

    def decode(ids):
        return bytes(ids).decode(errors="replace")

    result = collect(records([ids]), [1], [4])[-1]
    none, all_ = np.zeros_like(result.drafted), np.ones_like(result.drafted)
    result = dataclasses.replace(result, drafted=none, accepted=none)
    assert result.exits[0].tolist() == [1, 0, 1, 2]
    assert list(result.pieces(0, decode)) == [("a", 0), ("é", 2), ("b", 3)]
    red, green = (lambda text, c=c: f"\x1b[38;5;{c}m{text}\x1b[0m" for c in (196, 118))
    assert result.colored(0, decode) == green("a") + green("é") + "b"
    assert result.legend(colors=False) == "exit 1: 1, exit 4: 2, final 4: 1"
    assert result.legend() == f"{red('exit 1: 1')}, {green('exit 4: 2')}, final 4: 1"
    # A draft that was right has a color where the final exit emitted it.
    drafted = dataclasses.replace(result, drafted=all_, accepted=all_)
    right = f"\x1b[38;5;{DRAFT_COLOR}m"
    assert drafted.colored(0, decode) == green("a") + green("é") + f"{right}b\x1b[0m"
    assert drafted.legend(False) == "exit 1: 1, exit 4: 2, final 4: 1, of which 1 were drafted"
    # An exit without layers is there for drafts from the text, and is not shown where none came.
    final = np.full_like(result.exits, 2)
    text = dataclasses.replace(result, exits=final, exit_boundaries=(0, 2, 4))
    assert text.legend(False) == "exit 2: 0, final 4: 4"
    last = dataclasses.replace(drafted, exits=final)
    assert last.legend(False) == "final 4: 4, of which 4 were drafted"
