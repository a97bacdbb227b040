"""Cost of free slots: requests in an engine of many slots, against one that they fill.

    eejax bench slots --json

SmolLM2-135M's shape with random weights, two exits that may not fire, float32, greedy, prompts of
64 tokens. The engines read the same arrays of layers, and runs alternate in one process.

Reported: `lone`, by number of slots, tokens a second of one request there over those in an engine
of one slot; `active`, by number of requests, those in an engine of the most slots over those in an
engine that they fill. Every ratio is the median over pairs, with a 95 % bootstrap interval.
"""

from __future__ import annotations

import json
import time

import numpy as np
from absl import flags

from eejax.experiments import launch
from eejax.experiments.batch_runs import SteadyBatch
from eejax.experiments.decode_times import with_layers_of

_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")
_PAIRS = flags.DEFINE_integer("pairs", 8, "Pairs of runs to time.", lower_bound=2)
_SLOTS = flags.DEFINE_multi_integer(
    "slots", [4, 16, 64], "Slots; repeat the flag for several sizes.", lower_bound=2
)
_ACTIVE = flags.DEFINE_multi_integer(
    "active", [8], "Requests beside free slots; repeat the flag for several numbers.", lower_bound=1
)
_CONTEXT = flags.DEFINE_integer("context", 256, "Tokens of a slot.", lower_bound=80)
_NEW = flags.DEFINE_integer("new", 48, "Tokens of a request in a timed run.", lower_bound=2)
_LAYERS = flags.DEFINE_integer("layers", 30, "Layers.", lower_bound=3)

PROMPT = 64


def main() -> None:
    from eejax.analysis import interleave, median_ratio, table

    config, params = build(_LAYERS.value)
    most = max(_SLOTS.value)
    engines: dict = {}

    def batch(slots: int, active: int) -> SteadyBatch:
        if slots not in engines:
            first = next(iter(engines.values()), None)
            made = make_engine(params, config, slots, _CONTEXT.value)
            engines[slots] = made if first is None else with_layers_of(first, made)
        rng = np.random.default_rng(active)
        prompts = rng.integers(0, config.vocab_size, (active, PROMPT)).tolist()
        return SteadyBatch(engines[slots], prompts, active * _NEW.value)

    pairs = {f"lone {n}": (batch(1, 1), batch(n, 1)) for n in _SLOTS.value}
    pairs |= {f"active {n}": (batch(n, n), batch(most, n)) for n in _ACTIVE.value}
    result: dict = {"lone": {}, "active": {}}
    for name, both in pairs.items():
        launch.say(f"{name}: compiling, and timing {_PAIRS.value} pairs ...")
        seconds = interleave(
            [lambda _, one=one: one.finish() for one in both],
            _PAIRS.value,
            time.perf_counter,
            before=lambda r, both=both: both[r].start(),
        )
        filled, free = (s / np.array(b.tokens[1:]) for s, b in zip(seconds, both, strict=True))
        ratio = median_ratio(filled, free)
        kind, n = name.split()
        result[kind][n] = {
            "ratio": ratio.median,
            "interval": [ratio.low, ratio.high],
            "tokens_per_second": [1 / float(np.median(s)) for s in (filled, free)],
        }
        launch.say(json.dumps({name: result[kind][n]}))  # in case a later part fails
    print(table(("", ""), launch.lines(result)))
    if _JSON.value:
        print(json.dumps(result))


def build(layers: int):
    """Return (config, random parameters) of SmolLM2-135M's shape, with exits after each third."""
    import jax

    from eejax.models import params
    from eejax.models.config import ExitConfig, ModelConfig

    config = ModelConfig(
        vocab_size=49_152,
        n_layers=layers,
        d_model=576,
        n_heads=9,
        n_kv_heads=3,
        d_ff=1536,
        mlp_gated=True,
        activation="silu",
        context_length=1024,
        exits=tuple(ExitConfig(boundary=layers * i // 3) for i in (1, 2)),
    )
    return config, params.init(config, jax.random.key(0))


def make_engine(params, config, slots: int, context: int):
    from eejax.inference.engine import EarlyExitEngine

    return EarlyExitEngine.make(params, config, slots=slots, context=context)


if __name__ == "__main__":
    launch.run(main)
