"""Read XLA's final program for a GPU: launches, copies, temporaries and decisions of the host.

The text is that of `jax.stages.Compiled.as_text`. It names what runs on the device, so launches and
copies are exact. `hlo_cost` estimates the time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping

BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "s16": 2,
    "u16": 2,
    "f16": 2,
    "bf16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
"""Bytes of an element, by XLA's name of its type."""

FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "copy-done",
    "all-reduce-done",
    "async-done",
    "fusion-done",
    "opt-barrier",
    "add-dependency",
}
"""Instructions that start nothing on the device."""

NESTED = {"conditional", "while", "call"}

ATTENTION = "__cudnn$fmha"
"""The beginning of the targets of cuDNN's attention."""

UNGRAPHED = ("triton_kernel_call",)
"""Targets of custom calls that CUDA graphs do not take: jax-triton's older form of a call."""

SORTED = 512
"""Minimum elements of an array that XLA may sort by CUB, where it compiles for a card that is
present (`sort_rewriter.cc`). CUDA graphs do not take that call, and a compiler without a card does
not show it."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_BRANCHES = re.compile(
    r"branch_computations=\{([^}]*)\}|(?:true_computation|false_computation)=%?([\w.\-]+)"
)
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
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
        """Target of a custom call."""
        found = re.search(r'custom_call_target="([^"]+)"', self.rest)
        return found and found[1]

    @property
    def branches(self) -> tuple[str, ...]:
        """Computations of a conditional, by branch number; the branch of a false predicate is 0."""
        found = _BRANCHES.findall(self.rest)
        if found and found[0][0]:
            return tuple(name.strip().lstrip("%") for name in found[0][0].split(","))
        return tuple(name for _, name in found)[::-1]

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that a loop, call or fusion runs, without a loop's condition."""
        return tuple(_CALLED.findall(self.rest))


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """A compiled program.

    Attributes:
      computations: the instructions of each computation, by its name.
      entry: name of the entry computation.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str

    def nested(self, name: str) -> Iterator[tuple[Instruction, str]]:
        """Yield each (conditional, loop or call, computation it runs) of a computation."""
        for i in self.computations[name]:
            if i.op in NESTED:
                for inner in i.branches if i.op == "conditional" else i.called:
                    yield i, inner

    def loops(self) -> list[tuple[Instruction, str]]:
        """Return each (loop, its body's name) of the entry computation, in order."""
        return [(i, inner) for i, inner in self.nested(self.entry) if i.op == "while"]


def parse(text: str) -> HloProgram:
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
    return HloProgram({k: tuple(v) for k, v in computations.items()}, entry)


def _instruction(name: str, text: str, root: bool) -> Instruction:
    end = _closed(text) if text.startswith("(") else text.find(" ")
    type_, rest = text[:end], text[end:].strip()
    if (found := re.match(r"[\w\-]+", rest)) is None:
        raise ValueError(f"%{name} = {text[:80]}: has no operation")
    op = found[0]
    behind = rest[len(op) :]
    inside = behind[1 : _closed(behind) - 1] if behind.startswith("(") else ""
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, op, type_, operands, inside + " | " + behind[len(inside) :], root)


def _closed(text: str) -> int:
    """Return the index behind the parenthesis that closes the one at 0."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return i + 1
    return len(text)


def shape(type_: str) -> tuple[int, ...]:
    """Return the dimensions of an array's type."""
    if (found := ARRAY.search(type_)) is None:
        raise ValueError(f"{type_}: must be the type of an array")
    return tuple(int(n) for n in found[2].split(",") if n)


def nbytes(type_: str) -> int:
    """Return the bytes of a type; for a tuple, of all its parts."""
    return sum(BYTES.get(array[0], 0) * _elements(array) for array in ARRAY.findall(type_))


def _elements(array: tuple[str, str]) -> int:
    """Return the number of elements of an array, as `ARRAY` finds it."""
    return math.prod(int(n) for n in array[1].split(",") if n)


def launches(program: HloProgram, computation: str) -> int:
    """Count what a computation, and everything that it runs, starts on the device.

    For a conditional, the branch that starts most counts. A loop counts as often as XLA knows that
    it runs, or else once.
    """
    return sum(_started(program, i) for i in program.computations[computation])


def _started(program: HloProgram, i: Instruction) -> int:
    if i.op == "conditional":
        return max(launches(program, inner) for inner in i.branches)
    if i.op in NESTED:
        return trips(i) * launches(program, i.called[0])
    return int(i.op not in FREE)


def trips(i: Instruction) -> int:
    """Return how often an instruction runs the computation that it calls; 1 where it is unknown."""
    known = _TRIPS.search(i.rest)
    return int(known[1]) if known else 1


def has_known_trips(loop: Instruction) -> bool:
    """Return whether XLA knows how often a loop runs."""
    return _TRIPS.search(loop.rest) is not None


def between(program: HloProgram, computation: str, marks: Callable[[Instruction], bool]) -> float:
    """Count the mean launches from one marked instruction to the next.

    Args:
      program: the compiled program.
      computation: the name of the computation whose instructions are marked.
      marks: whether an instruction is marked.

    Returns:
      launches for each mark, including those of the marked instruction and of conditionals and
      loops on the way (`launches`); 0 with fewer than two marks.
    """
    body = program.computations[computation]
    at = [n for n, i in enumerate(body) if marks(i)]
    if len(at) < 2:
        return 0.0
    return sum(_started(program, i) for i in body[at[0] : at[-1]]) / (len(at) - 1)


def like(type_: str, array: str) -> int:
    """Count the arrays of a type, or of a tuple's parts, with an array's element and size."""
    element, size = array.partition("[")[0], nbytes(array)
    own = ARRAY.findall(type_)
    return sum(e == element and nbytes(f"{e}[{sizes}]") == size for e, sizes in own)


def first_writes(
    program: HloProgram, computation: str, buffer: str, together: int = 2
) -> tuple[str, ...]:
    """Find the instructions that first write to a group of buffers, such as a layer's cache.

    An instruction writes to a buffer if it takes one and returns one: a kernel that changes it in
    place, an update of a slice, a scatter. A copy by itself is part of the write that follows it.

    Args:
      program: the compiled program.
      computation: the name of the computation to read; those that it runs are not read.
      buffer: a buffer's type, such as "bf16[16,640,128]". Buffers of the same element and size
        count.
      together: buffers of a group: 2, a layer's keys and values.

    Returns:
      names of the instructions, in order: one for each group.
    """
    body = program.computations[computation]
    by_name = {i.name: i for i in body}
    written: set[str] = set()
    buffers, found = 0, []

    def origin(name: str) -> str:
        i = by_name.get(name)
        if i and i.op == "get-tuple-element" and i.operands[0] in written:
            return i.operands[0]
        return origin(i.operands[0]) if i and i.op in ("bitcast", "reshape", "copy") else name

    for i in body:
        if i.op in FREE | NESTED | {"copy", "reshape"} or not like(i.type, buffer):
            continue
        taken = [n for n in i.operands if n in by_name and like(by_name[n].type, buffer)]
        new = {origin(n) for n in taken} - written
        if new and buffers % together == 0:
            found.append(i.name)
        buffers += len(new)
        if taken:
            written.add(i.name)
    return tuple(found)


def copies(program: HloProgram, min_bytes: int = 0, inside: str = "conditional") -> dict[str, int]:
    """Sum the bytes that each computation copies where it is part of a conditional or a loop.

    Args:
      program: the compiled program.
      min_bytes: bytes of the smallest copy that counts.
      inside: "conditional" or "while".

    Returns:
      bytes of the copies in a computation, which are read and written once each, by its name.
      Computations that copy nothing are left out. Copies in a loop count once.
    """
    found: dict[str, int] = {}

    def visit(name: str, counts: bool) -> None:
        if counts and name not in found:
            sizes = [nbytes(i.type) for i in program.computations[name] if i.op == "copy"]
            found[name] = sum(n for n in sizes if n >= max(min_bytes, 1))
        for i, inner in program.nested(name):
            visit(inner, counts or i.op == inside)

    visit(program.entry, False)
    return {name: n for name, n in found.items() if n}


def temporaries(program: HloProgram, computations: list[str] | None = None) -> dict[str, int]:
    """Sum the arrays that instructions write.

    Args:
      program: the compiled program.
      computations: names of the computations to read, with everything that they run; the entry by
        default.

    Returns:
      bytes of one array by its type, such as "f32[8,64]", for all types that a result has.
    """
    found: dict[str, int] = {}
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        for i in program.computations[name]:
            if i.op not in FREE | NESTED:
                for element, sizes in ARRAY.findall(i.type):
                    one = f"{element}[{sizes}]"
                    found[one] = nbytes(one)
        for _, inner in program.nested(name):
            visit(inner)

    for name in computations or [program.entry]:
        visit(name)
    return found


def on_host(program: HloProgram) -> int:
    """Count the conditionals and loops that the host decides, where loops may be parts of graphs.

    A CUDA graph takes conditionals and loops (`--xla_gpu_enable_command_buffer=+WHILE`) unless they
    contain something that it cannot take. The count assumes that graphs take everything but
    `UNGRAPHED` and long sorts (`SORTED`): only XLA's log says what became a graph.
    """
    memo: dict[str, bool] = {}

    def taken(i: Instruction) -> bool:
        if i.op == "fusion":
            return all(map(taken, program.computations[i.called[0]]))
        long = i.op == "sort" and max(map(_elements, ARRAY.findall(i.type))) >= SORTED
        return i.target not in UNGRAPHED and not long

    def fits(name: str) -> bool:
        if name not in memo:
            own = all(map(taken, program.computations[name]))
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
