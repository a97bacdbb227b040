"""Exits that know the first tokens alone, or read few dimensions of a state, in every engine."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
from near_ties import assert_same

from eejax.common.errors import ConfigError
from eejax.inference import EngineOptions, Generator
from eejax.inference.deepening import more_weights, on_host
from eejax.inference.options import draft_cost
from eejax.inference.weights import prepare
from eejax.kernels import call
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig
from eejax.train.starts import copied_exit

KNOWN, RANK, NEW = 24, 6, 10
CONFIG = ModelConfig(
    vocab_size=61,
    vocab_multiple=8,
    n_layers=3,
    d_model=32,
    n_heads=4,
    context_length=48,
    head="tied",
    logit_softcap=20.0,
    exits=(
        ExitConfig(1, mlp=True, vocabulary=KNOWN),
        ExitConfig(2, head="own", temperature=0.8, vocabulary=KNOWN + 4, head_rank=RANK),
    ),
)
EARLY = dict(gate="max_probability", threshold=[0.3, 0.25])
PROMPTS = [np.random.default_rng(i).integers(0, 61, n).tolist() for i, n in enumerate((3, 9))]


@pytest.fixture(scope="module")
def model():
    p = params.init(CONFIG, jax.random.key(5))
    p["embed"]["tokens"] = p["embed"]["tokens"] * 8.0
    p["exits"]["exit_2"]["head"] = p["exits"]["exit_2"]["head"] * 8.0
    return p


def run(model, engine: EngineOptions | str, config=CONFIG, mesh=None, **rules):
    options = EngineOptions(engine, cap=4, buckets=(4,)) if engine == "recompute" else engine
    return Generator.make(model, config, options, mesh).generate(PROMPTS, NEW, **rules)


@pytest.fixture(scope="module")
def posthoc(model):
    return run(model, "posthoc", **EARLY)


def test_tokens_are_those_of_a_float64_model(model, posthoc):
    """Beside uncached logits, of which an exit drops those that it does not know."""
    left = 0
    for prompt, tokens, numbers in zip(PROMPTS, posthoc.tokens, posthoc.exits, strict=True):
        ids = list(prompt)
        for i, (token, number) in enumerate(zip(tokens.tolist(), numbers.tolist(), strict=True)):
            all_logits = reference_model.exit_logits(model, CONFIG, ids)
            for e, logits in enumerate(all_logits):
                known = logits[-1][: (KNOWN, KNOWN + 4, 61)[e]]
                confidence = 1 / np.exp(known - known.max()).sum()
                sure = e == 2 or (i > 0 and confidence >= EARLY["threshold"][e])
                if sure:
                    break
            assert (int(known.argmax()), e) == (token, number)
            left += e < 2 and int(all_logits[e][-1].argmax()) != token
            ids.append(token)
    assert left > 0  # some tokens would be others in all of the vocabulary


@pytest.mark.parametrize("engine", ["recompute", "propagate"])
def test_engines_agree(model, posthoc, engine):
    got = run(model, engine, **EARLY)
    if engine == "recompute":
        assert assert_same(posthoc, got) == 0
    early = got.exits == 0
    assert early.any() and (got.tokens[early] < KNOWN).all()
    assert (got.tokens[got.exits == 1] < KNOWN + 4).all()


@pytest.mark.parametrize("boundary", [1, 2])
def test_drafts_change_no_text(model, boundary):
    # The number of drafts would be 0 if it adapted.
    drafting = EngineOptions(
        "speculative", draft_exit=boundary, drafts=2, buckets=(4,), adapt=False
    )
    second = copied_exit(model, CONFIG, CONFIG.exits[1])  # random ones would never be right
    model = model | {"exits": model["exits"] | {"exit_2": second}}
    full, drafted = run(model, "full"), run(model, drafting)
    np.testing.assert_array_equal(full.tokens, drafted.tokens)
    assert drafted.accepted.sum() > 0 and (full.tokens >= KNOWN).any()


def test_sampled_tokens_are_known(model):
    got = run(model, "recompute", **EARLY | dict(threshold=0.0, temperature=1.5, seed=1))
    assert (got.exits[:, 1:] == 0).all() and (got.tokens[:, 1:] < KNOWN).all()


@pytest.mark.parametrize("mesh", [MeshConfig(model=2), MeshConfig(data=2)], ids=["model", "data"])
def test_a_mesh_gives_what_one_device_gives(model, posthoc, mesh):
    """Shards of a model mask rows that one device leaves out, and have heads of all dimensions."""
    got = run(model, "posthoc", mesh=mesh, **EARLY)
    assert assert_same(posthoc, got) == 0


def test_weights_hold_the_rows_that_are_known(model):
    trees = prepare(model, CONFIG).params["exits"]
    table = np.asarray(model["embed"]["tokens"])
    np.testing.assert_array_equal(trees["exit_1"]["head"], table[:KNOWN])
    assert trees["exit_2"]["head"].shape == (KNOWN + 4, RANK)
    assert trees["exit_2"]["low_rank"].keys() == {"down"}
    assert "head" not in model["exits"]["exit_1"]
    assert model["exits"]["exit_2"]["head"].shape == (64, 32)
    assert prepare(model, CONFIG, 1).params["exits"].keys() == {"exit_1"}


def test_statistics_and_label_logits_are_those_of_masked_logits(model):
    whole = exits.head(model, CONFIG, 0)
    cut = exits.head(model | {"exits": exits.with_known_rows(model, CONFIG)}, CONFIG, 0)
    assert cut.table.shape[0] == KNOWN < whole.table.shape[0]
    h = jax.random.normal(jax.random.key(1), (4, 32))
    y = np.asarray(exits.logits(whole, h))
    assert (y[:, KNOWN:] == y.min()).all() and y.min() < -1e8
    np.testing.assert_allclose(exits.logits(cut, h), y[:, :KNOWN], rtol=1e-5, atol=1e-6)
    labels = jnp.array([0, KNOWN - 1, KNOWN, 60])
    picked = exits.label_logits(whole, h, labels)
    np.testing.assert_allclose(picked, y[np.arange(4), labels], rtol=1e-5, atol=1e-6)
    for a, b in zip(exits.statistics(whole, h), exits.statistics(cut, h), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernels", [False, True], ids=["logits", "kernels"])
def test_a_head_of_few_dimensions_gives_the_logits_of_its_two_matrices(
    model, interpreted, monkeypatch, kernels
):
    folded, seen = prepare(model, CONFIG).params, []
    tokens = np.random.default_rng(2).integers(0, 61, (1, 7)).astype(np.int32)
    transformer.exit_states(model, CONFIG, tokens, tap=lambda _, x: seen.append(x[0]) or x)
    wanted = reference_model.exit_logits(model, CONFIG, tokens[0])[1][:, : KNOWN + 4]
    monkeypatch.setattr(call, "by_kernels", lambda: kernels)
    reader = exits.reader(folded, CONFIG, 1, seen[1])
    y = np.asarray(reader.logits())
    np.testing.assert_allclose(y[:, : KNOWN + 4], wanted, rtol=1e-4, atol=1e-4)
    assert (y[:, KNOWN + 4 :] < -1e8).all()
    if kernels:
        with call.implementation("interpreter"):
            found = reader.statistics()
        np.testing.assert_array_equal(found.token, wanted.argmax(-1))
        total = np.log(np.exp(wanted).sum(-1))
        np.testing.assert_allclose(found.lse, total, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found.top, np.exp(wanted.max(-1) - total), rtol=1e-4)


def test_rounded_to_bfloat16_a_folded_head_is_as_near_to_float64(model):
    config = CONFIG.replace(dtype="bfloat16")
    cast, tables = params.for_compute(model, "bfloat16"), prepare(model, config).params
    assert tables["exits"]["exit_2"]["head"].dtype == "bfloat16"
    x = np.asarray(jax.random.normal(jax.random.key(3), (9, 32)), "bfloat16")
    own = reference_model.tree64(model)["exits"]["exit_2"]
    exact = reference_model.norm(own["norm"], x.astype(np.float64), CONFIG)
    exact = exact @ own["low_rank"]["down"] @ own["low_rank"]["up"] @ own["head"][: KNOWN + 4].T
    exact = 20 * np.tanh(exact / 20) / 0.8
    folded, whole = (
        np.abs(exits.reader(tree, config, 1, x).logits()[:, : KNOWN + 4] - exact).max()
        for tree in (tables, cast)
    )
    assert folded < 1.5 * whole < 0.1 * np.abs(exact).max()


def test_exits_that_are_added_later_have_small_heads_too(model):
    first = prepare(model, CONFIG, 1)
    grown = more_weights(first, on_host(model, CONFIG), CONFIG, 3)
    for a, b in zip(*map(named_leaves, (grown, prepare(model, CONFIG))), strict=True):
        assert a[0] == b[0]
        np.testing.assert_array_equal(a[1], b[1])


def named_leaves(tree):
    return [(jax.tree_util.keystr(k), a) for k, a in jax.tree_util.tree_leaves_with_path(tree)]


def test_a_draft_costs_what_it_reads():
    drafting = EngineOptions("speculative", draft_exit=1)
    one = CONFIG.replace(exits=CONFIG.exits[:1])
    whole = one.replace(exits=(dataclasses.replace(one.exits[0], vocabulary=0),))
    layer = sum(np.prod(p.shape) for p in jax.tree.leaves(params.layer(one), is_leaf=declared))
    step = 3 * layer + 64 * 32
    saved = draft_cost(whole, drafting) - draft_cost(one, drafting)
    assert saved == pytest.approx((64 - KNOWN) * 32 / step)
    narrow = one.replace(exits=(dataclasses.replace(whole.exits[0], head_rank=RANK),))
    saved = draft_cost(whole, drafting) - draft_cost(narrow, drafting)
    assert saved == pytest.approx((64 * 32 - (64 + 32) * RANK) / step)


def declared(leaf) -> bool:
    return hasattr(leaf, "shape")


@pytest.mark.parametrize(
    "boundary, vocabulary, message",
    [
        (1, -1, "ExitConfig.vocabulary = -1: must be a positive number of token ids, or 0"),
        (1, True, "ExitConfig.vocabulary = True"),
        (1, 62, r"ModelConfig.exits.vocabulary = 62: must be at most vocab_size \(61\)"),
        (3, 8, "ModelConfig.exits.vocabulary = 8: must be 0 at the last boundary"),
    ],
)
def test_bad_vocabularies_are_named(boundary, vocabulary, message):
    with pytest.raises(ConfigError, match=message):
        CONFIG.replace(exits=(ExitConfig(boundary, vocabulary=vocabulary),))
