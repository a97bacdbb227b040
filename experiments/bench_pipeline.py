"""Cost of early exits on a pipeline in memory and time, and the error of its simulator.

    eejax bench pipeline --json

There is one configuration, EE-LLM's 1.3B depth and width on four stages (Chen et al., ICML 2024): d
2048, 24 layers, 2048 tokens, minimalistic exits at 1/4 and 1/2 of the depth, that is at the
beginnings of stages 1 and 2; 64 microbatches. Unlike in the paper's Table 1, the vocabulary is
50304, layers are GPT-2's and microbatches have one sequence.

`exit_memory_overhead`: growth of a device's memory (XLA's temporaries, arguments and outputs of the
compiled executor on four fake devices, nothing is run), exits "mixed", remat "none".
`exit_time_overhead`: of the simulated step, with costs of the operations measured here at an eighth
of the width, length and vocabulary, so that heads, layers and scores have the proportions of the
large model. Both are also given for every other policy, and `memory_vs_1f1b`, against EE-LLM's
asynchronous schedule (estimated: parameters with Adam's state, and activations).

Then two real stages, `measured`: pairs of steps with an exit at the beginning of stage 0 and
without; `simulator_error`, the larger of |simulated - measured| / measured time of these two
(simulated: slots of the schedule, the exchange between its steps, and the parts that a step has
once: zeros and sums); and `schedule_overhead`, the executor on one stage over the plain step's
gradients of as many microbatches, less 1.

XLA's CPU backend shares one pool of threads among a process's fake devices, whatever
--xla_cpu_multi_thread_eigen says, so times of fake devices are not those of stages. Each stage is
therefore a process of its own, on a core of its own. The work of one process alone (operations,
with three stages in it of which two are idle; the executor on one stage) is timed in seconds that
it had its core, so that other programs do little harm. Steps of two stages need a quiet machine:
`load` and `core_share`, the part of the time in which a busy process had its core, show whether it
was quiet.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import socket
import time

import numpy as np
from absl import app, flags

_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")
_PAIRS = flags.DEFINE_integer("pairs", 11, "Repetitions of each timing.", lower_bound=2)
_SMOKE = flags.DEFINE_bool("smoke", False, "Tiny shapes, to check that everything runs.")

STAGES, LAYERS, MICROBATCHES = 4, 6, 64  # layers of a stage
EXIT_STAGES = (1, 2)
SCALE, TIMED_MICROBATCHES, MORE = 8, 4, 16
RESAMPLES = 200
POLICIES = tuple((r, e) for r in ("none", "dots", "full") for e in ("mixed", "aligned", "deferred"))
TIMEOUT = 900  # seconds after which processes that wait for each other are ended


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={STAGES}"
    timed, whole = (32, 32) if _SMOKE.value else (SCALE, 1)
    found = timings(timed, _PAIRS.value)
    rows = policies(whole, found["parts"])
    result = {
        "exit_memory_overhead": rows[0]["memory"],
        "exit_time_overhead": rows[0]["time"],
        "exit_time_overhead_interval": np.quantile(
            [time_overhead(p, *POLICIES[0]) for p in found["resampled"]], (0.025, 0.975)
        ).tolist(),
        "simulator_error": max(found["error"].values()),
        "schedule_overhead": found["schedule"][0] - 1,
        "schedule_overhead_interval": [x - 1 for x in found["schedule"][1:]],
        "measured": {
            "exit_time_overhead": found["exit"][0] - 1,
            "exit_time_overhead_interval": [x - 1 for x in found["exit"][1:]],
            "exit_time_overhead_simulated": found["simulated"][True] / found["simulated"][False]
            - 1,
            "exit_memory_overhead": found["bytes"][True] / found["bytes"][False] - 1,
            "seconds": {name(k): v for k, v in found["seconds"].items()},
            "simulated_seconds": {name(k): v for k, v in found["simulated"].items()},
            "error": {name(k): v for k, v in found["error"].items()},
        },
        "policies": rows,
        "parts": found["parts"]._asdict(),
        "once_seconds": found["once"],
        "core_share": found["core_share"],
        "load": found["load"],
        "pairs": _PAIRS.value,
    }
    show(result)
    if _JSON.value:
        print(json.dumps(result))


def name(exits: bool) -> str:
    return "with exits" if exits else "without exits"


def model_config(scale: int, boundaries: tuple[int, ...], stages: int, dtype: str):
    """Return EE-LLM's 1.3B shape with stages of 6 layers.

    All sizes but the heads' width are divided by `scale`.
    """
    from eejax.models.config import ExitConfig, ModelConfig

    d = 2048 // scale
    return ModelConfig(
        vocab_size=50304 // scale,
        n_layers=stages * LAYERS,
        d_model=d,
        n_heads=max(1, d // 128),
        context_length=2048 // scale,
        d_ff=4 * d,
        mlp_gated=False,
        activation="gelu",
        norm="layernorm",
        head="own",
        dtype=dtype,
        exits=tuple(ExitConfig(n, norm=False, head="own") for n in boundaries),
    )


def policies(scale: int, parts) -> list[dict]:
    """Return both overheads of every policy, and its memory against the asynchronous schedule's.

    Times are of operations as measured with remat "none". "full" runs the layers once more; the
    parts that "dots" repeats, which make an exit's share smaller, are not counted.
    """
    from eejax.experiments.stage_memory import memory_vs_1f1b

    layers, rows = (LAYERS,) * STAGES, []
    boundaries = tuple(LAYERS * i for i in EXIT_STAGES)
    compiled = functools.cache(lambda *policy: device_bytes(scale, *policy))
    for remat, exits in POLICIES:
        model = model_config(scale, boundaries, STAGES, "bfloat16")
        ours, theirs = memory_vs_1f1b(
            model, layers, MICROBATCHES, 1, 2048 // scale, remat=remat, exits=exits
        )
        base = compiled(remat, "mixed", ())
        rows.append(
            {
                "remat": remat,
                "exits": exits,
                "memory": compiled(remat, exits, boundaries) / base - 1,
                "time": time_overhead(parts, remat, exits),
                "gib": base / 2**30,
                "memory_vs_1f1b": float(ours.total.max() / theirs.total.max()),
            }
        )
    return rows


def device_bytes(scale: int, remat: str, exits: str, boundaries: tuple[int, ...]) -> int:
    """Return the bytes of the compiled executor on each of four devices, from shapes alone."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from eejax.pipeline import runner
    from eejax.pipeline.layout import StageLayout
    from eejax.pipeline.partition import partition
    from eejax.pipeline.schedule import one_f_one_b
    from eejax.pipeline.stage import Pipeline
    from eejax.sharding import rules
    from eejax.sharding.mesh import MeshConfig, make_mesh

    model = model_config(scale, boundaries, STAGES, "bfloat16")
    layout = StageLayout(partition(model, STAGES))
    pipeline = Pipeline(layout, make_mesh(MeshConfig(pipe=STAGES)), remat=remat)
    table = one_f_one_b(
        STAGES,
        MICROBATCHES,
        exit_stages=layout.partition.input_exit_stages,
        exits=exits,
        recompute=remat == "full",
    )
    struct = functools.partial(jax.ShapeDtypeStruct, (MICROBATCHES, 2048 // scale), jnp.int32)
    tokens = struct(sharding=NamedSharding(pipeline.mesh, PartitionSpec("data")))
    arguments = (
        rules.structs(layout.declarations()[0], pipeline.mesh),
        {},
        jax.ShapeDtypeStruct((len(boundaries) + 1,), jnp.float32),
        None,
        {"tokens": tokens, "labels": tokens},
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    return memory(jax.jit(runner.gradients(pipeline, table)).lower(*arguments).compile())


def memory(compiled) -> int:
    a = compiled.memory_analysis()
    return a.temp_size_in_bytes + a.argument_size_in_bytes + a.output_size_in_bytes


def timings(scale: int, pairs: int) -> dict:
    """Time everything in two processes: each by itself, then both as stages."""
    from eejax.analysis import median_ratio
    from eejax.experiments import slot_costs
    from eejax.pipeline.schedule import one_f_one_b
    from eejax.pipeline.simulate import simulate

    by_itself = on_processes(alone, scale, pairs)
    stages = on_processes(together, scale, pairs)

    def both(what, key):
        return np.concatenate([found[what][key] for found in by_itself])

    slots = {key: both("slots", key) for key in by_itself[0]["slots"]}
    parts = slot_costs.parts_of(slots, LAYERS, MORE, "none")
    rest = max(0.0, float(np.median(slots[None])) - one_microbatch(parts)) / slot_costs.STAGES
    steps = {k: np.maximum(*(found["steps"][k] for found in stages)) for k in stages[0]["steps"]}
    exchange = max(0.0, float(np.median(steps.pop("exchange") - steps[False])) / MORE)
    simulated = {}
    for exits in steps:
        table = one_f_one_b(2, TIMED_MICROBATCHES, exit_stages=(0,) if exits else ())
        costs = parts.costs((LAYERS,) * 2, (int(exits), 0))
        simulated[exits] = simulate(table, costs).time + len(table.steps) * exchange + rest
    seconds = {exits: float(np.median(s)) for exits, s in steps.items()}
    return {
        "parts": parts,
        "resampled": resampled(slots),
        "exit": median_ratio(steps[True], steps[False]),
        "schedule": median_ratio(both("single", "executor"), both("single", "plain")),
        "seconds": seconds,
        "simulated": simulated,
        "error": {k: abs(simulated[k] - t) / t for k, t in seconds.items()},
        "bytes": stages[0]["bytes"],
        "once": {"exchange": exchange, "rest": rest},
        "load": max(found["load"] for found in stages),
        "core_share": min(found["core_share"] for found in by_itself),
    }


def one_microbatch(parts) -> float:
    """Return the time of a microbatch's operations and exchanges on three stages, one by one."""
    from eejax.experiments import slot_costs

    n = slot_costs.STAGES
    costs = parts.costs((LAYERS,) * n, (0, 1, 0))
    ops = sum(costs.of(kind, i) for kind in ("forward", "exits", "backward") for i in range(n))
    return ops + len(slot_costs.slot_tables(1, False)[None].steps) * parts.exchange


def resampled(slots: dict, remat: str = "none") -> list:
    """Return `MicrobatchCosts` of resampled repetitions (bootstrap)."""
    from eejax.experiments import slot_costs

    n = len(slots[None])
    picks = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    return [
        slot_costs.parts_of({k: s[pick] for k, s in slots.items()}, LAYERS, MORE, remat)
        for pick in picks
    ]


def time_overhead(parts, remat: str, exits: str) -> float:
    """Return the overhead in time of the simulated step on four stages."""
    from eejax.pipeline.schedule import one_f_one_b
    from eejax.pipeline.simulate import exit_time_overhead

    entry = [int(i in EXIT_STAGES) for i in range(STAGES)]
    table = functools.partial(one_f_one_b, STAGES, MICROBATCHES, recompute=remat == "full")
    costs = parts.costs((LAYERS,) * STAGES, entry)
    return exit_time_overhead(table(), table(exit_stages=EXIT_STAGES, exits=exits), costs)


def on_processes(work, *arguments) -> list:
    """Return the results of `work((rank, port, *arguments))` in two new processes, [rank].

    Raises the error of the first process that fails; the other, which would wait for it, is ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.imap_unordered(work, [(rank, port, *arguments) for rank in range(2)])
        results = dict(found.next(TIMEOUT) for _ in range(2))
        pool.close()
        pool.join()
    return [results[rank] for rank in range(2)]


def start(rank: int, devices: int) -> None:
    """Bind this process to a core of its own, with fake devices, before JAX starts."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    # XLA makes a thread for each core it sees.
    fake = f"--xla_force_host_platform_device_count={devices}"
    os.environ.update(NPROC="1", XLA_FLAGS=fake, JAX_PLATFORMS="cpu")


def alone(arguments: tuple[int, int, int, int]) -> tuple[int, dict]:
    """Measure the work of a process by itself, from (rank, port, scale, pairs).

    Returns its rank, and the seconds of `slot_tables` and of the executor and the plain step on one
    stage.
    """
    rank, _, scale, pairs = arguments
    start(rank, devices=3)

    from eejax.experiments import slot_costs
    from eejax.sharding.mesh import MeshConfig

    # Three stages share one core, and one of them works at a time: all operations are timed alike.
    model = slot_costs.three_stages(model_config(scale, (0,), 2, "float32"), LAYERS)
    built = slot_costs.pipelined(model, MeshConfig(pipe=slot_costs.STAGES), "none")
    slots = slot_costs.time_slots(*built, 1, 2048 // scale, pairs, MORE, time.process_time)
    seconds, core_share = single(scale, pairs)
    return rank, {"slots": slots, "single": seconds, "core_share": core_share}


def together(arguments: tuple[int, int, int, int]) -> tuple[int, dict]:
    """Time one stage of two, from (rank, port, scale, pairs).

    Returns its rank, the seconds of steps with and without exits and, as "exchange", of one with
    more steps of the table that only exchange.
    """
    rank, port, scale, pairs = arguments
    start(rank, devices=1)
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # so that signals end a process
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)

    from eejax.analysis import interleave
    from eejax.experiments import slot_costs
    from eejax.pipeline.schedule import ScheduleStep, one_f_one_b
    from eejax.sharding.mesh import MeshConfig

    runs, sizes = {}, {}
    for exits in (False, True):
        model = model_config(scale, (0,) if exits else (), 2, "float32")
        built = slot_costs.pipelined(model, MeshConfig(pipe=2), "none")
        run = functools.partial(slot_costs.run_of, *built, rows=1, length=2048 // scale)
        table = one_f_one_b(2, TIMED_MICROBATCHES, exit_stages=(0,) if exits else ())
        runs[exits], compiled = run(table)
        sizes[exits] = memory(compiled)
        if not exits:
            idle = (ScheduleStep(((), ())),) * MORE
            runs["exchange"], _ = run(dataclasses.replace(table, steps=idle + table.steps))
    seconds = interleave(list(runs.values()), pairs, time.perf_counter, slot_costs.barrier)
    return rank, {
        "steps": dict(zip(runs, seconds, strict=True)),
        "bytes": sizes,
        "load": os.getloadavg()[0],
    }


def single(scale: int, pairs: int) -> tuple[dict[str, np.ndarray], float]:
    """Time the executor on one stage and the plain step's gradients, on one device.

    Returns their seconds, and the share of the time in which this process had its core.
    """
    import jax
    import jax.numpy as jnp

    from eejax.analysis import interleave
    from eejax.experiments import slot_costs
    from eejax.losses.objective import CROSS_ENTROPY
    from eejax.pipeline.schedule import one_f_one_b
    from eejax.sharding.mesh import MeshConfig
    from eejax.train import step
    from eejax.train.scope import Scope
    from eejax.train.state import TrainState

    model, length = model_config(scale, (LAYERS // 2,), 1, "float32"), 2048 // scale
    pipeline, parameters = slot_costs.pipelined(
        model, MeshConfig(), "none", jax.local_devices()[:1]
    )
    table = one_f_one_b(1, TIMED_MICROBATCHES)
    executor, _ = slot_costs.run_of(pipeline, parameters, table, 1, length)
    plain = jax.jit(
        step.gradient_sums(
            Scope(model),
            pipeline.mesh,
            microbatches=TIMED_MICROBATCHES,
            remat="none",
            seed=0,
            objective=CROSS_ENTROPY,
            sparse=False,
        )
    )
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(
        step=zero, params=pipeline.stage_layout.from_stages(parameters), opt_state=(), skipped=zero
    )
    batch = slot_costs.batch(pipeline, TIMED_MICROBATCHES, length)
    weights = jnp.ones(model.n_exits + 1)
    runs = [executor, lambda _: jax.block_until_ready(plain(state, weights, None, batch))]
    interleave(runs, 1, time.perf_counter)
    begin, busy = time.perf_counter(), time.process_time()
    seconds = interleave(runs, pairs, time.process_time)
    share = (time.process_time() - busy) / (time.perf_counter() - begin)
    return dict(zip(("executor", "plain"), seconds, strict=True)), share


def show(result: dict) -> None:
    from eejax.analysis import table

    def percent(x):
        return f"{x:.3%}"

    rows = [
        (
            f"{r['remat']}, {r['exits']}",
            percent(r["memory"]),
            percent(r["time"]),
            f"{r['gib']:.2f}",
            f"{r['memory_vs_1f1b']:.2f}",
        )
        for r in result["policies"]
    ]
    header = ("activations, exits", "more memory", "more time", "GiB without", "memory vs 1F1B")
    print(table(header, rows), end="\n\n")
    parts = result["parts"]
    rows = [
        (k, *(f"{1e3 * t:.2f}" for t in parts[k])) for k in ("layer", "exit", "final", "embedding")
    ]
    print(table(("ms of a microbatch", "forward", "backward"), rows), end="\n\n")
    spread = ", ".join(f"{k} {v:.0%}" for k, v in parts["spread"].items())
    print(
        f"exchange between steps {1e3 * parts['exchange']:.2f} ms; quartile distance of each "
        f"operation: {spread}"
    )
    low, high = result["exit_time_overhead_interval"]
    print(f"exit_time_overhead {result['exit_time_overhead']:.3%} [{low:.3%}, {high:.3%}]")
    got = result["measured"]
    low, high = got["exit_time_overhead_interval"]
    print(
        f"two stages, an exit on stage 0: {got['exit_time_overhead']:.2%} [{low:.2%}, {high:.2%}]"
        f" more time ({got['exit_time_overhead_simulated']:.2%} simulated), "
        f"{got['exit_memory_overhead']:.2%} more memory"
    )
    for kind, error in got["error"].items():
        print(
            f"a step {kind}: {got['seconds'][kind]:.3f} s, simulated "
            f"{got['simulated_seconds'][kind]:.3f} s, {error:.1%} off"
        )
    low, high = result["schedule_overhead_interval"]
    print(
        f"the executor on one stage: {result['schedule_overhead']:.2%} [{low:.2%}, {high:.2%}] "
        "over the plain step's gradients"
    )
    if result["load"] > 2.5 or result["core_share"] < 0.9:
        print(
            f"this machine was busy (load {result['load']:.1f}, a process had its core "
            f"{result['core_share']:.0%} of the time): steps of two stages, and simulator_error, "
            "mean nothing"
        )


if __name__ == "__main__":
    app.run(main)
