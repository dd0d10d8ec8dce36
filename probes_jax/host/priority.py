"""The part of a report that is kept when the host falls behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from probes_jax.spec.metric import Priority
from probes_jax.spec.online import priority_of
from probes_jax.spec.readings import Readings


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Which columns of one tuple of names are kept; `columns` is None when all are."""

    names: tuple[str, ...]
    columns: np.ndarray | None
    chosen: frozenset[str]


_KEPT: dict[tuple[int, str], tuple[tuple[str, ...], _Kept]] = {}


def _kept(names: tuple[str, ...], rule: str, stays: Callable[[str], bool]) -> _Kept:
    key = (id(names), rule)
    found = _KEPT.get(key)
    if found is None or found[0] is not names:
        columns = [index for index, name in enumerate(names) if stays(name)]
        chosen = tuple(names[index] for index in columns)
        everything = len(columns) == len(names)
        kept = _Kept(chosen, None if everything else np.array(columns, np.intp), frozenset(chosen))
        if len(_KEPT) >= 256:
            _KEPT.clear()
        found = _KEPT[key] = (names, kept)  # holds `names`, so that its id cannot come back as another tuple
    return found[1]


def shed(readings: Readings, keep: Priority) -> Readings:
    """The readings of priority `keep` and above; the same object when nothing goes.

    Args:
        readings: All metrics of a step.
        keep: The lowest priority that stays; `Priority.P0` leaves the alerts.
    """
    return select(readings, f"priority {keep.name}", lambda name: priority_of(name) <= keep)


def select(readings: Readings, rule: str, stays: Callable[[str], bool]) -> Readings:
    """The readings whose names stay; the same object when all do.

    The shorter tuple of names is again one object for all reports of a layout.

    Args:
        readings: All metrics of a step.
        rule: Name of the rule: a layout is looked at once for each.
        stays: Whether a metric stays.
    """
    kept = _kept(readings.names, rule, stays)
    if kept.columns is None:
        return readings
    return dataclasses.replace(
        readings,
        names=kept.names,
        values=readings.values[kept.columns],
        present=readings.present[kept.columns],
        which={name: label for name, label in readings.which.items() if name in kept.chosen},
    )
