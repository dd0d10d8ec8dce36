"""One sink and the thread that feeds it: a sink that fails or hangs costs only itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from probes_jax.host.backlog import Ticket
from probes_jax.host.health import Complaint, SinkHealth, log
from probes_jax.host.queue import ReadingsQueue
from probes_jax.host.sink import BesideNotSaved, Sink
from probes_jax.spec.readings import Readings

_ATTEMPTS = 3  # per reading; then the next one gets its chance
_BACKOFF = (0.5, 30.0)  # seconds: first and longest wait after errors in a row; doubles in between
_IDLE = 60.0  # seconds
_HANGS = 30.0  # seconds in one call after which a line says so


class Delivery:
    """Feeds one sink from its own daemon thread, through a bounded queue.

    A call that raises is counted, logged (one line a minute) and repeated with growing waits; a reading that failed
    three times is given up. While the sink fails or hangs, its queue sheds the less important values first. A flush
    that saved the readings and nothing else (`BesideNotSaved`) is repeated when the next is due, and holds up nothing.

    Args:
        name: Name of the sink in health, logs and the thread's name.
        make: Makes the sink. Called by `open`, or by the thread when the first reading comes.
        capacity: Values that its queue holds.
        flush_every: Seconds after which what was written is flushed.
        backoff: First and longest wait after an error, in seconds.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        *,
        capacity: int,
        flush_every: float,
        backoff: tuple[float, float] = _BACKOFF,
        monotonic: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self.name = name
        self._make = make
        self._sink: Sink | None = None
        self._queue = ReadingsQueue(capacity)
        self._flush_every = flush_every
        self._backoff = backoff
        self._monotonic = monotonic
        self._complaint = Complaint(monotonic=monotonic)
        self._thread = threading.Thread(target=self._run, name=f"probes_jax-{name}", daemon=True)
        self._written = self._failed = self._abandoned = 0
        self._unsaved = 0  # readings taken since the last flush that worked
        self._last_error = ""
        self._held: Readings | None = None  # the reading that failed
        self._attempts = 0  # of the held reading
        self._errors_in_row = 0
        self._retry_at = float("-inf")
        self._flush_at: float | None = None  # None: nothing unflushed
        self._tickets: list[tuple[int, Ticket]] = []  # (readings that must be settled first, ticket)
        self._stopping = False
        self._called_at: float | None = None  # when the call began that the sink has not come back from
        self._left = False
        self._cpu = cpu
        self.cpu_seconds = 0.0  # that the thread has used
        self.finished = False

    def open(self) -> None:
        """Makes the sink now, so that what is wrong with it is raised here."""
        if self._sink is None:
            self._sink = self._make()

    def start(self) -> None:
        self._thread.start()

    def put(self, readings: Readings) -> None:
        """Hands over one reading; never waits for the sink."""
        self._queue.put(readings)
        called_at = self._called_at
        if called_at is not None and (seconds := self._monotonic() - called_at) > _HANGS:
            self._complaint.say(
                f"sink {self.name!r} has not come back from a call for {seconds:.0f} s; training goes on, "
                f"{len(self._queue)} readings wait for it"
            )

    def request(self, ticket: Ticket) -> None:
        """Asks for a flush of everything handed over so far; the ticket is answered afterwards."""
        self._tickets.append((self._queue.added, ticket))
        self._queue.wake()

    def stop(self) -> None:
        """Asks the thread to write what is left, to close the sink and to end."""
        self._stopping = True
        self._queue.wake()

    def leave(self) -> None:
        """Gives up on a sink that hangs: what it has not written counts as dropped from now on."""
        self._left = True

    @property
    def settled(self) -> int:
        """Readings that are written or given up."""
        return self._written + self._abandoned + self._queue.dropped

    @property
    def unsettled(self) -> int:
        """Readings handed over that are not, the one in hand included."""
        return self._queue.added - self.settled

    @property
    def health(self) -> SinkHealth:
        return SinkHealth(
            written=self._written,
            dropped=self._queue.added - self._written if self._left else self._abandoned + self._queue.dropped,
            thinned=self._queue.thinned,
            failed=self._failed,
            waiting=0 if self._left else len(self._queue) + (self._held is not None),
            last_error=self._last_error,
        )

    def owns(self, thread: threading.Thread) -> bool:
        return thread is self._thread

    # ---- in the thread ----

    def _run(self) -> None:
        while not (self._stopping and self._held is None and not len(self._queue)):
            wait = self._retry_at - self._monotonic()
            if wait > 0 and not (self._stopping or self._tickets):
                self._queue.pause(wait)
            else:
                self._turn()
            self.cpu_seconds = self._cpu()
        self._flush()
        if self._unsaved:
            self._own_up()
        self._answer(force=True)
        if self._sink is not None:
            self._call(self._sink.close)
        self.finished = True

    def _turn(self) -> None:
        readings = self._held or self._queue.get(self._patience())
        if readings is not None:
            self._write(readings)
        due = self._flush_at is not None and self._monotonic() >= self._flush_at
        if due or any(self.settled >= target for target, _ in self._tickets):
            self._flush()
        self._answer()

    def _patience(self) -> float:
        if self._tickets or self._stopping:
            return 0.0
        return _IDLE if self._flush_at is None else min(_IDLE, max(0.0, self._flush_at - self._monotonic()))

    def _write(self, readings: Readings) -> None:
        if self._call(lambda: self._opened().write(readings)):
            self._written += 1
            self._unsaved += 1
            self._held, self._attempts = None, 0
            if self._flush_at is None:
                self._flush_at = self._monotonic() + self._flush_every
            return
        self._held, self._attempts = readings, self._attempts + 1
        if self._attempts >= _ATTEMPTS:
            self._give_up()
        if self._stopping and self._errors_in_row >= _ATTEMPTS:  # no time left for a sink that is broken
            self._queue.drop_all()

    def _give_up(self) -> None:
        self._held, self._attempts = None, 0
        self._abandoned += 1

    def _flush(self) -> None:
        if self._sink is not None and self._flush_at is not None and self._call(self._sink.flush):
            self._flush_at, self._unsaved = None, 0

    def _own_up(self) -> None:
        """At the end: what the last flush could not save was not written, whatever the sink said when it took it."""
        self._written -= self._unsaved
        self._abandoned += self._unsaved
        log.error("sink %r could not save its last %d readings (%s)", self.name, self._unsaved, self._last_error)

    def _answer(self, force: bool = False) -> None:
        """Answers the tickets whose readings are settled; all of them once the sink fails."""
        failing = self._errors_in_row > 0
        left = []
        while self._tickets:
            target, ticket = self._tickets.pop(0)
            if failing or force or self.settled >= target:
                ticket.answer(self.name, ok=not failing and self._flush_at is None)
            else:
                left.append((target, ticket))
        self._tickets.extend(left)

    def _opened(self) -> Sink:
        self.open()
        assert self._sink is not None
        return self._sink

    def _call(self, action: Callable[[], None]) -> bool:
        self._called_at = self._monotonic()
        try:
            action()
        except BesideNotSaved as error:
            self._count(error)
            self._unsaved, self._flush_at = 0, self._monotonic() + self._flush_every
            self._errors_in_row, self._retry_at = 0, float("-inf")
            self._complaint.say(f"sink {self.name!r}: {error}; {self._failed} failed calls so far, tried again")
            return False
        except BaseException as error:  # whatever a foreign writer throws: this thread must go on
            self._count(error)
            self._errors_in_row += 1
            first, longest = self._backoff
            self._retry_at = self._monotonic() + min(longest, first * 2.0 ** min(self._errors_in_row - 1, 30))
            self._flush_at = self._retry_at if self._flush_at is not None else None
            self._complaint.say(
                f"sink {self.name!r} failed ({self._last_error}); training goes on, "
                f"{self._failed} failed calls so far, next try in {self._retry_at - self._monotonic():.1f} s"
            )
            return False
        finally:
            self._called_at = None
        self._errors_in_row = 0
        self._retry_at = float("-inf")
        return True

    def _count(self, error: BaseException) -> None:
        self._failed += 1
        self._last_error = f"{type(error).__name__}: {error}"
