"""Writes a run's store: every metric of every step as arrays, definitions and events as JSON entries."""

from __future__ import annotations

import collections
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from probes_jax.host import strict_json
from probes_jax.host.attempt import Attempt
from probes_jax.host.happenings import ATTEMPT, Happenings
from probes_jax.host.health import log
from probes_jax.host.open_series import SeriesSet
from probes_jax.host.run_folder import check_folder, is_url
from probes_jax.host.series_block import encode
from probes_jax.host.sink import BesideNotSaved
from probes_jax.host.store import Store
from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.coverage import Coverage
from probes_jax.spec.layout import Layout
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import Readings
from probes_jax.spec.registry import Registry


class StoreSink:
    """A sink that keeps every metric of every step.

    Rows wait in memory until a block is full, `seconds` have passed or `flush` is called. A write that fails is not
    taken and may be tried again; rows that could not be saved stay, one block at most, and are saved later. What goes
    with them (events, coverage) is saved by `flush` and never keeps a row out. Nothing is created before the first
    write.

    A session of a run is an *attempt*; steps that go back (a rollback) start the next attempt. Nothing is ever
    overwritten: readers let the last attempt win. When somebody deletes or moves the folder, the next flush raises
    once; the rows still in memory and all later ones then go to a new attempt in the same place.

    What its counters show (a skipped update, a co-spike, ...: `happenings`) is written as an event at the next flush.

    Args:
        run_dir: Local path or URL of the run's folder.
        plan: Written into the run's definitions.
        info: Further definitions: strings, numbers, lists, dicts.
        seconds: A write this long after the last flush flushes first.
        rows: Rows of a block; default about 1 MiB (16 to 1024 rows).
        clock: Seconds since the epoch.
        registry: What the run's definitions say about each metric.
        context: A shared `tensorstore.Context`, for `memory://`.

    Raises:
        NotADirectoryError: The folder cannot be created.
        PermissionError: The folder cannot be written.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        plan: Plan | None = None,
        info: Mapping[str, Any] | None = None,
        seconds: float = 10.0,
        rows: int | None = None,
        clock: Callable[[], float] = time.time,
        registry: Registry = REGISTRY,
        context: Any = None,
    ) -> None:
        root = os.fspath(run_dir)
        check_folder(root, "run_dir")
        if rows is not None and rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        strict_json.dumps(info or {})
        self._root = root if is_url(root) else os.path.abspath(root)  # the working directory may change
        self._context = context
        self._registry, self._rows = registry, rows
        self._definition = {
            "plan": None if plan is None else dataclasses.asdict(plan),
            "plan_fingerprint": None if plan is None else plan.fingerprint,
            "info": dict(info or {}),
        }
        self._seconds, self._clock = seconds, clock
        self._store: Store | None = None
        self._lock = threading.RLock()
        self._flushed = clock()
        self._least_number = 1
        self._coverage: dict[str, Coverage] = {}  # by program and layout; only ever added to
        self._notes: collections.deque[dict[str, Any]] = collections.deque()  # events of others, to be written
        self._begin()

    def _begin(self) -> None:
        """Forgets the attempt; the next write starts another."""
        self._attempt = self._next_attempt()
        self._happenings = Happenings()
        self._covered: set[str] = set()  # what of `_coverage` this attempt has saved
        self._series = SeriesSet(self._registry, self._rows)

    def _next_attempt(self) -> Attempt:
        return Attempt(self._open, self._definition, self._clock, self._least_number)

    def describe(self, layout: Layout, coverage: Coverage) -> None:
        """Takes what a program could and could not measure; it is saved at the next flush of a row."""
        self._coverage.setdefault(f"{layout.program}-{layout.fingerprint}", coverage)  # no lock: a flush may hang

    def note(self, step: int, kind: str, payload: Mapping[str, Any]) -> None:
        """Takes an event; it is saved at the next flush of a row."""
        self._notes.append({"step": step, "time": self._clock(), "kind": kind, "payload": payload})

    def write(self, readings: Readings) -> None:
        """Takes one step.

        Raises:
            Exception: Rows that waited could not be saved; this step is not taken.
        """
        if not readings.names:
            return
        with self._lock:
            series = self._series.find(readings)
            if readings.step < series.last_step:  # the run went back
                self._leave()
                series = self._series.find(readings)
            if series.block.full or self._clock() - self._flushed >= self._seconds:
                self._save_rows()
            if series.block.full:
                series.block.advance()
            row = encode(readings.values, readings.present, series.exact)
            wall_time = self._clock() if readings.wall_time is None else readings.wall_time
            series.block.append(readings.step, wall_time, row)
            series.last_step = readings.step
            if self._attempt.first_step is None:
                self._attempt.first_step = readings.step
            self._happenings.look(readings, series.counters, wall_time)

    def write_event(self, step: int, kind: str, payload: Mapping[str, Any]) -> None:
        """Writes an event at once: something that happened at a step.

        Args:
            step: The step.
            kind: What happened, for example `spike` or `rollback`.
            payload: Numbers (also NaN and infinities), text, lists, dicts, NumPy arrays.
        """
        with self._lock:
            self._save_happenings()
            self._attempt.save_event({"step": int(step), "time": self._clock(), "kind": str(kind), "payload": payload})

    def flush(self) -> None:
        """Saves all rows: readers see them, and they survive the death of the machine.

        Raises:
            BesideNotSaved: All rows are saved, and an event or the coverage is not; it is kept for the next flush.
            Exception: Some rows could not be saved; they are kept for the next flush.
        """
        with self._lock:
            self._save_rows()
            errors = []
            for save in (self._save_happenings, self._save_coverage):
                try:
                    save()
                except Exception as error:
                    errors.append(error)
            if errors:
                raise BesideNotSaved(f"rows are saved, but not what goes with them ({errors[0]})") from errors[0]

    def close(self) -> None:
        """Flushes."""
        self.flush()

    def _leave(self) -> None:
        """Ends the attempt. What goes with its rows and cannot be saved is given up, and said."""
        try:
            self.flush()
        except BesideNotSaved as error:
            log.warning("attempt %s in %s ends: %s", self._attempt.key, self._root, error)
        self._begin()

    def _save_rows(self) -> None:
        self._flushed = self._clock()
        self._check_there()
        for series in self._series:
            if series.block.waiting:
                series.save(self._open(), self._attempt.claim())

    def _check_there(self) -> None:
        """Looks for what was written: tensorstore itself would make the missing folders again, and say nothing."""
        attempt = self._attempt.key
        if attempt is None:
            return
        paths = [series.path(attempt) for series in self._series if series.arrays is not None]
        entries = ["entries/run.json", f"entries/attempts/{attempt}.json"]
        for key in (*entries, *(f"{path}/{name}/zarr.json" for path in paths for name in ("step", "values"))):
            if not self._open().has(key):
                self._start_over()
                raise FileNotFoundError(
                    f"the run in {self._root!r} was deleted or moved while it was being written ({key} is gone); "
                    "a new attempt begins there with the rows still in memory"
                )

    def _start_over(self) -> None:
        """Forgets the files, not the rows: the blocks in memory are saved again, whole, by the next attempt."""
        self._least_number = int(self._attempt.key or 0) + 1  # what is left of the old arrays is never written into
        self._attempt = self._next_attempt()
        self._covered.clear()
        for series in self._series:
            series.start_over()
        first = min((int(series.block.step[0]) for series in self._series if series.block.filled), default=None)
        self._attempt.first_step = first
        if first is not None and all(event["kind"] != ATTEMPT for event in self._happenings.waiting):
            self._happenings.begin(first, self._clock())

    def _save_happenings(self) -> None:
        waiting = self._happenings.waiting
        while waiting:
            event = waiting[0]
            if event["kind"] == ATTEMPT and "superseded_through" not in event["payload"]:
                event["payload"] |= self._attempt.superseded(event["step"])
            self._attempt.save_event(event)
            waiting.pop(0)
        while self._notes and self._attempt.key is not None:
            self._attempt.save_event(self._notes[0])
            self._notes.popleft()

    def _save_coverage(self) -> None:
        if self._attempt.key is None:  # no row and no event: there is no run yet
            return
        for key, coverage in list(self._coverage.items()):
            if key not in self._covered:
                program, layout = key.split("-")
                entry = {"program": program, "layout": layout, **coverage.to_json()}
                self._open().write(f"entries/coverage/{self._attempt.key}/{key}.json", entry)
                self._covered.add(key)

    def _open(self) -> Store:
        self._store = self._store or Store(self._root, self._context)
        return self._store
