"""What happened in a run, seen in the counters of its readings: the events of the store."""

from __future__ import annotations

from typing import Any

from probes_jax.spec.readings import Readings

KINDS = {
    "alert/guard/skipped_count": "skipped",
    "alert/guard/stopped": "guard_stopped",
    "alert/co_spike/count": "co_spike",
    "alert/nonfinite_steps": "nonfinite",
    "data/empty_steps": "empty_step",
    "opt/loss_scale_drops": "loss_scale_drop",
}
ATTEMPT = "attempt"
_MORE = {"co_spike": ("loss/spike/score", "grad/spike/score")}  # what an event says besides its counter


def counter_columns(names: tuple[str, ...]) -> dict[str, int]:
    """Columns of the counters that are watched, by name.

    >>> counter_columns(("loss/mean", "data/empty_steps"))
    {'data/empty_steps': 1}
    """
    return {name: column for column, name in enumerate(names) if name in KINDS}


class Happenings:
    """Watches the readings of one attempt: a counter that is higher than the last time it was seen is an event.

    The first value of a counter is only what later ones are compared with; the first readings of all are the event
    `attempt`. A kind that occurs again while its event still waits to be written makes that event longer, so a run in
    which every step goes wrong has one event of a kind for each flush, not one for each step.

    Attributes:
        waiting: Events to be written, in order: `step`, `time`, `kind`, `payload`. The owner removes them.
    """

    def __init__(self) -> None:
        self.waiting: list[dict[str, Any]] = []
        self._seen: dict[str, float] | None = None

    def look(self, readings: Readings, columns: dict[str, int], wall_time: float) -> None:
        """Takes one step.

        Args:
            readings: All metrics of the step.
            columns: `counter_columns(readings.names)`.
            wall_time: When it happened, seconds since the epoch.
        """
        if self._seen is None:
            self._seen = {}
            self.begin(readings.step, wall_time)
        for name, column in columns.items():
            if readings.present[column]:
                value = float(readings.values[column])
                if value > self._seen.get(name, value):
                    self._rise(readings, wall_time, name, int(value), int(value - self._seen[name]))
                self._seen[name] = value

    def begin(self, step: int, wall_time: float) -> None:
        """An attempt begins with this step: that is told before anything else that waits."""
        self.waiting.insert(0, _event(step, wall_time, ATTEMPT, {"first_step": step}))

    def _rise(self, readings: Readings, wall_time: float, name: str, count: int, rise: int) -> None:
        kind = KINDS[name]
        for event in self.waiting:
            if event["kind"] == kind:
                rise += event["payload"]["rise"]
                event["payload"] |= {"count": count, "rise": rise, "last_step": readings.step}
                return
        payload: dict[str, Any] = {"count": count, "rise": rise, "last_step": readings.step}
        for more in _MORE.get(kind, ()):
            if more in readings.names and readings.present[readings.names.index(more)]:
                payload[more] = float(readings.values[readings.names.index(more)])
        self.waiting.append(_event(readings.step, wall_time, kind, payload))


def _event(step: int, wall_time: float, kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    return {"step": step, "time": wall_time, "kind": kind, "payload": payload}
