"""Settings beside a vocabulary: special tokens that files name, flags of tokens, bad values."""

from __future__ import annotations

import json
import pathlib
import pickle
import tempfile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eejax.common.errors import DataError
from eejax.data import load_tokenizer
from eejax.data.tokenizer_export import save_for_transformers
from eejax.data.tokenizers import MARKER

END, NAMES = "</s>", ("<|im_end|>", "<|a|>", "<|B|>")
IM_END = NAMES[0]
VOCABULARY = {c: i for i, c in enumerate("abcdefgh< >|")} | {IM_END: 12, END: 13, "<unk>": 14}
VOCABULARY |= {"<|a|>": 15, "<|B|>": 16}
TEXTS = (
    "ab<|im_end|>b",
    "a </s> b",
    " ab ",
    "a<|im_end|> b",
    "",
    "a <|a|> <|b|> b",
    "a<|B|>b",
    "A <|A|>b",
)
CONFIG, NAMED, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
flags = st.fixed_dictionaries({}, optional={flag: st.booleans() for flag in FLAGS})


def inner(normalizer=None, **own):
    """own: flags of tokens that the tokenizer.json lists beside the one that ends texts."""
    from tokenizers import AddedToken, Tokenizer, models

    made = Tokenizer(models.BPE(vocab=dict(VOCABULARY), merges=[], unk_token="<unk>"))
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens([END])
    made.add_tokens([AddedToken(name, **flags) for name, flags in own.items()])
    return made


def written(folder, files, made=None):
    (folder / "tokenizer.json").write_text((made or inner()).to_str())
    for name, values in files.items():
        (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def ids_of(tokenizer, allow_special=True):
    return [tokenizer.encode(text, allow_special=allow_special).tolist() for text in TEXTS]


def copies(tokenizer, folder):
    """The tokenizer pickled, saved and exported, and the export without our own settings."""
    tokenizer.save(folder / "saved")
    save_for_transformers(tokenizer, folder / "export", 100)
    yield pickle.loads(pickle.dumps(tokenizer))
    yield load_tokenizer(folder / "saved")
    yield load_tokenizer(folder / "export")
    (folder / "export" / MARKER).unlink()
    yield load_tokenizer(folder / "export")


# The templates' name for the token, if there is one, and the files that name it.
WAYS = {
    "4s_list": (None, {CONFIG: {"additional_special_tokens": [IM_END]}}),
    "4s_list_in_map": (None, {NAMED: {"additional_special_tokens": [IM_END]}}),
    "objects": (None, {NAMED: {"additional_special_tokens": [{"content": IM_END}]}}),
    "4s_beside_5s": (
        None,
        {CONFIG: {"additional_special_tokens": [IM_END], "extra_special_tokens": {}}},
    ),
    "5s_list": (None, {CONFIG: {"extra_special_tokens": [IM_END]}}),
    "5s_object": ("im_end", {CONFIG: {"extra_special_tokens": {"im_end": IM_END}}}),
    "5s_object_in_map": ("im_end", {NAMED: {"extra_special_tokens": {"im_end": IM_END}}}),
    "of_a_model": ("image_token", {CONFIG: {"image_token": IM_END, "hf_token": 5}}),
    "of_a_model_in_map": ("image_token", {NAMED: {"image_token": {"content": IM_END}}}),
    "standard": ("pad_token", {CONFIG: {"pad_token": IM_END}}),
    "standard_object": ("pad_token", {CONFIG: {"pad_token": {"content": IM_END, "lstrip": False}}}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_token_that_a_file_names_is_a_special_one(way, tmp_path):
    """Ids are those of transformers 5.23."""
    called, files = WAYS[way]
    files = {CONFIG: {}} | files
    files[CONFIG] = files[CONFIG] | {"eos_token": END}
    tokenizer = load_tokenizer(written(tmp_path, files))
    assert tokenizer.special == {"eos_token": END} | ({called: IM_END} if called else {})
    for one in (tokenizer, *copies(tokenizer, tmp_path)):
        assert one.control == {END: 13, IM_END: 12} and one.special == tokenizer.special
        assert ids_of(one)[:4] == [[0, 1, 12, 1], [0, 9, 13, 9, 1], [9, 0, 1, 9], [0, 12, 9, 1]]
        assert 12 not in one.encode(TEXTS[0]) and one.decode([0, 12]) == "a"


@settings(max_examples=40, deadline=None)
@given(own=st.none() | flags, ours=flags, special=st.booleans(), named=st.booleans())
def test_flags_of_the_config_replace_those_of_the_tokenizer_json(own, ours, special, named):
    """Encode by the library, to which the token is added with the config's flags."""
    from tokenizers import AddedToken, normalizers

    start = inner(normalizers.Lowercase(), **({} if own is None else {"<|B|>": own}))
    token = {"content": "<|B|>", "special": special, **ours}
    config = {"added_tokens_decoder": {"16": token}}
    config |= {"extra_special_tokens": ["<|B|>"]} if named else {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(written(pathlib.Path(folder), {CONFIG: config}, start))
    start.add_tokens([AddedToken(**token)])
    want = [start.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert ids_of(tokenizer) == want
    assert ("<|B|>" in tokenizer.control) == (special or named)


some = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)
naming = st.fixed_dictionaries(
    {},
    optional={"additional_special_tokens": some, "image_token": st.sampled_from(NAMES)}
    | {"pad_token": st.sampled_from(NAMES)},
) | st.fixed_dictionaries(
    {"extra_special_tokens": some | some.map(lambda names: {f"x{n}": n for n in names})}
)
objects = st.builds(lambda name, flags: {"content": name, **flags}, st.sampled_from(NAMES), flags)
# Lists of transformers 4 in the map are read too where the config has its own: there transformers
# does not, so they are not compared.
in_map = st.fixed_dictionaries(
    {}, optional={"audio_token": objects, "mask_token": objects, "extra_special_tokens": some}
)
decoders = st.dictionaries(st.sampled_from(NAMES), flags, max_size=2).map(
    lambda found: {str(VOCABULARY[n]): {"content": n, **flags} for n, flags in found.items()}
)


def test_ids_are_those_of_transformers(tmp_path_factory):
    transformers = pytest.importorskip("transformers", reason="compared where it is installed")
    from tokenizers import normalizers

    @settings(max_examples=12, deadline=None)
    @given(
        st.dictionaries(st.sampled_from(NAMES), flags, max_size=2),
        st.none() | decoders,
        naming,
        in_map,
        st.lists(st.sampled_from(NAMES), max_size=2),
        st.sampled_from([None, normalizers.Lowercase()]),
    )
    def same(own, decoder, config, named, added, normalizer):
        folder = tmp_path_factory.mktemp("made")
        config = config | {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        config |= {} if decoder is None else {"added_tokens_decoder": decoder}
        files = {CONFIG: config, NAMED: named, ADDED: {name: VOCABULARY[name] for name in added}}
        tokenizer = load_tokenizer(written(folder, files, inner(normalizer, **own)))
        opened = transformers.PreTrainedTokenizerFast.from_pretrained
        theirs = opened(folder)
        want = [theirs.encode(text) for text in TEXTS]
        assert {*theirs.all_special_tokens} <= {*tokenizer.control}
        assert tokenizer.special == theirs.special_tokens_map
        for one in (tokenizer, *copies(tokenizer, folder)):
            assert ids_of(one) == want and one.control == tokenizer.control
        assert [opened(folder / "export").encode(text) for text in TEXTS] == want

    same()


def bad(key, value, told):
    return CONFIG, {key: value}, rf"tokenizer_config.json: {told}: must be "


DEEP = "[" * 100_000
BAD = {
    "decoder_a_list": bad("added_tokens_decoder", [], r"added_tokens_decoder = \[\]"),
    "decoder_no_id": bad("added_tokens_decoder", {"x": {"content": "a"}}, "a key of .* = 'x'"),
    "decoder_long_id": bad("added_tokens_decoder", {"9" * 5000: {"content": "a"}}, "a key of .*"),
    "decoder_a_text": bad("added_tokens_decoder", {"0": "a"}, "added_tokens_decoder.0 = 'a'"),
    "decoder_no_content": bad("added_tokens_decoder", {"0": {}}, "added_tokens_decoder.0 = {}"),
    "decoder_no_switch": bad(
        "added_tokens_decoder",
        {"0": {"content": "a", "lstrip": 1}},
        "added_tokens_decoder.0 .*",
    ),
    "eos_a_list": bad("eos_token", [END], r"eos_token = \['</s>'\]"),
    "eos_empty": bad("eos_token", {}, "eos_token = {}"),
    "more_a_number": bad("additional_special_tokens", 5, "additional_special_tokens = 5"),
    "extra_a_number": bad("extra_special_tokens", [5], r"extra_special_tokens = \[5\]"),
    "bos_a_text": bad("add_bos_token", "yes", "add_bos_token = 'yes'"),
    "class_a_number": bad("tokenizer_class", 5, "tokenizer_class = 5"),
    "template_a_number": bad("chat_template", 5, "chat_template = 5"),
    "template_name_a_list": bad(
        "chat_template",
        [{"name": ["x"], "template": "a"}],
        "chat_template = .*",
    ),
    "config_deep": (CONFIG, DEEP, "tokenizer_config.json cannot be read as JSON: .*recursion"),
    "map_a_list": (NAMED, {"eos_token": [END]}, "special_tokens_map.json: eos_token = .*must be"),
    "added_null": (ADDED, {"zz": None}, "added_tokens.json: zz = None: must be a token's id"),
    "added_a_switch": (ADDED, {"a": True}, "added_tokens.json: a = True: must be a token's id"),
    "kind": (MARKER, {"kind": []}, r"kind = \[\]: must be one of bytes, json, sentencepiece"),
    "saved_end_a_text": (MARKER, {"kind": "bytes", "eos_id": "x"}, "eos_id = 'x': must be a byte"),
    "saved_end_null": (MARKER, {"kind": "bytes", "eos_id": None}, "eos_id = None: must be a byte"),
    "saved_unknown": (MARKER, {"kind": "json", "foo": 1}, "'foo' is not a setting.*has eos, bos, "),
    "saved_ends": (MARKER, {"kind": "json", "ends": 5}, "ends = 5: must be a list of ids"),
    "saved_ends_texts": (MARKER, {"kind": "json", "ends": ["x"]}, r"ends = \['x'\]: must be "),
    "saved_ends_large": (MARKER, {"kind": "json", "ends": [2**31]}, "ends = .*: must be a list"),
    "saved_special": (MARKER, {"kind": "json", "special": 5}, "special = 5: must be an object of"),
    "saved_added": (
        MARKER,
        {"kind": "sentencepiece", "added": {"0": {"content": "a"}}},
        "added = .*special",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_named(name, tmp_path):
    file, values, told = BAD[name]
    with pytest.raises(DataError, match=told):
        load_tokenizer(written(tmp_path, {file: values}))


KEYS = {
    CONFIG: ("added_tokens_decoder", "eos_token", "image_token", "additional_special_tokens")
    + ("extra_special_tokens", "add_bos_token", "chat_template", "tokenizer_class", "legacy"),
    NAMED: ("bos_token", "extra_special_tokens", "x_token"),
    ADDED: ("a", IM_END, "zz"),
    MARKER: ("kind", "eos", "bos", "adds_bos", "ends", "chat", "special", "eos_id", "other"),
}
words = st.sampled_from(["", "a", END, IM_END, "content", "special", "name", "12", "json", "bytes"])
odd = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 20) | st.floats(allow_nan=False) | words,
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(words, inside, max_size=2),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*KEYS]).flatmap(
        lambda file: st.tuples(
            st.just(file), st.dictionaries(st.sampled_from(KEYS[file]), odd, max_size=3)
        )
    )
)
@example((MARKER, {"kind": "json", "special": {"a": "b"}, "ends": [0]}))
def test_odd_settings_load_or_are_refused(pair):
    file, values = pair
    values = {"kind": "json"} | values if file == MARKER else values
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer = load_tokenizer(written(pathlib.Path(folder), {file: values}))
        except DataError as error:
            assert folder in str(error)
            return
    other = pickle.loads(pickle.dumps(tokenizer))
    assert other.fingerprint == tokenizer.fingerprint
    assert other.encode("ab </s>").tolist() == tokenizer.encode("ab </s>").tolist()
