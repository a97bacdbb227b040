"""Engines against their oracle, and the time, bytes, launches and copies of a decoded token.

Part "engines" compares each engine with the post-hoc pass. Part "calls" times tokens with the
kernels and without, in all forms of calls. The other parts time tokens at full depth, and forced
out by each exit, under three settings of CUDA graphs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from eejax.experiments import card_programs
from eejax.experiments.gpu_check import traces
from eejax.experiments.gpu_check.check import (
    METERED,
    StageCheck,
    call_forms,
    copy_rate,
    mean_joules,
    median_seconds,
    on_gpu,
)

TIES = {"float32": 1e-4, "bfloat16": 0.1}
"""Margins of the oracle, of logits or of confidence to threshold, below which rounding decides."""

REPEATS = 5
COMPARED_ROWS = 4
"""Texts for which engines are compared."""


@dataclasses.dataclass(frozen=True)
class DecodeSizes:
    """Models and tokens of the stage.

    Attributes:
      model: the model, with exits after 1/4 and 1/2 of its layers.
      compared: a smaller model, on which engines are compared with their oracle.
      context: tokens of a slot.
      prompt: tokens of a prompt.
      new: generated tokens.
      batches: requests at once.
      width: factor of random weights: with larger weights texts vary, and are seldom nearly tied.
    """

    model: card_programs.ModelSize = card_programs.BILLION
    compared: card_programs.ModelSize = card_programs.MEDIUM
    context: int = 2048
    prompt: int = 512
    new: int = 64
    batches: tuple[int, ...] = (1, 8, 64)
    width: float = 4.0


SMALL = DecodeSizes(card_programs.SMALL, card_programs.SMALL, 192, 24, 8, (1, 2))


def sizes(check: StageCheck) -> DecodeSizes:
    return SMALL if check.small else DecodeSizes()


def run(check: StageCheck) -> None:
    if check.part == "engines":
        for dtype in TIES:
            check.measure(f"engines {dtype}", lambda d=dtype: engines(sizes(check), d))
    elif check.part == "calls":
        calls(check)
    else:
        times(check)


def programs(check: StageCheck) -> Iterator[tuple[str, Callable]]:
    """Yield the decoding loops, and the passes of prompts, in every form that is measured."""
    from eejax.inference.generate import decode_size

    setup = sizes(check)
    if check.part in ("", "engines"):
        yield from _compared_programs(setup)
    if check.part == "engines":
        return
    check.figures["call_forms"] = call_forms()
    config, steps = setup.model.config(setup.context), decode_size(setup.new)
    for batch in setup.batches:
        one = partial(_generation, "", config, batch, setup.prompt, setup.new + 1)
        if check.part != "calls":
            yield from one("recompute", token_options(setup, "recompute"), steps)
        yield from one("full", token_options(setup, "full"), steps)
        if check.part in ("", "calls"):
            for way in call_ways():
                one = partial(_generation, way, config, batch, setup.prompt, setup.new + 1)
                yield from one("full", token_options(setup, "full"), steps)


def _compared_programs(setup: DecodeSizes) -> Iterator[tuple[str, Callable]]:
    from eejax.inference.generate import decode_size

    steps = decode_size(setup.new)
    for dtype in TIES:
        config, way = setup.compared.config(setup.context, dtype=dtype), exactness(dtype)
        one = partial(_generation, way, config, COMPARED_ROWS, compared_prompt(setup), setup.new)
        for engine, options in compared_options().items():
            for name, build in one(engine, options, steps):
                yield f"{name} {dtype}", build
        slots = dict(slots=COMPARED_ROWS, cache=setup.context, options=compared_slot_options())
        build = partial(card_programs.slots, config=config, **slots)
        yield f"slots {dtype}", partial(_within, way, build)


def _generation(
    way: str, config, batch: int, prompt: int, new: int, engine: str, options, steps: int
) -> Iterator[tuple[str, Callable]]:
    """Yield the two programs of a generation of `new` tokens in calls of `steps`."""
    from eejax.inference.generate import program_lengths

    padded, cache = program_lengths(prompt, prompt + new, config.context_length, options)
    one = dict(config=config, batch=batch, options=options, cache=cache, steps=steps)
    for name, width in ((engine, 0), (f"prompts {engine}", padded)):
        build = partial(card_programs.decoding, prompt=width, **one)
        yield f"{name} {batch} {way}".strip(), partial(_within, way, build)


def _within(way: str, build: Callable, card):
    with settings_of(way):
        return build(card)


def call_ways() -> list[str]:
    """Return the ways of `settings_of` in which kernels are left out, or called by other means."""
    return ["reference", *(form for form in call_forms() if form == "legacy")]


def exactness(dtype: str) -> str:
    """Return the way of `settings_of` in which engines of a dtype are compared."""
    return "exact" if dtype == "float32" else ""


def token_options(setup: DecodeSizes, engine: str):
    """Return the options of an engine that is timed.

    No token is forced deeper, as the cap lies above the tokens. Caches of all engines have one
    length.
    """
    from eejax.inference import EngineOptions

    return EngineOptions(engine, cap=setup.new + 8, buckets=(1,))


def compared_options() -> dict[str, Any]:
    """Return the options of the oracle and of the engines that are compared with it, by name."""
    from eejax.inference import EngineOptions

    return {
        "posthoc": EngineOptions("posthoc"),
        "recompute": EngineOptions("recompute", cap=4, buckets=(1,)),
        "speculative": EngineOptions("speculative"),
    }


def compared_slot_options():
    """Return the options of the engine with slots that is compared with the oracle."""
    from eejax.inference.options import EngineOptions

    return EngineOptions(cap=4)


def compared_prompt(setup: DecodeSizes) -> int:
    """Return the tokens of prompts for which engines are compared."""
    return setup.prompt // 4


@contextlib.contextmanager
def settings_of(way: str) -> Iterator[None]:
    """Set how kernels are called, or products are rounded, in programs traced inside."""
    import jax

    from eejax.kernels import call

    ways = {
        "": contextlib.nullcontext,
        "legacy": call.legacy_calls,
        "reference": lambda: call.implementation("reference"),
        "exact": lambda: jax.default_matmul_precision("highest"),
    }
    with ways[way]():
        yield


def positions_read(prompt: int, new: int) -> float:
    """Return the mean positions that attention reads in `new` steps after a prompt."""
    return prompt + (new + 1) / 2


def weights(config, factor: float = 1.0) -> Any:
    """Draw a model's parameters, kept in the dtype that it computes in."""
    import jax

    from eejax.models import params

    def make(key):
        drawn = jax.tree.map(lambda a: factor * a, params.init(config, key))
        return params.for_compute(drawn, config.dtype)

    return jax.jit(make)(jax.random.key(0))


def prompts(config, batch: int, length: int, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, config.vocab_size, (batch, length)).tolist()


def engines(setup: DecodeSizes, dtype: str) -> dict[str, Any]:
    """Compare the texts of engines with those of the post-hoc pass.

    Returns:
      By engine: tokens, differ (those unlike the oracle's or by another exit, up to a text's first
      difference), near_ties and others of them, and the oracle's margins there.

    Raises:
      AssertionError: in float32, where a difference is no near-tie.
    """
    from eejax.inference import Generator

    config, found = setup.compared.config(setup.context, dtype=dtype), {}
    with settings_of(exactness(dtype)):
        params = weights(config, setup.width)
        texts = prompts(config, COMPARED_ROWS, compared_prompt(setup))
        made = {n: Generator.make(params, config, o) for n, o in compared_options().items()}
        oracle = made["posthoc"]
        seen = oracle.generate(texts, setup.new, threshold=0.0, gate="max_probability")
        # With this threshold half of the tokens leave by the first exit.
        threshold = float(np.median(seen.confidences))
        right = oracle.generate(texts, setup.new, threshold=threshold)
        whole = oracle.generate(texts, setup.new)
        others = {
            "recompute": (right, made["recompute"].generate(texts, setup.new, threshold=threshold)),
            "speculative": (whole, made["speculative"].generate(texts, setup.new)),
        }
        for name, (oracle_result, result) in others.items():
            exits = name != "speculative"
            found[name] = differences(
                oracle_result, result.tokens, result.exits if exits else None, TIES[dtype]
            )
        tokens, exits = in_slots(params, config, texts, setup.new, threshold)
        found["slots"] = differences(right, tokens, exits, TIES[dtype])
    early = float((right.exits < config.n_exits).mean())
    found |= dict(threshold=threshold, left_early=early, tie=TIES[dtype])
    wrong = [name for name in ("recompute", "speculative", "slots") if found[name]["others"]]
    if wrong and dtype == "float32":
        raise AssertionError(f"unlike the oracle beyond near-ties: {found}")
    return found


def in_slots(params, config, texts, new: int, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and exits [texts, new] of `recompute` with a slot for each text."""
    from eejax.inference.engine import EarlyExitEngine
    from eejax.inference.policy import ExitPolicy
    from eejax.inference.request import EngineRequest
    from eejax.inference.scheduler import Scheduler

    engine = EarlyExitEngine.make(params, config, compared_slot_options(), slots=len(texts))
    scheduler = Scheduler(engine)
    policy = ExitPolicy.make(config, 1, threshold)
    for i, text in enumerate(texts):
        scheduler.add_request(EngineRequest(str(i), text, new, policy))
    came: list[list] = [[] for _ in texts]
    for id_, tokens, _ in scheduler.run():
        came[int(id_)] += tokens

    def pick(what):
        return np.array([[getattr(t, what) for t in setup] for setup in came])

    return pick("id"), pick("exit")


def differences(oracle, tokens: np.ndarray, exits: np.ndarray | None, tie: float) -> dict[str, Any]:
    """Count the texts that differ from an oracle's, and those for which rounding accounts.

    A text is compared up to its first difference: the rest has another beginning.
    """
    unlike = oracle.tokens != tokens
    if exits is not None:
        unlike |= oracle.exits != exits
    found: dict[str, Any] = dict(tokens=0, near_ties=0, others=0, margins=[])
    for row, margins in zip(unlike, oracle.margins, strict=True):
        found["tokens"] += int(row.argmax() if row.any() else row.size)
        if row.any():
            margin = float(margins[: row.argmax() + 1][-1])
            found["margins"].append(margin)
            found["near_ties" if margin < tie else "others"] += 1
    return found


def times(check: StageCheck) -> None:
    """Time tokens at full depth, and forced out by each exit."""
    setup = sizes(check)
    config = setup.model.config(setup.context)
    params = weights(config)
    copied = check.measure("copy_bytes_per_second", lambda: copy_rate(check)) or float("nan")
    timed = partial(token, check, setup, params)
    for batch in setup.batches:
        found = check.measure(f"full {batch}", partial(timed, batch, copied))
        full = found and found["ms_per_step"]
        for n, boundary in enumerate(setup.model.exits):
            one = partial(timed, batch, copied, exit=n, full=full)
            check.measure(f"exit {boundary} {batch}", one)


def calls(check: StageCheck) -> None:
    """Time tokens at full depth by kernels in all forms of calls, and without kernels."""
    setup = sizes(check)
    params = weights(setup.model.config(setup.context))
    check.figures["call_forms"] = call_forms()
    copied = check.measure("copy_bytes_per_second", lambda: copy_rate(check)) or float("nan")
    timed = partial(token, check, setup, params)
    for batch in setup.batches:
        for way in ("", *call_ways()):
            check.measure(f"full {batch} {way}".strip(), partial(timed, batch, copied, way=way))


def token(
    check: StageCheck,
    setup: DecodeSizes,
    params: Any,
    batch: int,
    copied: float,
    *,
    way: str = "",
    exit: int | None = None,
    full: float | None = None,
) -> dict[str, Any]:
    """Time a decoding step at full depth, or where all tokens leave by one exit.

    Returns:
      ms_per_step; tokens_per_second; floor_bytes: those that a step has to read; allocated_bytes:
      the same with whole caches; share_of_floor: the time of copying `floor_bytes`, over the
      step's; launches and copies of a step, from a trace; joules_per_token where the device counts
      them; and for an exit what `exit_gain` returns.
    """
    from eejax.inference import Generator
    from eejax.inference.generate import program_lengths

    config = setup.model.config(setup.context)
    engine, rules = "full", {}
    if exit is not None:
        engine = "recompute"
        rules = dict(gate="fixed", threshold=0.5, exits=[setup.model.exits[exit]])
    with settings_of(way):
        options = token_options(setup, engine)
        generator = Generator.make(params, config, options)
        texts, under_way = prompts(config, batch, setup.prompt), {}

        def start() -> None:
            stream = generator.stream(texts, setup.new + 1, chunk=setup.new, **rules)
            under_way["first"], under_way["stream"] = next(stream), stream

        def finish() -> None:
            under_way["last"] = next(under_way["stream"])

        repeats = 2 if check.small else REPEATS
        seconds = median_seconds(finish, repeats, before=start)
        joules = mean_joules(finish, start, 0.0 if check.small else METERED)
        start()
        folder = check.out / "traces" / f"{check.name} {engine} {batch} {exit} {way}".strip()
        traced = traces.of_run(folder, finish)
    layers = float(under_way["last"].layers[:, 1:].mean())
    depth = config.n_layers if exit is None else setup.model.exits[exit]
    if layers != depth:
        raise AssertionError(f"{layers} layers ran in place of {depth}")
    read = partial(bytes_read, generator.weights, config)
    positions = positions_read(setup.prompt, setup.new)
    floor = read(depth, batch, positions)
    tokens = setup.prompt + setup.new + 1
    _, allocated = program_lengths(setup.prompt, tokens, setup.context, options)

    def each(value):
        return round(value / setup.new, 3)

    found = dict(
        ms_per_step=1e3 * seconds / setup.new,
        tokens_per_second=batch * setup.new / seconds,
        floor_bytes=floor,
        allocated_bytes=read(depth, batch, allocated),
        share_of_floor=floor / copied / (seconds / setup.new),
        launches_per_step=each(traced["kernels"]),
        copies_per_step={k: each(n) for k, n in traced["copies"].items()},
        busy_ms_per_step=each(traced["busy_ms"]),
        names=traced["names"],
    )
    if joules is not None:
        found["joules_per_token"] = joules / (batch * setup.new)
    if not on_gpu():
        found["threads"] = traced["threads"]
    if full is not None:
        spared = read(config.n_layers, batch, positions) / floor
        found |= exit_gain(full / found["ms_per_step"], spared, config.n_layers / depth)
    return found


def exit_gain(speedup: float, by_bytes: float, by_layers: float) -> dict[str, float]:
    """Compare the speed-up of a step that leaves early with the bytes and layers that it saves.

    Args:
      speedup: time of a step at full depth, over that of the step.
      by_bytes: bytes read at full depth, over those of the step.
      by_layers: layers run at full depth, over those of the step.
    """
    return dict(
        speedup=speedup,
        speedup_by_bytes=by_bytes,
        exit_efficiency=speedup / by_bytes,
        share_of_layer_ratio=speedup / by_layers,
    )


def bytes_read(setup, config, depth: int, batch: int, positions: float) -> float:
    """Return the bytes that a step reads once: layers and caches up to a depth, and the head.

    `positions` is the number of positions of each cache that are read.
    """
    from eejax.common.trees import nbytes

    layers = [layer for segment in setup.segments for layer in segment][:depth]
    size = np.dtype(config.dtype).itemsize
    cache = 2 * depth * batch * positions * config.n_kv_heads * config.head_dim * size
    return float(nbytes(layers) + cache + nbytes(setup.params["embed"]["tokens"]))
