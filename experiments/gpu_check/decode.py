"""Engines beside their oracle, and what a decoded token takes: time, bytes, launches, copies.

Part "engines" holds each engine to the post-hoc pass. The other parts time the same programs under
three settings of CUDA graphs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from experiments import card_programs
from experiments.gpu_check import traces
from experiments.gpu_check.check import Check, copy_rate, median_seconds, on_gpu

TIES = {"float32": 1e-4, "bfloat16": 0.1}
"""Margins of the oracle, of logits or of confidence to threshold, below which rounding decides."""

REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is decoded.

    Attributes:
      model: the model, with exits after 1/4 and 1/2 of its layers.
      compared: a smaller model, on which engines are held to their oracle.
      context, prompt, new: tokens.
      batches: requests at once.
      width: a factor of random weights: texts of larger ones vary, and are seldom nearly tied.
    """

    model: card_programs.Size = card_programs.BILLION
    compared: card_programs.Size = card_programs.MEDIUM
    context: int = 2048
    prompt: int = 512
    new: int = 64
    batches: tuple[int, ...] = (1, 8, 64)
    width: float = 4.0


SMALL = Sizes(card_programs.SMALL, card_programs.SMALL, 192, 24, 8, (1, 2))


def sizes(check: Check) -> Sizes:
    return SMALL if check.small else Sizes()


def run(check: Check) -> None:
    if check.part == "engines":
        for dtype in ("float32", "bfloat16"):
            check.measure(f"engines {dtype}", lambda d=dtype: engines(sizes(check), d))
    else:
        times(check)


def programs(check: Check) -> Iterator[tuple[str, Callable]]:
    """Yield the decoding loops, and the pass of prompts, in every form that is measured."""
    own = sizes(check)
    config, cache = own.model.config(own.context), cache_length(own)
    for batch in own.batches:
        one = dict(config=config, batch=batch, cache=cache)
        for engine in ("full", "recompute"):
            yield f"{engine} {batch}", partial(card_programs.decoding, engine=engine, **one)
        yield f"full {batch} older calls", partial(_within, "legacy", engine="full", **one)
        yield f"full {batch} reference", partial(_within, "reference", engine="full", **one)
        more = dict(engine="full", prompt=own.prompt)
        yield f"prompts {batch}", partial(card_programs.decoding, **one, **more)
    for dtype in TIES:
        config = own.compared.config(own.context, dtype=dtype)
        for engine in ("posthoc", "recompute", "speculative"):
            one = dict(engine=engine, config=config, batch=4, cache=cache)
            yield f"{engine} {dtype}", partial(_within, "exact", **one)
        yield f"batched {dtype}", partial(card_programs.slots, config=config, slots=4, cache=cache)


def _within(way: str, card, **what):
    with settings_of(way):
        return card_programs.decoding(card, **what)


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


def cache_length(own: Sizes) -> int:
    """Positions of the caches that a generation allocates, those behind its end included."""
    from eejax.inference.generate import LENGTH_STEP

    return -(-(own.prompt + own.new + 1 + own.new + 8) // LENGTH_STEP) * LENGTH_STEP


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


def engines(own: Sizes, dtype: str) -> dict[str, Any]:
    """Compare the texts of engines with those of the post-hoc pass.

    Returns:
      By engine: tokens, differ (those unlike the oracle's or by another exit, up to a text's first
      difference), near_ties and others of them, and the oracle's margins there.

    Raises:
      AssertionError: in float32, where a difference is no near-tie.
    """
    from eejax.inference import EngineOptions, Generator

    config, found = own.compared.config(own.context, dtype=dtype), {}
    with settings_of("exact" if dtype == "float32" else ""):
        params = weights(config, own.width)
        texts = prompts(config, 4, own.prompt // 4)
        oracle = Generator.make(params, config, "posthoc")
        seen = oracle.generate(texts, own.new, threshold=0.0, gate="max_probability")
        # By such a threshold half of the tokens of the first exit leave there.
        threshold = float(np.median(seen.confidences))
        right = oracle.generate(texts, own.new, threshold=threshold)
        whole = oracle.generate(texts, own.new)
        recompute = Generator.make(params, config, EngineOptions("recompute", cap=4, buckets=(1,)))
        speculative = Generator.make(params, config, "speculative")
        others = {
            "recompute": (right, recompute.generate(texts, own.new, threshold=threshold)),
            "speculative": (whole, speculative.generate(texts, own.new)),
        }
        for name, (oracle_result, result) in others.items():
            exits = name != "speculative"
            found[name] = differences(
                oracle_result, result.tokens, result.exits if exits else None, TIES[dtype]
            )
        tokens, exits = batched(params, config, texts, own.new, threshold)
        found["batched"] = differences(right, tokens, exits, TIES[dtype])
    early = float((right.exits < config.n_exits).mean())
    found |= dict(threshold=threshold, left_early=early, tie=TIES[dtype])
    wrong = [name for name in ("recompute", "speculative", "batched") if found[name]["others"]]
    if wrong and dtype == "float32":
        raise AssertionError(f"unlike the oracle beyond near-ties: {found}")
    return found


def batched(params, config, texts, new: int, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and exits [texts, new] of the engine `batched`."""
    from eejax.inference.batched_slots import BatchedEngine
    from eejax.inference.batched_state import BatchOptions
    from eejax.inference.policy import ExitPolicy
    from eejax.inference.scheduler import Scheduler

    options = BatchOptions(cap=4, drafts=0)
    engine = BatchedEngine.make(params, config, options, slots=len(texts))
    scheduler = Scheduler(engine, config)
    policy = ExitPolicy.make(config, 1, threshold)
    numbers = [scheduler.submit(text, new, policy=policy) for text in texts]
    came: dict[int, list] = {n: [] for n in numbers}
    while not scheduler.idle:
        for number, tokens, _ in scheduler.step():
            came[number] += tokens
    pick = lambda what: np.array([[getattr(t, what) for t in came[n]] for n in numbers])
    return pick("id"), pick("exit")


def differences(oracle, tokens: np.ndarray, exits: np.ndarray | None, tie: float) -> dict[str, Any]:
    """Count the texts that differ from an oracle's, and those for which rounding accounts.

    A text is compared up to its first difference: what follows has another beginning.
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


def times(check: Check) -> None:
    """Time tokens at full depth in all forms of calls, and forced out by each exit."""
    own = sizes(check)
    config = own.model.config(own.context)
    params = weights(config)
    copied = check.measure("copy_bytes_per_second", lambda: copy_rate(check)) or float("nan")
    timed = partial(token, check, own, params)
    for batch in own.batches:
        found = check.measure(f"full {batch}", partial(timed, batch, copied))
        full = found and found["ms_per_step"]
        for n, boundary in enumerate(own.model.exits):
            one = partial(timed, batch, copied, exit=n, full=full)
            check.measure(f"exit {boundary} {batch}", one)
    if check.part != "loops_in_graphs":
        return
    for batch in own.batches:
        for way in ("legacy", "reference"):
            check.measure(f"full {batch} {way}", partial(timed, batch, copied, way=way))


def token(
    check: Check,
    own: Sizes,
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
      ms_per_step; tokens_per_second; share_of_floor: the time of copying as many bytes as a step
      has to read, over its own; traced: launches and copies of a step; and for an exit the
      speed-up, that by layers, and the ratio of both, exit_efficiency.
    """
    from eejax.inference import EngineOptions, Generator

    config = own.model.config(own.context)
    # Nobody goes deeper: the cap lies above the tokens. Caches of all engines have one length.
    options = dict(cap=own.new + 8, buckets=(1,))
    engine, rules = "full", {}
    if exit is not None:
        engine = "recompute"
        rules = dict(gate="fixed", threshold=0.5, exits=[own.model.exits[exit]])
    with settings_of(way):
        generator = Generator.make(params, config, EngineOptions(engine, **options))
        texts, under_way = prompts(config, batch, own.prompt), {}

        def start() -> None:
            stream = generator.stream(texts, own.new + 1, chunk=own.new, **rules)
            under_way["first"], under_way["stream"] = next(stream), stream

        def finish() -> None:
            under_way["last"] = next(under_way["stream"])

        seconds = median_seconds(finish, 2 if check.small else REPEATS, before=start)
        start()
        folder = check.out / "traces" / f"{check.name} {engine} {batch} {exit} {way}".strip()
        traced = traces.of_run(folder, finish)
    layers = float(under_way["last"].layers[:, 1:].mean())
    depth = config.n_layers if exit is None else own.model.exits[exit]
    if layers != depth:
        raise AssertionError(f"{layers} layers ran in place of {depth}")
    floor = bytes_read(generator.weights, config, depth, batch, cache_length(own))
    each = lambda value: round(value / own.new, 3)
    found = dict(
        ms_per_step=1e3 * seconds / own.new,
        tokens_per_second=batch * own.new / seconds,
        floor_bytes=floor,
        share_of_floor=floor / copied / (seconds / own.new),
        launches_per_step=each(traced["kernels"]),
        copies_per_step={k: each(n) for k, n in traced["copies"].items()},
        busy_ms_per_step=each(traced["busy_ms"]),
        names=traced["names"],
    )
    if not on_gpu():
        found["threads"] = traced["threads"]
    if full is not None:
        gain, layered = full / found["ms_per_step"], config.n_layers / depth
        found |= dict(speedup=gain, speedup_by_layers=layered, exit_efficiency=gain / layered)
    return found


def bytes_read(own, config, depth: int, batch: int, length: int) -> float:
    """Return the bytes that a step reads once: layers and caches up to a depth, and the head."""
    from eejax.common.trees import nbytes

    layers = [layer for segment in own.segments for layer in segment][:depth]
    size = np.dtype(config.dtype).itemsize
    cache = 2 * depth * batch * length * config.n_kv_heads * config.head_dim * size
    return float(nbytes(layers) + cache + nbytes(own.params["embed"]["tokens"]))
