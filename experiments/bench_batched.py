"""Continuous batching: `recompute` in slots, where each request exits by itself, against `full`.

    eejax train --config=configs/demo_wide.py --workdir=runs/wide
    eejax bench batched --workdir=runs/wide --json

Prompts of held-out text, greedy, float32, in interleaved pairs after warm-up; ratios are medians
over pairs with 95 % bootstrap intervals. All engines read the same arrays of layers.

For every batch size, with all slots in use: `no_exit_overhead` is the time of `recompute` over
`full` where no exit may fire. `exits` is the gain with exits, at the fastest threshold of at least
97 % agreement with the full model (teacher-forced, on the held-out text it is chosen on), without
drafts and with them. `speculative` has drafts and no exits, so its tokens are the full model's.
`curve` goes over thresholds. Each uses the plan that the simulator found best for it. `auto_ratio`
runs three requests a slot, of different lengths, through the scheduler's queue, with exits turned
off where they do not pay, over `full` through the same queue; beside it are `recompute` with exits
and without (which shows the value of prompts in chunks), and the seconds between tokens.
`simulator_error` is simulated over measured seconds of a token, less 1, the median of all timed
runs. `ideal` is the best simulated plan if the step itself cost nothing and no row were padding.
`time` divides the time by the fitted costs.

`gpu_simulated` is no measurement: the same traces run through the simulator with the times of a
decoder of 1.2 billion parameters by bytes and products, at 80 % of an A100's bandwidth and half its
bf16 rate. It shows the gain of batches over batches without exits there.
"""

from __future__ import annotations

import dataclasses
import json
import time

import numpy as np
from absl import flags

from eejax.experiments import held_out, launch
from eejax.experiments.batch_runs import SteadyBatch, roofline, serve
from eejax.experiments.decode_times import with_layers_of

_WORKDIR = flags.DEFINE_string("workdir", None, "The training run.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")
_BATCHES = flags.DEFINE_multi_integer("batch", [8, 32], "Slots; repeat the flag for several sizes.")
_PAIRS = flags.DEFINE_integer("pairs", 8, "Pairs of runs to time.", lower_bound=2)
_QUEUES = flags.DEFINE_integer("queues", 4, "Pairs of queues to time.", lower_bound=2)
_TOKENS = flags.DEFINE_integer("tokens", 150_000, "Held-out tokens to score.", lower_bound=1)
_NEW = flags.DEFINE_integer("new", 96, "Tokens of a request in a timed run.", lower_bound=8)
_DRAFTS = flags.DEFINE_integer("drafts", 6, "Maximum drafted tokens.", lower_bound=0)
_CALLS = flags.DEFINE_integer("calls", 240, "Calls to fit costs to.", lower_bound=40)
flags.mark_flags_as_required(["workdir"])

PROMPT, PLANNED = 64, 180  # tokens of a prompt; tokens of a text for which plans are made
TARGET = 0.97
THRESHOLDS = tuple(np.round(np.arange(0.30, 1.0, 0.02), 2).tolist())
CURVE = (0.3, 0.5, 0.7, 0.9)
A100 = dict(bandwidth=0.8 * 2.04e12, flops=0.5 * 312e12, start=2e-5)
BILLION = dict(d=2048, vocab=32_000, context=1024)  # 24 layers: 1.2e9 parameters
GPU_BATCHES = (8, 16, 32, 64)


def main() -> None:
    import jax

    from eejax import calibration
    from eejax.analysis import table
    from eejax.train.runs import open_run

    run = open_run(_WORKDIR.value)
    model, split = run.model, run.dataset().split("validation")
    launch.say(f"scoring about {_TOKENS.value} tokens ...")
    scores = calibration.score(model.params, model.config, held_out.batches(run, _TOKENS.value))
    points = calibration.sweep(scores, (*THRESHOLDS, 1.0))
    chosen = calibration.fastest(points, TARGET)
    agreement = {p.threshold: p.agreement for p in points}

    def prompts(n, lengths=(PROMPT,)):
        starts = np.linspace(0, len(split) - max(lengths) - 1, n).astype(int)

        def read(i, start):
            return split.read(int(start), lengths[i % len(lengths)]).tolist()

        return [read(i, start) for i, start in enumerate(starts)]

    result: dict = {"threshold": chosen.threshold, "agreement": chosen.agreement}
    for slots in _BATCHES.value:
        one = of_batch(model, slots, chosen.threshold, agreement, prompts)
        result[f"batch_{slots}"] = one
        launch.say(json.dumps({f"batch_{slots}": one}))  # in case a later part fails
        jax.clear_caches()  # programs map much memory
    each = [result[f"batch_{slots}"] for slots in _BATCHES.value]
    result["no_exit_overhead"] = max(r["no_exit_overhead"] for r in each)
    result["auto_ratio"] = min(r["auto"]["ratio"] for r in each)
    result["gpu_simulated"] = on_gpu(model, chosen.threshold, prompts)
    print(table(("", ""), launch.lines(result)))
    if _JSON.value:
        print(json.dumps(result))


def make_engines(model, slots: int):
    """Build (`full`, `recompute`) with this number of slots, reading the same arrays of layers."""
    from eejax.inference.engine import EarlyExitEngine
    from eejax.inference.options import EngineOptions

    full = EarlyExitEngine.make(model.params, model.config, "full", slots=slots)
    options = EngineOptions(drafts=_DRAFTS.value)
    batched = EarlyExitEngine.make(model.params, model.config, options, slots=slots)
    return full, with_layers_of(full, batched)


def of_batch(model, slots: int, threshold: float, agreement: dict, prompts) -> dict:
    from eejax.analysis import interleave, median_ratio
    from eejax.inference import batch_costs
    from eejax.inference.batch_simulator import best_plan, simulate

    full, batched = make_engines(model, slots)
    texts, quota = prompts(slots), slots * _NEW.value
    launch.say(f"batch {slots}: compiling, and measuring costs ...")
    costs = batch_costs.measure(batched, texts, calls=_CALLS.value)
    sizes = batch_costs.engine_sizes(batched)
    chosen, settings = {}, {"full": (full, 1.0, 0)}
    plain = costs.plan(batched.options.buckets, slots)
    settings["threshold 1"] = (dataclasses.replace(batched, plan=plain), 1.0, 0)
    launch.say("planning ...")
    spoken = {}
    for t in sorted({threshold, *CURVE, 1.0}):
        spoken[t] = batch_costs.trace_requests(batched, texts, PLANNED, threshold=t)
        for name, most in ((f"{t}", sizes.drafts), (f"{t} undrafted", 0)):
            if most == 0 and t != threshold:
                continue
            chosen[name] = best_plan(spoken[t], costs, dataclasses.replace(sizes, drafts=most))
            plan = dataclasses.replace(batched, plan=chosen[name].plan)
            settings[name] = (plan, t, chosen[name].drafts)
    timed = {name: SteadyBatch(e, texts, quota, t, d) for name, (e, t, d) in settings.items()}
    launch.say(f"timing {_PAIRS.value} pairs of {len(timed)} ...")
    runs, names = list(timed.values()), list(timed)

    def before(r):
        for one in runs:
            if hasattr(one, "state") and len(one.works) < len(one.tokens):
                one.tell()
        runs[r].start()

    seconds = interleave(
        [lambda _, t=t: t.finish() for t in runs], _PAIRS.value, time.perf_counter, before=before
    )
    for one in runs:
        if len(one.works) < len(one.tokens):
            one.tell()
    each = {
        name: s / np.array(t.tokens[1:]) for name, s, t in zip(names, seconds, runs, strict=True)
    }

    def speed(name):
        ratio = median_ratio(each["full"], each[name])
        return {
            "ratio": ratio.median,
            "interval": [ratio.low, ratio.high],
            "drafts": settings[name][2],
            "fill": chosen[name].plan.fill.tolist(),
            "patience": chosen[name].plan.patience.tolist(),
        }

    result: dict = {"tokens_per_second": {n: 1 / float(np.median(s)) for n, s in each.items()}}
    ratio = median_ratio(each["threshold 1"], each["full"])
    result["no_exit_overhead"] = ratio.median - 1
    result["no_exit_overhead_interval"] = [ratio.low - 1, ratio.high - 1]
    result["exits"] = speed(f"{threshold}") | {"undrafted": speed(f"{threshold} undrafted")}
    result["speculative"] = speed("1.0")
    result["curve"] = {
        f"{t}": speed(f"{t}") | {"agreement": agreement[t]} for t in (*CURVE, threshold)
    }

    def steady(found):
        """Return the seconds of a token once all prompts are done, as in a `SteadyBatch` run."""
        begin = max(times[0] for times in found.emitted)
        came = np.sort([t for times in found.emitted for t in times if t > begin])
        return (came[min(quota, len(came)) - 1] - begin) / min(quota, len(came))

    errors = {}
    for name, (engine, t, most) in settings.items():
        if name == "full":
            continue
        own = [dataclasses.replace(x, drafts=most) for x in spoken[t]]
        found = simulate(own, engine.plan, costs, sizes)
        errors[name] = steady(found) / float(np.median(each[name])) - 1
    result["simulator_errors"] = errors
    result["simulator_error"] = float(np.median(np.abs([*errors.values()])))
    exact = tuple(range(1, sizes.buckets[-1] + 1))
    rows = (slots, *sizes.buckets)

    def fine(a):
        return (a[0], *np.interp(exact, rows[1:], a[1:]).tolist())

    free = dataclasses.replace(
        costs, step=0.0, layer=fine(costs.layer), exit_check=fine(costs.exit_check)
    )
    finest = dataclasses.replace(sizes, buckets=exact)
    found = best_plan(spoken[threshold], free, finest).simulated
    result["ideal"] = float(np.median(each["full"])) / steady(found)
    work, took = timed[f"{threshold}"].works[-1], costs.seconds
    parts = {
        "steps": dataclasses.replace(work, runs=0 * work.runs, spans=0 * work.spans),
        "attention of spans": dataclasses.replace(work, runs=0 * work.runs, steps=0),
    }
    shares = {name: took(part) / took(work) for name, part in parts.items()}
    result["time"] = shares | {"layers and heads": 1 - sum(shares.values())}
    result["costs"] = dataclasses.asdict(costs)
    launch.say("queues ...")
    result |= queues(model, slots, full, settings[f"{threshold}"], prompts)
    return result


def queues(model, slots: int, full, setting, prompts) -> dict:
    """Time requests of different lengths through the scheduler."""
    from eejax.analysis import median_ratio
    from eejax.inference.payoff import Payoff

    engine, threshold, drafts = setting
    texts = prompts(3 * slots, (16, 64, 40))
    limits = [(60, 110, 160)[i % 7 % 3] for i in range(len(texts))]
    payoff = Payoff()
    ways = {
        "full": lambda: serve(full, texts, limits, 1.0, 0),
        "without exits": lambda: serve(engine, texts, limits, 1.0, 0),
        "exits": lambda: serve(engine, texts, limits, threshold, drafts),
        "auto": lambda: serve(engine, texts, limits, threshold, drafts, payoff),
    }
    for way in ways.values():
        way()
    found = {name: [] for name in ways}
    for i in range(_QUEUES.value):
        for name in list(ways)[:: 1 if i % 2 == 0 else -1]:
            found[name].append(ways[name]())
    result = {}
    for name in ("without exits", "exits", "auto"):
        ratio = median_ratio(
            [r.seconds / r.tokens for r in found["full"]],
            [r.seconds / r.tokens for r in found[name]],
        )
        result["auto" if name == "auto" else f"queue {name}"] = {
            "ratio": ratio.median,
            "interval": [ratio.low, ratio.high],
        }
    # Latency as a client sees it: the host reads tokens after every step.
    for name, (e, t, d) in (("full", (full, 1.0, 0)), ("exits", setting)):
        one = serve(e, texts, limits, t, d, steps=1)
        low, high = np.quantile(one.gaps, (0.5, 0.99))
        result[f"latency {name}"] = {
            "p50": float(low),
            "p99": float(high),
            "mean": float(one.gaps.mean()),
            "first_p50": float(np.median(one.first)),
        }
    return result


def on_gpu(model, threshold: float, prompts) -> dict:
    """Simulate the gain in tokens over a model without exits, by batch size."""
    from eejax.inference import batch_costs
    from eejax.inference.batch_simulator import EngineSizes, RequestTrace, best_plan, simulate
    from eejax.inference.options import EngineOptions

    _, engine = make_engines(model, max(_BATCHES.value))
    texts = prompts(engine.slots)
    spoken = batch_costs.trace_requests(engine, texts, PLANNED, threshold=threshold)
    shares = np.diff([0, *model.config.exit_boundaries]) * 24 // model.config.n_layers
    result = {}
    for slots in GPU_BATCHES:
        options = EngineOptions(drafts=_DRAFTS.value, chunk=64).resolved(model.config, slots)
        costs = roofline(shares.tolist(), sizes=(slots, *options.buckets), **BILLION, **A100)
        sizes = EngineSizes(
            slots, options.buckets, options.cap, options.drafts, options.chunk, 4, 32
        )
        own = [spoken[i % len(spoken)] for i in range(slots)]
        last = len(shares) - 1
        without = [RequestTrace(t.prompt, (last,) * len(t.exits), t.accepted) for t in own]
        plan = costs.plan(options.buckets, slots)
        base = simulate(without, plan, costs, dataclasses.replace(sizes, drafts=0))
        for name, most in (("drafted", options.drafts), ("undrafted", 0)):
            found = best_plan(own, costs, dataclasses.replace(sizes, drafts=most))
            result[f"batch {slots} {name}"] = (
                base.seconds / base.tokens / (found.simulated.seconds / found.simulated.tokens)
            )
    return result


if __name__ == "__main__":
    launch.run(main)
