"""The one thread that reads reports: waits for the device, decodes, hands over to the sinks. NumPy only."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from probes_jax.host.backlog import STOP, Backlog, Pending, Ticket
from probes_jax.host.delivery import Delivery
from probes_jax.host.health import Complaint, Health
from probes_jax.host.priority import shed
from probes_jax.host.upkeep import UPKEEP_NAMES, Upkeep
from probes_jax.spec.metric import Priority
from probes_jax.spec.online import stored_only
from probes_jax.spec.plan import Plan
from probes_jax.spec.readings import Readings, decoder_of

HOST_NAMES = (
    "sys/monitor/records",
    "sys/monitor/dropped",
    "sys/monitor/failed",
    "sys/monitor/record_seconds",
    "sys/data_wait",
    "sys/monitor/queue",
    "sys/monitor/bytes",
    "sys/monitor/store_only",
    *UPKEEP_NAMES,
)
STOPPED = "alert/guard/stopped"
FLIGHT = "flight"
_FULL_PRESSURE = 0.25  # so full is the backlog that full reports give the sinks only their P0 values
_P0_PRESSURE = 0.5  # so full is it that all reports do


def _always() -> bool:
    return True


class Worker:
    """Takes reports from the backlog, in order, to the flight record and the sinks.

    Args:
        backlog: Unread reports.
        deliveries: The flight record (named `flight`), if any, and the sinks.
        upkeep: Measures what all of this costs, and says what is left out.
        clock: Seconds since the epoch, for the time at which a report reached the host.
        guarded: Whether somebody waits for `acknowledged`.
        max_series: See `Plan.max_series`.
        cpu: CPU seconds of the calling thread.

    Attributes:
        latest: The last readings seen.
        acknowledged: One token per report that has been dealt with: the step at which the guard stopped, if it has.
        stopped_at: The step at which the guard stopped, if it has.
        computing: Whether it waits for the device.
        finished: Whether it has handed over everything and ended.
    """

    def __init__(
        self,
        backlog: Backlog,
        deliveries: Sequence[Delivery],
        upkeep: Upkeep,
        *,
        clock: Callable[[], float] = time.time,
        guarded: bool = False,
        max_series: int = Plan.max_series,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self.backlog = backlog
        self.deliveries = tuple(deliveries)
        self._flight = next((d for d in self.deliveries if d.name == FLIGHT), None)
        self._sinks = tuple(d for d in self.deliveries if d is not self._flight)
        self._upkeep = upkeep
        self._clock = clock
        self._cpu = cpu
        self._guarded = guarded
        self._max_series = max_series
        self._complaint, self._behind = Complaint(), Complaint()
        self._said = 0  # records lost in part or whole when that was last said
        self._thread = threading.Thread(target=self._run, name="probes_jax-worker", daemon=True)
        self._last_step = -1
        self._bytes = 0  # of reports that were read
        self._shed = 0  # steps of which the budget left something out
        self._passed_over = 0  # reports that the sinks did not get in full because the backlog was long
        self.acknowledged: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        backlog.on_lost = self._acknowledge
        self.stopped_at: int | None = None
        self.latest: Readings | None = None
        self.recorded = 0  # written by the training thread
        self.record_seconds = 0.0  # written by the training thread
        self.read = 0
        self.refused = 0
        self.failed = 0
        self.last_error = ""
        self.computing = False
        self.finished = False

    def start(self) -> None:
        for delivery in self.deliveries:
            delivery.start()
        self._thread.start()

    def owns(self, thread: threading.Thread) -> bool:
        """Whether `thread` is the worker or one of its sinks' threads."""
        return thread is self._thread or any(delivery.owns(thread) for delivery in self.deliveries)

    def refuse(self, text: str) -> None:
        """Counts a report or a step that is not taken, and says so."""
        self.refused += 1
        self.last_error = text
        self._complaint.say(text)

    @property
    def progress(self) -> int:
        """A number that grows as long as anything is being done."""
        return self.read + self.refused + self.failed + sum(delivery.settled for delivery in self.deliveries)

    @property
    def health(self) -> Health:
        return Health(
            recorded=self.recorded,
            read=self.read,
            lost=self.backlog.lost,
            thinned=self.backlog.thinned,
            passed_over=self._passed_over,
            shed=self._shed,
            refused=self.refused,
            failed=self.failed,
            record_seconds=self.record_seconds,
            last_error=self.last_error,
            sinks={delivery.name: delivery.health for delivery in self.deliveries},
        )

    # ---- in the thread ----

    def _run(self) -> None:
        while (item := self.backlog.get()) is not STOP:
            if isinstance(item, Ticket):
                self._pass_on(item)
            elif isinstance(item, Pending):
                self._handle(item)
        for delivery in self.deliveries:
            delivery.stop()
        self.finished = True

    def _pass_on(self, ticket: Ticket) -> None:
        ticket.expect({delivery.name for delivery in self.deliveries})
        for delivery in self.deliveries:
            delivery.request(ticket)

    def _handle(self, item: Pending) -> None:
        try:
            # While the device still computes, a long backlog is the training thread's lead, not the host's delay.
            behind = getattr(item.buffer, "is_ready", _always)()
            self._read(item, behind, self.backlog.pressure if behind else 0.0)
        except Exception as error:  # a failed computation, a buffer that does not fit its layout
            self.failed += 1
            self.last_error = f"{type(error).__name__}: {error}"
            self._complaint.say(f"a report could not be read ({self.last_error}); training goes on")
        self._acknowledge()

    def _say_dropped(self, dropped: int) -> None:
        if dropped > self._said:
            self._said = dropped
            self._behind.say(
                f"{dropped} records so far were lost in part or whole (recorder.health says where, "
                "sys/monitor/dropped when): the host or a sink cannot keep up, or fails; training goes on"
            )

    def _acknowledge(self) -> None:
        if self._guarded:
            self.acknowledged.put(self.stopped_at)

    def _read(self, item: Pending, behind: bool, pressure: float) -> None:
        self.computing = True
        try:
            buffer = np.asarray(item.buffer)
        finally:
            self.computing = False
        wall_time, arrived_at = self._clock(), self._upkeep.now()
        self._bytes += item.nbytes
        decoder = decoder_of(item.layout)
        fresh = [r for row in buffer.reshape(-1, item.layout.size) if (r := decoder.decode(row)) is not None]
        for readings in fresh:
            dropped, failed = self._troubles()
            self._say_dropped(dropped)
            # The host's times are those of the whole record; the last of stacked steps carries them.
            times, upkeep = (None, None), (None,) * len(UPKEEP_NAMES)
            if readings is fresh[-1]:
                alone = buffer.ndim == 1 and not behind
                times = item.record_seconds, item.data_wait
                upkeep = self._look_at_cost(readings, arrived_at if alone else None)
            stored = sum(map(len, stored_only(item.layout, self._max_series)))
            values = (item.number, dropped, failed, *times, self.backlog.waiting, self._bytes, stored, *upkeep)
            self._deliver(readings.extended(HOST_NAMES, values, wall_time), pressure, item.thinned)

    def _look_at_cost(self, readings: Readings, arrived_at: float | None) -> tuple[float | None, ...]:
        threads = self._cpu() + sum(delivery.cpu_seconds for delivery in self.deliveries)
        return self._upkeep.measure(readings, arrived_at, self.record_seconds, threads)

    def _troubles(self) -> tuple[int, int]:
        """(records that somebody did not get in full, calls of a sink that raised) so far."""
        sinks = [delivery.health for delivery in self.deliveries]
        unread = self.backlog.lost + self.backlog.thinned + self.refused + self.failed + self._passed_over
        return unread + sum(s.dropped + s.thinned for s in sinks), sum(s.failed for s in sinks)

    def _deliver(self, readings: Readings, pressure: float, thinned: bool) -> None:
        if readings.step <= self._last_step:
            self.refuse(
                f"step {readings.step} came after step {self._last_step} and was not recorded; "
                "steps must rise within one recorder: make a new Recorder after going back to an earlier state; two "
                "monitors, or the replicas of pmap and vmap, take a Recorder each"
            )
            return
        self._last_step = readings.step
        self.read += 1
        self.latest = readings
        self._look_at_guard(readings)
        alerts = shed(readings, Priority.P0)
        if self._flight is not None:
            self._flight.put(alerts)
        late = pressure > (_FULL_PRESSURE if readings.program == "full" else _P0_PRESSURE)
        if late or thinned:
            self._passed_over += not thinned  # the backlog counts what it thinned
            readings = alerts
        lighter = self._upkeep.lighten(readings)
        self._shed += lighter is not readings
        for sink in self._sinks:
            sink.put(lighter)

    def _look_at_guard(self, readings: Readings) -> None:
        if self.stopped_at is not None or STOPPED not in readings.names:
            return
        column = readings.names.index(STOPPED)
        if readings.present[column] and readings.values[column] != 0:
            self.stopped_at = readings.step
