"""Bounded hand-over of readings to one slow consumer: what matters least goes first."""

from __future__ import annotations

import collections
import threading

from probes_jax.host.priority import shed
from probes_jax.spec.metric import Priority
from probes_jax.spec.readings import Readings

OBJECT_COST = 16  # values that a reading weighs beside its own values: objects, labels
_ROOM = 0.75  # after shedding, the queue is at most this full: shedding costs O(1) per reading


def cost_of(readings: Readings) -> int:
    """Weight of one reading in the queue, in values of about nine bytes."""
    return len(readings.names) + OBJECT_COST


class ReadingsQueue:
    """A queue between one producer and one consumer that never blocks the producer and never grows past its capacity.

    When it is full, the oldest readings lose their P2 values, then their P1 values; when P0 alone does not fit, whole
    readings go, the oldest first. The newest reading is never touched. Every reading that lost something is counted
    once as `thinned` or `dropped`.

    Args:
        capacity: Values held at most, over all readings (about nine bytes each).

    Attributes:
        added: Readings put in so far.
        dropped: Readings of which nothing was handed over.
        thinned: Readings that lost some of their values while they waited, and were not dropped afterwards.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"ReadingsQueue capacity must be at least 1 value, got {capacity}")
        self._capacity = capacity
        self._items: collections.deque[tuple[Readings, bool]] = collections.deque()  # (readings, has lost something)
        self._cost = 0
        self._ready = threading.Condition()
        self._woken = False
        self.added = 0
        self.dropped = 0
        self.thinned = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, readings: Readings) -> None:
        """Adds a reading, at the expense of older ones if need be."""
        with self._ready:
            self._items.append((readings, False))
            self.added += 1
            self._cost += cost_of(readings)
            if self._cost > self._capacity:
                self._make_room()
            self._ready.notify()

    def get(self, timeout: float) -> Readings | None:
        """The oldest reading; None when there is none within `timeout` seconds, or `wake` was called."""
        with self._ready:
            if not self._items:
                self._wait(timeout)
            if not self._items:
                return None
            readings, _ = self._items.popleft()
            self._cost -= cost_of(readings)
            return readings

    def pause(self, timeout: float) -> None:
        """Waits without taking anything, until `wake` or `timeout` seconds."""
        with self._ready:
            self._wait(timeout)

    def wake(self) -> None:
        """Ends the consumer's wait, or its next one if it is not waiting."""
        with self._ready:
            self._woken = True
            self._ready.notify_all()

    def _wait(self, timeout: float) -> None:
        if not self._woken:
            self._ready.wait(timeout)
        self._woken = False

    def drop_all(self) -> None:
        """Empties the queue; what it held counts as dropped."""
        with self._ready:
            for _, thinned in self._items:
                self._count_drop(thinned)
            self._items.clear()
            self._cost = 0

    def _count_drop(self, thinned: bool) -> None:
        self.dropped += 1
        self.thinned -= thinned

    def _make_room(self) -> None:
        target = int(self._capacity * _ROOM)
        for keep in (Priority.P1, Priority.P0):
            for index in range(len(self._items) - 1):
                if self._cost <= target:
                    return
                self._thin(index, keep)
        while self._cost > target and len(self._items) > 1:
            readings, thinned = self._items.popleft()
            self._cost -= cost_of(readings)
            self._count_drop(thinned)

    def _thin(self, index: int, keep: Priority) -> None:
        readings, thinned = self._items[index]
        less = shed(readings, keep)
        if less is not readings:
            self._items[index] = (less, True)
            self._cost -= cost_of(readings) - cost_of(less)
            self.thinned += not thinned
