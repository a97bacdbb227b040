"""Figures of a program that was compiled for a GPU, read out of its text."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eejax.experiments.card_programs import CardProgram, Compiled

ELEMENTS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
"""XLA's names of dtypes."""


def cache_type(config: Any, batch: int, length: int) -> str:
    """Return XLA's type of a layer's keys or values, [batch, length] positions."""
    sizes = batch * config.n_kv_heads, length, config.head_dim
    return f"{ELEMENTS[config.dtype]}[{','.join(map(str, sizes))}]"


def step_trips(most: float, cache: str, leaves: bool) -> Callable:
    """Say how often the loops of a step run: see `branches`.

    A loop of at most one round has the segments above the first exit, which run unless all leave,
    or a chunk of prompts, which does not run. Both carry caches.

    Args:
      most: operations of a round that has no more rows than a step.
      cache: type of a cache's buffer.
      leaves: whether all requests leave by the first exit.

    Returns:
      a function for `hlo_cost.estimate`.
    """
    from eejax.experiments import hlo, hlo_cost

    def trips(loop: hlo.Instruction, body: hlo_cost.Cost) -> int:
        if not hlo.like(loop.type, cache) or hlo.has_known_trips(loop):
            return hlo.trips(loop)
        return int(body.flops <= most and not leaves)

    return trips


def step_flops(config: Any, batch: int) -> float:
    """Return about the maximum operations of a step of `batch` rows, without attention.

    A GPU's products have two rows at least.
    """
    from eejax.train.flops import model_flops_per_token

    return max(batch, 2) * model_flops_per_token(config, 1) / 3


def branches(kind: str, batch: int, cache: str, leaves: bool) -> Callable:
    """Choose the branches of a step where all requests continue with one row, or all leave early.

    A conditional whose first branch has no products takes it where there is nothing to do. One that
    returns caches belongs to a segment, which runs unless all have left; `propagate` then fills its
    caches instead. Any other belongs to an exit's head, which runs until a request has left. Every
    other conditional takes its dearest branch. The first segment of a lone slot has no conditional.

    Args:
      kind: as `CardProgram.kind`.
      batch: rows of a step.
      cache: type of a cache's buffer.
      leaves: whether all requests leave by the first exit.

    Returns:
      a function for `hlo_cost.estimate`.
    """
    from eejax.experiments import hlo, hlo_cost
    from eejax.inference.schedule import IN_PLACE

    gone, begun = [False], [kind == "recompute" and batch == 1]

    def choose(i: hlo.Instruction, costs: list[hlo_cost.Cost]) -> int:
        first, *rest = costs
        if first.flops or not any(c.flops for c in rest):
            return hlo_cost.dearest(i, costs)
        if hlo.like(i.type, cache):
            by_flops = sorted(range(1, len(costs)), key=lambda n: costs[n].flops)
            if kind == "propagate":
                return by_flops[0 if leaves else -1]
            runs, begun[0] = not (leaves and begun[0]), True
            return IN_PLACE if runs else 0
        if gone[0] and leaves:
            return 0
        gone[0] = True
        return 1 + hlo_cost.cheapest(i, rest)

    return choose


def regrouped(shape: Sequence[int]) -> set[tuple[int, ...]]:
    """Return all shapes of an array whose axes are permuted and then merged with neighbours."""
    found = set()
    for order in itertools.permutations(n for n in shape if n > 1):
        for cuts in itertools.product((False, True), repeat=max(len(order) - 1, 0)):
            ends = [n for n, cut in enumerate(cuts, 1) if cut]
            parts = itertools.pairwise([0, *ends, len(order)])
            found.add(tuple(math.prod(order[a:b]) for a, b in parts))
    return found


@functools.cache
def parameter_shapes(config: Any) -> frozenset[tuple[int, ...]]:
    """Return possible shapes of parameters, gradients and moments: stacked, or one layer's."""
    import jax

    from eejax.models import params

    found: set[tuple[int, ...]] = set()
    declared = params.abstract(config)
    for p in jax.tree.leaves(declared, is_leaf=lambda x: isinstance(x, params.Param)):
        found |= regrouped(p.shape)
        if p.axes[0] == "l":
            found |= regrouped(p.shape[1:])
    return frozenset(found)


def are_scores(shape: Sequence[int], length: int, config: Any, one_query: bool = False) -> bool:
    """Return whether an array may hold attention's scores [..., queries, keys].

    Keys are all `length` positions, or a quarter, half or three quarters of them. Before the
    queries are heads, of any number of sequences. Parameters' shapes do not count.

    Args:
      shape: the array's shape.
      length: positions that attention reads.
      config: the model's configuration.
      one_query: whether [..., keys] counts too, for sequences of one query each.
    """
    if len(shape) < (2 if one_query else 3):
        return False
    heads, keys = shape[: -1 if one_query else -2], shape[-1]
    of_attention = keys in {length * n // 4 for n in range(1, 5)}
    of_heads = math.prod(heads) % config.n_kv_heads == 0
    known = tuple(n for n in shape if n > 1) in parameter_shapes(config)
    return of_attention and of_heads and not known


def scores(program: Any, length: int, config: Any, one_query: bool = False) -> int:
    """Return the bytes of the largest float32 array that may be attention's (`are_scores`).

    The statistics of each row's softmax that cuDNN's attention writes do not count.
    """
    from eejax.experiments import hlo

    calls = [i for part in program.computations.values() for i in part if i.op == "custom-call"]
    known = " ".join(i.type for i in calls if (i.target or "").startswith(hlo.ATTENTION))
    return max(
        (
            n
            for type_, n in hlo.temporaries(program).items()
            if type_.startswith("f32")
            and type_ not in known
            and are_scores(hlo.shape(type_), length, config, one_query)
        ),
        default=0,
    )


def weights_written(program: Any, body: str, config: Any) -> int:
    """Return the bytes that a step writes in shapes of MLPs' matrices.

    They are copies: a matrix in another order, or padded to a multiple of 64 columns or rows. Such
    work belongs where a model is loaded, once.
    """
    from eejax.experiments import hlo

    d, f = config.d_model, config.d_ff
    widths = {n * k for n in (f, -(-f // 64) * 64) for k in (1, 2)}  # gate and up may be one
    known = {order for n in widths for order in ((d, n), (n, d))}
    return sum(
        n
        for type_, n in hlo.temporaries(program, [body]).items()
        if tuple(m for m in hlo.shape(type_) if m > 1) in known
    )


def measured(card: Any, one: CardProgram, made: Compiled) -> dict[str, Any]:
    """Read a compiled program.

    Returns:
      figures by name: bytes, numbers of launches, and estimates in ms.
    """
    from eejax.experiments import hlo, hlo_cost

    program = hlo.parse(made.text)
    loops = one.kind not in ("prompts", "training")
    rates = hlo_cost.Rates(card.bandwidth, 0.7 * card.flops)
    found: dict[str, Any] = dict(
        copied_in_conditionals=sum(hlo.copies(program, 2**16).values()),
        copied_in_loops=sum(hlo.copies(program, 2**16, "while").values()),
        temporary=made.memory.temp_size_in_bytes,
        scores=scores(program, made.length, made.config, one_query=loops),
        host_decisions=hlo.on_host(program),
    )
    if one.kind == "training":
        cost = hlo_cost.estimate(program, program.entry, rates)
        return found | dict(
            launches=cost.launches,
            ms=cost.seconds * 1e3,
            mfu=made.flops / cost.seconds / card.flops if made.flops else None,
            largest=max(hlo.temporaries(program).items(), key=lambda kv: kv[1])[0],
        )
    body, cache = program.entry, cache_type(made.config, one.batch, made.length)
    if loops:
        loop, body = next((i, b) for i, b in program.loops() if hlo.like(i.type, cache))
        found["loop"] = loop.name

    def estimate(leaves):
        branch = branches(one.kind, one.batch, cache, leaves)
        trips = step_trips(1.5 * step_flops(made.config, one.batch), cache, leaves)
        return hlo_cost.estimate(program, body, rates, branch, trips)

    cost, floor = estimate(False), made.floor / card.bandwidth
    begins = hlo.first_writes(program, body, cache)
    found |= dict(
        weights_written=weights_written(program, body, made.config),
        launches=cost.launches,
        launches_a_layer=hlo.between(program, body, lambda i: i.name in begins),
        ms=cost.seconds * 1e3,
        floor_bytes=made.floor,
        floor_ms=floor * 1e3,
        share_of_floor=floor / cost.seconds,
    )
    if one.kind in ("recompute", "propagate"):
        least = estimate(True)
        found |= dict(leaving_ms=least.seconds * 1e3, leaving_launches=least.launches)
    return found
