"""The monitor's own cost, as metrics of the run, and what follows when it is above the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from probes_jax.host.budget import Budget, Shed
from probes_jax.host.cost import HostCost, HostShare, ScanCost
from probes_jax.host.health import log
from probes_jax.spec.readings import Readings

UPKEEP_NAMES = (
    "sys/monitor/record_share",
    "sys/monitor/thread_share",
    "sys/monitor/scan_overhead",
    "sys/monitor/shed",
)
SHED, SCANS = "shed", "scan_overhead"  # kinds of events
Note = Callable[[int, str, Mapping[str, Any]], None]


class Upkeep:
    """Watches the cost from the worker's thread.

    What the device runs is decided by the step's number and the plan alone, the same on every process. So of the host's
    cost something is left out of what is written, and of the device's it is only said which `scan_every` would do.

    Args:
        budget: Share of the time; None measures only.
        note: Called with the step, the kind and the payload of an event.
        monotonic: Seconds on a steady clock.
    """

    def __init__(self, budget: float | None, note: Note, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._budget = Budget(budget)
        self._note = note
        self._monotonic = monotonic
        self._host = HostCost()
        self._scans = ScanCost()
        self._said_scans = False

    @property
    def shed(self) -> Shed:
        return self._budget.shed

    def now(self) -> float:
        return self._monotonic()

    def measure(
        self, readings: Readings, arrived_at: float | None, record_seconds: float, thread_seconds: float
    ) -> tuple[float | None, ...]:
        """Takes one step.

        Args:
            readings: The step.
            arrived_at: When the worker, waiting for it, got its report (`now`); None if it was there already.
            record_seconds: Time spent in `record` so far.
            thread_seconds: CPU time of the recorder's threads so far.

        Returns:
            Values of `UPKEEP_NAMES`; None where there is nothing new.
        """
        host = self._host.look(self._monotonic(), record_seconds, thread_seconds)
        if host is not None and self._budget.judge(host.total):
            self._say_shed(readings.step, host)
        scans = self._scans.arrived(readings.step, readings.program, arrived_at)
        if scans is not None and self._budget.share is not None and scans > self._budget.share:
            self._say_scans(readings.step, scans, self._budget.share)
        shares = (None, None) if host is None else host
        return *shares, scans, float(self._budget.shed)

    def lighten(self, readings: Readings) -> Readings:
        """What of a step goes to the sinks."""
        return self._budget.lighten(readings)

    def _say_shed(self, step: int, host: HostShare) -> None:
        shed, budget = self._budget.shed, self._budget.share
        log.warning(
            "at step %d the recorder takes %.2g %% of the host's time (%.2g %% on the training thread), its budget is "
            "%.2g %%: from now on %s",
            *(step, 100 * host.total, 100 * host.record, 100 * (budget or 0.0), shed.text),
        )
        payload = {"level": int(shed), "what": shed.text, "record_share": host.record, "thread_share": host.threads}
        self._note(step, SHED, payload | {"budget": budget})

    def _say_scans(self, step: int, share: float, budget: float) -> None:
        if self._said_scans:
            return
        self._said_scans = True
        every = self._scans.scan_every(budget)
        log.warning(
            "tensor scans add %.2g %% to the time of a step, the budget is %.2g %%: Plan(scan_every=%d) would meet it",
            *(100 * share, 100 * budget, every),
        )
        self._note(step, SCANS, {"share": share, "budget": budget, "scan_every": every})
