"""Count requests that fit beside a part of a model, and beside all of it.

    eejax bench capacity --json

`batch_ratio` is the geometric mean of `ratio` over models and contexts: requests beside the layers
up to an exit over requests beside the whole model, in --budget bytes. The models are those of
HELIOS (Kumar et al., arXiv 2504.10724), which reports 3.7 times as many on average (abstract) and
does not give the contexts. Weights, keys and values are of --dtype. A request has room for its
whole context. Where few requests fit beside the whole model the ratio is large and says little:
with --budget=30e9 Llama-2-13B has 2 requests of 2048 tokens and its part 30, 15 times as many.
`whole` and `part` are the numbers of requests.

The counts come from shapes alone (eejax.inference.capacity), without the models or the card. A card
of "40 GB" has 40 GiB, 42.9e9 bytes; the default of 40e9 leaves some 7 % of them for CUDA and for a
step's temporary memory, which is not counted. With --can_deepen, as in a fleet of models, the part
also keeps the states behind its last layer, from which more layers fill in their keys and values.

`check` builds a small model of Llama-2-13B's proportions, in a proportional budget, with the slots
that should fit, and serves; then with one more slot. `held` is the bytes of its weights and state;
`live` the maximum bytes of all arrays at once, including running requests and records; `error` the
predicted bytes over those held, less 1.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math

import numpy as np
from absl import flags

from eejax.common.errors import require
from eejax.experiments import launch
from eejax.experiments.capacity_models import depths, llama, models, requests_that_fit

_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")
_BUDGET = flags.DEFINE_float("budget", 40e9, "Bytes for weights and requests.", lower_bound=1.0)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16", "float32"], "Of both.")
_CONTEXTS = flags.DEFINE_list("contexts", ["512", "1024", "2048"], "Tokens of a request.")
_CAN_DEEPEN = flags.DEFINE_bool(
    "can_deepen", True, "Whether layers may be added while requests run."
)
_CHECK = flags.DEFINE_bool("check", True, "Also build a small model at its budget.")

# A fifth of the layers of Llama-2-13B and a fortieth of its width, with the same share as a part.
SMALL = (3, dict(n_layers=8, d_model=128, n_heads=4, d_ff=344, vocab_size=800, context_length=128))
SHARE = 0.65  # share of the budget that the whole of Llama-2-13B takes
PROMPT, NEW = 12, 6  # tokens


def main() -> None:
    from eejax.analysis import table

    contexts = launch.numbers("contexts", _CONTEXTS.value, int)
    told = "must be at least one number of tokens, each at least 1"
    require(min(contexts, default=0) >= 1, "--contexts", ",".join(_CONTEXTS.value), told)
    told = "must be a finite number of bytes, at least 1"
    require(1 <= _BUDGET.value < math.inf, "--budget", _BUDGET.value, told)  # false for NaN

    def own(config):
        return config.replace(dtype=_DTYPE.value)

    rows = [
        {"model": name}
        | requests_that_fit(own(config), layer, context, _BUDGET.value, _CAN_DEEPEN.value)
        for name, (layer, config) in models().items()
        for context in contexts
    ]

    def mean(found):
        return math.exp(np.mean([math.log(r["ratio"]) for r in found]))

    held = [r for r in rows if r["whole"] and r["part"]]
    result: dict = {
        "budget": _BUDGET.value,
        "dtype": _DTYPE.value,
        "can_deepen": _CAN_DEEPEN.value,
        "batch_ratio": mean(held) if held else None,
        "by_model": {
            name: mean(each)
            for name in models()
            if (each := [r for r in held if r["model"] == name])
        },
        "least": min((r["ratio"] for r in held), default=None),
        "most": max((r["ratio"] for r in held), default=None),
        "rows": rows,
    }
    print(capacities(table, rows), end="\n\n")
    rest = {k: v for k, v in result.items() if k != "rows"}
    print(table(("", ""), launch.lines(rest)))
    if _CHECK.value:
        layer, size = SMALL
        result["check"] = check(own(llama(layer, size)), layer, 64, _CAN_DEEPEN.value)
        print("\n" + table(("small", ""), launch.lines(result["check"])))
    if _JSON.value:
        print(json.dumps(result))


def capacities(table, rows: list[dict]) -> str:
    names = (
        "model",
        "layers",
        "context",
        "weights, GB",
        "part, GB",
        "request, MB",
        "part, MB",
        "requests",
        "part",
        "ratio",
    )

    def one(r):
        return (
            r["model"],
            "{} of {}".format(*r["layers"]),
            str(r["context"]),
            *(f"{r[f'{w}_weights'] / 1e9:.3f}" for w in ("whole", "part")),
            *(f"{r[f'{w}_request'] / 1e6:.1f}" for w in ("whole", "part")),
            str(r["whole"]),
            str(r["part"]),
            f"{r['ratio']:.2f}" if r["ratio"] else "none fits",
        )

    return table(names, [one(r) for r in rows])


def check(config, layer: int, context: int, can_deepen: bool) -> dict:
    """Measure the memory that a model takes at a budget: whole, and its part up to a layer."""
    import jax

    from eejax.inference import capacity
    from eejax.inference.options import EngineOptions
    from eejax.models import params

    options = EngineOptions(cap=4, buckets=(8,), chunk=16, drafts=1, can_deepen=can_deepen)
    host = jax.device_get(params.init(config, jax.random.key(0)))
    budget = capacity.weight_bytes(config, config.n_exits + 1) / SHARE
    result: dict = {"budget": budget}
    for name, depth in depths(config, layer).items():
        launch.say(f"building the {name} at {budget / 1e6:.2f} MB ...")
        n = capacity.slots(config, options, depth, context, budget)
        predicted = capacity.engine_bytes(config, options, depth, context, n)
        found = serve(host, config, dataclasses.replace(options, num_segments=depth), n, context)
        more = serve(
            host, config, dataclasses.replace(options, num_segments=depth), n + 1, context, 0
        )
        result[name] = {
            "slots": n,
            "predicted": predicted,
            **found,
            "error": predicted / found["held"] - 1,
            "fits": max(found["held"], found["live"]) <= budget,
            "one_more": more["held"],
            "one_more_fits": more["held"] <= budget,
        }
    return result | {"ratio": result["part"]["slots"] / result["whole"]["slots"]}


def serve(host, config, options, slots: int, context: int, rounds: int = 2) -> dict:
    """Serve `rounds` requests for each slot of a model.

    Returns the bytes held, the bytes of all arrays made here, the number of answered requests, and
    how many of them ran at once.
    """
    import jax

    from eejax.common.trees import nbytes
    from eejax.inference.engine import EarlyExitEngine
    from eejax.inference.policy import ExitPolicy
    from eejax.inference.request import EngineRequest
    from eejax.inference.scheduler import Scheduler

    gc.collect()
    others = jax.live_arrays()  # kept, so that no new array gets the id of one of these
    known = {id(a) for a in others}

    def live():
        return sum(a.nbytes for a in jax.live_arrays() if id(a) not in known)

    engine = EarlyExitEngine.make(host, config, options, slots=slots, context=context)
    engine = dataclasses.replace(engine, weights=jax.device_put(engine.weights))
    scheduler = Scheduler(engine)
    rng, policy = np.random.default_rng(0), ExitPolicy.make(config, 1, 0.5)
    for i in range(rounds * slots):
        prompt = rng.integers(0, config.vocab_size, PROMPT).tolist()
        scheduler.add_request(EngineRequest(str(i), prompt, NEW, policy))
    held = nbytes(engine.weights) + nbytes(scheduler.state)
    most, tokens, together = live(), 0, 0
    while not scheduler.idle:
        tokens += sum(len(output.tokens) for output in scheduler.step())
        together = max(together, len(scheduler.running))
        most = max(most, live())
    if tokens != rounds * slots * NEW or held != nbytes(engine.weights) + nbytes(scheduler.state):
        raise RuntimeError(f"{tokens} tokens of {rounds * slots} requests, {held} bytes before")
    return {"held": held, "live": most, "tokens": tokens, "together": together}


if __name__ == "__main__":
    launch.run(main)
