"""What the monitor costs: the recorder's share of the host's time, and what tensor scans add to a step."""

from __future__ import annotations

import collections
import math
import statistics
from typing import NamedTuple

_WINDOW = 60.0  # seconds over which the host's share is taken
_LEAST_RECORDS = 10  # in one window; a longer one is taken where steps are slower
_LIGHT, _FULL = 128, 8  # intervals that medians are taken of
_LEAST_LIGHT, _LEAST_FULL = 8, 3  # and without so many there is no median


class HostShare(NamedTuple):
    """Of the wall time of one window.

    Attributes:
        record: Time that `record` took on the training thread.
        threads: CPU time of the recorder's threads, which run beside the training thread and take turns with it where
            both hold the interpreter.
    """

    record: float
    threads: float

    @property
    def total(self) -> float:
        return self.record + self.threads


class HostCost:
    """Turns running totals into shares of the wall time, one window after the other.

    Args:
        window: Seconds of a window at least.
    """

    def __init__(self, window: float = _WINDOW) -> None:
        self._window = window
        self._begin: tuple[float, float, float] | None = None
        self._records = 0

    def look(self, now: float, record_seconds: float, thread_seconds: float) -> HostShare | None:
        """Takes the totals after a record; the shares of the window that ends with it, if one does.

        Args:
            now: Seconds on a steady clock.
            record_seconds: Time spent in `record` so far.
            thread_seconds: CPU time of the recorder's threads so far.
        """
        if self._begin is None:
            self._begin = now, record_seconds, thread_seconds
        self._records += 1
        since, record, threads = self._begin
        if now - since < self._window or self._records <= _LEAST_RECORDS:
            return None
        self._begin, self._records = (now, record_seconds, thread_seconds), 1
        return HostShare((record_seconds - record) / (now - since), (thread_seconds - threads) / (now - since))


class ScanCost:
    """What the steps that scan cost more than the others, from the times at which reports reach the host.

    The time between the reports of two steps in a row is a step's time where the host waited for both. Reports that
    were there before the host looked say nothing, and are left out.
    """

    def __init__(self) -> None:
        self._light: collections.deque[float] = collections.deque(maxlen=_LIGHT)
        self._full: collections.deque[float] = collections.deque(maxlen=_FULL)
        self._last: tuple[int, float] | None = None  # step and time of the last report that was waited for
        self._last_full: int | None = None  # step

    def arrived(self, step: int, program: str, at: float | None) -> float | None:
        """Takes a step; the share of the time of all steps that scans add, if this step tells anew.

        Args:
            step: The step.
            program: `light` or `full`.
            at: When its report reached the host, in seconds on a steady clock; None where nobody waited for it.
        """
        full = program == "full"
        if at is not None:
            if self._last is not None and self._last[0] == step - 1:
                (self._full if full else self._light).append(at - self._last[1])
            self._last = step, at
        if not full:
            return None
        between = 0 if self._last_full is None else step - self._last_full
        self._last_full = step
        return self._share(between)

    def scan_every(self, budget: float) -> int:
        """The least number of steps between scans with which these cost no more than a share `budget` of the time."""
        least = 1
        added, light = self._medians()
        if added > 0:
            least = math.ceil(added * (1 - budget) / (budget * light))
        return max(1, least)

    def _medians(self) -> tuple[float, float]:
        """(what a scan adds to a step, time of a light step), seconds."""
        light = statistics.median(self._light)
        return statistics.median(self._full) - light, light

    def _share(self, between: int) -> float | None:
        if len(self._light) < _LEAST_LIGHT or len(self._full) < _LEAST_FULL or between < 1:
            return None
        added, light = self._medians()
        return added / (between * light + added)
