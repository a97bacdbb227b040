"""EE-LLM's inference methods: comparison of their tokens, and their latency by formula."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator

import numpy as np

from eejax.experiments.reproduce.catalogue import finding
from eejax.experiments.reproduce.claims import Finding

STAGES, NEW, CAP = 4, 40, 8
THRESHOLDS = (1.0, 0.5, 0.3, 0.2)
MIXED = 0.3  # by which some tokens leave early, and some do not
DRAWN = 100  # traces at random
SCALE = "8 layers of width 64, trained for seconds on Python's documentation"
SIMULATED = "simulated"


def findings() -> list[Finding]:
    """Return every finding about inference."""
    params, config, text = trained()
    prompts = [text[i : i + 32].tolist() for i in (1_000, 50_000, 200_000)]
    return [*engines(params, config, prompts), *latencies(), *decisions(params, config, prompts)]


def judged(key: str, holds: bool, ours: str, why: str, scale: str = SCALE) -> Finding:
    return finding("EE-LLM", key, ours, scale, bool(holds), why)


def trained(steps: int = 150):
    """Return (parameters, configuration, the text as bytes): two exits, trained for seconds."""
    import jax
    import jax.numpy as jnp
    import optax

    from eejax.losses.multi_exit import multi_exit_loss
    from eejax.models import params
    from eejax.models.config import ModelConfig

    config = ModelConfig.from_dict(
        dict(
            vocab_size=256,
            n_layers=8,
            d_model=64,
            n_heads=4,
            d_ff=172,
            context_length=96,
            head="tied",
            exits=[{"boundary": 2}, {"boundary": 5}],
        )
    )
    text = np.frombuffer("".join(pydoc_data.topics.topics.values()).encode(), np.uint8)
    text = text.astype(np.int32)
    value = params.init(config, jax.random.key(0))
    optimizer = optax.adam(optax.linear_schedule(4e-3, 5e-4, steps))
    weights = jnp.array([0.5, 0.5, 1.0])

    @jax.jit
    def update(value, state, rows):
        def loss(v):
            total, sums = multi_exit_loss(v, config, rows[:, :-1], rows[:, 1:], weights)
            return total / sums.num_tokens.astype(jnp.float32)

        grads = jax.grad(loss)(value)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32
            updates, state = optimizer.update(grads, state, value)
        return optax.apply_updates(value, updates), state

    rng, state = np.random.default_rng(0), optimizer.init(value)
    for _ in range(steps):
        starts = rng.integers(0, text.size - 65, 8)
        value, state = update(value, state, jnp.array([text[s : s + 65] for s in starts]))
    return value, config, text


def engines(params, config, prompts) -> Iterator[Finding]:
    """Judge both methods' tokens, the cause of full passes, propagation and drafts."""
    from eejax.inference import EngineOptions, Generator, PipelinedGenerator
    from eejax.sharding.mesh import MeshConfig

    def make(*args, **how):
        return Generator.make(params, config, EngineOptions(*args, **how))

    oracle, recompute = make("posthoc"), make("recompute")
    pipelined = PipelinedGenerator.make(params, config, MeshConfig(pipe=STAGES))
    same = total = early = on_way = 0
    for threshold in THRESHOLDS:
        a, b, c = (
            g.generate(prompts, NEW, threshold=threshold) for g in (oracle, recompute, pipelined)
        )
        equal = [(a.tokens == x.tokens) & (a.exits == x.exits) for x in (b, c)]
        same += int(sum(e.sum() for e in equal))
        total += 2 * a.tokens.size
        early += int((a.exits < config.n_exits).sum())
        first = config.n_layers // STAGES
        on_way += int((c.layers[:, 1:] == np.maximum(c.boundaries[:, 1:], first)).sum())
    yield judged(
        "same-output",
        same == total and early > 0,
        f"{same} of {total} tokens and exits are those of the pass of all layers, at thresholds "
        f"{THRESHOLDS}; {early / (total / 2):.0%} of the tokens leave early",
        "a near-tie in rounding decides otherwise in one of the methods",
    )
    decoded = len(THRESHOLDS) * len(prompts) * (NEW - 1)
    yield judged(
        "latency",
        on_way == decoded,
        f"the engine on {STAGES} stages runs the layers up to the exit, and those of the first "
        f"stage at least, for {on_way} of {decoded} tokens",
        "a token waits for other layers",
        f"{SCALE}, {STAGES} fake devices",
    )
    forced = make("recompute", cap=CAP).generate(prompts[:1], NEW, threshold=0.0)
    full = np.flatnonzero(forced.layers[0, 1:] == config.n_layers)
    gaps = np.diff(full)
    yield judged(
        "forced-pass",
        len(full) > 1 and (gaps == CAP).all(),
        f"with {CAP} tokens allowed to wait, and all leaving early, every {gaps.max(initial=0)}th "
        "step runs all layers",
        "full passes come at other steps",
    )
    exact, again, filled = (
        g.generate(prompts, NEW, threshold=MIXED) for g in (oracle, recompute, make("propagate"))
    )
    # Up to the first token that differs all have read the same text.
    alike = np.cumsum(exact.tokens != filled.tokens, 1) == 0
    alike &= np.cumsum(exact.tokens != again.tokens, 1) == 0
    off, rounding = (
        float(np.abs(exact.logprobs - other.logprobs)[alike].max()) for other in (filled, again)
    )
    yield judged(
        "propagation",
        off > 30 * rounding,
        f"at threshold {MIXED:g} {(exact.tokens != filled.tokens).mean():.0%} of the tokens differ "
        f"from those with exact keys and values; log p of the others is off by up to {off:.1e} "
        f"nats, by {rounding:.1e} with keys and values that are recomputed (more than 30 times "
        "as far)",
        "log p is that of exact keys and values but for rounding",
    )
    plain = make("full").generate(prompts, NEW)
    drafted = make("speculative").generate(prompts, NEW)
    yield judged(
        "drafts",
        (plain.tokens == drafted.tokens).all() and drafted.accepted.sum() > 0,
        f"{drafted.accepted.sum()} of {drafted.tokens.size} tokens were drafted by the first exit, "
        "all tokens are the full model's",
        "drafts change the text, or none is accepted",
    )


def latencies() -> Iterator[Finding]:
    """Check the latencies of free-running stages and of one device against their models."""
    from eejax.experiments import latency
    from eejax.experiments.latency import ForwardTimes
    from eejax.models.config import ModelConfig
    from eejax.pipeline.partition import EVEN, partition

    config = ModelConfig.from_dict(
        dict(
            vocab_size=8,
            n_layers=8,
            d_model=8,
            n_heads=1,
            d_ff=8,
            context_length=8,
            exits=[{"boundary": n} for n in (1, 3, 6)],
        )
    )
    stages = partition(config, STAGES, EVEN, "earlier")
    rng, ends = np.random.default_rng(0), (1, 3, 6, 8)
    mid_right = 0
    for _ in range(DRAWN):
        layers = rng.integers(1, 9, 8).astype(float)
        layers[:2] += 50  # nothing waits behind the first stage
        trace = rng.integers(0, 4, 12)
        times = ForwardTimes(tuple(layers), (0.0,) * 4)
        got = latency.pipelined(trace, stages, times)
        now, want = 0.0, []
        for e in trace:
            want.append(now + layers[: ends[e]].sum())
            now += max(layers[: ends[e]].sum(), layers[:2].sum())
        mid_right += np.allclose(got, want)
    yield judged(
        "mid-stage",
        mid_right == DRAWN,
        f"exits in the middle of stages 1, 2 and at the end of stage 3: times by the paper's rule "
        f"in {mid_right} of {DRAWN} traces at random",
        "a token waits for the rest of its stage",
        SIMULATED,
    )
    one = ForwardTimes((1.0,) * 8, (0.0,) * 4)
    first = [0] * 64
    full = 8.0 * len(first)
    faster = full / latency.pipelined(first, stages, one)[-1]
    yield judged(
        "figure-5",
        faster > 2,
        f"tokens that leave on the first of {STAGES} stages come {faster:.2f} times as fast as "
        "with full passes, while the later stages work on earlier tokens (more than 2 times)",
        "not explained: stages do not overlap",
        SIMULATED,
    )
    speeds = [
        full / latency.recompute(first, config, one, rows=rows)[-1]
        for rows in (lambda n: 1.0, lambda n: float(n))
    ]
    yield judged(
        "kv-recomputation",
        speeds[0] > 1 > speeds[1] - 0.05,
        f"all tokens leaving after 1 of 8 layers: {speeds[0]:.2f} times as fast where rows cost "
        f"nothing (above 1), {speeds[1]:.2f} where each costs as much as one (below 1.05)",
        "it gains without a batching effect",
        SIMULATED,
    )


def decisions(params, config, prompts) -> Iterator[Finding]:
    """Compare the rule of section 5.2 with its definition, by every exit's own probabilities."""
    from eejax import calibration
    from eejax.inference import Generator

    result = Generator.make(params, config, "recompute").generate(prompts, NEW, threshold=MIXED)
    right = total = early = 0
    for i, prompt in enumerate(prompts):
        whole = np.array(prompt + result.ids(i), np.int32)
        labels = np.where(np.arange(len(whole)) < len(prompt), -1, whole)
        batch = {"tokens": whole[None, :-1], "labels": labels[None, 1:]}
        scores = calibration.score(params, config, [batch])
        sure = scores.confidences["max_probability"][:-1, 1:] >= MIXED
        want = np.where(sure.any(0), sure.argmax(0), config.n_exits)
        right += int((result.exits[i, 1:] == want).sum())
        total += want.size
        early += int(sure.any(0).sum())
    yield judged(
        "confidence",
        right == total and 0 < early < total,
        f"{right} of {total} tokens leave by the first exit whose probability reaches {MIXED:g}, "
        f"{early} of them before the final one",
        "a near-tie in rounding changes a decision, or no token leaves early",
    )
