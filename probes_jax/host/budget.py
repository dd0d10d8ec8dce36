"""What is left out when the recorder costs more than its budget: one step at a time, and back again."""

from __future__ import annotations

import enum

from probes_jax.host.priority import select
from probes_jax.spec.metric import Priority
from probes_jax.spec.online import is_one_of_many, priority_of
from probes_jax.spec.readings import Readings

_LONGEST = 64  # windows that a recovery waits at most


class Shed(enum.IntEnum):
    """How much is left out of what goes to the sinks. P0 signals, and `sys/...`, never are."""

    NOTHING = 0
    LAYERS = 1  # series of layers and shards, in nine of ten full reports
    P2 = 2  # those in all full reports, and everything of priority P2
    P1 = 3  # everything but P0

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Shed.NOTHING: "everything is written",
    Shed.LAYERS: "per-layer series are written of one full report in ten",
    Shed.P2: "per-layer series and P2 metrics are not written",
    Shed.P1: "only P0 signals are written",
}
_WHOLE = 10  # with `LAYERS`, one full report of so many is whole


class Budget:
    """Decides how much is left out, from the cost of one window after the other.

    A window above the budget: one step more is left out. Windows below half of it: one step less. Between the two
    nothing changes. Each time that a step had to be taken back again, the next recovery needs twice as many quiet
    windows in a row as the one before, so that it does not go back and forth.

    Args:
        share: The budget, a share of the wall time; None never leaves anything out.

    Attributes:
        shed: What is left out now.
    """

    def __init__(self, share: float | None) -> None:
        self.share = share
        self.shed = Shed.NOTHING
        self._quiet = 0  # windows in a row
        self._needed = 1  # quiet windows for a recovery
        self._recovered = False  # since the last step
        self._full = 0  # full reports seen

    def judge(self, share: float) -> bool:
        """Takes the cost of a window; whether that changed what is left out."""
        if self.share is None:
            return False
        if share > self.share:
            self._quiet = 0
            if self._recovered:
                self._needed, self._recovered = min(2 * self._needed, _LONGEST), False
            return self._go(1)
        self._quiet = self._quiet + 1 if share < self.share / 2 else 0
        if self._quiet < self._needed:
            return False
        self._quiet = 0
        changed = self._go(-1)
        self._recovered |= changed
        return changed

    def _go(self, by: int) -> bool:
        before, self.shed = self.shed, Shed(min(max(self.shed + by, Shed.NOTHING), Shed.P1))
        return self.shed is not before

    def lighten(self, readings: Readings) -> Readings:
        """The readings without what is left out; the same object when nothing is."""
        self._full += readings.program == "full"
        if self.shed is Shed.NOTHING:
            return readings
        if self.shed is Shed.LAYERS and (readings.program != "full" or self._full % _WHOLE == 0):
            return readings
        return select(readings, self.shed.name, self._stays)

    def _stays(self, name: str) -> bool:
        priority = priority_of(name)
        if priority is Priority.P0 or name.startswith("sys/"):
            return True
        if self.shed is Shed.P1 or is_one_of_many(name):
            return False
        return self.shed is Shed.LAYERS or priority < Priority.P2
