"""The flight record: every P0 value of every step in one small local file that outlives the process.

A dead peer ends a JAX process by abort, without exception, `atexit` or `finally`. So each step goes to the operating
system with one `write(2)` as soon as it is read, and to the disk within one second:

* after `kill -9`, `os._exit` or an abort: everything written is there (what the writer's thread has not reached yet,
  normally the last few milliseconds, is not);
* after a power loss: everything up to the last `fsync`, at most one second before.

Format 1, little-endian. A file is a row of *attempts* (one per process start), each beginning with `MAGIC`, then
frames:

    kind uint8 | length uint16 (65535: a uint32 follows) | payload | CRC-32 uint32 of all before it

    'A'  attempt  JSON: format, process, processes (of the whole job), started (seconds since the epoch)
    'N'  names    JSON: id, names, wide (columns stored as float64, the counts), labelled (columns with a "which")
    'L'  label    uint16 id, UTF-8 text: what a worst-of metric points at
    'S'  step     uint8 names id | uint64 step | float64 wall time | presence bits | float32 values of the present
                  columns that are not wide | float64 values of those that are | uint16 label id per labelled column
                  (0: none)

A torn tail fails its CRC; the reader goes on at the next `MAGIC`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import struct
import time
import zlib
from collections.abc import Callable

import numpy as np

from probes_jax.host.priority import shed
from probes_jax.host.run_folder import is_still_at
from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.metric import Priority
from probes_jax.spec.readings import Readings

FORMAT = 1
MAGIC = b"\x89PJFLY\r\n"
FRAME = struct.Struct("<BH")
LONG = 0xFFFF
CHECK = struct.Struct("<I")
STEP = struct.Struct("<BQd")
_SETS = 255  # sets of names per attempt; then a new attempt header starts afresh
_LABELS = 65535
_WIDE_UNITS = ("count",)  # exact past 2^24


def previous_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Where the older segment of a flight record lies once the first one is full."""
    path = pathlib.Path(path)
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def frame(kind: bytes, payload: bytes) -> bytes:
    """One frame of the file."""
    if len(payload) < LONG:
        body = FRAME.pack(kind[0], len(payload)) + payload
    else:
        body = FRAME.pack(kind[0], LONG) + CHECK.pack(len(payload)) + payload
    return body + CHECK.pack(zlib.crc32(body))


class _NameSet:
    """How the values of one tuple of names are laid out in a step frame."""

    def __init__(self, index: int, names: tuple[str, ...], labelled: tuple[str, ...]) -> None:
        self.index = index
        self.names = names
        self.labelled = labelled
        self.wide = np.array([(REGISTRY.find(n) is not None and REGISTRY[n].unit in _WIDE_UNITS) for n in names], bool)

    def header(self) -> bytes:
        columns = {name: column for column, name in enumerate(self.names)}
        content = {
            "id": self.index,
            "names": list(self.names),
            "wide": np.flatnonzero(self.wide).tolist(),
            "labelled": [columns[name] for name in self.labelled],
        }
        return frame(b"N", json.dumps(content, separators=(",", ":")).encode())

    def step(self, readings: Readings, label_ids: list[int]) -> bytes:
        present, values = readings.present, readings.values
        parts = (
            STEP.pack(self.index, readings.step, np.nan if readings.wall_time is None else readings.wall_time),
            np.packbits(present, bitorder="little").tobytes(),
            values[present & ~self.wide].astype("<f4").tobytes(),
            values[present & self.wide].astype("<f8").tobytes(),
            np.array(label_ids, "<u2").tobytes(),
        )
        return frame(b"S", b"".join(parts))


class FlightRecord:
    """Appends the P0 values of every step to one file. A sink: all calls come from one thread.

    When half of `cap_bytes` is used, the file becomes the *previous* segment, replacing the one before, and a new one
    starts: the newest steps are always there, and both together never exceed the cap.

    Args:
        path: The file; its folder is made. An existing record is continued with a new attempt.
        process: Index of this process, kept in the header.
        processes: How many processes the job has, kept in the header: a reader knows whose record is missing.
        cap_bytes: Most bytes that the two segments may use together; 256 MiB hold about two million steps.
        clock: Seconds since the epoch.

    Attributes:
        discarded_bytes: Bytes of older steps given up to stay under the cap.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        process: int = 0,
        processes: int = 1,
        cap_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if cap_bytes < 4096:
            raise ValueError(f"FlightRecord cap_bytes must be at least 4096, got {cap_bytes}")
        self.path = pathlib.Path(path).absolute()  # also after somebody changes the working directory
        self.discarded_bytes = 0
        self._segment_bytes = cap_bytes // 2
        self._attempt = {"format": FORMAT, "process": process, "processes": processes, "started": clock()}
        self._fd: int | None = None
        self._size = 0
        self._fresh = True  # the attempt's header must be written first
        self._sets: dict[tuple[int, tuple[str, ...]], _NameSet] = {}
        self._labels: dict[str, int] = {}
        self._open()

    def write(self, readings: Readings) -> None:
        """Appends one step.

        Raises:
            OSError: The step is not in the file; what is there stays readable, and the call may be repeated.
        """
        readings = shed(readings, Priority.P0)
        try:
            if self._fd is None:
                self._open()
            data = self._encode(readings)
            if self._size + len(data) > self._segment_bytes and self._size > 0:
                self._rotate()
                data = self._encode(readings)
            self._append(data)
        except BaseException:
            self._drop_file()
            raise

    def flush(self) -> None:
        """Waits until the disk has it.

        Raises:
            OSError: The disk refused, or somebody deleted or moved the file; the next `write` makes a new one.
        """
        if self._fd is None:
            return
        try:
            os.fsync(self._fd)
            if not is_still_at(self.path, self._fd):
                raise FileNotFoundError(
                    f"flight record {self.path} was deleted or moved while it was being written; the next step starts "
                    "a new one there"
                )
        except BaseException:
            self._drop_file()
            raise

    def close(self) -> None:
        """Flushes and closes; a later `write` opens the file again."""
        try:
            self.flush()
        finally:
            self._drop_file()

    def _drop_file(self) -> None:
        """Lets go of the file. A torn frame ends its attempt: the next write begins where a reader looks again."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):
                os.close(fd)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._fd).st_size
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._fresh, self._sets, self._labels = True, {}, {}

    def _rotate(self) -> None:
        self.close()
        older = previous_path(self.path)
        discarded = older.stat().st_size if older.exists() else 0
        os.replace(self.path, older)
        self.discarded_bytes += discarded
        self._open()

    def _encode(self, readings: Readings) -> bytes:
        """The step's frame, after whatever header, names and labels it is the first to need."""
        labelled = tuple(name for name in readings.names if name in readings.which)
        known = self._sets.get((id(readings.names), labelled))
        if len(self._sets) >= _SETS or len(self._labels) + len(labelled) > _LABELS:
            self._start_afresh()
            known = None
        parts = []
        if self._fresh:
            parts += [MAGIC, frame(b"A", json.dumps(self._attempt).encode())]
            self._fresh = False
        if known is None or known.names is not readings.names:
            known = _NameSet(len(self._sets) + 1, readings.names, labelled)
            self._sets[id(readings.names), labelled] = known
            parts.append(known.header())
        ids = []
        for name in labelled:
            label = readings.which[name]
            if label not in self._labels:
                self._labels[label] = len(self._labels) + 1
                parts.append(frame(b"L", struct.pack("<H", self._labels[label]) + label.encode()))
            ids.append(self._labels[label])
        parts.append(known.step(readings, ids))
        return b"".join(parts)

    def _append(self, data: bytes) -> None:
        assert self._fd is not None
        while data:
            done = os.write(self._fd, data)
            self._size += done
            data = data[done:]
