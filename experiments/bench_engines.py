"""Engines of one device on a trained model: speed, agreement, and the cost of each part.

    eejax train --config=configs/demo_wide.py --workdir=runs/wide
    eejax bench engines --workdir=runs/wide --json

Prompts of held-out text, greedy, batch 1, float32, engines in interleaved pairs with `full` after
warm-up; every ratio is a median over pairs, with a 95 % bootstrap interval. All engines read the
same arrays of layers.

`recompute_speedup`: over `full`, at the fastest threshold with at least 97 % agreement with the
full model's most likely token (teacher-forced, on the held-out text that it is chosen on), and at
99 %. `own_output`: of the text generated there, the share of tokens that are the full model's
choice after the same text, that text's perplexity under the full model, and distinct n-grams,
beside those of the text of `full`. `propagate`: also at that threshold, with the state of a token's
exit in place of deeper states. `speculative_speedup`: over `full`, with the number of tokens that
differ. `no_exit_overhead`: of `recompute` at threshold 1. `exit_efficiency`: the smallest over
exits of (seconds of a full token / of a token forced out there) / (bytes of weights and cache that
the one reads / the other). `skip_accounting`: seconds that the executed segments and heads explain,
each timed by itself for the same number of rows, / seconds measured, at the 97 % threshold.
`sampled`: its speed at temperature 1, where text is more like held-out text. `recompilations`:
programs compiled after warm-up, also for shorter prompts and other gates, thresholds and sampling.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
import time

import numpy as np
from absl import flags

from eejax.experiments import held_out, launch, step_costs
from eejax.experiments.decode_times import TimedDecoding, with_layers_of

_WORKDIR = flags.DEFINE_string("workdir", None, "The training run.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")
_PAIRS = flags.DEFINE_integer("pairs", 24, "Pairs of runs to time.", lower_bound=2)
_TOKENS = flags.DEFINE_integer("tokens", 150_000, "Held-out tokens to score.", lower_bound=1)
_PROMPTS = flags.DEFINE_integer("prompts", 24, "Number of prompts.", lower_bound=1)
_DRAFTS = flags.DEFINE_integer("drafts", 4, "Tokens that `speculative` drafts.", lower_bound=1)
_DRAFT_EXIT = flags.DEFINE_integer(
    "draft_exit", None, "Boundary of the exit that drafts; by default the lowest."
)
flags.mark_flags_as_required(["workdir"])

PROMPT = 64  # tokens
TARGETS = (0.97, 0.99)
WARM = 2  # warm-up runs of each engine
THRESHOLDS = tuple(np.round(np.arange(0.30, 1.0, 0.02), 2).tolist())


def main() -> None:
    from eejax import calibration
    from eejax.analysis import table
    from eejax.train.runs import open_run

    run = open_run(_WORKDIR.value)
    model, split = run.model, run.dataset().split("validation")
    batches = held_out.batches(run, _TOKENS.value)
    launch.say(f"scoring about {_TOKENS.value} tokens ...")
    scores = calibration.score(model.params, model.config, batches)
    points = calibration.sweep(scores, (*THRESHOLDS, 1.0))
    starts = np.linspace(0, len(split) - PROMPT - 1, _PROMPTS.value).astype(int)
    prompts = [split.read(int(s), PROMPT).tolist() for s in starts]

    chosen = {target: calibration.fastest(points, target) for target in TARGETS}
    result = measure(model, chosen, prompts, _PAIRS.value)
    result["frontier"] = [
        {
            "threshold": p.threshold,
            "agreement": p.agreement,
            "depth": p.depth,
            "perplexity": p.perplexity,
        }
        for p in points
    ]
    plain = {k: v for k, v in result.items() if k != "frontier"}
    print(table(("", ""), launch.lines(plain)))
    if _JSON.value:
        print(json.dumps(result))


def measure(model, chosen: dict, prompts: list, pairs: int) -> dict:
    import jax

    from eejax.analysis import interleave, median_ratio
    from eejax.inference import EngineOptions, Generator
    from eejax.inference.generate import cache_length

    config, new = model.config, model.config.context_length - PROMPT - 1
    n = config.n_exits
    usual = Generator.make(model.params, config, "recompute")

    def make(engine, **options):
        return with_layers_of(
            usual, Generator.make(model.params, config, EngineOptions(engine, **options))
        )

    # A cap above the tokens generated never forces a token deeper.
    free = dict(cap=new + 8, buckets=(1,))
    forced, length = make("recompute", **free), PROMPT + new

    def new_timed(generator, **kwargs):
        return TimedDecoding(generator, prompts, new, **kwargs)

    chosen_at, only = chosen[TARGETS[0]].threshold, lambda e: [float(i != e) for i in range(n)]
    # Engines that are compared are neighbours in the turns. None is at an end, where a run follows
    # another run of the same engine.
    timed = {f"exit {e}": new_timed(forced, threshold=only(e)) for e in range(n)}
    timed["full, long cache"] = new_timed(make("full", **free))
    timed |= {f"{a:.0%}": new_timed(usual, threshold=p.threshold) for a, p in chosen.items()}
    timed["full"], timed["threshold 1"] = new_timed(make("full")), new_timed(usual)
    timed["speculative"] = new_timed(
        make("speculative", drafts=_DRAFTS.value, draft_exit=_DRAFT_EXIT.value)
    )
    timed["full, sampled"] = new_timed(make("full"), temperature=1.0)
    timed["sampled"] = new_timed(usual, temperature=1.0, threshold=chosen_at)
    timed["propagate"] = new_timed(make("propagate"), threshold=chosen_at)
    names, widths = list(timed), (1, *usual.slots_for(1)[0].buckets)
    # Segments are timed in the same turns, as a shared machine has slow and fast minutes.
    segments, read = step_costs.segment_runs(
        usual.weights, config, widths, cache_length(length, config.context_length, usual.options)
    )

    launch.say("compiling ...")
    for t in timed.values():
        t.start()
        t.finish()
    launch.say(f"timing {pairs} pairs of {len(timed)} engines and {len(segments)} parts ...")
    for run in segments:
        run(0)
    compiled: list[str] = []

    def listen(event, *_, **__):
        return compiled.append(event) if "backend_compile" in event else None

    jax.monitoring.register_event_duration_secs_listener(listen)
    seconds = interleave(
        [*(lambda _, t=t: t.finish() for t in timed.values()), *segments],
        pairs,
        time.perf_counter,
        before=lambda r: r < len(names) and timed[names[r]].start(),
    )
    ask_otherwise(usual, prompts, new)
    jax.monitoring.unregister_event_duration_listener(listen)
    of = dict(zip(names, seconds, strict=False))
    for t in timed.values():
        del t.results[:WARM]

    def speed(name, over="full"):
        ratio = median_ratio(of[over], of[name])
        return {"ratio": ratio.median, "interval": [ratio.low, ratio.high]}

    result: dict = {
        "pairs": pairs,
        "new_tokens": new,
        "tokens_per_second": {name: new / float(np.median(s)) for name, s in of.items()},
    }

    def texts(name):
        return [r.ids(0) for r in timed[name].results]

    for agreement, point in chosen.items():
        name = f"{agreement:.0%}"
        result[f"recompute_{name}"] = speed(name) | {
            "threshold": point.threshold,
            "agreement": point.agreement,
            "depth": point.depth,
            "executed_layers": executed_layers(timed[name]),
            "own_output": own_output(model, timed[name]),
        }
    result["recompute_speedup"] = result[f"recompute_{TARGETS[0]:.0%}"]["ratio"]
    result["full_own_output"] = own_output(model, timed["full"])
    drafts = timed["speculative"].results
    result["speculative"] = speed("speculative") | {
        "different_tokens": sum(
            a != b
            for x, y in zip(texts("full"), texts("speculative"), strict=True)
            for a, b in zip(x, y, strict=True)
        ),
        "accepted": float(
            sum(r.accepted.sum() for r in drafts) / max(1, sum(r.drafted.sum() for r in drafts))
        ),
    }
    result["speculative_speedup"] = result["speculative"]["ratio"]
    ratio = median_ratio(of["threshold 1"], of["full"])
    result["no_exit_overhead"] = ratio.median - 1
    result["no_exit_overhead_interval"] = [ratio.low - 1, ratio.high - 1]
    spared = bytes_ratios(model.params, config, PROMPT + new + free["cap"])
    efficiency = {
        config.exit_boundaries[e]: speed(f"exit {e}", "full, long cache")["ratio"] / spared[e]
        for e in range(n)
    }
    result["exit_efficiency"] = min(efficiency.values())
    result["exit_efficiency_by_exit"] = efficiency
    result["sampled"] = speed("sampled", "full, sampled") | {
        "executed_layers": executed_layers(timed["sampled"])
    }
    result["propagate"] = speed("propagate") | {
        "executed_layers": executed_layers(timed["propagate"]),
        "own_output": own_output(model, timed["propagate"]),
    }
    result["recompilations"] = len(compiled)
    rows, heads = read(np.median(seconds[len(names) :], 1))
    last = heads * np.eye(n + 1)[-1]  # at threshold 1 no other head is read
    for name in (f"{TARGETS[0]:.0%}", "sampled", "threshold 1"):
        spent = last if name == "threshold 1" else heads
        explained = accounted(timed[name].results, config, widths, rows, spent)
        result[f"skip_accounting {name}"] = float(np.median(explained / of[name]))
    result["skip_accounting"] = result[f"skip_accounting {TARGETS[0]:.0%}"]
    return result


def ask_otherwise(generator, prompts: list, new: int) -> None:
    """Generate with other lengths, gates, thresholds and sampling; nothing may compile."""
    from eejax.inference.policy import available_gates

    rng = np.random.default_rng(0)
    for prompt, gate in zip(
        itertools.cycle(prompts), available_gates(generator.config), strict=False
    ):
        shorter = int(rng.integers(0, PROMPT // 2))  # padded to the same length
        stream = generator.stream(
            [prompt[shorter:]],
            new + 1 + shorter,
            chunk=new,
            gate=gate,
            seed=shorter,
            threshold=rng.random(),
            temperature=rng.random(),
            top_k=int(rng.integers(0, 9)),
        )
        list(stream)


def own_output(model, timed: TimedDecoding) -> dict:
    """Evaluate texts: agreement with the full model, perplexity, distinct 1- to 3-grams."""
    import jax
    import jax.numpy as jnp

    from eejax.inference.sampling import argmax
    from eejax.models import exits, transformer

    config = model.config

    @jax.jit
    def judge(tokens):
        h = transformer.exit_states(model.params, config, tokens, which=[config.n_exits])[0]
        y = exits.logits(exits.head(model.params, config, config.n_exits), h)[0, :-1]
        picked = jnp.take_along_axis(y, tokens[0, 1:, None], 1)[:, 0]
        return argmax(y) == tokens[0, 1:], jax.nn.logsumexp(y, -1) - picked

    same, nll, grams = [], [], {k: collections.Counter() for k in (1, 2, 3)}
    for i, r in enumerate(timed.results[: len(timed.prompts)]):
        prompt = timed.prompts[(i + WARM) % len(timed.prompts)]
        ids = r.ids(0)
        match, cost = (np.asarray(a)[len(prompt) - 1 :] for a in judge(jnp.array([prompt + ids])))
        same.append(match)
        nll.append(cost)
        for k, counter in grams.items():
            counter.update(tuple(ids[j : j + k]) for j in range(len(ids) - k + 1))
    return {
        "agreement": float(np.concatenate(same).mean()),
        "perplexity": math.exp(float(np.concatenate(nll).mean(dtype=np.float64))),
    } | {f"distinct_{k}": len(c) / max(1, c.total()) for k, c in grams.items()}


def bytes_ratios(params, config, length: int) -> list[float]:
    """Return the bytes that a full token reads over those of a token of each exit.

    They are bytes of weights and caches.
    """
    from eejax.common.trees import nbytes, slice_layers
    from eejax.models import exits, work
    from eejax.models.params import for_compute

    params = for_compute(params, config.dtype)

    def read(e):
        depth = config.exit_boundaries[e]
        size = np.dtype(config.dtype).itemsize
        cache = 2 * depth * length * config.n_kv_heads * config.head_dim * size
        head = work.head_weights(config, e, decoding=True) * size
        own = work.without_head(exits.exit_params(params, config, e))
        return nbytes(slice_layers(params["layers"], 0, depth)) + nbytes(own) + head + cache

    whole = read(config.n_exits)
    return [whole / read(e) for e in range(config.n_exits)]


def executed_layers(timed: TimedDecoding) -> float:
    """Return the mean layers of a step, without the first token's prefill."""
    return float(np.mean([r.layers[0, 1:].mean() for r in timed.results]))


def accounted(results, config, widths, rows, heads) -> np.ndarray:
    """Return the seconds [runs] that executed segments and heads explain.

    `rows` and `heads` are the seconds of `step_costs`. A segment runs the rows that wait below it:
    as many as there were steps since it last ran.
    """
    explained = np.zeros(len(results))
    for i, r in enumerate(results):
        waiting = np.zeros(config.n_exits + 1, int)
        for layers, exit in zip(r.layers[0, 1:], r.exits[0, 1:], strict=True):
            waiting += 1
            ran = np.flatnonzero(np.asarray(config.exit_boundaries) <= layers)
            width = np.searchsorted(widths, waiting[ran])
            explained[i] += rows[width, ran].sum() + heads[: exit + 1].sum()
            waiting[ran] = 0
    return explained


if __name__ == "__main__":
    launch.run(main)
