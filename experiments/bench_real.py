"""Lossless decoding of a real model, by kind of prompt, beside full depth and other libraries.

    eejax bench real --tuned=models/smollm2-exits --json

The prompts are those of Spec-Bench (six categories) and HumanEval, read from $EEJAX_DATA, as the
model's chat template puts them if it has one. Each is continued alone, greedily and with a
temperature, by the engine "full" and by "speculative" in several ways, in turns; whole calls are
timed, prompt included. Models of all ways read the same arrays of layers.

Ways: `exit_and_text` is what `eejax.generate(draft_exit=N)` does with --tuned, the tuned model:
its exit drafts, and the text where it repeats itself; `exit` and `text` are one of the two alone;
`untuned` has an exit of the final norm and head instead, without drafts from the text. `default` is
the one that `eejax.generate(engine="speculative")` would take: `exit_and_text` where the exit's
acceptance promises a gain on this device (`calibration.drafting_exit`), else `text`.

Reported: `lossless_speedup`, the mean over categories of seconds of "full" over those of the
default way, both summed over the greedy runs; `lowest_speedup`, the smallest of them;
`tokens_differ`, tokens of any way that are not those of "full". With --peer, which needs `make
bench-env` and a GGUF file, also `full_vs_transformers` and, on a CPU, `full_vs_llama_cpp_f32`,
`_bf16` and `_q8_0`, the same weights in these types. Intervals are 95 % bootstraps over runs.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import flags

from eejax.common.errors import ConfigError
from eejax.experiments import data_sets, launch, llama_cpp, peer_device
from eejax.experiments.conversation import encoder_of
from eejax.experiments.decode_times import program, with_layers_of

_MODEL = flags.DEFINE_string("model", "smollm2", "A model that `eejax.load` takes.")
_TUNED = flags.DEFINE_string("tuned", None, "The same model with tuned exits, as `save` left it.")
_EXIT = flags.DEFINE_integer(
    "draft_exit", None, "Boundary of the exit that drafts; by default the one that promises most."
)
_PROMPTS = flags.DEFINE_integer("prompts", 3, "Prompts of a category.", lower_bound=1)
_CATEGORIES = flags.DEFINE_list("categories", None, "Categories to run; by default all.")
_NEW = flags.DEFINE_integer("new", 96, "Tokens to generate for a prompt.", lower_bound=2)
_RUNS = flags.DEFINE_integer("runs", 2, "Timed runs of a prompt in each way.", lower_bound=1)
_LONGEST = flags.DEFINE_integer("longest", 928, "Most tokens of a prompt.", lower_bound=16)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "Of sampled runs.", lower_bound=0.0)
_PEER = flags.DEFINE_bool("peer", True, "Measure transformers and llama.cpp too.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")

FULL, BOTH, EXIT, TEXT, UNTUNED = "full", "exit_and_text", "exit", "text", "untuned"
TURNS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""Categories of MT-Bench, which Spec-Bench counts as one."""


@dataclasses.dataclass
class CategoryRuns:
    """Seconds and counts of one category at one temperature.

    Attributes:
      seconds: of each way, by run.
      passes: passes through all layers, of each way.
      drafted: drafted tokens of each way, and how many of them were right.
      tokens: tokens that "full" generated.
    """

    seconds: dict[str, list[float]]
    passes: collections.Counter[str]
    drafted: dict[str, np.ndarray]
    tokens: int = 0

    @classmethod
    def of(cls, ways: Sequence[str]) -> CategoryRuns:
        zero = {way: np.zeros(2, np.int64) for way in ways}
        return cls({way: [] for way in ways}, collections.Counter(), zero)

    def add(self, way: str, seconds: float, result: Any) -> None:
        self.seconds[way].append(seconds)
        self.passes[way] += int((np.asarray(result.layers) > 0).sum())
        self.drafted[way] += [int(result.drafted.sum()), int(result.accepted.sum())]
        self.tokens += len(result.ids(0)) if way == FULL else 0

    def summary(self) -> dict[str, Any]:
        """Return speeds relative to "full", with what explains them."""
        from eejax.analysis.pairs import total_ratio

        full = self.seconds[FULL]
        found: dict[str, Any] = {"full_tokens_per_second": self.tokens / sum(full)}
        for way, seconds in self.seconds.items():
            if way == FULL or not seconds:
                continue
            ratio = total_ratio(full, seconds)
            drafted, accepted = map(int, self.drafted[way])
            found[way] = {
                "speedup": ratio.median,
                "interval": [ratio.low, ratio.high],
                "tokens_per_pass": self.tokens / max(self.passes[way], 1),
                "acceptance": accepted / max(drafted, 1),
            }
        return found


def main() -> None:
    import eejax

    cores = len(os.sched_getaffinity(0))
    model = eejax.load(_MODEL.value)
    chosen = prompts(model)
    generators, boundary, default = generators_of(model)
    ends = model.tokenizer.end_ids
    result: dict[str, Any] = {
        "model": _MODEL.value,
        "tuned": _TUNED.value,
        "draft_exit": boundary,
        "default": default,
        "threads": cores,
        "new": _NEW.value,
    }
    if _PEER.value:
        result |= against_peers(generators[FULL], chosen, ends, cores)
        launch.say(json.dumps(result))  # in case a later part fails
    greedy, differ = run(generators, chosen, ends, 0.0)
    result["greedy"] = {name: runs.summary() for name, runs in greedy.items()}
    ways = {way: g for way, g in generators.items() if way in (FULL, default)}
    sampled, others = run(ways, chosen, ends, _TEMPERATURE.value)
    result["sampled"] = {name: runs.summary() for name, runs in sampled.items()}
    speeds = [found[default]["speedup"] for found in result["greedy"].values()]
    result["lossless_speedup"] = float(np.mean(speeds))
    result["lowest_speedup"] = min(speeds)
    differ += others
    result["tokens_differ"] = differ
    for name, value in launch.lines(result):
        print(f"{name:48s} {value}")
    if _JSON.value:
        print(json.dumps(result))


def prompts(model) -> dict[str, list[list[int]]]:
    """Return token ids of the prompts by category.

    Those of a category run the same compiled program, the one that most of its prompts have.
    """
    encode = encoder_of(model)
    longest = min(_LONGEST.value, model.config.context_length - _NEW.value)
    by_program: dict[str, dict[tuple[int, int], list]] = {}
    for category, text in questions():
        ids = encode(text)
        if len(ids) <= longest:
            one = program(model.config, ids, _NEW.value)
            by_program.setdefault(category, {}).setdefault(one, []).append(ids)
    named = _CATEGORIES.value or list(by_program)
    if unknown := [name for name in named if name not in by_program]:
        raise ConfigError(f"--categories = {unknown}: must be of {', '.join(by_program)}.")
    rng = random.Random(0)
    return {
        name: rng.sample(most, min(_PROMPTS.value, len(most)))
        for name in named
        for most in [max(by_program[name].values(), key=len)]
    }


def questions() -> list[tuple[str, str]]:
    """List (category, prompt) of Spec-Bench and HumanEval."""
    found = []
    for name, field in (("spec_bench/question", "turns"), ("humaneval/humaneval", "prompt")):
        for record in data_sets.records(f"{name}.jsonl"):
            category = record.get("category", "humaneval")
            text = record[field]
            turn = text if isinstance(text, str) else text[0]
            found.append(("mt_bench" if category in TURNS else category, turn))
    return found


def generators_of(model) -> tuple[dict[str, Any], int, str]:
    """Return generators by way, whose layers are the same arrays, the exit's boundary, and the way
    that `drafting_generator` chooses."""
    import eejax
    from eejax.calibration import drafting_exit, with_exits
    from eejax.inference import EngineOptions, Generator
    from eejax.interop.api import LOOKUP

    params, config = {**model.params, "exits": {}}, model.config.replace(exits=())
    full = Generator.make(params, config, FULL)

    def make(params, config, **options):
        made = Generator.make(params, config, EngineOptions("speculative", **options))
        return with_layers_of(full, made)

    ways, boundary, default = {FULL: full}, _EXIT.value, TEXT
    if _TUNED.value is not None:
        tuned = eejax.load(_TUNED.value)
        best = drafting_exit(tuned.config) if boundary is None else boundary
        default = TEXT if best is None else BOTH
        boundary = min(tuned.config.exit_boundaries[:-1]) if best is None else best
        # Of one arrays' memory: the tuned model's own layers are equal, and are not kept.
        own = {**params, "exits": tuned.params["exits"]}
        room = dict(draft_exit=boundary)
        ways[BOTH] = make(own, tuned.config, lookup=LOOKUP, **room)
        ways[EXIT] = make(own, tuned.config, **room)
    ways[TEXT] = make(*with_exits(params, config, [0]), draft_exit=0, drafts=0, lookup=LOOKUP)
    boundary = config.n_layers // 8 if boundary is None else boundary
    ways[UNTUNED] = make(*with_exits(params, config, [boundary]), draft_exit=boundary)
    return ways, boundary, default


def run(
    generators, chosen: dict[str, list[list[int]]], ends: Sequence[int], temperature: float
) -> tuple[dict[str, CategoryRuns], int]:
    """Time every prompt in every way: (runs by category, tokens that are not those of "full")."""
    config, differ, compiled = generators[FULL].config, 0, set()
    found = {name: CategoryRuns.of(list(generators)) for name in chosen}
    for name, asked in chosen.items():
        for number, ids in enumerate(asked):
            for i in range(-1, _RUNS.value):
                if i < 0 and program(config, ids, _NEW.value) in compiled:
                    continue
                order = list(generators) if (number + i) % 2 == 0 else list(reversed(generators))
                results = {}
                for way in order:
                    begin = time.perf_counter()
                    result = generators[way].generate(
                        [ids],
                        _NEW.value,
                        stop_token_ids=ends,
                        temperature=temperature,
                        seed=number,
                    )
                    results[way] = time.perf_counter() - begin, result
                if i >= 0:
                    for way, (seconds, result) in results.items():
                        found[name].add(way, seconds, result)
                    want = results[FULL][1].ids(0)
                    differ += sum(unequal(want, r.ids(0)) for _, r in results.values())
            compiled.add(program(config, ids, _NEW.value))
        kind = "greedy" if temperature == 0 else f"temperature {temperature}"
        launch.say(json.dumps({name: found[name].summary(), "kind": kind}))
    return found, differ


def unequal(want: Sequence[int], got: Sequence[int]) -> int:
    """Return the number of tokens that differ, missing ones included."""
    return sum(a != b for a, b in zip(want, got, strict=False)) + abs(len(want) - len(got))


def against_peers(full, chosen, ends: Sequence[int], threads: int) -> dict[str, Any]:
    """Time whole greedy calls of "full", of transformers' `generate` and of llama.cpp.

    They have the same file's weights, which llama.cpp reads in its own types too. Tokens are
    compared up to the first that ends a text.
    """
    from eejax.analysis.pairs import total_ratio
    from eejax.checkpoint.hf.packages import find

    path = find(_MODEL.value) or pathlib.Path(_MODEL.value)
    asked = [ids for prompts in chosen.values() for ids in prompts]
    with tempfile.TemporaryDirectory() as folder:
        peers = peers_of(path, pathlib.Path(folder), threads, max(map(len, asked)) + _NEW.value)
        seconds: dict[str, list[float]] = {name: [] for name in (FULL, *peers)}
        differ, compiled = collections.Counter(), set()
        ways = {FULL: lambda ids, new: full.generate([ids], new).ids(0)} | peers
        for number, ids in enumerate(asked):
            if program(full.config, ids, _NEW.value) not in compiled:
                ways[FULL](ids, _NEW.value)
            compiled.add(program(full.config, ids, _NEW.value))
            got, order = {}, list(ways)[:: -1 if number % 2 else 1]
            for way in order:
                time.sleep(0.3)  # a peer's threads spin a while after their work
                begin = time.perf_counter()
                got[way] = ways[way](ids, _NEW.value)
                seconds[way].append(time.perf_counter() - begin)
            if short := [way for way in ways if len(got[way]) != _NEW.value]:
                raise ConfigError(
                    f"{short[0]}: gave {len(got[short[0]])} tokens where --new = {_NEW.value}."
                )
            # llama.cpp emits no token that ends a text where it is to go on.
            n = next((i for i, t in enumerate(got[FULL]) if t in ends), _NEW.value)
            differ.update({way: unequal(got[way][:n], got[FULL][:n]) for way in peers})
    tokens = len(asked) * _NEW.value
    found: dict[str, Any] = {"full_tokens_per_second": tokens / sum(seconds[FULL])}
    for way in peers:
        ratio = total_ratio(seconds[way], seconds[FULL])
        found[f"full_vs_{way}"] = ratio.median
        found[f"full_vs_{way}_interval"] = [ratio.low, ratio.high]
        found[f"{way}_tokens_per_second"] = tokens / sum(seconds[way])
        found[f"tokens_unlike_{way}"] = differ[way]
    return found | {"peer_device": peer_device.described(peer_device.torch_device())}


def peers_of(
    path: pathlib.Path, folder: pathlib.Path, threads: int, context: int
) -> dict[str, Callable[[list[int], int], list[int]]]:
    """Return greedy generation of the peers by name; llama.cpp's, from PyPI, is for CPUs alone."""
    peers = {"transformers": peer_device.generator_of_gguf(path, threads)}
    if peer_device.torch_device() == "cpu":
        launch.say(f"llama.cpp: {llama_cpp.described()}")
        for kind in llama_cpp.KINDS:
            file, cache = folder / f"{kind}.gguf", "F32" if kind == "F32" else "F16"
            llama_cpp.write_as(path, file, kind)
            peers[f"llama_cpp_{kind.lower()}"] = llama_cpp.generator(file, threads, context, cache)
    return peers


if __name__ == "__main__":
    launch.run(main)
