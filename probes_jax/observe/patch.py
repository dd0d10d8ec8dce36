"""Attributes of modules and classes, replaced while a block runs and put back after it, whatever happens in it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Patch = tuple[Any, str, Callable[[Any], Any]]  # (owner, name, original -> replacement)


@dataclasses.dataclass
class _Installed:
    owner: Any
    name: str
    original: Any
    replacement: Any
    users: int = 1


_lock = threading.Lock()
_installed: dict[tuple[int, str], _Installed] = {}


@contextlib.contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Replaces attributes that `owner` itself defines.

    Several blocks, also in several threads, may replace the same attribute: the first one's replacement serves all,
    and the last one to leave puts the original back. So a replacement must find out for itself, from thread-local
    state, for whom it works, and pass everybody else through.

    Args:
        patches: Owner, attribute name, and a function from the original to its replacement. Attributes that the
            owner does not define are left out.
    """
    taken: list[tuple[int, str]] = []
    try:
        with _lock:
            for owner, name, make in patches:
                if name in vars(owner):
                    _install(owner, name, make)
                    taken.append((id(owner), name))
        yield
    finally:
        with _lock:
            for key in taken:
                _remove(key)


def _install(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    entry = _installed.get((id(owner), name))
    if entry is not None:
        entry.users += 1
        return
    original = vars(owner)[name]
    entry = _Installed(owner, name, original, make(original))
    setattr(owner, name, entry.replacement)
    _installed[id(owner), name] = entry


def _remove(key: tuple[int, str]) -> None:
    entry = _installed[key]
    entry.users -= 1
    if entry.users == 0:
        setattr(entry.owner, entry.name, entry.original)
        del _installed[key]
