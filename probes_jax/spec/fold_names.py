"""Names that differ by layer numbers only, folded into one: `blocks[0..11]/mlp`."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
_Index = tuple[int, ...]

_NUMBER = re.compile(r"\[(\d+)\]")


class Folded(NamedTuple):
    """Names in one.

    Attributes:
        name: The name, with `[0..11]` or `[0,2]` where numbers were folded.
        key: What all of them have in common.
        count: How many they are.
    """

    name: str
    key: Hashable
    count: int


def fold_names(named: Iterable[tuple[str, Key]]) -> list[Folded]:
    """Folds names of the same form and the same key, in the order in which each form first came.

    Args:
        named: (name, what it must have in common with those that it is folded with).

    Example:
        >>> [folded.name for folded in fold_names([("a[0]/x", 1), ("a[1]/x", 1), ("a[2]/x", 2), ("b", 1)])]
        ['a[0..1]/x', 'a[2]/x', 'b']
    """
    families: dict[tuple[str, Key], set[_Index]] = {}
    for name, key in named:
        index = tuple(int(number) for number in _NUMBER.findall(name))
        families.setdefault((_NUMBER.sub("[]", name), key), set()).add(index)
    return [
        Folded(_fill(form, box), key, _size(box))
        for (form, key), indices in families.items()
        for box in _boxes(indices)
    ]


def _boxes(indices: set[_Index]) -> list[tuple[tuple[int, ...], ...]]:
    """The indices as products of ranges: for each place, the numbers that stand there."""
    if () in indices:
        return [()]
    behind: dict[int, set[_Index]] = {}
    for first, *rest in sorted(indices):
        behind.setdefault(first, set()).add(tuple(rest))
    alike: dict[frozenset[_Index], list[int]] = {}
    for first, rests in behind.items():
        alike.setdefault(frozenset(rests), []).append(first)
    return [(tuple(firsts), *box) for rests, firsts in alike.items() for box in _boxes(set(rests))]


def _size(box: Sequence[Sequence[int]]) -> int:
    size = 1
    for numbers in box:
        size *= len(numbers)
    return size


def _fill(form: str, box: Sequence[Sequence[int]]) -> str:
    for numbers in box:
        form = form.replace("[]", f"[{_stretches(numbers)}]", 1)
    return form


def _stretches(numbers: Sequence[int]) -> str:
    """Rising numbers as stretches.

    >>> _stretches([0, 1, 2, 5, 8, 9])
    '0..2,5,8..9'
    """
    cuts = [at for at in range(1, len(numbers)) if numbers[at] != numbers[at - 1] + 1]
    parts = [numbers[first:end] for first, end in zip([0, *cuts], [*cuts, len(numbers)])]
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}..{part[-1]}" for part in parts)
