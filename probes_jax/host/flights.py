"""The flight records of all processes of a job, side by side: who stopped early, whose record is missing."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from probes_jax.host.flight import MAGIC, STEP, previous_path
from probes_jax.host.read_flight import DamagedFrame, frame_at, segment_bytes

_TAIL = 1 << 20  # bytes that are read of a record: about ten thousand steps
_DURABLE = 1.0  # seconds: what a process recorded later may be missing in the record of another


class FlightTail(NamedTuple):
    """The newest steps of a flight record, those of its last attempt.

    Attributes:
        processes: How many processes the job had.
        started: When the attempt began, seconds since the epoch.
        steps: int64 `[T]`, rising.
        wall_times: float64 `[T]`, when each reached the host, seconds since the epoch.
        cut: Whether there may be older steps than these.
    """

    processes: int
    started: float
    steps: np.ndarray
    wall_times: np.ndarray
    cut: bool


def flight_tail(path: str | os.PathLike[str], most_bytes: int = _TAIL) -> FlightTail | None:
    """The end of a flight record, without its values; None where no attempt can be read.

    Raises:
        FileNotFoundError: There is no such record.
        ValueError: It is not a flight record.
    """
    path = pathlib.Path(path)
    data = segment_bytes(path)
    begin = max(0, len(data) - most_bytes)
    header, found = _header(data, data.rfind(MAGIC, 0, begin + len(MAGIC))), []
    cut = begin > 0 or previous_path(path).exists()
    offset = begin
    while offset < len(data):
        if data.startswith(MAGIC, offset):
            later = _header(data, offset)
            if later is not None and (header is None or later["started"] != header["started"]):
                header, found, cut = later, [], False
            offset += len(MAGIC)
            continue
        try:
            kind, payload, offset = frame_at(data, offset)
        except DamagedFrame:  # a torn frame, or the middle of one: the check of the next tells where it begins
            offset += 1
            continue
        if kind == b"S":
            found.append(STEP.unpack_from(payload)[1:])
    if header is None:
        return None
    steps, wall_times = np.array(found, np.float64).reshape(-1, 2).T
    return FlightTail(header.get("processes", 1), header["started"], steps.astype(np.int64), wall_times, cut)


def _header(data: bytes, offset: int) -> dict | None:
    """What an attempt that begins at `offset` says of itself."""
    try:
        kind, payload, _ = frame_at(data, offset + len(MAGIC)) if offset >= 0 else (b"", b"", 0)
    except DamagedFrame:
        return None
    return json.loads(payload) if kind == b"A" else None


def find_lacking(tails: Mapping[int, FlightTail]) -> dict[int, tuple[int, ...] | None]:
    """What the record of each process lacks, next to those of the others.

    Looked at are the newest steps of the last attempt, from where the record begins that was begun last. A process that
    is less than a second behind the others at the end lacks nothing: no record promises more.

    Args:
        tails: By process; those that could be read.

    Returns:
        By process, only of those that lack something: the steps that others recorded and it did not; None where there
        is no record.
    """
    if not tails:
        return {}
    newest = max(tails.values(), key=lambda tail: tail.started)
    count = newest.processes
    tails = {process: tail for process, tail in tails.items() if process < count}
    begins = [tail for tail in tails.values() if tail.steps.size and (tail.cut or tail is newest)]
    first = max((int(tail.steps[0]) for tail in begins), default=0)
    times: dict[int, float] = {}  # when each step was recorded first
    for tail in tails.values():
        for step, at in zip(tail.steps.tolist(), tail.wall_times.tolist()):
            times[step] = min(at, times.get(step, at))
    end = max(times.values(), default=0.0)
    found: dict[int, tuple[int, ...] | None] = {process: None for process in range(count) if process not in tails}
    for process, tail in tails.items():
        own = set(tail.steps.tolist())
        missing = sorted(step for step in times if step >= first and step not in own)
        behind = [step for step in missing if step > max(own, default=-1)]
        if behind and end - times[behind[0]] < _DURABLE:
            missing = missing[: -len(behind)]
        if missing:
            found[process] = tuple(missing)
    return dict(sorted(found.items()))
