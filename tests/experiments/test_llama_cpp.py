"""llama.cpp beside eejax: a model's file with other weights, and texts of both."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest

import eejax
from eejax.checkpoint.hf.packages import find
from eejax.common.errors import CheckpointError, ConfigError
from eejax.experiments import llama_cpp
from eejax.inference import Generator

# Largest errors: relative to the value, and to the largest value of its block of 32, whose step is
# 1/127 of that, rounded to float16.
ROUNDED = {"F32": (0.0, 0.0), "BF16": (2.0**-8, 0.0), "Q8_0": (0.0, 0.6 / 127)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Parts of a model, its matrices in Q4_0."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_block_count(1)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "\u0120b", "<s>"])
    writer.add_token_types([1, 1, 3])
    writer.add_chat_template("{{ messages }}")
    stored = gguf.GGMLQuantizationType.Q4_0
    for name, shape in (("token_embd", (3, 64)), ("blk.0.ffn_up", (96, 64))):
        values = rng.standard_normal(shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, stored), raw_dtype=stored)
    writer.add_tensor("output_norm.weight", rng.standard_normal(64).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", llama_cpp.KINDS)
def test_only_the_type_of_matrices_changes(source, kind, tmp_path):
    llama_cpp.write_as(source, tmp_path / "as.gguf", kind)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(tmp_path / "as.gguf")
    own = {n: f.contents() for n, f in before.fields.items() if not n.startswith("GGUF.")}
    del own["general.file_type"]
    assert own == {n: f.contents() for n, f in after.fields.items() if not n.startswith("GGUF.")}
    assert "tokenizer.ggml.tokens" in own
    for a, b in zip(before.tensors, after.tensors, strict=True):
        assert a.name == b.name and a.shape.tolist() == b.shape.tolist()
        assert b.tensor_type.name == (kind if len(a.shape) > 1 else "F32")
        values, got = (gguf.dequantize(t.data, t.tensor_type) for t in (a, b))
        if len(a.shape) == 1:
            np.testing.assert_array_equal(values, got)
            continue
        relative, of_block = ROUNDED[kind]
        largest = np.abs(values.reshape(-1, 32)).max(-1, keepdims=True)
        bound = relative * np.abs(values) + np.repeat(of_block * largest, 32, -1).reshape(got.shape)
        assert (np.abs(values - got) <= bound).all()


def test_the_missing_package_is_named(source, monkeypatch):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(ConfigError, match="xllamacpp: run `make bench-env`, or add --nopeer"):
        llama_cpp.generator(source, 1, 64)


@pytest.mark.slow
def test_greedy_texts_are_eejaxs(tmp_path):
    """Of SmolLM2 in float32, up to the first token that ends a text, which llama.cpp leaves out."""
    pytest.importorskip("xllamacpp", reason="needs xllamacpp (make bench-env)")
    try:
        llama_cpp.write_as(find("smollm2"), tmp_path / "f32.gguf", "F32")
    except CheckpointError as error:
        pytest.skip(str(error))
    theirs = llama_cpp.generator(tmp_path / "f32.gguf", 2, 256, "F32")
    model = eejax.load("smollm2")
    full = Generator.make(model.params, model.config, "full")
    for text in ("The capital of France is", "def add(a, b):\n", "Once upon a time"):
        ids, ends = model.tokenizer.encode(text).tolist(), model.tokenizer.end_ids
        ours = full.generate([ids], 32, stop_token_ids=ends).ids(0)
        ours = ours[:-1] if ours[-1] in ends else ours
        assert len(ours) > 16 and theirs(ids, 32)[: len(ours)] == ours
