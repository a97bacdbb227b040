"""What the evaluation of a run scores: which windows, and the bytes of which tokens."""

import math

import jax
import numpy as np
import pytest

from eejax import calibration
from eejax.common.errors import DataError
from eejax.data import ByteTokenizer, Document, batches, even_windows, pack, train_bpe
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig, make_mesh
from eejax.train.evaluate import evaluate, evaluate_mixture
from eejax.train.step import make_eval_step

CONFIG = ModelConfig(
    vocab_size=300, n_layers=2, d_model=16, n_heads=2, context_length=16, exits=(ExitConfig(1),)
)
NAMES = ("exit_1", "final")


class Texts:
    """ASCII, of ever fewer bytes a token, so that the beginning is not typical of the whole."""

    def documents(self):
        for i in range(60):
            yield Document(f"{i:02}", "early exits " * (60 - i) + f"{i * i} " * i + "end")

    def describe(self):
        return {"kind": "texts"}


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def packed(request, tmp_path_factory):
    texts = Texts()
    tokenizer = ByteTokenizer() if request.param == "bytes" else train_bpe(texts.documents(), 300)
    return pack(texts, tokenizer, tmp_path_factory.mktemp("packed"), validation_fraction=0.5)


@pytest.fixture(scope="module")
def model():
    return params.init(CONFIG, jax.random.key(0))


def run(model, packed, size, limit, data=1, masks=False):
    mesh = make_mesh(MeshConfig(data=data), devices=jax.devices()[:data])
    split = packed.split("validation")
    cut = batches(split, size, 16, limit=limit, document_masks=masks)
    lengths = packed.tokenizer.byte_lengths
    return evaluate(make_eval_step(CONFIG, mesh), model, cut, mesh, NAMES, lengths)


@pytest.mark.parametrize("masks", [False, True])
def test_bytes_are_those_of_the_labels_that_were_scored(model, packed, masks):
    got = run(model, packed, 4, 3, masks=masks)
    split, eos = packed.split("validation"), packed.tokenizer.eos_id
    labels = []
    for w in even_windows(split, 16, 12).tolist():
        ids = split.read(w * 16, 17).tolist()
        labels += [b for a, b in zip(ids, ids[1:], strict=False) if not (masks and a == eos)]
    # ASCII, so that every token decodes by itself.
    nbytes = sum(len(packed.tokenizer.decode([i]).encode()) for i in labels)
    assert (got.tokens, got.nbytes) == (len(labels), nbytes)
    for loss, bits in zip(got.losses, got.bits_per_byte, strict=True):
        assert bits == pytest.approx(loss * len(labels) / math.log(2) / nbytes)
    whole = sum(len(packed.tokenizer.decode([i]).encode()) for i in split.read(0, len(split)))
    assert whole == split.nbytes


def test_neither_parts_nor_devices_change_what_is_scored(model, packed):
    want = run(model, packed, 8, 3)
    for size, limit, data in [(2, 12, 1), (4, 6, 2), (8, 3, 4)]:
        got = run(model, packed, size, limit, data)
        assert (got.tokens, got.nbytes) == (want.tokens, want.nbytes)
        # Sums of a few hundred float32 terms in another order.
        assert got.losses == pytest.approx(want.losses, rel=1e-6)


def test_a_sample_speaks_for_the_whole_split(model, packed):
    """The first windows do not: bytes per token fall along the text."""
    split, lengths = packed.split("validation"), packed.tokenizer.byte_lengths

    def share(ids):
        return float(lengths[ids].mean())

    whole, first = share(split.read(1, len(split))), share(split.read(1, 40 * 16))
    got = run(model, packed, 8, 5)
    sampled = got.nbytes / got.tokens
    if packed.vocab_size > 257:
        assert abs(sampled - whole) < 0.2 * abs(first - whole)
    else:
        assert sampled == pytest.approx(whole, abs=0.01)


def test_the_frontier_counts_the_same_bytes(model, packed):
    got = run(model, packed, 4, 3)
    cut = batches(packed.split("validation"), 4, 16, limit=3)
    scores = calibration.score(model, CONFIG, cut)
    assert scores.bytes_per_token(packed.tokenizer) == pytest.approx(got.nbytes / got.tokens)
    per_token = scores.bytes_per_token(packed.tokenizer)
    point = calibration.at_threshold(scores, 1.0)
    # The mean of the same losses, summed in another order.
    assert point.bits_per_byte(per_token) == pytest.approx(got.bits_per_byte[-1], rel=1e-5)


def test_labels_without_text_and_no_labels():
    mesh, names = make_mesh(MeshConfig(), devices=jax.devices()[:1]), ("final",)
    lengths = ByteTokenizer().byte_lengths

    def step(params, batch):
        from eejax.losses import ExitSums

        return ExitSums(np.ones(1, np.float32), np.int32((batch["labels"] != -1).sum()))

    def batch(label):
        return [{"tokens": np.zeros((1, 2), np.int32), "labels": np.array([[-1, label]])}]

    assert evaluate(step, None, batch(256), mesh, names, lengths).bits_per_byte == (math.inf,)
    with pytest.raises(DataError, match="no token to evaluate"):
        evaluate(step, None, batch(-1), mesh, names, lengths)


def test_a_mixture_is_the_mean_of_its_parts_by_weight(tmp_path):
    tokenizer = ByteTokenizer()
    p = jax.jit(lambda: params.init(CONFIG, jax.random.key(0)))()
    mesh = make_mesh(MeshConfig())
    step = make_eval_step(CONFIG, mesh)
    split = pack(Texts(), tokenizer, tmp_path, validation_fraction=0.5).split("validation")

    def parts():
        return [batches(split, 4, 16, limit=2), batches(split, 4, 8)]  # of unequal sizes

    def one(part):
        return evaluate(step, p, part, mesh, NAMES, tokenizer.byte_lengths)

    a, b = map(one, parts())
    got = evaluate_mixture(
        step, p, zip((3.0, 1.0), parts(), strict=True), mesh, NAMES, tokenizer.byte_lengths
    )
    np.testing.assert_allclose(got.losses, 0.75 * np.array(a.losses) + 0.25 * np.array(b.losses))
    assert got.tokens == a.tokens + b.tokens and b.tokens > 4 * a.tokens
    # Bits per byte are those of text mixed by the weights.
    rate = 0.75 * a.nbytes / a.tokens + 0.25 * b.nbytes / b.tokens
    want = np.array(got.losses) / math.log(2) / rate
    np.testing.assert_allclose(got.bits_per_byte, want, rtol=1e-3)  # whole bytes are counted
    alone = evaluate_mixture(step, p, [(7.0, parts()[0])], mesh, NAMES, tokenizer.byte_lengths)
    assert alone == a
