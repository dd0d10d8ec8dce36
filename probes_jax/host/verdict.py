"""That the guard has given up, told to the training loop at the same record on every process."""

from __future__ import annotations

import queue

from probes_jax.host.health import log
from probes_jax.host.worker import Worker

RUN_AHEAD = 16  # reports


class GuardStopped(RuntimeError):
    """The guard has skipped too many updates in a row: the run does not learn any more."""


class Verdict:
    """Looks for the step at which the guard stopped; tells it once."""

    def __init__(self) -> None:
        self._acknowledged = 0  # reports known to be read
        self._told = False

    def stay_close(self, worker: Worker, number: int) -> None:
        """Waits until all but the last 16 of `number` reports are read, and looks at the oldest of them.

        Raises:
            GuardStopped: The guard had stopped there.
        """
        stopped_at = None
        while self._acknowledged < number - RUN_AHEAD and not worker.finished:
            try:
                stopped_at = worker.acknowledged.get(timeout=1.0)
            except queue.Empty:
                continue
            self._acknowledged += 1
        if stopped_at is not None:
            self._told = True
            raise GuardStopped(_why(stopped_at))

    def raise_now(self, worker: Worker | None) -> None:
        """Raises `GuardStopped` if the guard has stopped and nobody was told."""
        why = self._untold(worker)
        if why:
            raise GuardStopped(why)

    def log_now(self, worker: Worker | None) -> None:
        """Logs that the guard has stopped, if nobody was told."""
        why = self._untold(worker)
        if why:
            log.error(why)

    def _untold(self, worker: Worker | None) -> str:
        if worker is None or worker.stopped_at is None or self._told:
            return ""
        self._told = True
        return _why(worker.stopped_at)


def _why(stopped_at: int) -> str:
    return (
        f"the guard gave up at step {stopped_at}: it skipped Guard.max_consecutive updates in a row, and skips "
        "every later one. Go back to a checkpoint before the trouble, with a lower learning rate or past "
        "the data that caused it; alert/guard/... and the flight record say when it began"
    )
