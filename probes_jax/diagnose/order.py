"""The observed points in the order in which their values were computed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

_INDEX = re.compile(r"\[(\d+)\]")


def forward_order(names: Iterable[str], family: str = "act") -> list[str]:
    """Points that have an absolute maximum, by name, in forward order.

    A report lists the points in forward order already, but gives all layers of a scanned point in a row; in the model
    all points of one layer come before the next layer.

    Args:
        names: Metric names in the order of the report.
        family: `act`, or `grad_act` for what came back.

    Example:
        >>> forward_order(f"act/{p}/abs_max" for p in ("embed", "h[0]/up", "h[1]/up", "h[0]", "h[1]", "head"))
        ['embed', 'h[0]/up', 'h[0]', 'h[1]/up', 'h[1]', 'head']
    """
    pattern = re.compile(rf"{re.escape(family)}/(.+)/abs_max")
    found = [match[1] for name in names if (match := pattern.fullmatch(name))]
    runs = [list(group) for _, group in itertools.groupby(found, key=_template)]
    ordered: list[str] = []
    for (stack, length), group in itertools.groupby(runs, key=_stack):
        entries = list(group)
        if stack is None or length == 1:
            ordered += itertools.chain.from_iterable(entries)
        else:
            ordered += itertools.chain.from_iterable(zip(*entries, strict=True))
    return ordered


def _template(point: str) -> str:
    """A point's name without its first layer index: the same for all rows of one scanned point."""
    return _INDEX.sub("[*]", point, count=1)


def _stack(run: Sequence[str]) -> tuple[str | None, int]:
    """The scanned module that a run of rows belongs to, and how many layers it has."""
    match = _INDEX.search(run[0])
    return (run[0][: match.start()] if match else None), len(run)
