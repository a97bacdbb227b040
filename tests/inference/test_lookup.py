"""Drafts that a text makes itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adding import add
from hypothesis import given, settings
from hypothesis import strategies as st

from eejax.common.errors import ConfigError
from eejax.inference import EngineOptions, Generator, lookup
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.options import VERIFY_COSTS, verify_cost
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import SamplingParams
from eejax.inference.schedule import (
    INITIAL_TEXT_ACCEPTANCE,
    TEXT_RECOVERY,
    update_acceptance,
)
from eejax.inference.scheduler import Scheduler
from eejax.inference.state import TEXT_DRAFTS, RequestRows
from eejax.kernels import call
from eejax.models import params
from eejax.models.config import ExitConfig, ModelConfig
from eejax.sharding.mesh import MeshConfig


def by_hand(text: list[int], n: int) -> tuple[list[int], int]:
    """The continuation of a text's last tokens, by trying all places, and its equal tokens."""
    best, length = None, lookup.SHORTEST - 1
    for end in range(len(text) - 1):
        equal = 0
        while equal < min(end + 1, lookup.LONGEST) and text[end - equal] == text[-1 - equal]:
            equal += 1
        if equal > lookup.SHORTEST - 1 and equal >= length:
            best, length = end, equal
    if best is None:
        return [], 0
    found = list(text)
    for _ in range(n):  # a copy that reads what it has written
        found.append(found[best + 1 + len(found) - len(text)])
    return found[len(text) :], length


@settings(max_examples=60)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    room=st.integers(0, 3),
    data=st.data(),
)
def test_continuations_are_those_of_all_places_tried(text, room, data):
    other = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
    width = 24
    rows = np.full((2, width), 2, np.int32)  # what lies behind a text is not read
    for row, own in zip(rows, (text, other), strict=True):
        row[: len(own)] = own
    ends = jnp.array([len(text) - 1, len(other) - 1], jnp.int32)
    tokens, equal = jax.jit(lookup.continuation, static_argnums=2)(rows, ends, 5)
    for own, got, there in zip((text, other), tokens.tolist(), equal.tolist(), strict=True):
        expected, length = by_hand(own, 5)
        assert there == length
        if there:
            assert got == expected


CONFIG = ModelConfig(
    vocab_size=13,
    vocab_multiple=2,
    n_layers=3,
    d_model=16,
    n_heads=2,
    context_length=96,
    sliding_window=(None, 8, None),
    head="tied",
    exits=(ExitConfig(1, mlp=True, block=True), ExitConfig(2)),
)
USUAL = dict(cap=8, drafts=2, lookup=5)
DRAFTING = USUAL | dict(buckets=(6,))  # one row count, as each is compiled
# Few tokens at random repeat pairs, and a small model of random weights soon repeats itself.
PROMPT = np.random.default_rng(0).integers(0, 13, 40).tolist()


@pytest.fixture(scope="module")
def model():
    p = params.init(CONFIG, jax.random.key(2))
    p["embed"]["tokens"] = p["embed"]["tokens"] * 8.0
    return p


def generator(model, mesh=None, **options) -> Generator:
    return Generator.make(model, CONFIG, EngineOptions("speculative", **options), mesh)


@pytest.mark.parametrize("rules", [dict(), dict(temperature=0.9, seed=3)])
@pytest.mark.parametrize("length", [5, 17, 40])
def test_tokens_are_those_of_the_full_model(model, rules, length):
    full = Generator.make(model, CONFIG, "full").generate([PROMPT[:length]], 50, **rules)
    got = generator(model, **USUAL).generate([PROMPT[:length]], 50, **rules)
    np.testing.assert_array_equal(full.tokens, got.tokens)
    np.testing.assert_allclose(full.logprobs, got.logprobs, atol=1e-4)
    assert (got.accepted <= got.drafted).all() and (got.drafted <= 1).all()


def test_repetitions_are_emitted_in_fewer_steps(model):
    """Beside drafts of the exit alone: tokens that took no step of the whole model."""
    alone, both = (
        generator(model, adapt=False, **DRAFTING | dict(lookup=n)).generate([PROMPT], 50)
        for n in (0, 5)
    )
    np.testing.assert_array_equal(alone.tokens, both.tokens)
    assert both.accepted.sum() > alone.accepted.sum()
    assert (both.layers > 0).sum() < (alone.layers > 0).sum()


def test_a_text_drafts_alone_for_one_request(model):
    own = DRAFTING | dict(drafts=0)
    text = generator(model, **own).generate([PROMPT], 50)
    full = Generator.make(model, CONFIG, "full").generate([PROMPT], 50)
    np.testing.assert_array_equal(text.tokens, full.tokens)
    assert text.accepted.any()
    with pytest.raises(ConfigError, match="^drafts = 0: "):
        generator(model, drafts=0)


@pytest.mark.parametrize("exit_drafts", [2, 0])
def test_longer_matches_have_acceptances_of_their_own(model, exit_drafts):
    """Each length of match has the share that is counted on the host from emitted tokens. The
    exit's grows alone if it drafts nothing."""
    own = DRAFTING | dict(drafts=exit_drafts)
    options = EngineOptions("speculative", adapt=False, **own)
    engine = EarlyExitEngine.make(model, CONFIG, options, slots=1)
    policy = ExitPolicy.make(engine.config, 1, drafts=options.draft_rows)
    asked = RequestRows.make(engine.config, [len(PROMPT)], [40], policy, SamplingParams.make(1))
    rows, _ = engine.prefill([PROMPT], asked)
    state, text = engine.insert(engine.start(), rows, [0]), list(PROMPT)
    shares = np.full((1, len(TEXT_DRAFTS)), INITIAL_TEXT_ACCEPTANCE)
    untried, tried_ever = np.array([np.float32(0.5)]), np.zeros_like(shares)
    for _ in range(60):
        state, record = engine.generate(state, 1)
        tokens = [t for t in np.asarray(record.token)[:, 0].tolist() if t >= 0]
        counts = np.zeros((2, *shares.shape), np.int32)
        left = 40 - (len(text) - len(PROMPT))
        if 1 < left < 40 and tokens:  # the first token is the prompt's
            drafts, equal = by_hand(text, min(options.lookup, left - 1))
            right = 0
            while right < len(drafts) and drafts[right] == tokens[right]:
                right += 1
            if equal:
                counts[:, 0, TEXT_DRAFTS.index(equal)] = min(right + 1, len(drafts)), right
        if tokens:
            shares = update_acceptance(np, shares, *counts, TEXT_RECOVERY)
            untried = update_acceptance(np, untried, *np.zeros((2, 1), np.int32))
        tried_ever += counts[0]
        np.testing.assert_allclose(state.lookup_acceptance, shares, rtol=1e-5)
        text += tokens
    assert np.allclose(state.acceptance, untried, rtol=1e-5) == (exit_drafts == 0)
    assert len(text) == len(PROMPT) + 40
    # Steps without drafts of the exit begin at other tokens, none of them behind a match of three.
    assert (tried_ever[0] > 0).tolist() == [True, exit_drafts > 0, True]


def test_stops_and_limits_end_a_text_within_a_draft(model):
    g, full = generator(model, **DRAFTING), Generator.make(model, CONFIG, "full")
    text = full.generate([PROMPT], 50).tokens[0].tolist()
    for n in range(1, 12):
        assert g.generate([PROMPT], n).tokens[0].tolist() == text[:n]
    for token in {*text[:30]}:
        ids = dict(stop_token_ids=[token])
        expected, got = (each.generate([PROMPT], 50, **ids) for each in (full, g))
        assert got.ids(0) == expected.ids(0) and got.finish == expected.finish
    room = CONFIG.context_length - len(PROMPT)
    assert g.generate([PROMPT], 90).lengths.tolist() == [room]


@pytest.mark.parametrize("exit_drafts", [2, 0])
def test_several_requests_look_up_each_in_its_own_text(model, exit_drafts):
    prompts, own = [PROMPT, PROMPT[:9], PROMPT[5:30]], DRAFTING | dict(drafts=exit_drafts)
    own |= dict(buckets=(18,))
    got = generator(model, adapt=False, **own).generate(prompts, 40, temperature=[0, 0, 0.8])
    full = Generator.make(model, CONFIG, "full").generate(prompts, 40, temperature=[0, 0, 0.8])
    np.testing.assert_array_equal(full.tokens, got.tokens)
    np.testing.assert_allclose(full.logprobs, got.logprobs, atol=1e-4)
    assert got.accepted[:2].sum(1).all() and (got.accepted <= got.drafted).all()


@pytest.mark.parametrize("prompts", [[PROMPT], [PROMPT, PROMPT[:9], PROMPT[5:30]]])
@pytest.mark.parametrize("threshold", [0.3, 0.6, 1.0])
def test_early_exits_verify_drafts_of_the_text(model, prompts, threshold):
    """Tokens, exits and log-probabilities are those of every layer run for each."""
    rules = dict(threshold=threshold, exits=[1, 2], gate="margin")
    most = 8 * len(prompts)  # few row counts, as each is compiled
    expected = Generator.make(model, CONFIG, "posthoc").generate(prompts, 40, **rules)
    for more in (dict(buckets=tuple({8, most})), dict(buckets=(most,), drafts=2)):
        options = EngineOptions(cap=8, lookup=5, **more)
        got = Generator.make(model, CONFIG, options).generate(prompts, 40, **rules)
        np.testing.assert_array_equal(expected.tokens, got.tokens)
        np.testing.assert_array_equal(expected.exits, got.exits)
        np.testing.assert_allclose(expected.logprobs, got.logprobs, atol=1e-4)
        assert got.accepted.any() and (got.accepted <= got.drafted).all()


def test_without_lookup_a_text_drafts_nothing(model):
    rules = dict(threshold=0.3, exits=[1, 2], gate="margin")
    alone = Generator.make(model, CONFIG, EngineOptions(cap=8, buckets=(8,)))
    assert not alone.generate([PROMPT], 40, **rules).drafted.any()


def test_a_model_without_exits_drafts_from_its_text_too(model):
    bare, config = {**model, "exits": {}}, CONFIG.replace(exits=())
    full = Generator.make(bare, config, "full").generate([PROMPT], 40)
    for prompts in ([PROMPT], [PROMPT, PROMPT[:9]]):
        options = EngineOptions(cap=8, buckets=(16,), lookup=5)
        text = Generator.make(bare, config, options).generate(prompts, 40)
        np.testing.assert_array_equal(full.tokens[0], text.tokens[0])
        assert text.accepted[0].any() and (text.layers[0] == 0).any()


def test_texts_of_several_slots_take_fewer_passes(model):
    """While requests join and leave, end within drafts, and have a count of tokens of their own."""
    asked = [(PROMPT, 25), (PROMPT[:9], 40), (PROMPT[3:30], 7), (PROMPT[8:], 30), (PROMPT[:2], 33)]
    full, passes = Generator.make(model, CONFIG, "full"), {}
    expected = [full.generate([prompt], n).ids(0) for prompt, n in asked]
    ends = [expected[1][-4]]  # also of other requests
    for n in (0, 5):
        own = USUAL | dict(buckets=(24,), lookup=n, adapt=False)
        engine = EarlyExitEngine.make(model, CONFIG, EngineOptions("speculative", **own), slots=3)
        scheduler = Scheduler(engine)
        numbers = [
            add(scheduler, prompt, limit, stop_token_ids=ends * (i == 1))
            for i, (prompt, limit) in enumerate(asked)
        ]
        outputs = scheduler.run()
        passes[n] = int(scheduler.state.work.runs[-1].sum())
        for i, number in enumerate(numbers):
            tokens = [t.id for o in outputs if o.request_id == number for t in o.tokens]
            whole = expected[i]
            end = whole.index(ends[0]) if i == 1 else len(whole)
            assert tokens in (whole[:end], whole[: end + 1])
    assert passes[5] < passes[0]


def test_a_row_costs_a_request_more_where_others_share_the_step(model):
    options = EngineOptions("speculative", **USUAL)
    engine = EarlyExitEngine.make(model, CONFIG, options, slots=4)
    state = engine.start()
    first, more = map(float, state.plan.verify_cost)
    assert first > 0 and more > 0
    for live in range(5):
        remaining = jnp.where(jnp.arange(4) < live, 9, 0)
        cost = state.replace(remaining=remaining).verify_cost
        rows = lambda r: 1.0 if r < 2 else 1 + first + more * (r - 2)  # noqa: E731
        one = (rows(live + 1) - rows(live)) / (rows(live) / live) if live > 1 else first
        np.testing.assert_allclose(cost, [one, one if live > 1 else more], rtol=1e-5)


def test_an_engine_of_one_slot_serves_them_one_after_another(model):
    asked, steps = [PROMPT, PROMPT[:9], PROMPT[3:30]], {}
    for n in (0, 5):
        own = DRAFTING | dict(lookup=n, adapt=False)
        engine = EarlyExitEngine.make(model, CONFIG, EngineOptions("speculative", **own), slots=1)
        scheduler = Scheduler(engine)
        numbers = [add(scheduler, prompt, 25) for prompt in asked]
        outputs = scheduler.run()
        steps[n] = int(scheduler.state.work.runs[-1].sum())  # passes of the last segment
    assert steps[5] < steps[0]
    full = Generator.make(model, CONFIG, "full")
    for number, prompt in zip(numbers, asked, strict=True):
        own = [t for o in outputs if o.request_id == number for t in o.tokens]
        assert [t.id for t in own] == full.generate([prompt], 25).ids(0)


def test_a_mesh_looks_up_too(model):
    one = generator(model, **DRAFTING).generate([PROMPT], 30)
    two = generator(model, MeshConfig(model=2), **DRAFTING).generate([PROMPT], 30)
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_array_equal(one.drafted, two.drafted)
    alone = generator(model, MeshConfig(model=2), **DRAFTING | dict(lookup=0))
    assert (two.layers > 0).sum() < (alone.generate([PROMPT], 30).layers > 0).sum()


def test_each_data_shard_searches_its_own_texts(model):
    prompts, own = [PROMPT, PROMPT[:9]], dict(cap=8, buckets=(8,), lookup=5)
    full = Generator.make(model, CONFIG, "full")
    two = Generator.make(model, CONFIG, EngineOptions(**own), MeshConfig(data=2))
    got = two.generate(prompts, 30)
    for text, prompt in zip(got.tokens, prompts, strict=True):
        assert text.tolist() == full.generate([prompt], 30).ids(0)
    assert got.accepted.any(1).all()


def test_bad_numbers_are_named():
    for wrong in (-1, True, 0.5):
        with pytest.raises(ConfigError, match="^lookup = "):
            EngineOptions("speculative", lookup=wrong)
    with pytest.raises(ConfigError, match=r"^lookup = 8: must be below cap \(8\)"):
        EngineOptions("speculative", cap=8, lookup=8)
    with pytest.raises(ConfigError, match="^lookup = 3: must be left out with the engine 'full'"):
        EngineOptions("full", lookup=3)


def test_a_pass_of_several_rows_costs_more_where_no_cache_holds_the_weights():
    drafting, large = EngineOptions("speculative"), CONFIG.replace(d_model=2048, d_ff=8192)
    one = [config.replace(exits=config.exits[:1]) for config in (CONFIG, large)]
    found = [verify_cost(config, drafting, 1) for config in one]
    assert found == [VERIFY_COSTS["cache"], VERIFY_COSTS["cpu"]]
    assert verify_cost(one[1], drafting, 2) == (0.0, 0.0)
    assert verify_cost(one[1], EngineOptions("speculative", adapt=False), 1) == (0.0, 0.0)
    with call.compute_capability(90):
        assert verify_cost(one[1], drafting, 1) == VERIFY_COSTS["gpu"]
