"""EE-LLM's claims about the time and memory of pipelines, by formulas and simulated schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from eejax.experiments.reproduce import ee_llm_formulas
from eejax.experiments.reproduce.catalogue import finding
from eejax.experiments.reproduce.claims import Finding

SCALE = "simulated"
STAGES = 4
DRAWN = 200  # settings at random
STATE_BYTES, LAYER_BYTES, LOGIT_BYTES = 18, 34, 4  # Megatron-LM's, per parameter, state and logit


def findings() -> list[Finding]:
    """Return every finding about schedules."""
    return [*overheads(), *memory(), *formulas(), *filling(), *exits_of_choice()]


def judged(key: str, holds: bool | None, ours: str, why: str, scale: str = SCALE) -> Finding:
    return finding("EE-LLM", key, ours, scale, None if holds is None else bool(holds), why)


def costs_of(stages, exits_on=(), forward: float = 2.0, exit_forward: float = 0.5):
    """Return equal stages with a backward pass twice as long, and exits on the input of some."""
    from eejax.pipeline.simulate import PassTime, stage_costs

    exit_ = PassTime(exit_forward, 2 * exit_forward)
    count = [int(i in exits_on) for i in range(stages)]
    return stage_costs(
        (1,) * stages, count, layer=PassTime(forward, 2 * forward), exit=exit_, final=exit_
    )


def overheads() -> Iterator[Finding]:
    """Judge section 3.2 and Remark A.2."""
    from eejax.experiments.async_1f1b import async_1f1b

    told, right = [], True
    for middle in ((1,), (1, 2)):
        costs = costs_of(STAGES, middle)
        more = {
            m: async_1f1b(costs, m).time - async_1f1b(costs.without_exits, m).time
            for m in (4, 8, 64)
        }
        right &= all(abs(x - len(middle) * 1.5) < 1e-9 for x in more.values())
        told.append(f"k = {len(middle)}: {', '.join(f'{x:g}' for x in more.values())}")
    yield judged(
        "time-overhead",
        right,
        f"with f + b = 1.5, at 4, 8 and 64 microbatches: {'; '.join(told)} (1.5 k)",
        "not explained: the simulated overhead is another",
    )
    costs = costs_of(STAGES, (1, 2))
    base = async_1f1b(costs.without_exits, 16).time
    moved, not_moved = (
        async_1f1b(costs, 16, exits_in_bubbles=one).time - base for one in (True, False)
    )
    yield judged(
        "remark-a2",
        abs(moved - 2 * 1.0) < 1e-9 and abs(not_moved - 2 * 1.5) < 1e-9,
        f"k = 2, f = 0.5, b = 1: {moved:g} with forward passes of the cool-down moved (k b = 2), "
        f"{not_moved:g} without (k (f + b) = 3)",
        "not explained: the simulated overhead is another",
    )


def paper_model(name: str):
    """Return (configuration of the paper, its model)."""
    import importlib

    from eejax.models.config import ModelConfig

    config = importlib.import_module(f"eejax.configs.{name}").get_config()
    return config, ModelConfig.from_dict(config.model.to_dict())


def logits_share(name: str) -> float:
    """Return a microbatch's logits over its activations on a stage, in bytes."""
    _, model = paper_model(name)
    layers = model.n_layers // STAGES
    return LOGIT_BYTES * model.padded_vocab / (LAYER_BYTES * model.d_model * layers)


def model_peaks(name: str, exits: bool, **how) -> np.ndarray:
    """Return the bytes [stages] of a configuration of the paper, with its exits or none."""
    from eejax.experiments.stage_memory import model_sizes, peak_memory

    config, model = paper_model(name)
    model = model if exits else model.replace(exits=())
    rows = 2 if name in ("ee_llm_1b3", "ee_llm_7b") else 1
    tokens = rows * config.data.length
    sizes = model_sizes(
        model,
        [model.n_layers // STAGES] * STAGES,
        layer_kept=LAYER_BYTES * tokens * model.d_model,
        exit_kept=LOGIT_BYTES * tokens * model.padded_vocab,
        state_bytes=STATE_BYTES,
    )
    return peak_memory(sizes, 64, **how)


def memory() -> Iterator[Finding]:
    """Judge section 3.2's memory, and the largest model of section 1."""
    from eejax.experiments.stage_memory import Size, Sizes, peak_memory

    kept = Size(0, 1)
    nothing = (Size(),) * STAGES
    sizes = Sizes(nothing, (Size(), kept, kept, Size()), nothing)
    deferred, not_deferred = (
        peak_memory(sizes, 16, deferred=one)[1:3].tolist() for one in (True, False)
    )
    yield judged(
        "logits-memory",
        deferred == [1, 1] and not_deferred == [3, 2],
        f"logits of {' and '.join(f'{n:g}' for n in deferred)} microbatch on stages 2 and 3 of 4, "
        f"of {' and '.join(f'{n:g}' for n in not_deferred)} if not deferred",
        "not explained: the simulated memory is another",
    )
    grown = {
        name: model_peaks(f"ee_llm_{name}", True).max() / model_peaks(f"ee_llm_{name}", False).max()
        for name in ("1b3", "7b", "13b", "30b")
    }
    logits = [logits_share(f"ee_llm_{name}") for name in grown]
    told = ", ".join(f"{name} {ratio:.3f}" for name, ratio in grown.items())
    yield judged(
        "peak-memory",
        max(logits) < 1 and max(grown.values()) <= 1 + 1e-9,
        f"peak with exits over peak without, 4 stages: {told} (at most 1); logits of a microbatch "
        f"take {min(logits):.2f} to {max(logits):.2f} of a stage's activations",
        "not explained: the fullest stage grows",
    )
    yield judged(
        "largest-model",
        None,
        f"the fullest of 4 stages of the 30B model needs {grown['30b']:.3f} times the memory with "
        "exits at 1/4 and 1/2",
        "no model of this size was run",
    )


def drawn_costs(rng: np.random.Generator):
    """Draw stages, exits and microbatches at random."""
    from eejax.pipeline.simulate import PassTime, stage_costs

    p = int(rng.integers(2, 7))

    def work():
        return PassTime(float(rng.integers(1, 9)), float(rng.integers(1, 9)))

    counts = rng.integers(0, 3, p).tolist()
    costs = stage_costs(
        rng.integers(1, 4, p).tolist(), counts, layer=work(), exit=work(), final=work()
    )
    return costs, int(rng.integers(1, 20))


def formulas() -> Iterator[Finding]:
    """Compare Table 2 with the simulated schedule, over random settings."""
    from eejax.experiments.async_1f1b import async_1f1b
    from eejax.experiments.stage_memory import iteration_time

    rng = np.random.default_rng(0)
    equal = slowest_last = 0
    for _ in range(DRAWN):
        costs, m = drawn_costs(rng)
        p = costs.stages
        line = async_1f1b(costs, m)
        bound = iteration_time(costs, m)
        work = [costs.layers[i].total + costs.entry[i].total for i in range(p)]
        work[-1] += costs.final.total
        if work[-1] == max(work):
            slowest_last += 1
            equal += abs(line.time - bound) < 1e-9
    yield judged(
        "table-2",
        equal == slowest_last > 0,
        f"from these quantities alone the time is exact in {equal} of {slowest_last} settings "
        "whose last stage is the slowest",
        "not explained: the formula misses the simulated time",
    )
    equal = sum(simulated_memory(rng) for _ in range(DRAWN))
    yield judged(
        "eq-4-6",
        equal == DRAWN,
        f"in {equal} of {DRAWN} settings the most bytes at a time, operation by operation of the "
        "simulated schedule, are the formula's on every stage",
        "not explained: the operations hold another number of bytes",
    )


def simulated_memory(rng: np.random.Generator) -> bool:
    """Compare the bytes that operations of drawn schedules hold at most with Eq. 4 to 6."""
    from eejax.experiments.async_1f1b import EXIT_BACKWARD, EXIT_FORWARD, async_1f1b
    from eejax.experiments.stage_memory import Size
    from eejax.pipeline.schedule import BACKWARD, FORWARD
    from eejax.pipeline.simulate import PassTime, stage_costs

    p = int(rng.integers(2, 7))
    m = int(rng.integers(p, 20))  # the formula has no fewer microbatches than stages
    n = rng.integers(0, 3, p).tolist()

    def work():
        return PassTime(*rng.uniform(0.1, 2, 2))

    costs = stage_costs((1,) * p, n, layer=work(), exit=work(), final=work(), embedding=work())
    of = {part: Size(*rng.integers(0, 99, 2).tolist()) for part in ("IN", "BB", "EE", "FE")}

    def last(i):
        return i == p - 1

    layers = [of["BB"].kept + (i == 0) * of["IN"].kept for i in range(p)]
    exits = [n[i] * of["EE"].kept + last(i) * of["FE"].kept for i in range(p)]
    kept = {FORWARD: layers, BACKWARD: layers, EXIT_FORWARD: exits, EXIT_BACKWARD: exits}
    most = np.zeros(p)
    for i in range(p):
        changes = [
            (op.begin, 1, kept[op.kind][i])
            if op.kind in (FORWARD, EXIT_FORWARD)
            else (op.end, -1, kept[op.kind][i])
            for op in async_1f1b(costs, m).ops
            if op.stage == i
        ]
        now = 0
        for _, sign, nbytes in sorted(changes):  # what is freed makes room for what begins
            now += sign * nbytes
            most[i] = max(most[i], now)
        state = of["BB"].state + (i == 0) * of["IN"].state
        most[i] += state + n[i] * of["EE"].state + last(i) * of["FE"].state
    return np.array_equal(most, ee_llm_formulas.stage_memory(p, n, of))


def filling() -> Iterator[Finding]:
    """Judge Appendix C.2 and Figure 12 in our lockstep table."""
    from eejax.experiments.async_1f1b import async_1f1b, max_kept
    from eejax.pipeline.schedule import BACKWARD, FORWARD
    from eejax.pipeline.schedule_fill import filled, filled_to, max_inserted
    from eejax.pipeline.simulate import PassTime, simulate, stage_costs

    def equal(p, ratio):
        return stage_costs((1,) * p, layer=PassTime(1.0, ratio))

    rows, ways_right, stops_right, ways_seen = [], True, True, 0
    for p, ratio in ((4, 1.0), (4, 2.0), (8, 1.0), (8, 2.0), (8, 3.0)):
        found = filled(equal(p, ratio), 4 * p, inner_stages=range(p))
        k = math.floor((p - 1) / (1 / ratio + 1) + 1e-9)
        assert k == max_inserted(p, 1.0, ratio)
        rows.append((p, ratio, k, found.part1, found.part2))
        routes = found.schedule.routes[found.main :]
        late = routes[found.part1 :]
        for i, route in enumerate(late, 1):
            ways_right &= p - route.bottom == math.floor(p - i * (1 / ratio + 1) + 1e-9)
            ways_seen += 1
        sparse = filled(equal(p, ratio), 4 * p, inner_stages=[0])
        tops = sparse.schedule.routes[sparse.main : sparse.main + sparse.part1]
        stops_right &= sparse.part1 > 0 and all(route.top == 0 for route in tops)
    told = "; ".join(
        f"p = {p}, b/f = {ratio:g}: K = {k}, ours {a} and {b}" for p, ratio, k, a, b in rows
    )
    yield judged(
        "inserted",
        all(k == a == b for *_, k, a, b in rows),
        told,
        "not explained: the table takes another number",
    )
    yield judged(
        "backward-stages",
        ways_right and ways_seen > 0,
        f"the number of the formula for all {ways_seen} microbatches inserted above",
        "not explained: a microbatch goes back through another number of stages",
    )
    yield judged(
        "part-1-stops",
        stops_right,
        "with one exit on stage 1 every inserted microbatch ends there",
        "not explained: a microbatch passes its last exit",
    )
    plain = filled(equal(STAGES, 2.0), 16)
    yield judged(
        "without-exits",
        plain.part1 == 0 < plain.part2,
        f"{plain.part2} in part 2, {plain.part1} in part 1, without early exits",
        "not explained: nothing is inserted without early exits",
    )
    less = filled_to(equal(STAGES, 2.0), 16, inner_stages=range(STAGES))
    base = filled(equal(STAGES, 2.0), 16, part1=0, part2=0)
    yield judged(
        "replaced",
        less.time < base.time and less.main + less.inserted == 16,
        f"{less.inserted} of 16 partial: {1 - less.time / base.time:.1%} less time",
        "not explained: partial passes save no time",
    )
    costs = equal(STAGES, 2.0)

    def kept(line):
        return max_kept(line, FORWARD, BACKWARD)

    most = {
        part1: kept(
            simulate(
                filled(costs, 16, part1=part1, part2=0, inner_stages=range(STAGES)).schedule, costs
            )
        )
        for part1 in (0, 2)
    }
    yield judged(
        "part-1-memory",
        most[2][0] > most[0][0],
        f"microbatches whose activations a stage holds at most: {most[0].tolist()} without, "
        f"{most[2].tolist()} with 2 in part 1",
        f"Our lockstep table has {most[0][0]} microbatches in flight on the first stage in its "
        f"steady phase, where asynchronous 1F1B has {kept(async_1f1b(costs, 16))[0]}; the "
        "inserted ones have finished by then.",
    )
    counts = [filled(equal(8, r), 32, inner_stages=range(8)).inserted for r in (0.5, 1.0, 2.0, 3.0)]
    yield judged(
        "automatic",
        counts == sorted(counts) and counts[0] < counts[-1],
        f"8 stages: {counts} microbatches at backward over forward times 0.5, 1, 2, 3 (rising)",
        "not explained: the number does not follow the ratio",
    )
    one = filled(equal(STAGES, 2.0), 16, part1=1, part2=1, inner_stages=range(STAGES))
    early, late = one.schedule.routes[one.main :]
    yield judged(
        "figure-12",
        early.bottom == 0 and early.top < STAGES - 1 and late.top == STAGES - 1 and late.bottom > 0,
        f"stages 1 to {early.top + 1} in part 1; all forward and {STAGES - late.bottom} backward "
        "in part 2",
        "not explained: the ways are others",
    )


def exits_of_choice() -> Iterator[Finding]:
    """Judge Appendix A.2's rules of thumb and Remark A.3, for the 7B model.

    They are judged by counted operations.
    """
    plain = {"norm": False}
    two, every = (overhead_7b(plain, at) for at in ((8, 16), range(1, 32)))
    yield judged(
        "rule-few-exits",
        every[0] > 0.1 > 0.01 > two[0],
        f"7B, an exit after each layer: {every[0]:+.1%} of an iteration (over 10 %) and "
        f"{every[1]:+.0%} of a pass; two exits: {two[0]:+.2%} (below 1 %) and {two[1]:+.0%}. What "
        "more exits gain is not measured",
        "not explained: exits after each layer cost little more than two",
        f"{SCALE}, {STAGES} stages, 64 microbatches",
    )
    places = {"on one stage": (10, 12), "on the first stage": (4,), "on the last stage": (28,)}
    reused = {"on one stage": "shared", "on the first stage": "tied", "on the last stage": "shared"}
    gb = {
        place: [states_7b(at, head) for head in ("own", reused[place])]
        for place, at in places.items()
    }
    yield judged(
        "rule-same-matrix",
        all(own.sum() > one.sum() and (own >= one).all() for own, one in gb.values()),
        "7B, GB of parameters and their state that are saved by using a matrix that is there: "
        + ", ".join(f"{place} {(own - one).max():.1f}" for place, (own, one) in gb.items()),
        "not explained: a stage holds no less",
        "counted parameters",
    )
    kinds = {"head alone": plain, "with norm": {}, "with MLP": {"mlp": True}}
    kinds["with a layer"] = {"block": True}
    more = [overhead_7b(kind, (8, 16))[1] for kind in kinds.values()]
    many = [overhead_7b(plain, tuple(range(8, 8 + n)))[0] for n in (1, 2, 4)]
    yield judged(
        "remark-a3",
        more == sorted(more) and more[0] < more[-1] and many == sorted(set(many)),
        "7B, operations of a pass with two exits: "
        + ", ".join(f"{name} {x:+.1%}" for name, x in zip(kinds, more, strict=True))
        + "; an iteration with 1, 2 and 4 exits on the second stage: "
        + ", ".join(f"{x:+.1%}" for x in many)
        + " (rising)",
        "not explained: larger exits or more of them cost no more",
        f"{SCALE}, {STAGES} stages, 64 microbatches",
    )


def model_7b(exit_: dict, boundaries, head: str = "own"):
    import importlib

    from eejax.models.config import ModelConfig

    values = importlib.import_module("eejax.configs.ee_llm_7b").get_config().model.to_dict()
    exits = [exit_ | {"boundary": n, "head": head} for n in boundaries]
    return ModelConfig.from_dict(values | {"exits": exits, "head": head})


def overhead_7b(exit_: dict, boundaries) -> tuple[float, float]:
    """Return the cost of exits: (share of an iteration's time, share of a pass's operations)."""
    from eejax.experiments.async_1f1b import async_1f1b
    from eejax.pipeline.costs import model_costs

    costs = model_costs(model_7b(exit_, boundaries), (8,) * STAGES, 2, 2048)
    base = costs.without_exits

    def forward(c):
        return sum(w.forward for w in (*c.layers, *c.entry, *c.inner, c.final))

    more = async_1f1b(costs, 64).time / async_1f1b(base, 64).time
    return more - 1, forward(costs) / forward(base) - 1


def states_7b(boundaries, head: str) -> np.ndarray:
    """Return the GB of parameters and their state on each stage."""
    from eejax.experiments.stage_memory import model_sizes, peak_memory

    model = model_7b({"norm": False}, boundaries, head)
    sizes = model_sizes(model, (8,) * STAGES, state_bytes=STATE_BYTES)
    return peak_memory(sizes, 1) / 1e9
