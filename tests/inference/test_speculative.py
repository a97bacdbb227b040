"""Self-speculative decoding: the full model's tokens, greedy or sampled, and a true account."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from near_ties import TIE, assert_same

from eejax.common.errors import ConfigError
from eejax.inference import EngineOptions, ExitPolicy, Generator, RequestRows, SamplingParams
from eejax.inference.engine import EarlyExitEngine
from eejax.inference.options import ENGINES
from eejax.models import exits, transformer

# Most tests ask for this many requests of these options and this model, for which their programs
# are compiled once.
REQUESTS = 3
OPTIONS = EngineOptions("speculative", draft_exit=2, drafts=3, cap=4, buckets=(12,))
STEADY = dataclasses.replace(OPTIONS, adapt=False)
FULL = EngineOptions("full", cap=4)  # whose cache is as long


@pytest.fixture(scope="module")
def model(subset):
    """(params, config) whose last early exit, which drafts, has a block."""
    p, config = subset((1, 2))
    return p, config.replace(context_length=60)


def rough(p, seed):
    """The trained model with a final norm that makes it disagree with its exits, more or less."""
    scale = p["final"]["norm"]["scale"]
    noise = np.random.default_rng(seed).standard_normal(scale.shape)
    return p | {"final": {"norm": {"scale": scale * jnp.asarray(1 + noise, scale.dtype)}}}


def check_account(r, config, options):
    """What the tokens' layers and drafts say of the passes that verified them."""
    below, batch = config.exit_boundaries[0], len(r.prompts)
    fit = batch * (options.drafts + 1) <= options.resolved(config, batch).buckets[-1]
    assert (r.exits[r.exits >= 0] == config.n_exits).all()
    for i, n in enumerate(r.lengths):
        layers, drafted, accepted = (a[i, :n] for a in (r.layers, r.drafted, r.accepted))
        assert layers[0] == config.n_layers  # the prompt's pass
        assert drafted[0] == accepted[0] == 0
        assert {*drafted.tolist(), *accepted.tolist()} <= {0, 1} and (accepted <= drafted).all()
        starts = np.flatnonzero(layers > 0)
        for start, end in zip(starts, [*starts[1:], n], strict=True):
            # A pass emits what its drafts said, and one token more.
            assert (accepted[start : end - 1] == 1).all() and not accepted[end - 1]
        run = (layers[starts] - config.n_layers) / max(below, 1)  # drafts, by the batch together
        if not fit:
            continue  # some wait for the pass that verifies the drafts of others
        assert (run <= options.drafts).all()
        if below:
            tried = np.add.reduceat(drafted, starts)
            assert (run == run.astype(int)).all() and (run >= tried).all()
    assert ([len(p) for p in r.prompts] + r.lengths <= config.context_length).all()


def test_thresholds_seeds_and_sampling_do_not_recompile(model, prompts, compiled):
    """It comes first: what another test had compiled would not be seen."""
    g = Generator.make(*model, OPTIONS)
    asked = prompts(2, [10, 13, 4])
    g.generate(asked, 12)
    assert compiled  # the listener works
    compiled.clear()
    for i in range(6):
        g.generate(asked, 12, threshold=i / 5, temperature=0.3 * i, top_k=i, seed=i)
    assert not compiled


GEOMETRY = dict(
    layout=st.sets(st.integers(0, 5), min_size=1, max_size=3).map(sorted).map(tuple),
    drafts=st.integers(1, 5),
    adapt=st.booleans(),
    buckets=st.sampled_from([(1,), (1, 2, 4), (3,)]),
    batch=st.integers(1, 4),
    data=st.data(),
)


@settings(max_examples=4)
@given(data=st.data())
def test_greedy_is_the_full_model(model, prompts, data):
    check_greedy(*model, prompts, STEADY, REQUESTS, data)


@pytest.mark.slow
@settings(max_examples=30)
@given(**GEOMETRY)
def test_greedy_is_the_full_model_widely(
    subset, prompts, layout, drafts, adapt, buckets, batch, data
):
    options = EngineOptions(
        "speculative",
        draft_exit=data.draw(st.sampled_from(layout)),
        drafts=drafts,
        adapt=adapt,
        buckets=buckets,
    )
    check_greedy(*subset(layout), prompts, options, batch, data)


def check_greedy(p, config, prompts, options, batch, data):
    p = rough(p, seed) if (seed := data.draw(st.integers(0, 3))) else p
    engine = Generator.make(p, config, options)
    oracle = Generator.make(p, engine.config, "posthoc")
    excused = 0
    for _ in range(3):
        lengths = data.draw(st.lists(st.integers(1, 16), min_size=batch, max_size=batch))
        asked = prompts(data.draw(st.integers(0, 99)), lengths)
        stops = data.draw(st.sampled_from([(), (), (ord(" "), ord("e")), (ord("\n"),)]))
        # The simplest example, which is always one of them, is long.
        limit = 30 - data.draw(st.integers(0, 29))

        # In chunks of one size: each other one is a program of its own.
        def run(g, *given, **kwargs):
            return [*g.stream(*given, chunk=32, **kwargs)][-1]

        a, b = (run(g, asked, limit, stop_token_ids=stops) for g in (oracle, engine))
        excused += assert_same(a, b)
        check_account(b, engine.config, options)
    assert excused <= 2


def test_drafts_stand_exactly_where_the_exit_and_the_final_exit_agree(model, prompts):
    trained, config = model
    drafts, limit = STEADY.drafts, 48
    asked = prompts(3, [12, 5, 9])
    for seed in range(10):  # the model was trained here: which texts are a test depends on that
        p = rough(trained, seed)
        g = Generator.make(p, config, STEADY)
        r = g.generate(asked, limit)
        if 0.1 < r.accepted.sum() / r.drafted.sum() < 0.9:
            break
    else:
        pytest.fail("no model is a test")
    compared = 0
    longest = max(map(len, asked)) + limit
    which = [config.exit_boundaries.index(STEADY.draft_exit), config.n_exits]

    @jax.jit
    def logits_of(p, text):
        states = transformer.exit_states(p, config, text, which=which)
        return [
            exits.logits(exits.head(p, config, e), h)[0] for e, h in zip(which, states, strict=True)
        ]

    for i, prompt in enumerate(asked):
        text = prompt + r.ids(i)
        logits = logits_of(p, jnp.array([text + [0] * (longest - len(text))]))  # nobody sees zeros
        at = np.arange(limit) + len(prompt) - 1
        tops = [np.sort(np.asarray(y)[at], -1) for y in logits]
        agrees = np.asarray(logits[0].argmax(-1))[at] == r.tokens[i]
        clear = np.min([top[:, -1] - top[:, -2] for top in tops], 0) > TIE
        j = 1
        while j < limit:
            k = min(drafts, limit - j - 1)
            if not clear[j : j + k + 1].all():
                break
            stand = int(np.cumprod(agrees[j : j + k]).sum())
            tried = [1] * min(stand + 1, k)
            assert r.drafted[i, j : j + stand + 1].tolist() == [*tried, 0][: stand + 1]
            assert r.accepted[i, j : j + stand + 1].tolist() == [1] * stand + [0]
            j, compared = j + stand + 1, compared + 1
    assert compared > 20


@pytest.mark.slow
def test_the_last_row_of_a_pass_gets_no_draft_and_none_starts_behind_it(model, prompts):
    """Also where drafting is paused and taken up again while rows are pending."""
    p, config = model
    asked, new, drafts = prompts(8, [9, 12]), 40, [1, 3]
    engine = EarlyExitEngine.make(p, config, STEADY, slots=2, context=60)
    policy = ExitPolicy.make(engine.config, 2, drafts=drafts)
    lengths = [len(a) for a in asked]
    request = RequestRows.make(engine.config, lengths, [new] * 2, policy, SamplingParams.make(2))
    rows, _ = engine.prefill(asked, request)
    state = engine.insert(engine.start(), rows, [0, 1])
    got, seen, rng = ([], []), 0, np.random.default_rng(0)
    for step in range(160):
        pauses = step > 40  # before that nothing is paused
        paused = rng.random(2) < 0.5 * pauses
        policy = state.request.policy.replace(paused=jnp.asarray(paused))
        state = state.replace(request=state.request.replace(policy=policy))
        state, record = engine.generate(state, 1)
        exits, tokens = np.asarray(record.exit), np.asarray(record.token)
        for slot, ids in enumerate(got):
            ids += tokens[exits[:, slot] >= 0, slot].tolist()
            first, filled = int(state.position[slot]), int(state.cache.filled[slot, 0])
            pending = np.asarray(state.pending.token)[slot, np.arange(first, filled) % 4]
            if not pauses and len(pending):
                left = int(state.remaining[slot])
                want = np.arange(len(pending)) < min(drafts[slot], left - 1, STEADY.cap - 1)
                assert (pending >= 0).tolist() == want.tolist()
                seen += int(not want.all())
    assert seen > 2  # the one with fewer drafts waited for the other
    full = Generator.make(p, config, FULL).generate(asked, new)
    for i, ids in enumerate(got):
        tied = np.flatnonzero(full.margins[i] < TIE)
        n = int(tied[0]) if len(tied) else new
        assert n > 10 and len(ids) == new and ids[:n] == full.ids(i)[:n]


def test_drafting_ends_where_it_does_not_pay(subset, prompts):
    p, config = subset((2,))
    promising = dataclasses.replace(config.exits[0], acceptance=0.9)
    config = config.replace(exits=(promising,))
    rng = np.random.default_rng(0)
    useless = jax.tree.map(
        lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype), p["exits"]["exit_2"]
    )
    options = EngineOptions("speculative")
    limit, asked = 120, prompts(1, [8, 8])
    for model, pays in ((p, True), (p | {"exits": {"exit_2": useless}}, False)):
        g = Generator.make(model, config, options)
        r = g.generate(asked, limit)
        assert r.ids(0) == Generator.make(model, config, "full").generate(asked, limit).ids(0)
        if not pays:  # the first steps try, and few after them, unless by chance they are right
            wrong = r.drafted - r.accepted
            assert (wrong[:, :40].sum(1) > 0).all()
            assert wrong[:, 40:].sum() < 0.05 * 80 * len(asked)
            assert r.layers.sum(1).max() < 1.25 * config.n_layers * limit


@pytest.mark.parametrize("acceptance, drafts", [(1.0, True), (0.0, False)])
def test_a_request_begins_with_the_acceptance_of_the_exit(subset, prompts, acceptance, drafts):
    p, config = subset((2,))
    first = dataclasses.replace(config.exits[0], acceptance=acceptance)
    config = config.replace(exits=(first,))
    asked = prompts(1, [8])
    alone = Generator.make(p, config, "speculative").generate(asked, 8)
    assert (alone.drafted[0, 1:3].sum() > 0) == drafts
    engine = EarlyExitEngine.make(p, config, EngineOptions("speculative"), slots=2)
    state = engine.start()
    np.testing.assert_allclose(state.acceptance, acceptance)
    policy = ExitPolicy.make(engine.config, 1, drafts=engine.options.draft_rows)
    rows = RequestRows.make(engine.config, [8], [8], policy, SamplingParams.make(1))
    state = state.replace(acceptance=state.acceptance + 0.25)  # of requests before
    state = engine.insert(state, engine.prefill(asked, rows)[0], [1])
    np.testing.assert_allclose(state.acceptance, [acceptance + 0.25, acceptance])


def test_a_request_at_the_end_of_the_context(model, prompts):
    g = Generator.make(*model, STEADY)
    asked = prompts(11, [40, 3, 8])
    a = Generator.make(model[0], g.config, "posthoc").generate(asked, 50)
    b = g.generate(asked, 50)
    assert b.finish == ("context", "length", "length") and b.lengths.tolist() == [20, 50, 50]
    assert assert_same(a, b) == 0


def test_nothing_early_is_emitted_whatever_is_asked(model, prompts):
    p, config = model
    asked = prompts(0, [8, 5, 11])
    g = Generator.make(p, config, STEADY)

    def run(**kwargs):
        return [*g.stream(asked, 12, chunk=2, **kwargs)]

    r = run(threshold=0.0, exits=[1], prefill_exit=True)[-1]
    want = Generator.make(p, config, FULL).generate(asked, 12)
    assert [r.ids(i) for i in range(REQUESTS)] == [want.ids(i) for i in range(REQUESTS)]
    assert (r.boundaries == config.n_layers).all() and r.exit_boundaries == (2, config.n_layers)
    assert "drafts accepted" in r.summary()
    pieces = run()
    assert pieces[-1].ids(0) == r.ids(0) and len(pieces) > 2


def test_samples_are_the_full_models(model, prompts):
    """Nine requests in turn, of one prompt and each with a rule of its own."""
    p, config = model
    asked = prompts(0, [6]) * REQUESTS
    rules = dict(
        temperature=[0.2, 0.5, 0.8, 1.0, 1.2, 1.5, 0.7, 1.0, 0.9],
        top_k=[0, 0, 20, 5, 0, 0, 3, 50, 0],
        top_p=[1.0, 1.0, 0.9, 1.0, 0.8, 1.0, 1.0, 0.95, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.01, 0.0],
        seed=[*range(9)],
    )
    accepted = tried = 0
    for start in range(0, 9, REQUESTS):
        kwargs = {name: values[start : start + REQUESTS] for name, values in rules.items()}
        drafted, full = (
            Generator.make(p, config, e).generate(asked, 40, **kwargs) for e in (STEADY, FULL)
        )
        np.testing.assert_array_equal(drafted.tokens, full.tokens)
        np.testing.assert_allclose(drafted.logprobs, full.logprobs, atol=1e-4)
        check_account(drafted, config.replace(exits=config.exits[1:]), STEADY)
        accepted, tried = accepted + drafted.accepted.sum(), tried + drafted.drafted.sum()
    assert 0.1 < accepted / tried < 1


@pytest.mark.slow
def test_a_sampled_row_does_not_depend_on_its_batch_mates(subset, prompts):
    p, config = subset((1, 3))
    g = Generator.make(p, config, EngineOptions("speculative", draft_exit=3, drafts=3, adapt=False))
    asked = prompts(0, [5, 12, 7])
    kwargs = dict(temperature=[0.0, 0.8, 1.5], top_k=[0, 20, 0], top_p=[1.0, 0.9, 1.0])
    together = g.generate(asked, 40, seed=[1, 2, 3], **kwargs)
    full = Generator.make(p, config, "full").generate(asked[:1], 40)
    assert together.ids(0) == full.ids(0)  # greedy beside sampled ones
    for i in range(3):
        alone = g.generate(
            asked[i : i + 1], 40, seed=[i + 1], **{k: v[i] for k, v in kwargs.items()}
        )
        assert alone.ids(0) == together.ids(i)
        assert alone.drafted[0].tolist() == together.drafted[i].tolist()
    assert together.accepted[1:].any() and g.generate(asked, 40, temperature=1.0).accepted.any()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(drafts=0), "drafts = 0: must be at least 1 without lookup. Set lookup"),
        (dict(draft_exit=-1), "draft_exit = -1"),
        (dict(draft_exit=2), r"draft_exit = 2: .*2 early exits, \[1, 3\]"),
        (dict(adapt=1), "adapt = 1: must be True or False"),
        (dict(num_segments=1), "num_segments = 1: must be None"),
        (dict(cap=161), "cap = 161: must be at most 160"),
    ],
)
def test_options_that_cannot_be_are_named(subset, options, message):
    p, config = subset((1, 3))
    with pytest.raises(ConfigError, match=message):
        Generator.make(p, config, EngineOptions("speculative", **options))


def test_a_model_without_exits_drafts_nothing(subset):
    p, config = subset(())
    with pytest.raises(ConfigError, match="draft_exit = None: .* 0 early exits.*Tune an exit"):
        Generator.make(p, config, "speculative")


@pytest.mark.parametrize(
    "engine, own, engines",
    [
        ("full", dict(drafts=2), "recompute, speculative"),
        ("recompute", dict(draft_exit=1), "speculative"),
        ("full", dict(adapt=False), "speculative"),
        ("posthoc", dict(propagate="mask"), "propagate"),
        ("propagate", dict(can_deepen=True), "recompute, full, speculative"),
    ],
)
def test_a_setting_that_an_engine_does_not_have_is_refused(engine, own, engines):
    ((name, value),) = own.items()
    message = f"{name} = {value!r}: must be left out with the engine {engine!r}. Engines with it: "
    with pytest.raises(ConfigError, match=f"^{message}{engines}.$"):
        EngineOptions(engine, **own)


def test_options_that_are_resolved_are_options(subset):
    """As `resolved` sets what is open, none of that may be refused."""
    config = subset((1, 3))[1]
    for engine in ENGINES:
        made = EngineOptions(engine).resolved(config, 2)
        assert dataclasses.replace(made) == made == made.resolved(config, 2)
