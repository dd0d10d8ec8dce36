"""From the training thread to the worker: reports that nobody has read yet.

The training thread takes no lock that the worker needs, and a signal handler takes none at all: a `SimpleQueue` is
re-entrant. So a flush from a SIGTERM handler cannot deadlock, wherever the signal struck.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from probes_jax.host.thin import thin
from probes_jax.spec.layout import Layout

_PAUSE, _LOOKS = 0.01, 100  # seconds between looks for a report, and how many before the thread blocks
ITEM_BYTES = 512  # that a thinned report takes beside its buffer: objects, numbers, its place in the queue


class Pending(NamedTuple):  # made on the training thread: a frozen dataclass takes three times as long
    """One report on its way.

    Attributes:
        buffer: uint32 `[size]` or `[T, size]`, its copy to the host started.
        layout: What is where in it.
        data_wait: Seconds that the training thread waited for the batch; None when not measured.
        record_seconds: Seconds that `record` has taken so far.
        number: How many reports were recorded up to this one.
        nbytes: Size of the buffer.
        thinned: Whether this is what is left of a report: its P0 part.
    """

    buffer: Any
    layout: Layout
    data_wait: float | None
    record_seconds: float
    number: int
    nbytes: int
    thinned: bool = False


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
    """Unread reports, bounded in number and bytes; when it is full, the oldest whole one is thinned to its P0 part.

    A thinned report keeps its place. It no longer counts towards the number, and bytes hold some hundred thousands. A
    report is lost where it cannot be thinned, because the device has not delivered it; and the oldest of all is when
    P0 parts alone fill the bytes.

    The queue holds numbers; what they stand for lies in two dicts. Whoever takes a number out of `_whole` first, the
    worker to read it or a producer to thin it, has it: no lock is needed, because that is one step of the interpreter.

    Args:
        capacity: Whole reports held at most.
        capacity_bytes: Bytes held at most, of buffers and `ITEM_BYTES` for each report.

    Attributes:
        thinned: Reports of which only the P0 part was kept.
        lost: Reports dropped unread.
        on_lost: Called for each of them.
    """

    def __init__(self, capacity: int, capacity_bytes: int) -> None:
        if capacity < 1:
            raise ValueError(f"queue_size must be at least 1 report, got {capacity}")
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._items: queue.SimpleQueue[int | Ticket | object] = queue.SimpleQueue()
        self._whole: dict[int, Pending] = {}
        self._thin: dict[int, Pending] = {}
        self._producers = threading.Lock()  # only ever taken by threads that record
        self._next = 0  # number of the next report
        self._oldest = 0  # no report with a lower number is whole
        self._bytes_in = 0  # less what was thinned away or lost; written by producers
        self._bytes_out = 0  # written by the worker
        self.thinned = 0
        self.lost = 0
        self.on_lost: Callable[[], None] = lambda: None

    def put(self, pending: Pending) -> None:
        """Adds a report; never waits for the worker."""
        with self._producers:
            while self._is_full(pending.nbytes) and (self._thin_oldest() or self._lose_oldest()):
                pass
            self._bytes_in += pending.nbytes
            self._whole[self._next] = pending
            self._items.put(self._next)
            self._next += 1

    def send(self, message: Ticket | object) -> None:
        """Adds a ticket or `STOP` behind the reports. Takes no lock: safe in a signal handler."""
        self._items.put(message)

    def get(self) -> Item:
        """The oldest item; waits for one."""
        while isinstance(item := self._next_item(), int):
            pending = self._take(item)
            if pending is not None:  # else it was lost
                self._bytes_out += pending.nbytes
                return pending
        return item

    def _next_item(self) -> int | Ticket | object:
        """Looks every few milliseconds: to wake a thread that blocks would cost the training thread more than the rest
        of `put`. Where nothing comes for a second, nobody trains, and it does block.
        """
        for _ in range(_LOOKS):
            try:
                return self._items.get_nowait()
            except queue.Empty:
                time.sleep(_PAUSE)
        return self._items.get()

    @property
    def waiting(self) -> int:
        return self._items.qsize()

    @property
    def pressure(self) -> float:
        """How full it is: 0 is empty, 1 is full."""
        return max(len(self._whole) / self._capacity, self._held / self._capacity_bytes)

    @property
    def _held(self) -> int:
        return self._bytes_in - self._bytes_out + ITEM_BYTES * self._items.qsize()

    def _is_full(self, nbytes: int) -> bool:
        held = self._held
        return len(self._whole) >= self._capacity or (held > 0 and held + nbytes + ITEM_BYTES > self._capacity_bytes)

    def _take(self, number: int) -> Pending | None:
        whole = self._whole.pop(number, None)
        return self._thin.pop(number, None) if whole is None else whole

    def _thin_oldest(self) -> bool:
        """Thins the oldest whole report, or loses it where that cannot be done; whether there was one."""
        while self._oldest < self._next:
            number = self._oldest
            self._oldest += 1
            whole = self._whole.get(number)
            if whole is not None and self._replace(number, whole):
                return True
        return False

    def _replace(self, number: int, whole: Pending) -> bool:
        """Whether the worker did not take the report meanwhile."""
        part = thin(whole.buffer, whole.layout)
        if part is not None:  # there before the whole one is gone
            self._thin[number] = whole._replace(
                buffer=part.buffer, layout=part.layout, nbytes=part.buffer.nbytes, thinned=True
            )
        if self._whole.pop(number, None) is None:
            self._thin.pop(number, None)
            return False
        self._bytes_in -= whole.nbytes
        if part is None:
            self._count_lost()
        else:
            self._bytes_in += part.buffer.nbytes
            self.thinned += 1
        return True

    def _lose_oldest(self) -> bool:
        """Takes the oldest report out of the queue; whether there was one."""
        messages, number = [], None
        try:
            while number is None:
                item = self._items.get_nowait()
                if isinstance(item, int):
                    number = item
                else:
                    messages.append(item)
        except queue.Empty:
            pass
        for message in messages:  # now behind more reports than before: they promise no less
            self._items.put(message)
        if number is not None and (pending := self._take(number)) is not None:
            self._bytes_in -= pending.nbytes
            self.thinned -= pending.thinned
            self._count_lost()
        return number is not None

    def _count_lost(self) -> None:
        self.lost += 1
        self.on_lost()
