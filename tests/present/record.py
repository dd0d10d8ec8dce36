"""A run made of plain arrays, read like the one on disk."""

from __future__ import annotations

from typing import Any

import numpy as np


class FakeRun:
    """Series by name: `values`, or `(steps, values)`; None is absent."""

    def __init__(
        self,
        series: dict[str, Any],
        manifest: dict | None = None,
        events=(),
        which=None,
        flight=None,
        coverage=(),
        lacking=None,
    ) -> None:
        self._series = series
        self._manifest = manifest or {"attempts": [{"attempt": 1, "first_step": 0, "plan": None}]}
        self._events = list(events)
        self._which = which or {}
        self._flight = flight
        self._coverage = list(coverage)
        self._lacking = lacking or {}

    def names(self) -> list[str]:
        return list(self._series)

    def series(self, name: str):
        found = self._series[name]
        steps, values = found if isinstance(found, tuple) else (range(len(found)), found)
        present = np.array([value is not None for value in values], bool)
        numbers = np.array([np.nan if value is None else value for value in values], float)
        return np.array(list(steps), np.int64), numbers, present

    def which(self, name: str):
        steps, labels = self._which[name]
        return np.array(steps), labels

    def events(self) -> list[dict]:
        return self._events

    def manifest(self) -> dict:
        return self._manifest

    def damaged(self) -> list[str]:
        return []

    def coverage(self) -> list[dict]:
        return self._coverage

    def flight_step(self) -> int | None:
        return self._flight

    def lacking(self) -> dict:
        return self._lacking
