"""How long the training loop waits for its data."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _Waits(threading.local):
    """Waits of the loop that runs in this thread."""

    owner: object = None  # the iterator that they belong to
    seconds: float | None = None  # since the last record; None when no batch came


_waits = _Waits()


def take_wait() -> float | None:
    """Seconds that this thread waited for batches since the last call; None when `timed` gave none."""
    seconds = _waits.seconds
    if seconds is not None:
        _waits.seconds = None
    return seconds


class Timed(Generic[T]):
    """An iterable that yields the batches of another one and measures each wait. Made by `timed`."""

    def __init__(self, iterable: Iterable[T], clock: Callable[[], float]) -> None:
        self._iterable = iterable
        self._clock = clock

    def __iter__(self) -> Iterator[T]:
        return _TimedIterator(iter(self._iterable), self._clock)


class _SizedTimed(Timed[T]):
    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]


class _TimedIterator(Iterator[T]):
    def __init__(self, batches: Iterator[T], clock: Callable[[], float]) -> None:
        self._batches = batches
        self._clock = clock

    def __next__(self) -> T:
        start = self._clock()
        batch = next(self._batches)  # the end of the data is nobody's wait
        wait = self._clock() - start
        # Batches of one loop add up until they are recorded; what another loop (an evaluation) left is not ours.
        earlier = _waits.seconds if _waits.owner is self else None
        _waits.owner, _waits.seconds = self, wait + (earlier or 0.0)
        return batch


def timed(iterable: Iterable[T], *, clock: Callable[[], float] = time.perf_counter) -> Timed[T]:
    """Yields the same batches, and lets the recorder report the wait for each as `sys/data_wait`.

    The wait is handed to the next `Recorder.record` of the same thread, so loops in several threads do not mix.
    Several batches per record add up. Without `timed` the metric is absent.

    Args:
        iterable: Batches, a data loader.
        clock: Seconds; replaced in tests.

    Returns:
        An iterable that may be iterated as often as `iterable`; it has a length if `iterable` has one.

    >>> [batch for batch in timed(["a", "b"])], len(timed(["a", "b"]))
    (['a', 'b'], 2)
    """
    if not isinstance(iterable, Iterable) and not hasattr(iterable, "__getitem__"):
        raise TypeError(f"timed() needs an iterable of batches, got {type(iterable).__name__}")
    return _SizedTimed(iterable, clock) if hasattr(iterable, "__len__") else Timed(iterable, clock)
