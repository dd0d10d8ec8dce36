"""The rows of a series that are not yet on disk, encoded as they will lie there.

A value takes a float64. Absent is a NaN with a payload of its own (`ABSENT_BITS`), so value and presence can never
disagree; a measured NaN is the ordinary quiet NaN.
"""

from __future__ import annotations

import numpy as np

ABSENT_BITS = 0x7FF800000000AB5E  # a quiet NaN whose payload no arithmetic produces
NO_STEP = -1  # in the step array: this row was not written (yet)

_BLOCK_BYTES = 1 << 20
_MOST_ROWS, _LEAST_ROWS = 1024, 16


def block_rows(columns: int) -> int:
    """Rows of one block: about 1 MiB, a power of two from 16 to 1024.

    A block is what one flush rewrites, so wide reports, which come rarely, get low blocks.

    >>> block_rows(100), block_rows(5200)
    (1024, 16)
    """
    rows = max(_BLOCK_BYTES // (8 * columns), 1)
    return int(np.clip(1 << (rows.bit_length() - 1), _LEAST_ROWS, _MOST_ROWS))


def encode(values: np.ndarray, present: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """One row as it is stored, float64 `[columns]`.

    Values outside `exact` are rounded to the nearest float32, which is what the step measured them in: half of each
    float64 is then zeros, and compresses away. Whole numbers (counts), and what a float32 cannot hold to its full
    relative precision, stay exact.

    Args:
        values: float64 `[columns]`.
        present: bool `[columns]`.
        exact: bool `[columns]`, the columns that keep every bit.
    """
    values = np.asarray(values, np.float64)
    with np.errstate(all="ignore"):
        rounded = values.astype(np.float32).astype(np.float64)
        keep = exact | (values == np.rint(values)) | ~(np.abs(rounded - values) <= np.abs(values) * 2.0**-24)
    row = np.where(keep, values, rounded)
    row[np.isnan(row)] = np.nan
    row.view(np.uint64)[~np.asarray(present, bool)] = ABSENT_BITS
    return row


def decode(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and presence of stored rows; an absent value reads as NaN."""
    stored = np.ascontiguousarray(stored, np.float64)
    present = stored.view(np.uint64) != ABSENT_BITS
    return np.where(present, stored, np.nan), present


def absent(shape: tuple[int, ...]) -> np.ndarray:
    """Stored values that are all absent, float64."""
    return np.full(shape, ABSENT_BITS, np.uint64).view(np.float64)


class Block:
    """The block that is being filled: `rows` rows from row `base` of the series.

    Attributes:
        step: int64 `[rows]`, `NO_STEP` where there is no row yet.
        wall_time: float64 `[rows]`, seconds since the epoch.
        values: float64 `[rows, columns]`, encoded.
        filled: Rows taken.
        saved: Rows that are on disk.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self.rows, self.base = rows, 0
        self.step = np.empty(rows, np.int64)
        self.wall_time = np.empty(rows, np.float64)
        self.values = absent((rows, columns))
        self.filled = self.saved = 0
        self._clear()

    def _clear(self) -> None:
        self.step.fill(NO_STEP)
        self.wall_time.fill(np.nan)
        self.values.view(np.uint64).fill(ABSENT_BITS)
        self.filled = self.saved = 0

    @property
    def full(self) -> bool:
        return self.filled == self.rows

    @property
    def waiting(self) -> int:
        """Rows taken but not saved."""
        return self.filled - self.saved

    def append(self, step: int, wall_time: float, row: np.ndarray) -> None:
        """Takes one encoded row. The block must not be full."""
        self.values[self.filled] = row
        self.wall_time[self.filled] = wall_time
        self.step[self.filled] = step
        self.filled += 1

    def advance(self) -> None:
        """Starts the next block. What was not saved is lost."""
        self.base += self.rows
        self._clear()
