"""Optimized HLO as XLA prints it, read as far as costs need it: computations, who runs whom, and how often.

XLA's own cost analysis counts the body of a loop once, does not exist on GPU, and does not tell collectives apart. The
text is the same on every backend.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_BITS = {"pred": 8, "token": 0, "opaque": 0}  # the others say their width: bf16, s32, f8e4m3fn, c64, u4
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OP = re.compile(r"\s*([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation|body)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
_CONSTANT = re.compile(r"constant\((\d+)\)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's shape.

    Attributes:
        size: Bytes, without padding.
        near: It lies in a memory beside the processor (`S(1)` and so on in its layout), not in the main memory.
        text: Type and dimensions.
    """

    size: int
    near: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    op: str
    arrays: tuple[Array, ...]  # of its result; several for a tuple
    operands: tuple[str, ...]
    rest: str  # what follows the operands, and of a constant or a parameter what stands between the parentheses
    root: bool

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that this one runs once (a loop: once each turn)."""
        branches = _BRANCHES.search(self.rest)
        return (*_CALLED.findall(self.rest), *(_NAME.findall(branches[1]) if branches else ()))


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text."""

    name: str
    instructions: Mapping[str, Instruction]

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.rest.split(")")[0]): i for i in self.instructions.values() if i.op == "parameter"}

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.root)


@dataclasses.dataclass(frozen=True)
class Module:
    """One compiled program.

    Attributes:
        computations: By name.
        entry: Name of the one that is run.
    """

    computations: Mapping[str, Computation]
    entry: str

    def walk(self) -> Iterator[tuple[Computation, Instruction, int, bool]]:
        """Every instruction that is run: its computation, itself, how many times, and whether a loop does it.

        The inside of a fusion, of a reduction or of a sort is not walked: it is one instruction to the outside.
        """
        yield from self._walk(self.entry, 1, False)

    def _walk(self, name: str, times: int, looped: bool) -> Iterator[tuple[Computation, Instruction, int, bool]]:
        computation = self.computations[name]
        for instruction in computation.instructions.values():
            yield computation, instruction, times, looped
            if instruction.op not in ("while", "conditional", "call", "async-start"):
                continue
            turns = self.trip_count(computation, instruction) if instruction.op == "while" else 1
            for called in instruction.called:
                if called in self.computations:
                    yield from self._walk(called, times * turns, looped or instruction.op == "while")

    def trip_count(self, computation: Computation, loop: Instruction) -> int:
        """How often the body of a loop runs: as XLA says, or as its condition compares; 1 where neither tells."""
        known = _TRIPS.search(loop.rest)
        if known:
            return int(known[1])
        found = re.search(r"condition=%?([\w.\-]+)", loop.rest)
        condition = self.computations.get(found[1]) if found else None
        if condition is None or "direction=LT" not in condition.root.rest:
            return 1
        limits = [condition.instructions.get(name) for name in condition.root.operands]
        constants = [int(i.rest.split(")")[0]) for i in limits if i is not None and i.op == "constant"]
        return constants[0] if constants else 1

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Instructions of the computations that a fusion or another call is made of, at any depth."""
        for called in instruction.called:
            if called in self.computations:
                for found in self.computations[called].instructions.values():
                    yield found
                    yield from self.inside(found)


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`.

    Raises:
        ValueError: The text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name, instructions = "", "", {}
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name, instructions = head[2], {}
            computations[name] = Computation(name, instructions)
            entry = name if head[1] else entry
        elif name and (found := _instruction(line)):
            instructions[found.name] = found
    if not entry:
        raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction | None:
    start = _LINE.match(line)
    if not start:
        return None
    shape, after = _split_shape(line, start.end())
    op = _OP.match(line, after)
    if not op:
        return None
    end = _closing(line, op.end() - 1)
    between, rest = line[op.end() : end], line[end + 1 :]
    written = op[1] in ("constant", "parameter", "iota")
    return Instruction(
        start[2],
        op[1],
        tuple(map(_array, _ARRAY.finditer(shape))),
        () if written else tuple(_NAME.findall(between)),
        f"{between}){rest}" if written else rest,
        bool(start[1]),
    )


def _split_shape(line: str, start: int) -> tuple[str, int]:
    """The shape that stands at `start`, and where it ends. A tuple's shape is in parentheses and may hold comments."""
    end = _closing(line, start) + 1 if line[start] == "(" else line.find(" ", start)
    return line[start:end], end


def _closing(line: str, start: int) -> int:
    depth = 0
    for match in re.finditer(r"[()]", line[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.start()
    return len(line)


def count_elements(dims: str) -> int:
    """How many elements an array of such dimensions has, as HLO writes them.

    >>> count_elements("8,<=4"), count_elements("")
    (32, 1)
    """
    return math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim.strip())


def _array(found: re.Match[str]) -> Array:
    kind, dims, layout = found[1], found[2], found[3] or ""
    width = re.match(r"[a-z]+(\d+)", kind)
    bits = _BITS.get(kind, int(width[1]) if width else 0)
    near = re.search(r"S\((\d+)\)", layout)
    return Array(-(-count_elements(dims) * bits // 8), near is not None and near[1] != "0", f"{kind}[{dims}]")
