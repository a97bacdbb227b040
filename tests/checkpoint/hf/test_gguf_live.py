"""Models of installed packages, beside transformers' own reading of the same GGUF files."""

from __future__ import annotations

import json
import random
import unicodedata

import jax
import numpy as np
import pytest

import eejax
from eejax.checkpoint.hf import packages
from eejax.common.errors import CheckpointError
from eejax.data.chat import ChatTemplate, find
from eejax.inference import Generator
from eejax.models import exits, transformer

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="needs transformers (make bench-env)")
torch = pytest.importorskip("torch", reason="needs torch (make bench-env)")

LENGTH, NEW = 160, 64
BOOKS = ("moby_dick", "pride_and_prejudice", "two_cities", "great_expectations")


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def file(name):
    try:
        return packages.find(name)
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(name, file, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EEJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield eejax.load(name)


@pytest.fixture(scope="module")
def theirs(file):
    read = transformers.AutoModelForCausalLM.from_pretrained
    return read(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def test_logits_of_twenty_texts(model, theirs, eejax_data):
    rng = np.random.default_rng(0)
    texts = [(eejax_data / "books" / f"{name}.txt").read_text() for name in BOOKS]
    texts = [text[i : i + 4000] for text in texts for i in rng.integers(0, len(text) - 4000, 5)]

    @jax.jit
    def logits(params, ids):
        h = transformer.exit_states(params, model.config, ids, which=[0])[0]
        return exits.logits(exits.head(params, model.config, 0), h)

    for text in texts:
        ids = model.tokenizer.encode(text)[None, :LENGTH]
        assert ids.shape == (1, LENGTH)
        ours = np.asarray(logits(model.params, ids))[0]
        with torch.no_grad():
            expected = theirs(torch.asarray(ids.astype(np.int64))).logits[0].numpy()
        bound = 1e-3 * (expected.max() - expected.min())
        assert np.abs(ours - expected).max() <= bound


def test_greedy_answers_to_twenty_chats(model, theirs, eejax_data):
    lines = (eejax_data / "spec_bench" / "question.jsonl").read_text().splitlines()
    asked = [json.loads(line)["turns"][0] for line in random.Random(1).sample(lines, 60)]
    asked = [text for text in asked if len(text) < 600][:20]
    assert len(asked) == 20
    form = find(model.source, model.tokenizer)  # the base model of Gemma has none
    generator = Generator.make(model.params, model.config, "full")
    for text in asked:
        ids = model.tokenizer.encode(text).tolist()
        if form is not None:
            asked_for = ChatTemplate(*form).render([{"role": "user", "content": text}])
            ids = model.tokenizer.encode_marked(asked_for).tolist()
        ours = generator.generate([ids], NEW, stop_token_ids=model.tokenizer.end_ids)
        with torch.no_grad():
            found = theirs.generate(
                torch.asarray([ids]),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=list(model.tokenizer.end_ids),
            )
        expected = found[0, len(ids) :].tolist()
        assert ours.tokens[0, : ours.lengths[0]].tolist() == expected


ODD = [
    *(" ", "  ", "\n", "\t", "\r\n", "'s", "don't", "Hello", "world", "a", "B", "_", "$", "=="),
    *("é", "É", "ß", "中", "文字", "🙂", "👩\u200d👧", "ﬁ", "\u00a0", "\u2028", "«", "—", "ا"),
    *("0", "12", "345", "3.14", "½", "٣", "²", "हि", "\u0301", "%", "def f(x):", "</s>"),
    "<|im_start|>",
]


def test_ten_thousand_odd_strings(name, model, file):
    """transformers does not read `tokenizer.ggml.pre`: for SmolLM it gets each numeral by itself
    here, as llama.cpp cuts its texts (llama-vocab.cpp)."""
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    rng, differ = random.Random(0), []
    for _ in range(10_000):
        text = "".join(rng.choice(ODD) for _ in range(rng.randint(0, 20)))
        parts = [[]]
        for c in text:
            alone = name == "smollm2" and unicodedata.category(c).startswith("N")
            parts += [[c], []] if alone else []
            if not alone:
                parts[-1].append(c)
        expected = [
            i for part in parts for i in theirs("".join(part), add_special_tokens=False).input_ids
        ]
        expected = [model.tokenizer.bos_id] * model.tokenizer.adds_bos + expected
        if model.tokenizer.encode(text, allow_special=True).tolist() != expected:
            differ.append(text)
    assert not differ
