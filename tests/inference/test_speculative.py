"""Self-speculative decoding: the full model's tokens, or its distribution, and a true account."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
from hypothesis import given, settings
from hypothesis import strategies as st
from near_ties import TIE, assert_same

from eejax.common.errors import ConfigError
from eejax.inference import EngineOptions, Generator
from eejax.inference.sampling import SamplingParams, sample, sample_draft, verify_drafts
from eejax.models import exits, params, transformer
from eejax.models.config import ExitConfig, ModelConfig


def rough(p, seed):
    """The trained model with a final norm that makes it disagree with its exits, more or less."""
    scale = p["final"]["norm"]["scale"]
    noise = np.random.default_rng(seed).standard_normal(scale.shape)
    return p | {"final": {"norm": {"scale": scale * jnp.asarray(1 + noise, scale.dtype)}}}


def check_account(r, config, options):
    """What the tokens' layers and drafts say of the steps, against the rules of a step."""
    below, most = config.exit_boundaries[0], r.prompt_lengths + r.lengths
    assert (r.exits[r.exits >= 0] == config.n_exits).all()
    for i, n in enumerate(r.lengths):
        layers, drafted, accepted = (a[i, :n] for a in (r.layers, r.drafted, r.accepted))
        begins = layers > 0
        assert begins[0] and layers[0] == config.n_layers  # the prompt's pass
        assert (drafted[~begins] == 0).all() and drafted[0] == accepted[0] == 0
        assert set(accepted.tolist()) <= {0, 1}
        starts = np.flatnonzero(begins)
        for start, end in zip(starts, [*starts[1:], n], strict=True):
            assert accepted[start:end].sum() <= drafted[start] <= options.gamma
            last = end == n and r.finish[i] == "stop"
            assert (accepted[start : end - 1] == 1).all() and (last or accepted[end - 1] == 0)
        cut = int(r.finish[i] == "stop" and accepted[-1])  # a draft that stands ended the request
        assert n == accepted.sum() + len(starts) - cut
        run = (layers[starts] - config.n_layers) / max(below, 1)  # by the batch together
        assert (run <= options.gamma).all()
        if below:
            assert (run == run.astype(int)).all() and (run >= drafted[starts]).all()
            assert len(r.lengths) > 1 or (run == drafted[starts]).all()
    assert (most <= config.context_length).all()


GEOMETRY = dict(
    layout=st.sets(st.integers(0, 5), min_size=1, max_size=3).map(sorted).map(tuple),
    gamma=st.integers(1, 5),
    adapt=st.booleans(),
    buckets=st.sampled_from([(1,), (1, 2, 4), (3,)]),
    batch=st.integers(1, 4),
    data=st.data(),
)


@settings(max_examples=2)
@given(**GEOMETRY)
def test_greedy_is_the_full_model(subset, prompts, layout, gamma, adapt, buckets, batch, data):
    check_greedy(subset, prompts, layout, gamma, adapt, buckets, batch, data)


@pytest.mark.slow
@settings(max_examples=30)
@given(**GEOMETRY)
def test_greedy_is_the_full_model_widely(
    subset, prompts, layout, gamma, adapt, buckets, batch, data
):
    check_greedy(subset, prompts, layout, gamma, adapt, buckets, batch, data)


def check_greedy(subset, prompts, layout, gamma, adapt, buckets, batch, data):
    p, config = subset(layout)
    p = rough(p, seed) if (seed := data.draw(st.integers(0, 3))) else p
    options = EngineOptions(
        "speculative",
        draft_exit=data.draw(st.integers(0, len(layout) - 1)),
        gamma=gamma,
        adapt=adapt,
        buckets=buckets,
    )
    engine = Generator.make(p, config, options)
    oracle = Generator.make(p, engine.config, "posthoc")
    excused = 0
    for _ in range(3):
        lengths = data.draw(st.lists(st.integers(1, 16), min_size=batch, max_size=batch))
        asked = prompts(data.draw(st.integers(0, 99)), lengths)
        stops = data.draw(st.sampled_from([(), (), (ord(" "), ord("e")), (ord("\n"),)]))
        limit = data.draw(st.integers(1, 30))
        # In chunks of one size: each other one is a program of its own.
        run = lambda g, *given, **kwargs: [*g.stream(*given, chunk=32, **kwargs)][-1]
        a, b = (run(g, asked, limit, stop_token_ids=stops) for g in (oracle, engine))
        excused += assert_same(a, b)
        check_account(b, engine.config, options)
    assert excused <= 2


def test_drafts_stand_exactly_where_the_exit_and_the_final_exit_agree(subset, prompts):
    trained, config = subset((2,))  # an exit with a block
    gamma, limit = 3, 48
    options = EngineOptions("speculative", gamma=gamma, adapt=False)
    asked = prompts(3, [12, 5, 9])
    for seed in range(10):  # the model was trained here: which texts are a test depends on that
        p = rough(trained, seed)
        g = Generator.make(p, config, options)
        r = g.generate(asked, limit)
        if 0.1 < r.accepted.sum() / r.drafted.sum() < 0.9:
            break
    else:
        pytest.fail("no model is a test")
    compared = 0
    longest = max(map(len, asked)) + limit

    @jax.jit
    def logits_of(p, text):
        states = transformer.exit_states(p, config, text)
        return [exits.logits(exits.head(p, config, e), h)[0] for e, h in enumerate(states)]

    for i, prompt in enumerate(asked):
        text = prompt + r.ids(i)
        logits = logits_of(p, jnp.array([text + [0] * (longest - len(text))]))  # nobody sees zeros
        at = np.arange(limit) + len(prompt) - 1
        tops = [np.sort(np.asarray(y)[at], -1) for y in logits]
        agrees = np.asarray(logits[0].argmax(-1))[at] == r.tokens[i]
        clear = np.min([top[:, -1] - top[:, -2] for top in tops], 0) > TIE
        j = 1
        while j < limit:
            k = min(gamma, limit - j - 1)
            if not clear[j : j + k + 1].all():
                break
            stand = int(np.cumprod(agrees[j : j + k]).sum())
            assert r.drafted[i, j : j + stand + 1].tolist() == [k] + [0] * stand
            assert r.accepted[i, j : j + stand + 1].tolist() == [1] * stand + [0]
            j, compared = j + stand + 1, compared + 1
    assert compared > 20


@pytest.mark.slow
def test_drafting_ends_where_it_does_not_pay(subset, prompts):
    p, config = subset((2,))
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
        if not pays:  # some steps still try
            assert 0 < r.drafted[:, 40:].sum() < 0.2 * 80 * len(asked)
            assert r.layers.sum(1).max() < 1.25 * config.n_layers * limit


def test_a_request_at_the_end_of_the_context(subset, prompts):
    p, config = subset((1,))
    options = EngineOptions("speculative", gamma=5, adapt=False, buckets=(1, 3))
    g = Generator.make(p, config, options)
    asked = [*prompts(11, [140]), *prompts(12, [3])]
    a = Generator.make(p, g.config, "posthoc").generate(asked, 60)
    b = g.generate(asked, 60)
    assert b.finish == ("context", "length") and b.lengths.tolist() == [20, 60]
    assert assert_same(a, b) == 0


def test_nothing_early_is_emitted_whatever_is_asked(subset, prompts):
    p, config = subset((1, 3))
    options = EngineOptions("speculative", draft_exit=1, gamma=2, buckets=(1,))
    g = Generator.make(p, config, options)
    run = lambda **kwargs: [*g.stream(prompts(0, [8]), 12, chunk=2, **kwargs)]
    r = run(threshold=0.0, exits=[1], prefill_exit=True)[-1]
    assert r.ids(0) == Generator.make(p, config, "full").generate(prompts(0, [8]), 12).ids(0)
    assert (r.boundaries == config.n_layers).all() and r.exit_boundaries == (3, config.n_layers)
    assert "drafts accepted" in r.summary()
    pieces = run()
    assert pieces[-1].ids(0) == r.ids(0) and 1 < len(pieces) <= 7


# Sampling.

V, PROMPT, COUNTED = 5, [1, 4, 2], 4
TINY = ModelConfig(
    vocab_size=V,
    vocab_multiple=8,
    n_layers=3,
    d_model=16,
    n_heads=2,
    context_length=32,
    head="own",
    exits=(ExitConfig(1, head="own", temperature=1.3), ExitConfig(2, head="own", block=True)),
)


@pytest.fixture(scope="module")
def tiny():
    """(params, [V, V, V, 4, V]: the final exit's logits behind the prompt and each three tokens).

    A random model of uneven distributions, with exits that half agree with its end; the logits are
    the uncached float64 model's.
    """
    p = params.init(TINY, jax.random.key(3))
    grow = lambda path, a: a * 2 if "head" in str(path[-1]) else a * (3 if a.ndim > 2 else 1)
    p = jax.tree_util.tree_map_with_path(grow, p)
    half = lambda own: own | {"head": 0.6 * p["final"]["head"] + 0.4 * own["head"]}
    p = p | {"exits": {name: half(own) for name, own in p["exits"].items()}}
    whole = lambda tail: reference_model.exit_logits(p, TINY, [*PROMPT, *tail])[-1][-COUNTED:]
    logits = [whole(tail) for tail in np.ndindex(*[V] * (COUNTED - 1))]
    return p, np.reshape(logits, [V] * (COUNTED - 1) + [COUNTED, V])


def allowed(logits, temperature, top_k, top_p):
    """The distribution sampled from, in float64."""
    y = logits / temperature
    order = np.argsort(-y)[: top_k or None]
    q = np.exp(y[order] - y[order[0]])
    q /= q.sum()
    kept = np.cumsum(q) - q < top_p
    out = np.zeros(len(y))
    out[order[kept]] = q[kept] / q[kept].sum()
    return out


def joint(logits, **settings):
    """[V] * 4: probability of the first four tokens."""
    out = np.ones([V] * COUNTED)
    for text in np.ndindex(*out.shape):
        for i, token in enumerate(text):
            out[text] *= allowed(logits[text[:-1]][i], **settings)[token]
    return out


def assert_follows(counts, probabilities):
    """Pearson's chi-square below its quantile at 1e-4; cells expecting under 5 are one."""
    n = counts.sum()
    assert not counts[probabilities == 0].any()
    expected = n * probabilities.reshape(-1)
    rare = expected < 5
    pool = lambda a: np.append(a[~rare], a[rare].sum())
    got, want = pool(counts.reshape(-1)), pool(expected)
    got, want = got[want > 0], want[want > 0]
    df = len(want) - 1
    bound = df * (1 - 2 / (9 * df) + 3.72 * np.sqrt(2 / (9 * df))) ** 3  # Wilson and Hilferty
    assert ((got - want) ** 2 / want).sum() < bound
    return df


@pytest.mark.slow
@pytest.mark.parametrize(
    "draft_exit, gamma, adapt, settings",
    [
        (0, 3, False, dict(temperature=1.0, top_k=0, top_p=1.0)),
        (1, 2, False, dict(temperature=0.8, top_k=4, top_p=1.0)),
        (0, 3, True, dict(temperature=1.2, top_k=5, top_p=0.85)),
    ],
)
def test_samples_follow_the_full_model(tiny, draft_exit, gamma, adapt, settings):
    p, logits = tiny
    options = EngineOptions(
        "speculative", draft_exit=draft_exit, gamma=gamma, adapt=adapt, buckets=(1,)
    )
    g = Generator.make(p, TINY, options)
    counts, drafted, accepted, rows = np.zeros([V] * COUNTED), 0, 0, 4000
    for i in range(6):  # 24,000 texts, each with a seed of its own
        # Longer than what is counted, so that the first step drafts as much as it can.
        r = g.generate([PROMPT] * rows, COUNTED + gamma, seed=i * rows, **settings)
        np.add.at(counts, tuple(r.tokens[:, :COUNTED].T), 1)
        drafted, accepted = drafted + r.drafted.sum(), accepted + r.accepted.sum()
    assert 0.2 < accepted / drafted < 0.95  # all that can happen does
    want = joint(logits, **settings)
    assert abs(want.sum() - 1) < 1e-9 and counts.sum() == 6 * rows
    assert assert_follows(counts, want) > 20
    with pytest.raises(AssertionError):  # a distribution a little beside it is found out
        assert_follows(counts, 0.9 * want + 0.1 * want.mean(1, keepdims=True))


def test_a_verdict_follows_the_target_whatever_drafted():
    """`verify` alone: two drafts of a distribution that has little to do with the target."""
    rng, rows = np.random.default_rng(0), 40000
    logits, guess = (jnp.asarray(rng.standard_normal((1, 3, V)) * 1.5, jnp.float32) for _ in "ab")
    sampling = SamplingParams.make(rows, 0.9, 5, 0.95)
    wide = lambda a: jnp.broadcast_to(a, (rows, *a.shape[1:]))
    at = jnp.full((rows,), 7)
    count = jnp.asarray(rng.integers(0, 3, rows), jnp.int32)
    drafts = [sample_draft(wide(guess[:, i]), sampling, at + i) for i in range(2)]
    tokens, drafted = (jnp.stack(a, 1) for a in zip(*drafts, strict=True))
    stand, own = verify_drafts(wide(logits), drafted, tokens, count, sampling, at)
    stand, own, tokens, count = map(np.asarray, (stand, own, tokens, count))
    assert (stand <= count).all() and len(set(stand.tolist())) == 3
    text = np.where(
        np.arange(3)[None] == stand[:, None], own[:, None], np.pad(tokens, [(0, 0), (0, 1)])
    )
    want = [allowed(np.asarray(y, np.float64), 0.9, 5, 0.95) for y in logits[0]]
    for i in range(3):
        for k in range(3):  # also of those with so many drafts alone
            here = text[(stand >= i) & (count == k), i]
            if len(here):
                # Who gets further than i depends on what stood there before, and not on i.
                assert_follows(np.bincount(here, minlength=V), want[i])
    # Without drafts it is `choose`'s token.
    none, token = verify_drafts(
        wide(logits)[:, :1],
        drafted[:, :0],
        jnp.asarray(tokens)[:, :0],
        jnp.zeros_like(at),
        sampling,
        at,
    )
    assert not none.any()
    np.testing.assert_array_equal(token, sample(wide(logits[:, 0]), sampling, at))


@pytest.mark.slow
def test_a_sampled_row_does_not_depend_on_its_batch_mates(subset, prompts):
    p, config = subset((1, 3))
    g = Generator.make(p, config, EngineOptions("speculative", draft_exit=1, gamma=3))
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


def test_thresholds_seeds_and_sampling_do_not_recompile(subset, prompts, compiled):
    p, config = subset((1, 3))
    g = Generator.make(p, config, EngineOptions("speculative", gamma=2, buckets=(1,)))
    asked = prompts(2, [10, 13])
    g.generate(asked, 12)
    assert compiled  # the listener works
    compiled.clear()
    for i in range(6):
        g.generate(asked, 12, threshold=i / 5, temperature=0.3 * i, top_k=i, seed=i)
    assert not compiled


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(gamma=0), "gamma = 0: must be an integer of at least 1"),
        (dict(draft_exit=-1), "draft_exit = -1"),
        (dict(draft_exit=2), r"draft_exit = 2: .*2 early exits, .*\[1, 3\]"),
        (dict(adapt=1), "adapt = 1: must be True or False"),
        (dict(num_segments=1), "num_segments = 1: must be None"),
    ],
)
def test_options_that_cannot_be_are_named(subset, options, message):
    p, config = subset((1, 3))
    with pytest.raises(ConfigError, match=message):
        Generator.make(p, config, EngineOptions("speculative", **options))


def test_a_model_without_exits_drafts_nothing(subset):
    p, config = subset(())
    with pytest.raises(ConfigError, match="draft_exit = 0: .* 0 early exits.*Tune an exit"):
        Generator.make(p, config, "speculative")
