"""Where the recorder sends the readings of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from probes_jax.spec.coverage import Coverage
from probes_jax.spec.layout import Layout
from probes_jax.spec.readings import Readings


class BesideNotSaved(OSError):
    """A flush saved every reading, but not all that goes with them: the next flush tries that again."""


@runtime_checkable
class Sink(Protocol):
    """Takes the readings of every recorded step, in order.

    A sink is called from one thread, the recorder's worker. It may raise: the recorder counts the failure, logs it
    and goes on. It must never start work on a device, and it creates nothing before the first `write`.
    """

    def write(self, readings: Readings) -> None:
        """Takes one step. May buffer."""
        ...

    def flush(self) -> None:
        """Makes everything taken so far readable by others and safe from the death of this process.

        Raises:
            BesideNotSaved: All readings are.
            Exception: Some are not.
        """
        ...

    def close(self) -> None:
        """Flushes and releases files. A second call does nothing."""
        ...


@runtime_checkable
class DescribedSink(Protocol):
    """A sink that also keeps what could be measured and what could not."""

    def describe(self, layout: Layout, coverage: Coverage) -> None:
        """Takes what a program measures, before its first reading. Called on the training thread: never waits."""
        ...


@runtime_checkable
class EventSink(Protocol):
    """A sink that also keeps what happened."""

    def note(self, step: int, kind: str, payload: Mapping[str, Any]) -> None:
        """Takes an event, to be written at the next flush. Called on the recorder's worker thread: never waits."""
        ...
