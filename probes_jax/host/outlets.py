"""Which sinks a recorder writes to, on which process."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from probes_jax.host.delivery import Delivery
from probes_jax.host.flight import FlightRecord
from probes_jax.host.health import log
from probes_jax.host.run_folder import RunFolder, check_folder, is_url
from probes_jax.host.select import Selection
from probes_jax.host.sink import DescribedSink, EventSink, Sink
from probes_jax.host.worker import FLIGHT
from probes_jax.spec.coverage import Coverage
from probes_jax.spec.layout import Layout
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import Readings

_CAPACITY = 1 << 20  # values waiting for one sink: about ten megabytes
_SYNC_EVERY = 0.9  # seconds: the flight record is on disk within one


class Borrowed:
    """A sink around somebody else's writer: flushed at the end, not closed."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, readings: Readings) -> None:
        self._sink.write(readings)

    def flush(self) -> None:
        self._sink.flush()

    def close(self) -> None:
        self._sink.flush()


def flight_path(folder: RunFolder, process: int) -> pathlib.Path:
    """The flight record of a process: in the run folder, or with the machine's temporary files if that is a URL."""
    if not is_url(folder.root):
        return pathlib.Path(folder.flight, f"process_{process}.bin")
    name = re.sub(r"[^\w.-]+", "_", folder.root)
    return pathlib.Path(tempfile.gettempdir(), "probes_jax", name, "flight", f"process_{process}.bin")


class Outlets:
    """The flight record and the sinks of one recorder. Creates no file before the first reading.

    Args:
        path: Run folder, or None.
        plan: Goes to the store's definitions, and says how many series the writers get.
        writer: Any CLU `MetricWriter`, instead of event files in the run folder.
        sinks: Used instead of event files and store.
        flush_every: Seconds between flushes of the sinks.
        clock: Seconds since the epoch.

    Raises:
        NotADirectoryError: The folder cannot be created.
        PermissionError: The folder cannot be written.
        TypeError: The writer or a sink lacks a method.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        plan: Plan | None,
        *,
        writer: Any,
        sinks: Iterable[Sink] | None,
        flush_every: float,
        clock: Callable[[], float],
    ) -> None:
        self._folder = None if path is None else RunFolder(_fixed(os.fspath(path)))
        self._flush_every = flush_every
        self._clock = clock
        shown = Plan.max_series if plan is None else plan.max_series
        self._sinks = _named(sinks, writer, shown) if sinks is not None else self._default(plan, writer, shown)

    def deliveries(self, process: int, processes: int) -> list[Delivery]:
        """The threads to start on this process of so many: the sinks on process 0 only, the flight record on each."""
        found = []
        if self._folder is not None:
            path = flight_path(self._folder, process)
            if is_url(self._folder.root):
                log.info("the run folder is a URL; the flight record of process %d is %s", process, path)
            make = functools.partial(FlightRecord, path, process=process, processes=processes, clock=self._clock)
            found.append(Delivery(FLIGHT, make, capacity=_CAPACITY, flush_every=_SYNC_EVERY))
        if process == 0:
            for name, sink in self._sinks.items():
                make = functools.partial(_given, sink)
                found.append(Delivery(name, make, capacity=_CAPACITY, flush_every=self._flush_every))
        return found

    def describe(self, layout: Layout, coverage: Coverage) -> None:
        """Tells the sinks that keep it what a program measures. Never waits."""
        for sink in self._sinks.values():
            if isinstance(sink, DescribedSink):
                sink.describe(layout, coverage)

    def note(self, step: int, kind: str, payload: Mapping[str, Any]) -> None:
        """Tells the sinks that keep it what happened. Never waits."""
        for sink in self._sinks.values():
            if isinstance(sink, EventSink):
                sink.note(step, kind, payload)

    def _default(self, plan: Plan | None, writer: Any, max_series: int) -> dict[str, Sink]:
        # Imported here: a recorder with sinks of its own needs neither TensorBoard's protos nor tensorstore.
        from probes_jax.host.writers.clu import WriterSink, default_writer

        sinks: dict[str, Sink] = {}
        if writer is not None:
            sinks["writer"] = Borrowed(WriterSink(writer, Selection(max_series=max_series)))
        elif self._folder is not None:
            sinks["events"] = WriterSink(default_writer(self._folder.events), Selection(max_series=max_series))
        if self._folder is not None:
            from probes_jax.host.store_sink import StoreSink

            sinks["store"] = StoreSink(self._folder.root, plan=plan, clock=self._clock)
        return sinks


def _fixed(path: str) -> str:
    """A path that stays the same place when the working directory changes."""
    check_folder(path, "Recorder path")
    return path if is_url(path) else os.path.abspath(path)


def _given(sink: Sink) -> Sink:
    return sink


def _named(sinks: Iterable[Sink], writer: Any, max_series: int) -> dict[str, Sink]:
    found: dict[str, Sink] = {}
    if not isinstance(sinks, Iterable) or isinstance(sinks, str):
        raise TypeError(f"sinks must be a list of sinks, got {sinks!r}; write sinks=[...]")
    if writer is not None:
        from probes_jax.host.writers.clu import WriterSink

        found["writer"] = Borrowed(WriterSink(writer, Selection(max_series=max_series)))
    for sink in sinks:
        if not isinstance(sink, Sink) or isinstance(sink, type):
            raise TypeError(f"sinks must have write, flush and close; got {sink!r}")
        name = type(sink).__name__
        found[name if name not in found else f"{name}-{len(found)}"] = sink
    return found
