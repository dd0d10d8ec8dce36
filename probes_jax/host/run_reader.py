"""Reads a run's folder, also while the run is being written."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from probes_jax.host.damage import LOST, Damage
from probes_jax.host.entries import Entries, SeriesEntry
from probes_jax.host.flights import find_lacking, flight_tail
from probes_jax.host.joined import Rows, Source, join
from probes_jax.host.outlets import flight_path
from probes_jax.host.read_flight import FlightStep, last_flight_step, read_flight
from probes_jax.host.run_folder import FORMAT, RunFolder, is_url, runs_in
from probes_jax.host.series_block import decode
from probes_jax.host.store import Store
from probes_jax.spec.derive import derive
from probes_jax.spec.near import near_names

_T = TypeVar("_T")
_PARTS = ("events", "series", "entries", "flight")  # folders inside a run's
_MOST = 20  # runs that are listed where a folder holds more


def _candidates(names: tuple[str, ...], worst: str) -> dict[str, str]:
    """Label and metric of everything that `worst` is the worst of."""
    rules = (rule for rule in derive(names).worst if rule[0] == worst)
    return {label: names[i] for _, at, labels in rules for i, label in zip(at, labels) if i < len(names)}


def _hint(path: str, context: Any) -> str:
    """What to open instead, where `path` is a part of a run or holds some; else empty."""
    inside = [] if is_url(path) else runs_in(path)
    if inside:
        more = f" and {len(inside) - _MOST} more" if len(inside) > _MOST else ""
        return f"it holds runs: open {', '.join(map(repr, inside[:_MOST]))}{more}"
    parent, _, name = (path if is_url(path) else os.path.abspath(path)).rstrip("/").rpartition("/")
    if name not in _PARTS:
        return ""
    try:
        Run(parent, context)
    except (OSError, ValueError):
        return ""
    shown = parent if is_url(path) or os.path.isabs(path) else os.path.relpath(parent)
    return f"it is the {name}/ of a run: open {shown!r}"


class Run:
    """A run's folder, read-only. Every call looks at the folder anew; `open_run` makes one.

    A run that was killed before its store was first flushed opens too: it has no `names()`, but a `flight()`.

    What is damaged is left out, with a `DamagedRun` warning that names it; `damaged()` lists it.

    Args:
        path: Local path or URL.
        context: A shared `tensorstore.Context`, for `memory://`.

    Raises:
        FileNotFoundError: There is no run in this folder.
        ValueError: The run's format is newer than this reader, or `entries/run.json` is damaged.
    """

    def __init__(self, path: str, context: Any = None) -> None:
        self.folder = RunFolder(path)
        self._store = Store(path, context)
        self._damage = Damage(self.folder.root)
        self._entries = Entries(self._store, self._damage)
        try:
            about = self._entries.about()
        except ValueError as error:
            raise ValueError(
                f"run {path!r}: entries/run.json is damaged ({error}); put it back from a copy of the run, or write "
                f'{{"format": {FORMAT}}} into it'
            ) from error
        if about is None and any(self.flight_step(process) is not None for process in self.processes()):
            about = {"format": FORMAT, "created": None}
        if about is None:
            hint = _hint(path, context) or "nothing was recorded there yet, or PROBES_JAX=off was set"
            raise FileNotFoundError(f"no run in {path!r}: it has no entries/run.json ({hint})")
        found = about.get("format")
        if found != FORMAT:
            raise ValueError(f"run {path!r} has format {found}, this version reads {FORMAT}; use a newer one")
        self._about = about

    def names(self) -> list[str]:
        """Names of all metrics that have a series, in the order of their columns."""
        return list(
            dict.fromkeys(name for series in self._entries.series() for name in self._entries.columns(series.columns))
        )

    def damaged(self) -> list[str]:
        """What could not be read so far, and why; empty when nothing was damaged."""
        return list(self._damage.found)

    def series(self, name: str, raw: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One metric over the steps.

        Args:
            name: A name of `names()`.
            raw: False: one value per step, in order of the steps; where steps were done again, the last attempt's.
                True: every value ever recorded, in order of recording.

        Returns:
            Steps (int64), values (float64), presence (bool), all `[T]`. An absent value is NaN; a NaN that is
            present was measured.

        Raises:
            KeyError: No series has that name.
        """
        steps, _, stored = self._joined(name, [name], raw)
        values, present = decode(stored[:, 0])
        return steps, values, present

    def wall_times(self, name: str, raw: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Steps and the seconds since the epoch at which each was recorded; rows as in `series`."""
        steps, wall_time, _ = self._joined(name, [name], raw)
        return steps, wall_time

    def which(self, name: str) -> tuple[np.ndarray, list[str]]:
        """Which layer or shard is behind a worst-of metric, over the steps at which it is present.

        Raises:
            KeyError: No series has that name, or it is not the worst of others.
        """
        rules: dict[str, str] = {}
        for series in self._holding(name):
            rules |= _candidates(tuple(self._entries.columns(series.columns)), name)
        if not rules:
            raise KeyError(f"{name!r} is not the worst of other metrics, so nothing is behind it")
        steps, _, stored = self._joined(name, list(rules.values()), raw=False)
        values, present = decode(stored)
        rank = np.where(present, np.where(np.isnan(values), np.inf, values), -np.inf)
        nan = present & np.isnan(values)
        worst = np.where(nan.any(axis=1), nan.argmax(axis=1), rank.argmax(axis=1))
        seen = present.any(axis=1)
        labels = list(rules)
        return steps[seen], [labels[i] for i in worst[seen]]

    def events(self) -> list[dict[str, Any]]:
        """What happened, in order: `attempt`, `step`, `time`, `kind`, `payload`, and `superseded` for what belongs
        to steps that were done again.
        """
        out, attempts = [], {attempt.key: attempt for attempt in self._entries.attempts()}
        for number, event in self._entries.events():
            attempt = attempts.get(number)
            superseded = attempt is not None and attempt.superseded(event["step"])
            out.append({"attempt": int(number), **event, "superseded": superseded})
        return out

    def coverage(self) -> list[dict[str, Any]]:
        """What could be measured and what could not: `attempt`, `program`, `layout` and `coverage` (`pj.Coverage`) of
        every program of every attempt, in order. Empty for a run that holds none.
        """
        return self._entries.coverage()

    def flight(self, process: int = 0) -> list[FlightStep]:
        """The P0 signals of every step, as process `process` wrote them down within a second; empty without a record.

        After a kill it reaches further than `series`. Its steps are in the order of recording, of all attempts.
        """
        path = flight_path(self.folder, process)
        try:
            return read_flight(path)
        except FileNotFoundError:
            return []

    def flight_step(self, process: int = 0) -> int | None:
        """The last step in the flight record of a process: how far the run got. None without a record."""
        return self._of_flight(process, last_flight_step)

    def processes(self) -> list[int]:
        """The processes that left a flight record where this machine can see it."""
        folder = flight_path(self.folder, 0).parent
        found = [path.stem.removeprefix("process_") for path in folder.glob("process_*.bin")]
        return sorted(int(number) for number in found if number.isdecimal())

    def lacking(self) -> dict[int, tuple[int, ...] | None]:
        """What the flight record of a process lacks, next to those of the others; empty when all have the same.

        Of the newest steps, about ten thousand: by process the steps that others recorded and it did not, or None where
        the job had a process without a record. A second at the end does not count: no record promises more.
        """
        tails = {process: self._of_flight(process, flight_tail) for process in self.processes()}
        found = find_lacking({process: tail for process, tail in tails.items() if tail is not None})
        elsewhere = is_url(self.folder.root)  # then every machine keeps the records of its own processes
        return {process: steps for process, steps in found.items() if steps is not None or not elsewhere}

    def _of_flight(self, process: int, read: Callable[[pathlib.Path], _T]) -> _T | None:
        path = flight_path(self.folder, process)
        try:
            return read(path)
        except FileNotFoundError:
            return None
        except ValueError as error:
            self._damage.note(f"flight/{path.name}", "the flight record", error)
            return None

    def manifest(self) -> dict[str, Any]:
        """Format, creation time, attempts with their plans, series, names, and the registry's entries behind them."""
        series = self._entries.series()
        metrics: dict[str, Any] = {}
        for columns in dict.fromkeys(s.columns for s in series):
            metrics |= self._entries.metrics(columns)
        return {
            **self._about,
            "attempts": [{"attempt": int(a.key), **a.entry} for a in self._entries.attempts()],
            "series": [dataclasses.asdict(s) for s in series],
            "names": self.names(),
            "metrics": metrics,
        }

    def _holding(self, name: str) -> list[SeriesEntry]:
        found = [series for series in self._entries.series() if name in self._entries.columns(series.columns)]
        if not found:
            raise KeyError(f"run {self.folder.root!r} has no series {name!r}; {self._instead(name)}")
        return found

    def _instead(self, name: str) -> str:
        """What there is where a series is not."""
        names = self.names()
        reasons = [reason for entry in self.coverage() if (reason := entry["coverage"].why(name)) is not None]
        if reasons:
            return reasons[-1]
        near = ", ".join(map(repr, near_names(name, names)))
        if names:
            return f"did you mean {near}?" if near else "names(), or `probes series` without a name, lists what it has"
        flown = self.flight_step()
        left = "" if flown is None else f"; its flight() goes on to step {flown}"
        return f"it has none at all: its store {LOST}{left}"

    def _joined(self, name: str, wanted: list[str], raw: bool) -> Rows:
        """The `wanted` values of the rows that have `name`, over all series."""
        ends = {} if raw else {attempt.key: attempt.end for attempt in self._entries.attempts()}
        sources = []
        for series in self._holding(name):
            columns = self._entries.columns(series.columns)
            end = ends.get(series.attempt)
            sources.append(Source(series.path, int(series.attempt), end, tuple(columns.get(n) for n in wanted)))
        return join(self._store, self._damage, sources, len(wanted), raw)
