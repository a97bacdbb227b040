"""Estimate the time of XLA's final program for a GPU from the work of every instruction.

A fusion reads only the slices that it takes of an operand, and writes only what it updates of a
result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable

from eejax.experiments import hlo

SLICES = {"dynamic-slice", "slice", "gather"}
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations whose result may alias an operand, and the index of the operand that they write."""

SAME = {"bitcast", "reshape", "get-tuple-element"}
"""Operations whose result is their operand's memory, or a part of it."""

GEMMS = ("__cublas$gemm", "__cublas$lt$matmul")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Work of a computation.

    Attributes:
      bytes: bytes that it reads and writes in device memory.
      flops: operations of its matrix products, two for each multiplication.
      launches: kernels and copies that it starts.
      decisions: conditionals and loops that it decides.
      seconds: the estimated time at given `Rates`, instruction by instruction.
    """

    bytes: float = 0.0
    flops: float = 0.0
    launches: float = 0.0
    decisions: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Cost(*map(sum, pairs))

    def times(self, n: float) -> Cost:
        return Cost(*(n * value for value in dataclasses.astuple(self)))


@dataclasses.dataclass(frozen=True)
class Rates:
    """A device's rates for an estimate.

    Attributes:
      bandwidth: bytes a second.
      flops: operations a second in matrix products of bfloat16.
      launch: seconds from one kernel to the next.
      decision: seconds that a conditional or a loop's step takes.
    """

    bandwidth: float
    flops: float
    launch: float = 1.5e-6
    decision: float = 3e-6


Branch = Callable[[hlo.Instruction, list[Cost]], int]
"""Chooses a branch of a conditional from the cost of each."""

Trips = Callable[[hlo.Instruction, Cost], int]
"""Says how often a loop runs, from the cost of its body."""


def dearest(_: hlo.Instruction, costs: list[Cost]) -> int:
    """Choose the branch that takes the most time."""
    return max(range(len(costs)), key=lambda n: costs[n].seconds)


def cheapest(_: hlo.Instruction, costs: list[Cost]) -> int:
    """Choose the branch that takes the least time."""
    return min(range(len(costs)), key=lambda n: costs[n].seconds)


def known_trips(loop: hlo.Instruction, _: Cost) -> int:
    """Return how often XLA knows that a loop runs, or else 1."""
    return hlo.trips(loop)


def estimate(
    program: hlo.HloProgram,
    computation: str,
    rates: Rates,
    branch: Branch = dearest,
    trips: Trips = known_trips,
) -> Cost:
    """Estimate the work of one run of a computation, including what it runs.

    Args:
      program: the compiled program.
      computation: its name.
      rates: the device's rates.
      branch: chooses the branch that every conditional takes.
      trips: says how often every loop runs.

    Returns:
      bytes, operations, launches and decisions of one run, and its seconds at those rates.
    """
    cost = functools.partial(_cost, program, rates)
    memo: dict[str, Cost] = {}

    def of(name: str) -> Cost:
        if name not in memo:
            total = Cost()
            types = {i.name: i.type for i in program.computations[name]}
            for i in program.computations[name]:
                if i.op == "conditional":
                    costs = [of(inner) for inner in i.branches]
                    total += costs[branch(i, costs)]
                    total += Cost(decisions=1, seconds=rates.decision)
                elif i.op == "while":
                    own, once = of(i.called[0]), Cost(decisions=1, seconds=rates.decision)
                    n = trips(i, own)
                    total += own.times(n) + once.times(max(n, 1))
                elif i.op == "call":
                    total += of(i.called[0])
                elif i.op not in hlo.FREE:
                    total += cost(types, i)
            memo[name] = total
        return memo[name]

    return of(computation)


def _cost(program: hlo.HloProgram, rates: Rates, types: dict[str, str], i: hlo.Instruction) -> Cost:
    """Return the cost of one instruction; `types` are those of its computation, by name."""
    operands = [types.get(name, "") for name in i.operands]
    if i.op in ("fusion", "fusion-start"):
        moved, flops = _fusion(program, i.called[0])
        for inner in program.computations[i.called[0]]:  # a call, and what cuts out its operands
            moved -= _aliased(inner) if inner.op == "custom-call" else 0
    elif i.op == "custom-call":
        moved = sum(map(hlo.nbytes, operands)) + hlo.nbytes(i.type) - _aliased(i)
        flops = _called_flops(i, operands)
    elif i.op in SLICES:
        moved, flops = 2 * hlo.nbytes(i.type), 0.0
    elif i.op == "dynamic-update-slice":
        moved, flops = 2 * hlo.nbytes(operands[1]), 0.0
    else:
        moved = sum(map(hlo.nbytes, operands)) + hlo.nbytes(i.type)
        flops = _dot(i, operands) if i.op == "dot" else 0.0
    seconds = max(moved / rates.bandwidth, flops / rates.flops) + rates.launch
    return Cost(moved, flops, 1, 0, seconds)


def _aliased(i: hlo.Instruction) -> int:
    """Return the bytes of a call's results that alias an operand, which it changes in part."""
    parts = [f"{element}[{sizes}]" for element, sizes in hlo.ARRAY.findall(i.type)]
    found = re.findall(r"\{(\d+)\}: \(\d+", i.rest.split("metadata")[0])
    return sum(hlo.nbytes(parts[int(n)]) for n in found)


def _fusion(program: hlo.HloProgram, name: str) -> tuple[float, float]:
    """Return (bytes, operations) of a fusion; only the slices that it takes of operands count."""
    body = program.computations[name]
    types = {j.name: j.type for j in body}
    reads, written = _reads(program, name)
    moved = sum(min(n, hlo.nbytes(types[parameter])) for parameter, n in reads.items())
    return moved + written, _products(program, name)


def _reads(program: hlo.HloProgram, name: str) -> tuple[dict[str, float], float]:
    """Return (bytes read of each parameter, bytes written) of a fusion's body.

    The bytes of a parameter that is read whole are infinite.
    """
    body = program.computations[name]
    types = {j.name: j.type for j in body}
    same = {j.name: j.operands[0] for j in body if j.op in SAME}

    def origin(n: str) -> str:
        while n in same:
            n = same[n]
        return n

    reads = {j.name: 0.0 for j in body if j.op == "parameter"}
    root = next(j for j in body if j.root)
    results = {origin(n) for n in (root.operands if root.op == "tuple" else (root.name,))}
    written = float(hlo.nbytes(root.type))
    for j in body:
        if j.op in SAME | {"parameter", "tuple"}:
            continue
        inner, part = {}, None
        if j.op == "fusion":
            inner, part = _reads(program, j.called[0])
        elif j.op in UPDATES:
            part = hlo.nbytes(types.get(j.operands[UPDATES[j.op]], ""))
        for k, (n, own) in enumerate(zip(j.operands, inner or j.operands, strict=False)):
            base = origin(n)
            if base not in reads:
                continue
            if j.op == "fusion":
                reads[base] += inner[own]
            elif j.op in SLICES and k == 0:
                reads[base] += hlo.nbytes(j.type)
            elif j.op in UPDATES and k == 0 and j.name in results:
                continue  # the result aliases it
            else:
                reads[base] = math.inf
        if part is not None and j.name in results:
            written += part - hlo.nbytes(j.type)
    return reads, max(written, 0.0)


def _products(program: hlo.HloProgram, name: str) -> float:
    """Return the operations of a fusion's products."""
    types = {j.name: j.type for j in program.computations[name]}
    total = 0.0
    for j in program.computations[name]:
        if j.op == "dot":
            total += _dot(j, [types.get(n, "") for n in j.operands])
        elif j.op == "fusion":
            total += _products(program, j.called[0])
    return total


def _dot(i: hlo.Instruction, operands: list[str]) -> float:
    """Return the operations of a product."""
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
    if not contracted or not operands[0]:
        return 0.0
    sizes = hlo.shape(operands[0])
    inner = math.prod(sizes[int(n)] for n in contracted[1].split(",") if n)
    return 2.0 * inner * math.prod(hlo.shape(i.type))


def _called_flops(i: hlo.Instruction, operands: list[str]) -> float:
    """Return the operations of a library's product or attention."""
    target = i.target or ""
    if target in GEMMS:
        contracted = re.search(r'"lhs_contracting_dimensions":\["(\d+)"', i.rest)
        sizes = hlo.shape(operands[0])
        inner = sizes[int(contracted[1])] if contracted else sizes[-1]
        return 2.0 * inner * math.prod(hlo.shape(i.type))
    if target.startswith(hlo.ATTENTION):
        # Queries times keys and weights times values, half of it masked; backwards five products.
        b, t, n, h = hlo.shape(operands[0])
        s = hlo.shape(operands[1])[1]
        return 2.0 * b * n * t * s * h * (5 if "Backward" in target else 2) / 2
    return 0.0
