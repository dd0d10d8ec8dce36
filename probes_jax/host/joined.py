"""The rows of a metric over all series of a run, in order of the steps or of recording."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from probes_jax.host.damage import Damage
from probes_jax.host.series_block import absent
from probes_jax.host.store import SeriesArrays, Store


class Rows(NamedTuple):
    """Rows of some columns.

    Attributes:
        steps: int64 `[T]`.
        wall_times: float64 `[T]`, seconds since the epoch.
        values: float64 `[T, columns]`, as stored: an absent one is a NaN of its own.
    """

    steps: np.ndarray
    wall_times: np.ndarray
    values: np.ndarray


class Source(NamedTuple):
    """One series, and what of it is wanted.

    Attributes:
        path: Where its arrays lie.
        attempt: Number of the attempt.
        end: Steps from this one on are left out; None leaves out none.
        columns: Column of each wanted metric; None where the series does not have it.
    """

    path: str
    attempt: int
    end: int | None
    columns: tuple[int | None, ...]


def join(store: Store, damage: Damage, sources: Iterable[Source], wanted: int, raw: bool) -> Rows:
    """Reads the series and puts their rows in one order.

    Args:
        store: Of the run's folder.
        damage: Where to note what cannot be read.
        sources: The series.
        wanted: Number of wanted metrics.
        raw: True: every row, in order of recording. False: one for each step, the last attempt's, in order of steps.
    """
    parts = [(np.zeros(0, np.int64), np.zeros(0), absent((0, wanted)), np.zeros(0, np.int64))]
    for source in sources:
        there = {place: column for place, column in enumerate(source.columns) if column is not None}
        for steps, times, values in read_rows(store, damage, source.path, list(there.values())):
            full = absent((steps.size, wanted))
            full[:, list(there)] = values
            keep = np.ones(steps.size, bool) if source.end is None else steps < source.end
            parts.append((steps[keep], times[keep], full[keep], np.full(int(keep.sum()), source.attempt)))
    steps, times, values, attempt = (np.concatenate(part) for part in zip(*parts))
    order = np.lexsort((times, attempt)) if raw else np.lexsort((times, attempt, steps))
    if not raw and steps.size:
        order = order[np.append(np.diff(steps[order]) != 0, True)]
    return Rows(steps[order], times[order], values[order])


def read_rows(store: Store, damage: Damage, path: str, columns: list[int]) -> list[Rows]:
    """The rows of a series; where some are damaged, those of every block that is not."""
    try:
        arrays = SeriesArrays(store, path)
    except ValueError as error:  # tensorstore's, for everything
        damage.note(path, "the whole series", error)
        return []
    blocks = arrays.blocks()
    try:
        return [Rows(*arrays.read(columns, 0, blocks[-1][1]))] if blocks else []
    except ValueError as error:
        failure = error
    found = []
    for first, end in blocks:
        try:
            found.append(Rows(*arrays.read(columns, first, end)))
        except ValueError:
            continue
    damage.note(path, f"{len(blocks) - len(found)} of its {len(blocks)} blocks of steps", failure)
    return found
