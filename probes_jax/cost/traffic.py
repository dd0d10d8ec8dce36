"""What a compiled program costs: bytes to and from memory, and collectives, loops counted as often as they turn."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from probes_jax.cost.hlo import Array, Computation, Instruction, Module, count_elements

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
# No memory is read or written for these; what a loop, a branch or a call costs is counted inside of it.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "while", "conditional", "call",
    "partition-id", "replica-id", "opt-barrier", "copy-done", "async-start", "async-update", "async-done", "domain",
    "add-dependency",
}  # fmt: skip
_SLICES = ("slice", "dynamic-slice", "gather", "slice-start")
_VIEWS = ("bitcast", "reshape", "get-tuple-element")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    Attributes:
        op: One of `COLLECTIVES`.
        arrays: Type and dimensions of what comes out of it.
        parts: The same before the compiler laid several arrays end to end, to exchange them as one.
        reduction: What it reduces with, `add` or `maximum`; empty where it only moves.
        looped: It runs once for each turn of a loop.
        times: How often it runs in a step.
        source: What it was traced from, as far as the compiler says.
    """

    op: str
    arrays: tuple[str, ...]
    parts: tuple[str, ...]
    reduction: str
    looped: bool
    times: int
    source: str

    @property
    def keys(self) -> tuple[tuple[str, str, str, int, bool], ...]:
        """What is exchanged, part by part, whatever shape the compiler gave it: type and number of elements."""
        split = [part.rstrip("]").partition("[") for part in self.parts]
        return tuple((self.op, self.reduction, kind, count_elements(dims), self.looped) for kind, _, dims in split)


def collectives(module: Module) -> list[Collective]:
    """All of a program; the two halves of an asynchronous one count as one."""
    found = []
    for computation, instruction, times, looped in module.walk():
        here = (instruction, *module.inside(instruction)) if instruction.op == "fusion" else (instruction,)
        for each in here:
            op = each.op.removesuffix("-start")
            if op in COLLECTIVES:
                arrays = tuple(array.text for array in each.arrays)
                reducer = module.computations[each.called[0]].root.op if each.called else ""
                parts = (_joined(module, computation, each) if op == "all-reduce" else ()) or arrays
                source = each.rest.partition('op_name="')[2].partition('"')[0]
                found.append(Collective(op, arrays, parts, reducer, looped, times, source))
    return found


def _joined(module: Module, computation: Computation, instruction: Instruction) -> tuple[str, ...]:
    """What XLA laid end to end for one all-reduce, as it does on GPU; nothing where it did not."""
    names = instruction.operands
    operand = computation.instructions.get(names[0]) if len(names) == 1 else None
    if operand is not None and operand.op == "fusion":
        computation = module.computations[operand.called[0]]
        operand = computation.root
    if operand is None or operand.op != "concatenate":
        return ()
    return tuple(computation.instructions[name].arrays[0].text for name in operand.operands)


def more(mine: Iterable[Collective], plain: Iterable[Collective]) -> tuple[Collective, ...]:
    """What one program exchanges and the other does not; of one that both have, the parts that only the first has.

    The compiler joins exchanges of several arrays, not always the same ones, and flattens some. So those that are the
    same as a whole are paired first, then parts. Two parts of one type, size and reduction are not told apart.
    """
    whole = collections.Counter(found.keys for found in plain)
    left = [found for found in mine if not _take(whole, found.keys)]
    parts = collections.Counter(key for keys in whole.elements() for key in keys)
    out = []
    for found in left:
        new = tuple(part for key, part in zip(found.keys, found.parts, strict=True) if not _take(parts, key))
        if new:
            arrays = found.arrays if new == found.parts else new
            out.append(dataclasses.replace(found, arrays=arrays, parts=new))
    return tuple(out)


def _take(stock: collections.Counter[Any], what: Any) -> bool:
    """Whether there was one; then there is one less."""
    there = stock[what] > 0
    stock[what] -= there
    return there


def bytes_accessed(module: Module) -> int:
    """Bytes that one run moves between the device's main memory and its processors.

    Every instruction reads its operands and writes its result once; a fusion is one instruction. A slice reads what it
    takes, an update in place touches what it changes. What lies in a memory beside the processor costs nothing.
    """
    return sum(times * _bytes(module, computation, i) for computation, i, times, _ in module.walk())


def _bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    if instruction.op in _FREE or instruction.op.endswith("-done"):
        return 0
    operands = [computation.instructions[name] for name in instruction.operands if name in computation.instructions]
    if instruction.op == "fusion":
        body = module.computations[instruction.called[0]]
        read = sum(_read_inside(body, index, operand) for index, operand in enumerate(operands))
        return read + _written_inside(body, body.root, instruction.arrays)
    if instruction.op in _SLICES:
        taken = _all(instruction.arrays[:1])
        return (taken if _far(operands[:1]) else 0) + _main(instruction.arrays[:1])
    if instruction.op == "copy-start":  # result, source and context
        return _main(instruction.arrays[:1]) + sum(_main(operand.arrays) for operand in operands)
    if instruction.op == "dynamic-update-slice":
        return 2 * _all(operands[1].arrays) if _far(operands[:1]) else _main(operands[1].arrays)
    if instruction.op == "scatter":  # in place: indices and updates are read, as many elements read and written
        return sum(_main(i.arrays) for i in operands[1:]) + 2 * _all(operands[-1].arrays)
    return sum(_main(i.arrays) for i in operands) + _main(instruction.arrays)


def _main(arrays: Iterable[Array]) -> int:
    return sum(array.size for array in arrays if not array.near)


def _all(arrays: Iterable[Array]) -> int:
    return sum(array.size for array in arrays)


def _far(operands: list[Instruction]) -> bool:
    return any(not array.near for operand in operands for array in operand.arrays)


def _read_inside(body: Computation, index: int, operand: Instruction) -> int:
    """What a fusion reads of one operand: all of it, or only what its slices take."""
    if index not in body.parameters or not _far([operand]):
        return 0
    whole, taken = _main(operand.arrays), 0
    todo = [body.parameters[index].name]
    while todo:
        name = todo.pop()
        for user in body.users[name]:
            if user.op in _VIEWS:
                todo.append(user.name)
            elif user.op in _SLICES and user.operands[0] == name:
                taken += _all(user.arrays)
            elif user.op == "dynamic-update-slice" and user.operands[0] == name:
                continue  # updated in place
            else:
                return whole
    return min(taken, whole)


def _written_inside(body: Computation, root: Instruction, arrays: tuple[Array, ...]) -> int:
    """What a fusion writes: its results, or of one that is updated in place the update."""
    if root.op == "tuple":
        roots = [body.instructions[name] for name in root.operands]
        if len(roots) == len(arrays):
            return sum(_written_inside(body, each, (array,)) for each, array in zip(roots, arrays, strict=True))
    if not any(not array.near for array in arrays):
        return 0
    while root.op in _VIEWS and root.operands:
        root = body.instructions[root.operands[0]]
    if root.op == "dynamic-update-slice":
        return 2 * _all(body.instructions[root.operands[1]].arrays)  # it reads what it changes, too
    return _main(arrays)
