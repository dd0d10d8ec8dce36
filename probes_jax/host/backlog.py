"""From the training thread to the worker: reports that nobody has read yet.

The training thread takes no lock that the worker needs, and a signal handler takes none at all: a `SimpleQueue` is
re-entrant. So a flush from a SIGTERM handler cannot deadlock, wherever the signal struck.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from probes_jax.spec.layout import Layout


class Pending(NamedTuple):  # made on the training thread: a frozen dataclass takes three times as long
    """One report on its way.

    Attributes:
        buffer: uint32 `[size]` or `[T, size]`, its copy to the host started.
        layout: What is where in it.
        data_wait: Seconds that the training thread waited for the batch; None when not measured.
        record_seconds: Seconds that `record` has taken so far.
        number: How many reports were recorded up to this one.
        nbytes: Size of the buffer.
    """

    buffer: Any
    layout: Layout
    data_wait: float | None
    record_seconds: float
    number: int
    nbytes: int


class Ticket:
    """A request to write down everything recorded so far; it moves through the threads behind the data."""

    def __init__(self) -> None:
        self._missing: set[str] | None = None  # sinks still to answer; None until the worker has passed the ticket on
        self.failed: set[str] = set()  # sinks that could not write

    def expect(self, names: set[str]) -> None:
        self._missing = names

    def answer(self, name: str, ok: bool) -> None:
        """Called once by each sink's thread."""
        if not ok:
            self.failed.add(name)
        if self._missing is not None:
            self._missing.discard(name)

    @property
    def missing(self) -> set[str] | None:
        return self._missing

    @property
    def done(self) -> bool:
        return self._missing is not None and not self._missing


STOP = object()
Item = Pending | Ticket | object  # `STOP` is the only plain object


class Backlog:
    """Unread reports, bounded in number and bytes; when full, the oldest is lost and counted.

    Args:
        capacity: Reports held at most.
        capacity_bytes: Bytes of their buffers held at most.

    Attributes:
        lost: Reports dropped unread.
        on_lost: Called for each of them.
    """

    def __init__(self, capacity: int, capacity_bytes: int) -> None:
        if capacity < 1:
            raise ValueError(f"queue_size must be at least 1 report, got {capacity}")
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._producers = threading.Lock()  # only ever taken by threads that record
        self._bytes_in = 0  # less what was lost; written by producers
        self._bytes_out = 0  # written by the worker
        self.lost = 0
        self.on_lost: Callable[[], None] = lambda: None

    def put(self, pending: Pending) -> None:
        """Adds a report; never waits for the worker."""
        with self._producers:
            while self._is_full(pending.nbytes) and self._lose_oldest():
                pass
            self._bytes_in += pending.nbytes
            self._items.put(pending)

    def send(self, message: Ticket | object) -> None:
        """Adds a ticket or `STOP` behind the reports. Takes no lock: safe in a signal handler."""
        self._items.put(message)

    def get(self) -> Item:
        """The oldest item; waits for one."""
        item = self._items.get()
        if isinstance(item, Pending):
            self._bytes_out += item.nbytes
        return item

    @property
    def waiting(self) -> int:
        return self._items.qsize()

    @property
    def pressure(self) -> float:
        """How full it is: 0 is empty, 1 is full."""
        held = (self._bytes_in - self._bytes_out) / self._capacity_bytes
        return max(self._items.qsize() / self._capacity, held)

    def _is_full(self, nbytes: int) -> bool:
        held = self._bytes_in - self._bytes_out
        return self._items.qsize() >= self._capacity or (held > 0 and held + nbytes > self._capacity_bytes)

    def _lose_oldest(self) -> bool:
        messages, dropped = [], False
        try:
            while not dropped:
                item = self._items.get_nowait()
                if isinstance(item, Pending):
                    self._bytes_in -= item.nbytes
                    self.lost += 1
                    self.on_lost()
                    dropped = True
                else:
                    messages.append(item)
        except queue.Empty:
            pass
        for message in messages:  # now behind more reports than before: they promise no less
            self._items.put(message)
        return dropped
