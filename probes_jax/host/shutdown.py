"""What happens to unwritten records when the process is asked to end.

One SIGTERM handler serves all recorders of a process: it flushes them, then does what the handler before it did. Under
`jax.distributed` none is installed: JAX's own handler is in C++, Python cannot chain to it, and replacing it would
break preemption sync points for good. There the timed flush and the flight record have to do.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

_LIMIT = 10.0  # seconds that a flush may hold up the end of the process


class Flushable(Protocol):
    """What can be written down in a hurry."""

    def flush(self, limit: float) -> bool: ...

    def close(self) -> None: ...


# Replaced as a whole, never changed: the handler may run between any two instructions of the code below.
_watched: tuple[Flushable, ...] = ()
_exits: dict[int, Callable[[], None]] = {}
_installed: _Handler | None = None


def watch(target: Flushable, *, signals: bool) -> None:
    """Closes `target` when the interpreter ends and, with `signals`, flushes it on SIGTERM.

    Signals can be watched from the main thread only; elsewhere `signals` does nothing. A process forked from this one
    inherits the handler but not the threads: there it only passes the signal on.

    Args:
        target: Held until `unwatch`.
        signals: False under `jax.distributed`.
    """
    global _watched
    owner = os.getpid()

    def close_at_exit() -> None:
        if os.getpid() == owner:
            target.close()

    _exits[id(target)] = close_at_exit
    atexit.register(close_at_exit)
    if signals and threading.current_thread() is threading.main_thread():
        _watched = (*_watched, target)
        _install()


def unwatch(target: Flushable) -> None:
    """Ends `watch`; the last one puts the earlier signal handler back."""
    global _watched
    close_at_exit = _exits.pop(id(target), None)
    if close_at_exit is not None:
        atexit.unregister(close_at_exit)
    _watched = tuple(other for other in _watched if other is not target)
    if not _watched and threading.current_thread() is threading.main_thread():
        _uninstall()


def _install() -> None:
    global _installed
    current = signal.getsignal(signal.SIGTERM)
    if current is None or isinstance(current, _Handler):  # None: made outside Python, so it cannot be chained to
        return
    _installed = _Handler(current)
    signal.signal(signal.SIGTERM, _installed)


def _uninstall() -> None:
    """Puts the earlier handler back, unless somebody has put theirs over ours (they may call ours)."""
    global _installed
    if _installed is not None and signal.getsignal(signal.SIGTERM) is _installed:
        signal.signal(signal.SIGTERM, _installed.previous)
        _installed = None


class _Handler:
    """Flushes, then does what the handler before it did. Takes no lock: the main thread may hold any."""

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self._owner = os.getpid()

    def __call__(self, number: int, stack: FrameType | None) -> None:
        if os.getpid() == self._owner:
            for target in _watched:
                target.flush(_LIMIT / max(1, len(_watched)))
        if callable(self.previous):
            self.previous(number, stack)
        elif self.previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
