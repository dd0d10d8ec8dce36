"""The series of an attempt that are being filled: a block of rows each, and the arrays behind it."""

from __future__ import annotations

from collections.abc import Iterator

from probes_jax.host.definitions import columns_entry, columns_key, exact_columns
from probes_jax.host.happenings import counter_columns
from probes_jax.host.series_block import NO_STEP, Block, block_rows
from probes_jax.host.store import SeriesArrays, Store
from probes_jax.spec.readings import Readings
from probes_jax.spec.registry import Registry


class OpenSeries:
    """One series: what one program reports with one list of columns.

    Attributes:
        exact: Columns that keep every bit.
        counters: Columns of the counters that events are made of.
        block: The rows being filled.
        arrays: Where full blocks lie; None until the first was saved.
        last_step: The last step taken.
    """

    def __init__(self, program: str, names: tuple[str, ...], registry: Registry, rows: int | None) -> None:
        self.exact = exact_columns(names, registry)
        self.counters = counter_columns(names)
        self.block = Block(len(names), rows or block_rows(len(names)))
        self.arrays: SeriesArrays | None = None
        self.last_step = NO_STEP
        self._program, self._names, self._registry = program, names, registry
        self._columns = columns_key(names)

    def path(self, attempt: str) -> str:
        """Where its arrays lie."""
        return f"series/{attempt}/{self._program}-{self._columns}"

    def save(self, store: Store, attempt: str) -> None:
        """Writes the block, and before the first one what the series is."""
        if self.arrays is None:
            path = self.path(attempt)
            store.create(f"entries/columns/{self._columns}.json", columns_entry(self._names, self._registry))
            arrays = SeriesArrays.create(store, path, len(self._names), self.block.rows)
            entry = {"program": self._program, "columns": self._columns, "path": path}
            store.write(f"entries/{path}.json", entry)
            self.arrays = arrays
        filled = self.block.filled
        self.arrays.write(self.block)
        self.block.saved = filled

    def start_over(self) -> None:
        """Forgets the arrays, not the rows: the block is saved again, whole, by the next attempt."""
        self.arrays = None
        self.block.base = self.block.saved = 0


class SeriesSet:
    """All open series of an attempt.

    Args:
        registry: What is known of each metric.
        rows: Rows of a block; None: about 1 MiB.
    """

    def __init__(self, registry: Registry, rows: int | None) -> None:
        self._registry, self._rows = registry, rows
        self._series: dict[tuple[str, str], OpenSeries] = {}  # by program and columns
        # By program and id of the names; the names are kept, so that their id cannot come back as another tuple.
        self._recent: dict[tuple[str, int], tuple[tuple[str, ...], OpenSeries]] = {}

    def __iter__(self) -> Iterator[OpenSeries]:
        return iter(self._series.values())

    def find(self, readings: Readings) -> OpenSeries:
        """The series of these columns. By identity first: comparing thousands of names costs more."""
        recent = self._recent.get((readings.program, id(readings.names)))
        if recent is not None:
            return recent[1]
        key = (readings.program, columns_key(readings.names))
        series = self._series.get(key) or OpenSeries(readings.program, readings.names, self._registry, self._rows)
        self._series[key] = series
        if len(self._recent) >= 64:
            self._recent.clear()
        self._recent[readings.program, id(readings.names)] = (readings.names, series)
        return series
