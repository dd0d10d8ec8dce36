"""Reads a flight record, also one that was torn when its process died."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

from probes_jax.host.flight import CHECK, FORMAT, FRAME, LONG, MAGIC, STEP, previous_path

_T = TypeVar("_T")


class FlightStep(NamedTuple):
    """The P0 values of one step.

    Attributes:
        step: The step.
        values: By name; what was absent is left out.
        which: For a worst-of metric, the label of the one that it is.
        wall_time: When the report reached the host, seconds since the epoch; None where not recorded.
        attempt: 0 for the first process that wrote the file, 1 for the next; a resumed run repeats steps.
    """

    step: int
    values: dict[str, float]
    which: dict[str, str]
    wall_time: float | None
    attempt: int


@dataclasses.dataclass
class _Attempt:
    """What the frames seen so far in one attempt have declared."""

    number: int
    started: float
    sets: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    labels: dict[int, str] = dataclasses.field(default_factory=dict)


class DamagedFrame(Exception):
    """The bytes from here on are no frame."""


def frame_at(data: bytes, offset: int) -> tuple[bytes, bytes, int]:
    """(kind, payload, offset behind it) of the frame at `offset`."""
    try:
        kind, length = FRAME.unpack_from(data, offset)
        start = offset + FRAME.size
        if length == LONG:
            (length,) = CHECK.unpack_from(data, start)
            start += CHECK.size
        end = start + length
        (check,) = CHECK.unpack_from(data, end)
    except struct.error:
        raise DamagedFrame from None
    if zlib.crc32(data[offset:end]) != check:
        raise DamagedFrame
    return bytes((kind,)), data[start:end], end + CHECK.size


def _read_step(payload: bytes, attempt: _Attempt) -> FlightStep:
    index, step, wall_time = STEP.unpack_from(payload)
    if index not in attempt.sets:
        raise DamagedFrame
    names, wide = attempt.sets[index]["names"], np.zeros(len(attempt.sets[index]["names"]), bool)
    wide[attempt.sets[index]["wide"]] = True
    offset = STEP.size
    bits = np.frombuffer(payload, np.uint8, (len(names) + 7) // 8, offset)
    present = np.unpackbits(bits, count=len(names), bitorder="little").astype(bool)
    offset += bits.size
    values = np.full(len(names), np.nan)
    for columns, dtype in ((present & ~wide, "<f4"), (present & wide, "<f8")):
        found = np.frombuffer(payload, dtype, int(columns.sum()), offset)
        values[columns] = found
        offset += found.nbytes
    labelled = attempt.sets[index]["labelled"]
    ids = np.frombuffer(payload, "<u2", len(labelled), offset).tolist()
    return FlightStep(
        step=step,
        values={names[column]: float(values[column]) for column in np.flatnonzero(present)},
        which={names[column]: attempt.labels[label] for column, label in zip(labelled, ids) if label in attempt.labels},
        wall_time=None if math.isnan(wall_time) else wall_time,
        attempt=attempt.number,
    )


def _begin(payload: bytes, last: _Attempt | None, path: pathlib.Path) -> _Attempt:
    header = json.loads(payload)
    if header.get("format") != FORMAT:
        raise ValueError(f"flight record {path} has format {header.get('format')!r}, this version reads {FORMAT}")
    if last is None or header["started"] != last.started:
        return _Attempt(0 if last is None else last.number + 1, header["started"])
    return _Attempt(last.number, last.started)


def _number(payload: bytes, attempt: _Attempt) -> int:
    return STEP.unpack_from(payload)[1]


def _steps(
    data: bytes, path: pathlib.Path, attempt: _Attempt | None, read: Callable[[bytes, _Attempt], _T]
) -> Iterator[_T | _Attempt]:
    """What `read` makes of each step of one segment, and each attempt as it begins."""
    offset = data.find(MAGIC)
    while offset >= 0:
        offset += len(MAGIC)
        try:
            while offset < len(data):
                if data.startswith(MAGIC, offset):
                    break
                kind, payload, offset = frame_at(data, offset)
                if kind == b"A":
                    attempt = _begin(payload, attempt, path)
                    yield attempt
                elif attempt is None:
                    raise DamagedFrame
                elif kind == b"N":
                    names = json.loads(payload)
                    attempt.sets[names["id"]] = names
                elif kind == b"L":
                    attempt.labels[struct.unpack_from("<H", payload)[0]] = payload[2:].decode()
                elif kind == b"S":
                    yield read(payload, attempt)
        except DamagedFrame:
            pass
        offset = data.find(MAGIC, offset)


def segment_bytes(segment: pathlib.Path) -> bytes:
    """What a file of a flight record holds.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not a flight record.
    """
    data = segment.read_bytes()
    if data and MAGIC not in data and not MAGIC.startswith(data[: len(MAGIC)]):
        raise ValueError(f"{segment} is not a flight record: it has no header")
    return data


def read_flight(path: str | os.PathLike[str]) -> list[FlightStep]:
    """All steps of a flight record in the order they were written, those of its previous segment first.

    What a dying process left half written is skipped. The file may still be growing.

    Args:
        path: `flight/process_<i>.bin` of a run folder.

    Raises:
        FileNotFoundError: There is no such record.
        ValueError: It is not a flight record, or of a format that this version does not read.
    """
    path = pathlib.Path(path)
    found, attempt = [], None
    for segment in (previous_path(path), path):
        if segment == path or segment.exists():
            for item in _steps(segment_bytes(segment), segment, attempt, _read_step):
                if isinstance(item, _Attempt):
                    attempt = item
                else:
                    found.append(item)
    return found


def last_flight_step(path: str | os.PathLike[str]) -> int | None:
    """The step written last, without reading any values; None where there is none. Args and errors as `read_flight`."""
    path = pathlib.Path(path)
    for segment in (path, previous_path(path)):
        if segment == path or segment.exists():
            last = None
            for item in _steps(segment_bytes(segment), segment, None, _number):
                last = last if isinstance(item, _Attempt) else item
            if last is not None:
                return last
    return None
