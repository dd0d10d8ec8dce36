"""Takes the report of every step and returns at once."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from probes_jax.host import shutdown
from probes_jax.host.announce import announce
from probes_jax.host.backlog import Backlog, Pending
from probes_jax.host.buffer import checked_nbytes, is_far, local, parts
from probes_jax.host.drain import Drain
from probes_jax.host.health import Health
from probes_jax.host.outlets import Outlets
from probes_jax.host.process import is_distributed, process_count, process_index
from probes_jax.host.sink import Sink
from probes_jax.host.timed import take_wait
from probes_jax.host.upkeep import Upkeep
from probes_jax.host.verdict import Verdict
from probes_jax.host.worker import Worker
from probes_jax.spec import check
from probes_jax.spec.coverage import Coverage
from probes_jax.spec.layout import Layout
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import Readings
from probes_jax.spec.report import PackedReport

_CAPACITY_BYTES = 256 << 20  # of unread reports


class Recorder:
    """Takes the report of every step, and writes it down without holding up the training thread.

    `record` starts one copy to the host, puts the report in a bounded queue and returns. A thread of its own reads the
    reports, on NumPy alone; the flight record and each sink have a thread each, so that one that fails or hangs holds
    up nothing else: it is counted in `health`, logged, tried again, and visible as `sys/monitor/...` in later steps.
    When the host falls behind, P2 values go first, then P1: past `queue_size` unread reports only the P0 values of the
    oldest wait on. P0 values reach the sinks and, if there is a `path`, the flight record, up to three caps: past 256
    MiB unread, some hundred thousand steps, the oldest is dropped unread; past a million values waiting for one of them
    its oldest steps are dropped; past 256 MiB of file the oldest steps are overwritten. The first two are counted in
    `health` and in `sys/monitor/dropped`, and logged.

    Everything recorded is written when the context ends, also by an exception, on `close`, when the interpreter ends,
    and, in a single process, on SIGTERM (then the handler before runs). Under `jax.distributed` no signal handler is
    installed, because JAX's own cannot be chained to: there the flush every `flush_every` seconds and the flight record
    count. Only process 0 writes to the sinks; every process keeps its own flight record.

    Steps must rise: a repeated or lower one is refused, counted and logged. A resumed run is a new Recorder on the same
    folder. Several recorders in one process do not know of each other.

    With a guard in the plan, `record` raises `GuardStopped` once the guard has given up: at the record 16 reports after
    the one that says so, the same on every process. For that, `record` waits while more than 16 reports are unread. A
    loop that ends before is told at the end of the context: `GuardStopped` is raised there once everything is written,
    or logged where another exception is on its way.

    Args:
        path: Run folder; event files, store and flight record lie in it (`RunFolder`). None: no folder.
        plan: The plan of the train state.
        writer: Any CLU `MetricWriter`, instead of the event files in the run folder. It is flushed, not closed.
        sinks: Used instead of the folder's event files and store.
        queue_size: Unread reports held whole at most. One that the device has not delivered by then is lost: keep it
            far above the steps that the device runs behind (tens).
        flush_every: Seconds between flushes of the sinks.
        patience: Seconds without progress after which `close` leaves a hanging sink behind.
        budget: Share of the time that monitoring may cost. Above it, less and less goes to the sinks, never P0; what it
            costs on the device is only told. None: everything is written, whatever it costs.
        clock: Seconds since the epoch.
        process_index: Index of this process; by default asked from JAX when the first report comes.

    Raises:
        ValueError: There is nowhere to write, or a setting is out of its range; the message names it.
        TypeError: An argument is of another kind.
        NotADirectoryError: The folder cannot be created.
        PermissionError: The folder cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        plan: Plan | None = None,
        *,
        writer: Any = None,
        sinks: Iterable[Sink] | None = None,
        queue_size: int = 4096,
        flush_every: float = 10.0,
        patience: float = 10.0,
        budget: float | None = 0.05,
        clock: Callable[[], float] = time.time,
        process_index: int | None = None,
    ) -> None:
        if isinstance(path, Plan):
            raise TypeError("Recorder's first argument is the run folder, got a Plan; pass Recorder(folder, plan=...)")
        if path is not None and not (isinstance(path, str | os.PathLike) and os.fspath(path)):
            raise ValueError(f'Recorder path must be a folder such as "runs/demo", or None, got {path!r}')
        if plan is not None and not isinstance(plan, Plan):
            raise TypeError(
                f"Recorder plan must be a probes_jax.Plan, got {type(plan).__name__}; pass a writer as writer="
            )
        if path is None and writer is None and sinks is None:
            raise ValueError("Recorder has nowhere to write; give it a folder, writer= or sinks=")
        if not callable(clock):
            raise TypeError(f"Recorder clock must be a function that gives seconds, got {clock!r}")
        queue_size = check.integer("Recorder queue_size", queue_size, 1)
        flush_every = check.number("Recorder flush_every, in seconds,", flush_every)
        patience = check.number("Recorder patience, in seconds,", patience, zero=True)
        if budget is not None:
            budget = check.share("Recorder budget, a share of the time,", budget)
        if process_index is not None:
            process_index = check.integer("Recorder process_index", process_index, 0)
        self._outlets = Outlets(path, plan, writer=writer, sinks=sinks, flush_every=flush_every, clock=clock)
        self._backlog = Backlog(queue_size, _CAPACITY_BYTES)
        self._plan = plan
        self._announced: set[Layout] = set()
        self._last: tuple[Any, Any, Any, int] = (None, None, None, 0)  # layout, class, type, bytes of a checked buffer
        self._guarded = plan is not None and plan.guard is not None
        self._verdict = Verdict()
        self._budget = budget
        self._clock = clock
        self._patience = patience
        self._process_index = process_index
        self._is_far: bool | None = None  # whether reports must be copied to the host; known at the first one
        self._numbers = itertools.count(1)
        self._worker: Worker | None = None  # made at the first report
        self._drain: Drain | None = None
        self._distributed = False  # known at the first report
        self._closed = False
        self._starting = threading.Lock()

    def record(self, report: PackedReport) -> None:
        """Takes the report of one step, or the stacked reports of an outer `lax.scan`. Returns at once.

        A report without entries (`PROBES_JAX=off`) is ignored. Of the report only its buffer is kept, a fresh output
        of the step: donating the train state does not touch it.

        Args:
            report: What `monitored_train_step` returned.

        Raises:
            TypeError: It is no report, or one from inside a jitted function.
            ValueError: The buffer does not fit the layout, or the recorder is closed.
            GuardStopped: The guard gave up 16 reports ago.
        """
        start = time.perf_counter()
        buffer, layout = parts(report)
        if not layout.entries:
            return
        if self._closed:
            raise ValueError("record() after close(); make a new Recorder to record more")
        # Nearly every report is of the program, and so of the very same layout and type, that the last one was of.
        known, kind, aval, nbytes = self._last
        if layout is not known or type(buffer) is not kind or getattr(buffer, "aval", None) is not aval:
            if layout not in self._announced:  # a new program: once or twice in a run
                self._announced.add(layout)
                announce(report, self._plan)
                self._describe(report)
            nbytes = checked_nbytes(buffer, layout)
            if hasattr(buffer, "aval"):  # of a NumPy array there is nothing that is cheaper to ask for
                self._last = (layout, type(buffer), buffer.aval, nbytes)
        worker = self._worker or self._start()
        if self._distributed:
            buffer = local(buffer)
            if buffer is None:
                worker.refuse("a report split over several processes was not recorded: its buffer must be replicated")
                return
        if not isinstance(buffer, np.ndarray):
            if self._is_far is None:
                self._is_far = is_far(buffer)
            if self._is_far:
                buffer.copy_to_host_async()
        number = next(self._numbers)
        seconds = time.perf_counter() - start
        self._backlog.put(Pending(buffer, layout, take_wait(), seconds, number, nbytes))
        worker.recorded = number
        worker.record_seconds += seconds
        if self._guarded:
            self._verdict.stay_close(worker, number)

    @property
    def latest(self) -> Readings | None:
        """The last readings seen, for a progress bar; None before the first. Never waits."""
        return None if self._worker is None else self._worker.latest

    @property
    def health(self) -> Health:
        """What was recorded, written, dropped and failed so far. Never waits."""
        return Health() if self._worker is None else self._worker.health

    def flush(self, limit: float = 60.0) -> bool:
        """Waits until everything recorded so far is written.

        Args:
            limit: Seconds to wait at most.

        Returns:
            Whether all sinks wrote everything in time.
        """
        return self._drain is None or self._drain.flush(limit)

    def close(self) -> None:
        """Writes what is left, closes the sinks and ends the threads. A second call does nothing.

        A slow sink is waited for as long as it makes progress; after a few seconds the log says what it is and how much
        is queued for it. That the guard gave up is logged here, if `record` has not raised it.
        """
        self._end()
        self._verdict.log_now(self._worker)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._end()
        if kind is None:
            self._verdict.raise_now(self._worker)
        self._verdict.log_now(self._worker)

    def _describe(self, report: PackedReport) -> None:
        coverage = getattr(report, "coverage", None)
        if isinstance(coverage, Coverage):
            self._outlets.describe(report.layout, coverage)

    def _end(self) -> None:
        self._closed = True
        if self._drain is not None:
            self._drain.close()

    def _start(self) -> Worker:
        """At the first report JAX, if it made it, knows which process this is."""
        with self._starting:
            if self._worker is None:
                index = process_index() if self._process_index is None else self._process_index
                index = index or 0
                deliveries = self._outlets.deliveries(index, max(process_count(), index + 1))
                upkeep = Upkeep(self._budget if index == 0 else None, self._outlets.note)
                worker = Worker(
                    self._backlog,
                    deliveries,
                    upkeep,
                    clock=self._clock,
                    guarded=self._guarded,
                    max_series=Plan.max_series if self._plan is None else self._plan.max_series,
                )
                self._drain = Drain(worker, self._patience)
                self._distributed = is_distributed()
                shutdown.watch(self._drain, signals=not self._distributed)
                weakref.finalize(self, self._drain.close).atexit = False
                worker.start()
                self._worker = worker
            return self._worker
