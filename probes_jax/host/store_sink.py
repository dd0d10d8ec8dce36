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
from probes_jax.host.definitions import columns_entry, columns_key, exact_columns
from probes_jax.host.happenings import ATTEMPT, Happenings, counter_columns
from probes_jax.host.health import log
from probes_jax.host.run_folder import FORMAT, check_folder, is_url, number_key
from probes_jax.host.series_block import NO_STEP, Block, block_rows, encode
from probes_jax.host.sink import BesideNotSaved
from probes_jax.host.store import SeriesArrays, Store
from probes_jax.spec.catalog import REGISTRY
from probes_jax.spec.coverage import Coverage
from probes_jax.spec.layout import Layout
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import Readings
from probes_jax.spec.registry import Registry


def _reached(store: Store, before: str) -> int | None:
    """The last step that the attempts before one hold, without what they already did again."""
    reached: int | None = None
    for key in store.keys("entries/attempts/"):
        attempt = key.rsplit("/", 1)[1].removesuffix(".json")
        if attempt >= before:
            break
        first = store.read(key)["first_step"]
        steps = [] if reached is None else [reached if first is None else min(reached, first - 1)]
        for series in store.keys(f"entries/series/{attempt}/"):
            last = SeriesArrays(store, store.read(series)["path"]).last_step()
            steps += [] if last is None else [last]
        reached = max(steps, default=None)
    return reached


class _Series:
    """One open series of this attempt: names, the block being filled, the arrays once they exist."""

    def __init__(self, names: tuple[str, ...], registry: Registry, rows: int | None) -> None:
        self.names, self.registry = names, registry
        self.exact = exact_columns(names, registry)
        self.counters = counter_columns(names)
        self.block = Block(len(names), rows or block_rows(len(names)))
        self.arrays: SeriesArrays | None = None
        self.last_step = NO_STEP


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
        self._plan, self._info, self._registry, self._rows = plan, dict(info or {}), registry, rows
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
        self._attempt: str | None = None
        self._first_step: int | None = None
        self._told: int | None = None  # the first step that the attempt's entry says
        self._events = 0
        self._happenings = Happenings()
        self._covered: set[str] = set()  # what of `_coverage` this attempt has saved
        self._series: dict[str, _Series] = {}
        # By program and id of the names; the names are kept, so that their id cannot come back as another tuple.
        self._recent: dict[tuple[str, int], tuple[tuple[str, ...], _Series]] = {}

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
            series = self._find(readings)
            if readings.step < series.last_step:  # the run went back
                self._leave()
                series = self._find(readings)
            if series.block.full or self._clock() - self._flushed >= self._seconds:
                self._save_rows()
            if series.block.full:
                series.block.advance()
            row = encode(readings.values, readings.present, series.exact)
            wall_time = self._clock() if readings.wall_time is None else readings.wall_time
            series.block.append(readings.step, wall_time, row)
            series.last_step = readings.step
            self._first_step = readings.step if self._first_step is None else self._first_step
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
            self._save_event({"step": int(step), "time": self._clock(), "kind": str(kind), "payload": payload})

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
            log.warning("attempt %s in %s ends: %s", self._attempt, self._root, error)
        self._begin()

    def _save_rows(self) -> None:
        self._flushed = self._clock()
        self._check_there()
        for key, series in self._series.items():
            if series.block.waiting:
                self._save(key, series)

    def _check_there(self) -> None:
        """Looks for what was written: tensorstore itself would make the missing folders again, and say nothing."""
        if self._attempt is None:
            return
        paths = [self._path(key) for key, series in self._series.items() if series.arrays is not None]
        entries = ["entries/run.json", f"entries/attempts/{self._attempt}.json"]
        for key in (*entries, *(f"{path}/{name}/zarr.json" for path in paths for name in ("step", "values"))):
            if not self._open().has(key):
                self._start_over()
                raise FileNotFoundError(
                    f"the run in {self._root!r} was deleted or moved while it was being written ({key} is gone); "
                    "a new attempt begins there with the rows still in memory"
                )

    def _start_over(self) -> None:
        """Forgets the files, not the rows: the blocks in memory are saved again, whole, by the next attempt."""
        self._least_number = int(self._attempt or 0) + 1  # what is left of the old arrays is never written into
        self._attempt, self._events = None, 0
        self._covered.clear()
        for series in self._series.values():
            series.arrays = None
            series.block.base = series.block.saved = 0
        steps = [int(series.block.step[0]) for series in self._series.values() if series.block.filled]
        self._first_step = min(steps, default=None)
        if self._first_step is not None and all(event["kind"] != ATTEMPT for event in self._happenings.waiting):
            self._happenings.begin(self._first_step, self._clock())

    def _path(self, key: str) -> str:
        return f"series/{self._attempt}/{key}"

    def _find(self, readings: Readings) -> _Series:
        """The open series of these columns. By identity first: comparing thousands of names costs more."""
        recent = self._recent.get((readings.program, id(readings.names)))
        if recent is not None:
            return recent[1]
        key = f"{readings.program}-{columns_key(readings.names)}"
        series = self._series.get(key) or _Series(readings.names, self._registry, self._rows)
        self._series[key] = series
        if len(self._recent) >= 64:
            self._recent.clear()
        self._recent[readings.program, id(readings.names)] = (readings.names, series)
        return series

    def _save(self, key: str, series: _Series) -> None:
        store, attempt = self._open(), self._ensure_attempt()
        path = self._path(key)
        if series.arrays is None:
            columns = columns_key(series.names)
            store.create(f"entries/columns/{columns}.json", columns_entry(series.names, series.registry))
            arrays = SeriesArrays.create(store, path, len(series.names), series.block.rows)
            program = key.rsplit("-", 1)[0]
            store.write(f"entries/series/{attempt}/{key}.json", {"program": program, "columns": columns, "path": path})
            series.arrays = arrays
        filled = series.block.filled
        series.arrays.write(series.block)
        series.block.saved = filled

    def _save_happenings(self) -> None:
        waiting = self._happenings.waiting
        while waiting:
            event = waiting[0]
            if event["kind"] == ATTEMPT and "superseded_through" not in event["payload"]:
                event["payload"] |= self._superseded(event["step"])
            self._save_event(event)
            waiting.pop(0)
        while self._notes and self._attempt is not None:
            self._save_event(self._notes[0])
            self._notes.popleft()

    def _save_event(self, event: Mapping[str, Any]) -> None:
        attempt = self._ensure_attempt()
        self._open().write(f"entries/events/{attempt}/{number_key(self._events, 8)}.json", event)
        self._events += 1

    def _save_coverage(self) -> None:
        if self._attempt is None:  # no row and no event: there is no run yet
            return
        for key, coverage in list(self._coverage.items()):
            if key not in self._covered:
                program, layout = key.split("-")
                entry = {"program": program, "layout": layout, **coverage.to_json()}
                self._open().write(f"entries/coverage/{self._attempt}/{key}.json", entry)
                self._covered.add(key)

    def _superseded(self, first_step: int) -> dict[str, int]:
        """The last step that an attempt from `first_step` on supersedes; nothing where there is none. Says so."""
        try:
            reached = _reached(self._open(), self._ensure_attempt())
        except Exception as error:  # an older attempt that cannot be read must not keep this one from being written
            log.warning("the earlier attempts in %s could not be read (%s)", self._root, error)
            return {}
        if reached is None or reached < first_step:
            return {}
        log.warning("steps %d..%d of an earlier attempt in %s are superseded", first_step, reached, self._root)
        return {"superseded_through": reached}

    def _open(self) -> Store:
        self._store = self._store or Store(self._root, self._context)
        return self._store

    def _ensure_attempt(self) -> str:
        """The key of this attempt; a new one claims the next free number."""
        store = self._open()
        if self._attempt is None:
            store.create("entries/run.json", {"format": FORMAT, "created": self._clock()})
            found = store.read("entries/run.json")["format"]
            if found != FORMAT:
                raise ValueError(
                    f"run {self._root!r} has format {found}, this version writes {FORMAT}; use another folder"
                )
            names = [key.rsplit("/", 1)[1].removesuffix(".json") for key in store.keys("entries/attempts/")]
            taken = max((int(name) for name in names if name.isdecimal()), default=0)  # others are not ours
            number = max(taken + 1, self._least_number)
            while not store.create(f"entries/attempts/{number_key(number)}.json", self._definition()):
                number += 1
            self._attempt, self._told = number_key(number), self._first_step
        elif self._told != self._first_step:  # events came before the first step
            store.write(f"entries/attempts/{self._attempt}.json", self._definition())
            self._told = self._first_step
        return self._attempt

    def _definition(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "created": self._clock(),
            "first_step": self._first_step,
            "plan": dataclasses.asdict(plan) if plan is not None else None,
            "plan_fingerprint": plan.fingerprint if plan is not None else None,
            "info": self._info,
        }
