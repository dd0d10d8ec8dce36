"""From the readings of a step to any writer with the methods of CLU's `MetricWriter`."""

from __future__ import annotations

from typing import Any, Protocol

from probes_jax.host.select import Selection
from probes_jax.host.writers.event import EventWriter
from probes_jax.spec.readings import Readings

_NEEDED = ("write_scalars", "flush")


class MetricWriter(Protocol):
    """The part of CLU's `MetricWriter` that a recorder uses. Importing CLU's own class would import TensorFlow."""

    def write_scalars(self, step: int, scalars: Any) -> None: ...

    def flush(self) -> None: ...


def as_metric_writer(writer: Any) -> MetricWriter:
    """`writer`, once it is known to have the methods that a recorder calls.

    Raises:
        TypeError: It lacks one of them, or is a class instead of an instance.
    """
    if isinstance(writer, type):
        raise TypeError(f"writer must be an instance, got the class {writer.__name__}; write {writer.__name__}(...)")
    missing = [name for name in _NEEDED if not callable(getattr(writer, name, None))]
    if missing:
        raise TypeError(
            f"writer must have the methods of clu.metric_writers.MetricWriter; {type(writer).__name__} lacks {missing}"
        )
    return writer


def default_writer(logdir: str) -> EventWriter:
    """The writer used when none is given: always `EventWriter`, with or without TensorFlow installed.

    Pass `writer=clu.metric_writers.create_default_writer(logdir)` for CLU's own, which imports TensorFlow and costs
    about 100 times more interpreter time per scalar.
    """
    return EventWriter(logdir)


class WriterSink:
    """A sink that shows the selected metrics of every step through a writer.

    Each step is one `write_scalars` call, plus one `write_texts` call when the worst layers change. Steps that go
    back (a resumed run, a rollback) are announced to an `EventWriter`, so that readers hide what they supersede.

    Args:
        writer: Any writer with the methods of CLU's `MetricWriter`.
        selection: What is shown; by default signals, group summaries and the five worst layers.

    Raises:
        TypeError: The writer lacks a method.
    """

    def __init__(self, writer: Any, selection: Selection | None = None) -> None:
        self.writer: Any = as_metric_writer(writer)
        self._select = selection or Selection()
        self._last: dict[str, int] = {}  # last step of each program
        self._said: dict[str, str] = {}  # texts as they were last written
        self._closed = False

    def write(self, readings: Readings) -> None:
        """Writes one step."""
        selected = self._select(readings)
        self._announce(readings)
        if selected.scalars:
            self.writer.write_scalars(readings.step, selected.scalars)
        texts = {tag: text for tag, text in selected.texts.items() if text != self._said.get(tag)}
        if texts and hasattr(self.writer, "write_texts"):
            self.writer.write_texts(readings.step, texts)
        self._said.update(texts)

    def flush(self) -> None:
        """Flushes the writer."""
        self.writer.flush()

    def close(self) -> None:
        """Closes the writer, or flushes one without `close`."""
        if not self._closed:
            self._closed = True
            getattr(self.writer, "close", self.writer.flush)()

    def _announce(self, readings: Readings) -> None:
        restart = getattr(self.writer, "restart", None)
        goes_back = readings.step < self._last.get(readings.program, readings.step)
        resumes = not self._last and restart is not None and self.writer.continues()
        if restart is not None and (goes_back or resumes):
            restart(readings.step)
        if goes_back:
            self._last.clear()
        self._last[readings.program] = readings.step
