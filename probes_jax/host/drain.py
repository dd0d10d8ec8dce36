"""Waiting, with a limit, until what was recorded is written."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from probes_jax.host import shutdown
from probes_jax.host.backlog import STOP, Ticket
from probes_jax.host.health import log
from probes_jax.host.worker import Worker

_POLL = (0.001, 0.02)  # seconds; the first and the longest pause between two looks
_DEVICE_PATIENCE = 12  # times as patient while the device still computes
_SAY_AFTER = 3.0  # seconds of waiting in `close` after which a line says for what
_SAY_EVERY = 30.0  # seconds between two such lines


class Drain:
    """Flushes and ends a worker and its sinks.

    It only looks at flags and sleeps, and takes no lock: a signal handler may call `flush` wherever it struck. In a
    process forked from the one that records it does nothing: that one writes what it recorded.

    Args:
        worker: The worker; it may or may not have started.
        patience: Seconds without any progress after which `close` leaves a hanging sink behind.
    """

    def __init__(self, worker: Worker, patience: float) -> None:
        self._worker = worker
        self._patience = patience
        self._say_at = float("inf")
        self._owner = os.getpid()  # a process that is forked from it has none of its threads
        self.closed = False

    def flush(self, limit: float) -> bool:
        """Writes down everything recorded so far; whether all sinks did within `limit` seconds."""
        if self.closed:
            return True
        if os.getpid() != self._owner:
            return False
        ticket = Ticket()
        self._worker.backlog.send(ticket)
        end = time.monotonic() + limit
        # Behind the end of the worker nobody answers a ticket: `close`, elsewhere or interrupted, writes all.
        _look_until(lambda: ticket.done or self._ended() or time.monotonic() > end)
        return (ticket.done or self._ended()) and not ticket.failed

    def _ended(self) -> bool:
        return self._worker.finished and all(delivery.finished for delivery in self._worker.deliveries)

    def close(self) -> None:
        """Writes what is left, closes the sinks and ends the threads. A second call does nothing.

        After a few seconds a line in the log says what it waits for, and then one now and then.
        """
        worker = self._worker
        if self.closed:
            return
        if os.getpid() != self._owner:
            self.closed = True
            return
        worker.backlog.send(STOP)
        if worker.owns(threading.current_thread()):  # the garbage collector may strike in one of our own threads
            return
        self._say_at = time.monotonic() + _SAY_AFTER
        if not self._wait(lambda: worker.finished):
            log.warning("the device did not deliver %d reports; they are not written", worker.backlog.waiting)
            for delivery in worker.deliveries:
                delivery.stop()
        if not self._wait(lambda: all(delivery.finished for delivery in worker.deliveries)):
            for delivery in worker.deliveries:
                if not delivery.finished:
                    delivery.leave()
                    dropped = delivery.health.dropped
                    log.warning("sink %r hangs and is left behind; %d readings are dropped", delivery.name, dropped)
        self.closed = True
        shutdown.unwatch(self)

    def _wait(self, done: Callable[[], bool]) -> bool:
        """Whether `done` came true before the patience ran out; any progress renews it."""
        seen, since = -1, time.monotonic()

        def over() -> bool:
            nonlocal seen, since
            now, progress = time.monotonic(), self._worker.progress
            if progress != seen:
                seen, since = progress, now
            patience = self._patience * (_DEVICE_PATIENCE if self._worker.computing else 1)
            if now > self._say_at and not done():
                self._say_at = now + _SAY_EVERY
                text = "closing the recorder waits for %s; what makes no progress for %g s is left behind"
                log.warning(text, self._waited_for(), patience)
            return done() or now - since > patience

        _look_until(over)
        return done()

    def _waited_for(self) -> str:
        """Who is not done yet, and how much is queued there."""
        worker, whom = self._worker, []
        if not worker.finished:
            whom.append(
                f"{'the device' if worker.computing else 'the reader'} (reports queued: {worker.backlog.waiting})"
            )
        for delivery in worker.deliveries:
            if delivery.unsettled and not delivery.finished:
                whom.append(f"sink {delivery.name!r} (readings not written: {delivery.unsettled})")
            elif worker.finished and not delivery.finished:
                whom.append(f"sink {delivery.name!r} (its last flush)")
        return ", ".join(whom)


def _look_until(over: Callable[[], bool]) -> None:
    pause, longest = _POLL
    while not over():
        time.sleep(pause)
        pause = min(longest, pause * 1.5)
