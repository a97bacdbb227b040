"""Read XLA's final program for a GPU: launches, copies, temporaries and an estimate of its time.

The text is that of `jax.stages.Compiled.as_text`. It names what runs on the device, so launches and
copies are exact. Seconds are estimates, from the bytes and products of every instruction.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping

BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2,
    "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
"""Bytes of an element, by XLA's name of its type."""

FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id",
    "replica-id", "copy-done", "all-reduce-done", "async-done", "fusion-done", "opt-barrier",
    "add-dependency",
}  # fmt: skip
"""Instructions that start nothing on the device."""

NESTED = {"conditional", "while", "call"}
SLICES = {"dynamic-slice", "slice", "gather"}
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations whose result may take an operand's place, and the number of what they write."""

GEMMS = ("__cublas$gemm", "__cublas$lt$matmul")
ATTENTION = "__cudnn$fmha"
UNGRAPHED = ("triton_kernel_call",)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_BRANCHES = re.compile(
    r"branch_computations=\{([^}]*)\}|(?:true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED = re.compile(r"(?:body|to_apply|calls)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: its name in the program.
      op: XLA's name of the operation, such as "fusion".
      type: the result's type, a tuple's in parentheses.
      operands: names of the operands.
      rest: the text behind the operation's name.
      root: whether it is the computation's result.
    """

    name: str
    op: str
    type: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def target(self) -> str | None:
        """The target of a custom call."""
        found = re.search(r'custom_call_target="([^"]+)"', self.rest)
        return found and found[1]

    @property
    def branches(self) -> tuple[str, ...]:
        """Computations of a conditional, by the number that chooses one; a predicate's false is
        0."""
        found = _BRANCHES.findall(self.rest)
        if found and found[0][0]:
            return tuple(name.strip().lstrip("%") for name in found[0][0].split(","))
        return tuple(name for _, name in found)[::-1]

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that a loop, call or fusion runs; not a loop's condition."""
        return tuple(_CALLED.findall(self.rest))


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: the instructions of each computation, by name, and the entry's name."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str

    def nested(self, name: str) -> Iterator[tuple[Instruction, str]]:
        """Yield each (conditional, loop or call, computation it runs) of a computation."""
        for i in self.computations[name]:
            if i.op in NESTED:
                for inner in i.branches if i.op == "conditional" else i.called:
                    yield i, inner

    def loops(self) -> list[str]:
        """Bodies of the loops in the entry computation, in order."""
        return [inner for i, inner in self.nested(self.entry) if i.op == "while"]


def parse(text: str) -> Program:
    """Parse the text of a compiled program."""
    computations: dict[str, list[Instruction]] = {}
    current, entry = None, None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            current = computations.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(_instruction(found[2], found[3], bool(found[1])))
    if entry is None:
        raise ValueError("the text has no ENTRY computation: give it `Compiled.as_text()`")
    return Program({k: tuple(v) for k, v in computations.items()}, entry)


def _instruction(name: str, text: str, root: bool) -> Instruction:
    end = _closed(text) if text.startswith("(") else text.find(" ")
    type_, rest = text[:end], text[end:].strip()
    op = re.match(r"[\w\-]+", rest)[0]
    behind = rest[len(op) :]
    inside = behind[1 : _closed(behind) - 1] if behind.startswith("(") else ""
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, op, type_, operands, inside + " | " + behind[len(inside) :], root)


def _closed(text: str) -> int:
    """The index behind the parenthesis that closes the one at 0."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return i + 1
    return len(text)


def shape(type_: str) -> tuple[int, ...]:
    """The dimensions of an array's type."""
    return tuple(int(n) for n in _ARRAY.search(type_)[2].split(",") if n)


def nbytes(type_: str) -> int:
    """Bytes of a type; of all parts of a tuple's."""
    return sum(
        BYTES.get(element, 0) * math.prod(int(n) for n in sizes.split(",") if n)
        for element, sizes in _ARRAY.findall(type_)
    )


def launches(program: Program, computation: str) -> int:
    """Count what a computation starts on the device, loops and conditionals aside."""
    return sum(i.op not in FREE | NESTED for i in program.computations[computation])


def between(program: Program, computation: str, marks: Callable[[Instruction], bool]) -> float:
    """Count launches from a marked instruction to the next in the mean; 0 with fewer than two."""
    started = [i for i in program.computations[computation] if i.op not in FREE | NESTED]
    at = [n for n, i in enumerate(started) if marks(i)]
    return (at[-1] - at[0]) / (len(at) - 1) if len(at) > 1 else 0.0


def changes_operand(program: Program, i: Instruction) -> bool:
    """Whether an instruction is a call that changes an operand in its place."""
    if i.op == "fusion":
        return any(changes_operand(program, j) for j in program.computations[i.called[0]])
    return i.op == "custom-call" and _aliased(i) > 0


def copies(program: Program, least: int = 0, inside: str = "conditional") -> dict[str, int]:
    """Find the bytes that each computation copies where it is a part of a conditional or a loop.

    Args:
      program: the compiled program.
      least: bytes of the smallest copy that counts.
      inside: "conditional" or "while".

    Returns:
      bytes by name of the computation, of those that copy anything.
    """
    found: dict[str, int] = {}

    def visit(name: str, counts: bool) -> None:
        if counts and name not in found:
            sizes = [nbytes(i.type) for i in program.computations[name] if i.op == "copy"]
            found[name] = sum(n for n in sizes if n >= max(least, 1))
        for i, inner in program.nested(name):
            visit(inner, counts or i.op == inside)

    visit(program.entry, False)
    return {name: n for name, n in found.items() if n}


def temporaries(program: Program, computations: list[str] | None = None) -> dict[str, int]:
    """Measure what instructions write: bytes by type of their results.

    Args:
      program: the compiled program.
      computations: those to look at, with all that they run; the entry by default.
    """
    found: dict[str, int] = {}
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        for i in program.computations[name]:
            if i.op not in FREE | NESTED:
                for element, sizes in _ARRAY.findall(i.type):
                    one = f"{element}[{sizes}]"
                    found[one] = nbytes(one)
        for _, inner in program.nested(name):
            visit(inner)

    for name in computations or [program.entry]:
        visit(name)
    return found


def on_host(program: Program) -> int:
    """Count the conditionals and loops that the host decides, where loops may be parts of graphs.

    A CUDA graph takes conditionals and loops (`--xla_gpu_enable_command_buffer=+WHILE`) unless they
    hold something that it does not take, such as a call of a kernel in jax-triton's older form.
    """
    memo: dict[str, bool] = {}

    def fits(name: str) -> bool:
        if name not in memo:
            own = all(i.target not in UNGRAPHED for i in program.computations[name])
            memo[name] = own and all(fits(inner) for _, inner in program.nested(name))
        return memo[name]

    def count(name: str) -> int:
        inner: dict[str, list[str]] = {}
        for i, computation in program.nested(name):
            inner.setdefault(i.name, []).append(computation)
        return sum(
            1 + sum(map(count, parts)) for parts in inner.values() if not all(map(fits, parts))
        )

    return count(program.entry)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The work of a computation.

    Attributes:
      bytes: bytes that it reads and writes in device memory.
      flops: operations of its matrix products, two for each multiplication.
      launches: kernels and copies that it starts.
      decisions: conditionals and loops that it decides.
      seconds: the time by a `Rates`, instruction by instruction.
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
    """What an estimate takes a device to do.

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


Branch = Callable[[Instruction, list[Cost]], int]
"""Chooses a branch of a conditional from the cost of each."""


def dearest(_: Instruction, costs: list[Cost]) -> int:
    """Choose the branch that takes longest."""
    return max(range(len(costs)), key=lambda n: costs[n].seconds)


def cheapest(_: Instruction, costs: list[Cost]) -> int:
    """Choose the branch that takes least time."""
    return min(range(len(costs)), key=lambda n: costs[n].seconds)


def estimate(
    program: Program,
    computation: str,
    rates: Rates,
    branch: Branch = dearest,
) -> Cost:
    """Estimate the work of a computation, and of what it runs once.

    A loop counts as often as XLA knows that it runs, otherwise once.

    Args:
      program: the compiled program.
      computation: its name.
      rates: what the device does.
      branch: chooses the branch that every conditional takes.
    """
    cost = functools.partial(_cost, program, rates)
    memo: dict[str, Cost] = {}

    def of(name: str) -> Cost:
        if name not in memo:
            total = Cost()
            for i in program.computations[name]:
                if i.op == "conditional":
                    costs = [of(inner) for inner in i.branches]
                    total += costs[branch(i, costs)]
                    total += Cost(decisions=1, seconds=rates.decision)
                elif i.op == "while":
                    times = re.search(r'known_trip_count":\{"n":"(\d+)"', i.rest)
                    n = int(times[1]) if times else 1
                    once = Cost(decisions=1, seconds=rates.decision)
                    total += (of(i.called[0]) + once).times(n)
                elif i.op == "call":
                    total += of(i.called[0])
                elif i.op not in FREE:
                    total += cost(name, i)
            memo[name] = total
        return memo[name]

    return of(computation)


def _cost(program: Program, rates: Rates, computation: str, i: Instruction) -> Cost:
    """An instruction's own."""
    types = {j.name: j.type for j in program.computations[computation]}
    operands = [types.get(name, "") for name in i.operands]
    if i.op in ("fusion", "fusion-start"):
        moved, flops = _fusion(program, i.called[0])
        for inner in program.computations[i.called[0]]:  # a call, and what cuts out its operands
            moved -= _aliased(inner) if inner.op == "custom-call" else 0
    elif i.op == "custom-call":
        moved = sum(map(nbytes, operands)) + nbytes(i.type) - _aliased(i)
        flops = _called_flops(i, operands)
    elif i.op in SLICES:
        moved, flops = 2 * nbytes(i.type), 0.0
    elif i.op == "dynamic-update-slice":
        moved, flops = 2 * nbytes(operands[1]), 0.0
    else:
        moved = sum(map(nbytes, operands)) + nbytes(i.type)
        flops = _dot(i, operands) if i.op == "dot" else 0.0
    seconds = max(moved / rates.bandwidth, flops / rates.flops) + rates.launch
    return Cost(moved, flops, 1, 0, seconds)


def _aliased(i: Instruction) -> int:
    """Bytes of a call's results that take an operand's place, of which it changes a part."""
    parts = [f"{element}[{sizes}]" for element, sizes in _ARRAY.findall(i.type)]
    found = re.findall(r"\{(\d+)\}: \(\d+", i.rest.split("metadata")[0])
    return sum(nbytes(parts[int(n)]) for n in found)


def _fusion(program: Program, name: str) -> tuple[float, float]:
    """(bytes, operations) of a fusion: of an operand that it slices only what it takes."""
    body = program.computations[name]
    types = {j.name: j.type for j in body}
    reads, written = _reads(program, name)
    moved = sum(min(n, nbytes(types[parameter])) for parameter, n in reads.items())
    return moved + written, _products(program, name)


def _reads(program: Program, name: str) -> tuple[dict[str, float], float]:
    """(bytes read of each parameter, infinite for all of it; bytes written) of a fusion's body."""
    body = program.computations[name]
    types = {j.name: j.type for j in body}
    same = {j.name: j.operands[0] for j in body if j.op in ("bitcast", "reshape") and j.operands}

    def origin(n: str) -> str:
        while n in same:
            n = same[n]
        return n

    reads = {j.name: 0.0 for j in body if j.op == "parameter"}
    root = next(j for j in body if j.root)
    results = {origin(n) for n in (root.operands if root.op == "tuple" else (root.name,))}
    written = float(nbytes(root.type))
    for j in body:
        if j.op in ("bitcast", "reshape", "parameter", "tuple"):
            continue
        inner: dict[str, float] = {}
        if j.op == "fusion":
            inner, _ = _reads(program, j.called[0])
        for k, (n, own) in enumerate(zip(j.operands, inner or j.operands, strict=False)):
            base = origin(n)
            if base not in reads:
                continue
            if j.op == "fusion":
                reads[base] += inner[own]
            elif j.op in SLICES and k == 0:
                reads[base] += nbytes(j.type)
            elif j.op in UPDATES and k == 0 and j.name in results:
                continue  # the result takes its place
            else:
                reads[base] = math.inf
        if j.op in UPDATES and j.name in results:
            written += nbytes(types.get(j.operands[UPDATES[j.op]], "")) - nbytes(j.type)
    return reads, max(written, 0.0)


def _products(program: Program, name: str) -> float:
    """Operations of a fusion's products."""
    types = {j.name: j.type for j in program.computations[name]}
    total = 0.0
    for j in program.computations[name]:
        if j.op == "dot":
            total += _dot(j, [types.get(n, "") for n in j.operands])
        elif j.op == "fusion":
            total += _products(program, j.called[0])
    return total


def _dot(i: Instruction, operands: list[str]) -> float:
    """Operations of a product."""
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
    if not contracted or not operands[0]:
        return 0.0
    sizes = shape(operands[0])
    inner = math.prod(sizes[int(n)] for n in contracted[1].split(",") if n)
    return 2.0 * inner * math.prod(shape(i.type))


def _called_flops(i: Instruction, operands: list[str]) -> float:
    """Operations of a library's product or attention."""
    target = i.target or ""
    if target in GEMMS:
        contracted = re.search(r'"lhs_contracting_dimensions":\["(\d+)"', i.rest)
        sizes = shape(operands[0])
        inner = sizes[int(contracted[1])] if contracted else sizes[-1]
        return 2.0 * inner * math.prod(shape(i.type))
    if target.startswith(ATTENTION):
        # Queries times keys and weights times values, half of it masked; backwards five products.
        b, t, n, h = shape(operands[0])
        s = shape(operands[1])[1]
        return 2.0 * b * n * t * s * h * (5 if "Backward" in target else 2) / 2
    return 0.0
