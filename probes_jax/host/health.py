"""What the monitor knows about itself."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

log = logging.getLogger("probes_jax.recorder")


@dataclasses.dataclass(frozen=True)
class SinkHealth:
    """How one sink fares.

    Attributes:
        written: Readings that it took.
        dropped: Readings that it never got: it was too slow or kept failing.
        thinned: Readings of which it got the more important values only.
        failed: Calls that raised.
        waiting: Readings in its queue.
        last_error: Text of the last error, empty if there was none.
    """

    written: int = 0
    dropped: int = 0
    thinned: int = 0
    failed: int = 0
    waiting: int = 0
    last_error: str = ""


@dataclasses.dataclass(frozen=True)
class Health:
    """A snapshot of the recorder.

    Attributes:
        recorded: Reports that `record` took.
        read: Steps read from them.
        lost: Reports dropped unread: the host was a whole queue behind, and not even their P0 values could be kept.
        thinned: Reports of which only the P0 values were kept: the host was a whole queue behind.
        passed_over: Steps that the sinks did not get in full, because many reports were waiting to be read.
        shed: Steps of which the recorder's budget left something out.
        refused: Reports or steps not taken: a step that was not above the last, a buffer split over processes.
        failed: Reports that could not be read.
        record_seconds: Time spent in `record` on the training thread, in all.
        last_error: Text of the last refusal or failure.
        sinks: By name. The flight record is the one named `flight`.
    """

    recorded: int = 0
    read: int = 0
    lost: int = 0
    thinned: int = 0
    passed_over: int = 0
    shed: int = 0
    refused: int = 0
    failed: int = 0
    record_seconds: float = 0.0
    last_error: str = ""
    sinks: dict[str, SinkHealth] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether everything recorded so far was read, and nothing dropped, left out, thinned, refused or failed."""
        trouble = self.lost or self.thinned or self.passed_over or self.shed or self.refused or self.failed
        return not trouble and not any(s.dropped or s.thinned or s.failed for s in self.sinks.values())


class Complaint:
    """One log line for many like errors: the first at once, then at most one in `every` seconds, with their number."""

    def __init__(self, every: float = 60.0, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._monotonic = monotonic
        self._next = float("-inf")
        self._silent = 0

    def say(self, text: str) -> None:
        now = self._monotonic()
        if now < self._next:
            self._silent += 1
            return
        more = f" ({self._silent} more since the last such line)" if self._silent else ""
        self._next, self._silent = now + self._every, 0
        log.warning("%s%s", text, more)
