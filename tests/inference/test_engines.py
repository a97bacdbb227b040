"""The engines against the oracle, and the oracle against an uncached float64 model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_model
from drawn_requests import asked_of
from hypothesis import given, settings
from hypothesis import strategies as st
from near_ties import TIE, assert_same

from eejax.common.errors import ConfigError
from eejax.inference import EngineOptions, Generator
from eejax.inference.decoding import decode, default_plan
from eejax.inference.generate import decode_size, prefill
from eejax.inference.policy import ExitPolicy
from eejax.inference.sampling import SamplingParams
from eejax.inference.state import RequestRows

# One row count, as each is compiled for every segment; test_batched.py has several. Two requests
# share the room of one, which decides about what they run and not about what they say.
SMALL = EngineOptions("recompute", cap=4, buckets=(4,))
ROOMY = EngineOptions("recompute", cap=4, buckets=(8,))  # in which nobody waits for another
ORACLE = EngineOptions("posthoc", cap=4)
DRAFTING = EngineOptions("speculative", cap=3, drafts=2, buckets=(3,))
CONTEXT = 50


@pytest.fixture(scope="module")
def model(subset):
    """(params, config) with exits of all kinds. Tests of it have two prompts of up to 16 tokens
    each: with a context in which all caches have one length, they share what is compiled."""
    p, config = subset((1, 2, 3))
    return p, config.replace(context_length=CONTEXT)


def test_thresholds_exits_and_sampling_do_not_recompile(model, prompts, compiled):
    """It comes first: what another test had compiled would not be seen."""
    p, config = model
    g = Generator.make(p, config, SMALL)
    asked = prompts(2, [10, 13])
    g.generate(asked, 12, threshold=0.5)
    assert compiled  # the listener works
    compiled.clear()
    for i in range(20):
        g.generate(
            asked,
            12,
            threshold=i / 19,
            exits=[1, 3][: 1 + i % 2],
            temperature=0.1 * i,
            top_k=i,
            seed=i,
        )
    assert not compiled


def test_stops_of_like_number_and_buckets_as_a_list_do_not_recompile(model, prompts, compiled):
    p, config = model
    asked, text = prompts(2, [10, 13]), lambda ids: "".join(map(chr, ids))
    g = Generator.make(p, config, EngineOptions("recompute", cap=4, buckets=[4]))
    assert g.options == SMALL

    def run(**kwargs):
        return g.generate(asked, 12, threshold=0.5, **kwargs)

    run(), run(stop_token_ids=[1, 2, 3, 4])
    compiled.clear()
    run(stop_token_ids=[7]), run(stop_token_ids=[1, 2, 3]), run(stop_token_ids=[9, 8, 7, 6])
    assert not compiled
    run(stop_strings=["zq"], decode_text=text)  # in chunks of its own
    compiled.clear()
    run(stop_strings=["z", "qqqq"], decode_text=text)
    again = Generator.make(p, config, SMALL)
    again.generate(asked, 12, threshold=0.5)
    assert not compiled


def test_a_conversation_compiles_no_more_until_its_cache_doubles(model, prompts, compiled):
    p, config = model
    g = Generator.make(p, config.replace(context_length=600), "full")

    def answer(n):
        *_, last = g.stream(prompts(1, [n]), 9, growing=True)
        return last.ids(0)

    first = answer(130)
    compiled.clear()
    for n in (140, 200, 250):
        answer(n)
    assert not compiled
    answer(260)
    assert compiled
    assert first == g.generate(prompts(1, [130]), 9).ids(0)


def reference_greedy(p, config, prompt, n, thresholds):
    """n times (token, exit number, logits, confidence) by the uncached float64 model, and the
    smallest margin."""
    ids, out, margin = list(prompt), [], np.inf
    for i in range(n):
        for e, logits in enumerate(reference_model.exit_logits(p, config, ids)):
            top = np.sort(logits[-1])[::-1]
            confidence = 1 / np.exp(logits[-1] - top[0]).sum()
            final = e == config.n_exits
            if not final and i > 0 and thresholds[e] < 1:
                margin = min(margin, abs(confidence - thresholds[e]))
            if final or (i > 0 and thresholds[e] < 1 and confidence >= thresholds[e]):
                margin = min(margin, top[0] - top[1])
                out.append((int(logits[-1].argmax()), e, logits[-1], confidence))
                ids.append(out[-1][0])
                break
    return out, margin


ALL = tuple(range(6))
MORE = [(engine, ALL) for engine in ("full", "posthoc", "recompute")]


@pytest.mark.parametrize(
    "engine, layout",
    [("recompute", (1, 2, 3)), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_engines_equal_uncached_float64(subset, prompts, engine, layout):
    p, config = subset(layout)
    config = config.replace(context_length=CONTEXT)
    thresholds = [1.0] * len(layout)
    # The model was trained here, on a text that comes with Python, so what it says depends on the
    # machine: thresholds let a part of the tokens leave at each exit, and the first prompt that
    # decides clearly, and by several exits, is taken.
    if engine != "full":
        text = reference_model.exit_logits(p, config, prompts(99, [CONTEXT])[0])
        for e, boundary in enumerate(layout):
            if 0 < boundary < 5:  # the first is never sure, and the last one may not fire
                top = text[e].max(-1, keepdims=True)
                sure = 1 / np.exp(text[e] - top).sum(-1)
                thresholds[e] = float(np.quantile(sure, 0.7))
    for seed in range(24):
        prompt = prompts(seed, [9])[0]
        want, margin = reference_greedy(p, config, prompt, 14, thresholds)
        if margin > TIE and (engine == "full" or len({w[1] for w in want}) >= 3):
            break
    else:
        pytest.fail("no prompt is a test")
    g = Generator.make(p, config, EngineOptions(engine, cap=4, buckets=(4,)))
    got = g.generate([prompt, prompt], 14, threshold=thresholds)
    for i in (0, 1):
        assert got.ids(i) == [w[0] for w in want]
        if engine != "full":
            assert got.exits[i].tolist() == [w[1] for w in want]
    for j, (token, _, logits, confidence) in enumerate(want):
        logprob = logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert abs(got.logprobs[0, j] - logprob) < 1e-4
        assert abs(got.confidences[0, j] - confidence) < 1e-4


LAYOUTS = st.sets(st.integers(0, 5), min_size=1, max_size=4).map(sorted).map(tuple)


GEOMETRY = dict(
    layout=LAYOUTS,
    cap=st.integers(1, 9),
    buckets=st.sampled_from([(1,), (1, 2, 4), (3,)]),
    batch=st.integers(1, 4),
    data=st.data(),
)


@settings(max_examples=4)
@given(data=st.data())
def test_recompute_equals_posthoc(subset, prompts, data):
    """One geometry, as each is compiled: three requests with the room of one, and exits below and
    above all layers."""
    check_recompute_equals_posthoc(subset, prompts, (0, 5), 3, (3,), 3, data)


@pytest.mark.slow
@settings(max_examples=80)
@given(**GEOMETRY)
def test_recompute_equals_posthoc_widely(subset, prompts, layout, cap, buckets, batch, data):
    check_recompute_equals_posthoc(subset, prompts, layout, cap, buckets, batch, data)
    # No example uses another's programs, and each program maps memory, of which a process may
    # have so many pieces (vm.max_map_count): XLA ends with a segmentation fault where they run out.
    jax.clear_caches()


def check_recompute_equals_posthoc(subset, prompts, layout, cap, buckets, batch, data):
    p, config = subset(layout)
    options = dict(cap=cap, buckets=buckets)
    oracle, engine = (
        Generator.make(p, config, EngineOptions(name, **options))
        for name in ("posthoc", "recompute")
    )
    excused = 0
    for _ in range(4):
        asked, kwargs = asked_of(data.draw, prompts, config, batch)
        a, b = (g.generate(asked, 30, **kwargs) for g in (oracle, engine))
        excused += assert_same(a, b)
        assert (a.layers[a.exits >= 0] == config.n_layers).all()
        # Nothing is emitted from deeper than was run.
        assert (b.layers >= b.boundaries)[b.exits >= 0].all()
        if batch == 1:  # others of a batch may take a step's room
            check_layers_skipped(b, cap, config.n_layers)
    assert excused <= 2


def check_layers_skipped(r, cap, n_layers):
    """A step runs only as deep as its one request needs, unless the cap is reached."""
    depth, layers = r.boundaries[0, 1:], r.layers[0, 1:]
    assert ((layers == depth) | (layers == n_layers)).all()
    # The request is forced deep once in `cap` of its steps at most.
    assert (layers > depth).sum() <= len(layers) // cap


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_recompute_leaves_early_where_posthoc_does(model, prompts, batch):
    p, config = model
    asked = prompts(4, [9, 14][:batch])
    oracle, engine = (Generator.make(p, config, options) for options in (ORACLE, ROOMY))
    forced = batch * 36 / 4  # steps at most: at a cap of 4 every request forces one step in 4
    # The model was trained here, so its confidences depend on the machine: take the highest
    # threshold by which enough leaves early.
    for threshold in np.arange(0.45, 0.1, -0.01):
        a = oracle.generate(asked, 36, threshold=threshold)
        real = a.exits >= 0
        real[:, 0] = False  # the prompt's pass has all layers
        early = real & (a.exits < config.n_exits)
        together = real.any(0) & (early | ~real).all(0)  # steps in which all requests left early
        if 0.3 < early[real].mean() < 1 and together.sum() > forced + 4:
            break
    else:
        pytest.fail("no threshold is a test")
    b = engine.generate(asked, 36, threshold=threshold)
    assert_same(a, b)
    assert (a.layers[real] == config.n_layers).all()
    skipped = together & (b.layers.max(0) < config.n_layers)
    assert skipped.sum() >= together.sum() - forced
    if batch == 1:
        check_layers_skipped(b, 4, config.n_layers)


def test_recompute_equals_posthoc_while_sampling(model, prompts):
    p, config = model
    asked = prompts(0, [5, 12, 7, 9])
    drawn = dict(
        temperature=[0.0, 0.8, 1.5, 1.0],
        top_k=[0, 20, 0, 5],
        top_p=[1.0, 0.9, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.05, 0.0],
        seed=[1, 2, 3, 4],
    )
    oracle, engine = (Generator.make(p, config, e) for e in (ORACLE, SMALL))

    def run(g, rows, **more):
        own = {name: [values[i] for i in rows] for name, values in drawn.items()}
        return g.generate([asked[i] for i in rows], 36, threshold=0.3, **own | more)

    for rows in ((0, 1), (2, 3)):
        a, b = (run(g, rows) for g in (oracle, engine))
        np.testing.assert_array_equal(a.tokens, b.tokens)
    # A draw depends on (seed, position), not on the row or on who is beside it.
    assert run(oracle, (3, 0)).ids(0) == b.ids(1)
    assert run(oracle, (3, 3), seed=[4, 9]).ids(1) != b.ids(1)


def test_waiting_tokens_get_exact_keys_and_values(model, prompts):
    """The state after each step: filled depths, waiting rows, keys and values."""
    p, config = model
    asked = prompts(5, [6, 11])
    cap, length, steps = ROOMY.cap, 64, 24
    # Every request and step has its own thresholds, some of which decide alone: all leave by the
    # first exit in steps 4 to 7, so that some wait whatever the model says, and nobody in step 8.
    thresholds = np.random.default_rng(0).choice(
        np.float32([0.0, 0.2, 0.4, 1.0]), (steps, 2, config.n_exits)
    )
    thresholds[4:8], thresholds[8] = 0.0, 1.0
    run = {}
    for own in (ORACLE, ROOMY):
        g = Generator.make(p, config, own)
        tokens, lengths = g._pad(asked)
        options, slots = g.slots_for(2)
        plan = default_plan(config, options, slots)
        static = dict(config=config, options=options)
        policy = ExitPolicy.make(config, 2, 0.2)
        request = RequestRows.make(config, lengths, [30, 30], policy, SamplingParams.make(2))
        state, _ = prefill(g.weights, plan, tokens, request, length=length, **static)
        size = decode_size(1)  # as `Generator` has it
        run[own.engine] = []
        for step in range(steps):
            request = state.request.replace(policy=ExitPolicy.make(config, 2, thresholds[step]))
            state = state.replace(request=request)
            state, record = decode(g.weights, state, np.int32(1), size=size, **static)
            run[own.engine].append((jax.tree.map(np.asarray, state), record))
    deepest_backlog = 0
    for (a, ra), (b, rb) in zip(run["posthoc"], run["recompute"], strict=True):
        np.testing.assert_array_equal(ra.token, rb.token)
        filled = b.cache.filled
        assert (np.diff(filled, axis=1) <= 0).all()  # never increases with depth
        assert (filled[:, 0] == a.cache.filled[:, 0]).all()
        backlog = filled[:, 0] - filled[:, -1]
        assert (backlog < cap).all() or (np.asarray(rb.layers) == config.n_layers).any()
        deepest_backlog = max(deepest_backlog, backlog.max())
        for e, (kva, kvb) in enumerate(zip(a.cache.segments, b.cache.segments, strict=True)):
            for x, y in zip(
                jax.tree.leaves((kva, a.cache.blocks[e])),
                jax.tree.leaves((kvb, b.cache.blocks[e])),
                strict=True,
            ):
                x, y = (z.reshape(2, config.n_kv_heads, length, config.head_dim) for z in (x, y))
                for i, done in enumerate(filled[:, e]):
                    np.testing.assert_allclose(x[i, :, :done], y[i, :, :done], atol=2e-5)
    assert deepest_backlog >= 3


@pytest.mark.parametrize("cap", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3)), 4])
def test_the_cap_forces_depth_but_not_the_exit(model, prompts, cap):
    p, config = model
    asked = prompts(1, [8, 8])
    g = Generator.make(p, config, EngineOptions("recompute", cap=cap, buckets=(2 * cap,)))
    r = g.generate(asked, 25, threshold=0.0)
    assert (r.boundaries[:, 1:] == 1).all()
    # No token comes behind the last one, which therefore need not go deeper.
    want = [5 if j % cap == 0 else 1 for j in range(1, 24)] + [1]
    assert r.layers[:, 1:].tolist() == [want] * 2


def test_threshold_one_never_exits_even_when_confidence_rounds_to_one(model):
    p, config = model
    sure = p | {"embed": {"tokens": p["embed"]["tokens"] * 1000}}
    g = Generator.make(sure, config, SMALL)
    r = g.generate([[5, 6], [7]], 10, threshold=1.0)
    assert (r.exits == config.n_exits).all()
    r = g.generate([[5, 6], [7]], 10, threshold=0.999)
    assert (r.exits[:, 1:] == 0).all()


def test_a_row_does_not_depend_on_its_batch_mates(model, prompts):
    p, config = model
    asked = prompts(7, [3, 14, 9, 6])
    oracle, engine = (Generator.make(p, config, options) for options in (ORACLE, SMALL))
    beside_itself = [oracle.generate([one, one], 36, threshold=0.35) for one in asked]
    for g in (oracle, engine):
        compared = 0
        for rows in ((0, 1), (2, 3), (3, 0)):
            together = g.generate([asked[i] for i in rows], 36, threshold=0.35)
            for row, i in enumerate(rows):
                alone = beside_itself[i]
                tied = np.flatnonzero(alone.margins[row] < TIE)
                n = tied[0] if len(tied) else 36
                compared += n
                assert alone.ids(row)[:n] == together.ids(row)[:n]
                assert alone.exits[row, :n].tolist() == together.exits[row, :n].tolist()
        assert compared >= 90


def test_prefill_exit_lets_the_first_token_leave(model, prompts):
    p, config = model
    g = Generator.make(p, config, SMALL)
    asked = prompts(0, [8, 8])
    assert g.generate(asked, 10, threshold=0.0, prefill_exit=True).exits[0].tolist() == [0] * 10
    r = g.generate(asked, 10, threshold=0.0)
    assert r.exits[0].tolist() == [3] + [0] * 9 and r.boundaries[0].tolist() == [5] + [1] * 9


@pytest.mark.slow
def test_an_exit_after_all_layers_is_not_the_final_exit(subset, prompts):
    p, config = subset((1, 5))
    asked = prompts(0, [8, 5])
    for engine in ("posthoc", "recompute"):
        r = Generator.make(p, config, engine).generate(asked, 12, threshold=[1.0, 0.0])
        assert r.exits[:, 1:].tolist() == [[1] * 11] * 2 and (r.exits[:, 0] == 2).all()
        assert (r.boundaries == 5).all() and r.n_exits == 2
        counts = [line.split()[:3] for line in r.summary().splitlines()[1:]]
        assert counts == [["exit", "1", "0"], ["exit", "5", "22"], ["final", "5", "2"]]
        assert r.color(0, 0) is None and len({r.color(0, j) for j in range(1, 12)} - {None}) == 1


def test_stop_tokens_strings_lengths_and_context(model, prompts):
    g = Generator.make(*model, SMALL)
    asked = prompts(11, [14, 5])

    def text(ids):
        return bytes(i for i in ids if i < 256).decode("latin-1")

    def run(asked, **kwargs):
        return [*g.stream(asked, 36, threshold=0.4, **kwargs)][-1]

    free = run(asked)
    assert free.finish == ("length", "length") and (free.lengths == 36).all()

    stop = int(free.tokens[0, 10])
    first = free.ids(0).index(stop)
    r = run(asked, stop_token_ids=[stop])
    assert r.ids(0) == free.ids(0)[: first + 1] and r.finish[0] == "stop"

    target = text(free.ids(1))[8:11]
    ends = [text(free.ids(i)).find(target) + 3 for i in (0, 1)]
    stops = [end >= 3 for end in ends]  # the other request may come to say the same
    for chunk in (None, 6):
        r = run(asked, stop_strings=[target], decode_text=text, chunk=chunk)
        for i, (end, stop) in enumerate(zip(ends, stops, strict=True)):
            assert r.ids(i) == (free.ids(i)[:end] if stop else free.ids(i))
            assert r.finish[i] == ("stop" if stop else "length")
        assert stops[1]

    long = run([asked[0] + asked[1][:2], asked[1]])  # 16 of 50 positions
    assert long.finish == ("context", "length") and long.lengths.tolist() == [34, 36]
    pieces = list(g.stream(asked, 20, threshold=0.4, chunk=6))
    assert [q.tokens.shape[1] for q in pieces] == [1, 7, 13, 19, 20]
    assert pieces[-1].ids(0) == free.ids(0)[:20]


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(prompts=[]), "prompts"),
        (dict(prompts=[[]]), r"prompts\[0\] = '0 tokens'"),
        (dict(prompts=[[1] * 160]), "context"),
        (dict(prompts=[[1, 300]]), "tokenizer"),
        (dict(threshold=1.5), "threshold"),
        (dict(threshold=float("nan")), "threshold"),
        (dict(threshold=[0.1, 0.2, 0.3]), "one per early exit"),
        (dict(exits=[2]), r"exits = \[2\]"),
        (dict(exits=3), "exits = 3: must be a list of boundaries"),
        (dict(threshold="a"), "threshold = 'a'"),
        (dict(threshold=[[0.1], [0.2, 0.3]]), "threshold"),
        (dict(gate=None), "gate = None"),
        (dict(temperature=-1), "temperature"),
        (dict(temperature=[0.5, 0.5]), "one number, or 1"),
        (dict(top_k=2.5), "top_k"),
        (dict(top_k=3 * 10**9), "top_k"),
        (dict(seed=2**32), "seed"),
        (dict(max_new_tokens=2.5), "max_new_tokens"),
        (dict(chunk=0), "chunk"),
        (dict(stop_strings="end", decode_text=str), "stop_strings"),
        (dict(stop_strings=[""], decode_text=str), "stop_strings"),
        (dict(stop_token_ids=[1.5]), "stop_token_ids"),
        (dict(stop_token_ids=5), "stop_token_ids"),
        (dict(prompts="abc"), "Encode text"),
        (dict(prompts=["abc"]), r"prompts\[0\].*Encode text"),
        (dict(prompts=[[[1, 2]]]), r"prompts\[0\]"),
        (dict(top_p=0), "top_p"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(stop_strings=["x"]), "decode_text"),
        (dict(stop_token_ids=[900]), "stop_token_ids"),
    ],
)
def test_bad_input_is_named(subset, kwargs, message):
    p, config = subset((1, 3))
    g = Generator.make(p, config, "recompute")
    args = dict(prompts=[[1, 2]], max_new_tokens=4) | kwargs
    with pytest.raises(ConfigError, match=message):
        list(g.stream(**args))


def test_nan_parameters_are_an_error_and_not_a_token(model):
    p, config = model
    broken = p | {"final": {"norm": {"scale": p["final"]["norm"]["scale"] * jnp.nan}}}
    with pytest.raises(FloatingPointError, match="not finite"):
        Generator.make(broken, config, SMALL).generate([[1, 2], [3]], 10, threshold=1.0)


@pytest.mark.parametrize("options", [SMALL, DRAFTING], ids=lambda options: options.engine)
def test_exits_whose_logits_are_nan_emit_nothing(model, prompts, options):
    p, config = model
    nan = jax.tree.map(lambda a: a * jnp.nan, p["exits"])
    asked = prompts(5, [9, 6])
    full = Generator.make(p, config, ORACLE).generate(asked, 6, threshold=1.0)
    assert (full.exits == config.n_exits).all()
    broken = Generator.make(p | {"exits": nan}, config, options)
    np.testing.assert_array_equal(broken.generate(asked, 6, threshold=0.0).tokens, full.tokens)


def test_summary_and_colors(model, prompts):
    r = Generator.make(*model, SMALL).generate(prompts(0, [8, 8]), 15, threshold=0.3)
    text = r.summary()
    assert text.startswith("30 tokens") and all(
        f"  {n}  " in text for n in ("exit   1", "exit   3", "final  5")
    )

    def plain(ids):
        return bytes(i for i in ids if i < 256).decode("latin-1")

    colored = r.colored(0, plain)
    assert "\x1b[38;5;" in colored
    import re

    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain(r.ids(0))
