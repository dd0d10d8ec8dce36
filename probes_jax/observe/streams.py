"""Residual adds of a model that nobody edited, seen where they happen: `stream + branch`.

While a model is traced under observation, `+` between two traced arrays asks whether one of them is the residual stream
of the module that is running. An array is a stream when it is

* what the running module was given first,
* what a norm was given, in a model that normalizes before each branch,
* what a norm made of a stream, in one that normalizes after it,
* the sum of a stream and a branch.

The other one is a branch when it is no stream, of the same shape, and when some module has run since the stream was
known: that tells a branch from the arithmetic of an activation function. Arrays are told apart by identity, so a stream
that is cast or sharded on its way to the sum is not found, and a sum written as `jnp.add` is not seen. They are held
weakly: what is traced in the body of a scan must not outlive it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, Tracer

from probes_jax.observe.patch import patched

_BRANCHES = ("attention_output", "feed_forward", "expert_output")
Take = Callable[[str, jax.Array, jax.Array], None]  # (name below the running module, stream, branch)


class _Held:
    """An array, as long as the model keeps it; anything else of a module's output is no branch."""

    def __init__(self, value: Any) -> None:
        self._found = weakref.ref(value) if isinstance(value, Tracer) else lambda: None

    def is_of(self, value: Any) -> bool:
        return self._found() is value


@dataclasses.dataclass
class _Frame:
    """A module that runs, what it was given first, and what its children have returned."""

    given: Any
    entered: int  # modules that had returned by then
    children: list[tuple[str, str, _Held]] = dataclasses.field(default_factory=list)  # name, role, output
    sums: int = 0
    named: int = 0  # children that a sum was named after already, or might have been


class Streams:
    """The residual streams of one run of a model.

    Args:
        take: Called with each branch that is added to a stream.
    """

    def __init__(self, take: Take) -> None:
        self._take = take
        self._frames = [_Frame(None, 0)]
        self._known: dict[int, tuple[_Held, int]] = {}  # by identity: the array, and the modules that had returned
        self._returned = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Sees the sums of this thread while the block runs."""
        previous, _active.streams = _active.streams, self
        try:
            with patched([(ShapedArray, "_add", _seeing)]):
                yield
        finally:
            _active.streams = previous

    @contextlib.contextmanager
    def inside(self, given: Any) -> Iterator[None]:
        """A module runs in the block, with this as its first argument."""
        self._frames.append(_Frame(given, self._returned))
        try:
            yield
        finally:
            self._frames.pop()
            self._returned += 1

    def returned(self, name: str, role: str, output: Any, given: Any) -> None:
        """What a module has returned.

        Args:
            name: Its name in the module around it.
            role: See `roles.role_of`.
            output: What it returned, as the module around it gets it.
            given: Its first argument.
        """
        if role == "norm":
            if self._since(given) is not None:
                self._mark(output, self._returned)
            self._mark(given, self._returned - 1)
        self._frames[-1].children.append((name, role, _Held(output)))

    def _mark(self, x: Any, since: int) -> None:
        if _may_be_stream(x) and self._marked(x) is None:
            self._known[id(x)] = _Held(x), since

    def _marked(self, x: Any) -> int | None:
        held, since = self._known.get(id(x), (None, None))
        return since if held is not None and held.is_of(x) else None  # another may have come to its place in memory

    def _since(self, x: Any) -> int | None:
        """How many modules had returned when `x` became a stream; None for what is none."""
        found = [frame.entered for frame in self._frames if frame.given is x]
        return found[0] if found else self._marked(x)

    def add(self, x: Any, y: Any, total: Any) -> None:
        """Hears of a sum."""
        if not (_may_be_stream(x) and _may_be_stream(y)) or x.shape != y.shape:
            return
        first, second = self._since(x), self._since(y)
        if (first is None) is (second is None):
            return
        stream, branch, since = (x, y, first) if second is None else (y, x, second)
        assert since is not None
        if since == self._returned:
            return
        self._take(self._name(self._frames[-1], branch), stream, branch)
        self._mark(total, since)

    def _name(self, frame: _Frame, branch: Any) -> str:
        """The child of the running module that the branch comes from, as far as that is known."""
        frame.sums += 1
        children = [child for child in frame.children if child[0] and child[1] != "norm"]
        fresh = children[frame.named :]
        found = [name for name, role, output in children if output.is_of(branch) and role != "other"]
        found = found or [name for name, role, _ in fresh if role in _BRANCHES]
        found = found or [name for name, role, _ in fresh if role != "other"]
        found = found or [name for name, _, _ in fresh]
        frame.named = len(children)
        return found[-1] if found else f"branch{frame.sums}"


def _may_be_stream(x: Any) -> bool:
    return isinstance(x, Tracer) and x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating)


def is_stream(args: Any) -> bool:
    """Whether the first of a module's arguments can be a residual stream."""
    return bool(args) and _may_be_stream(args[0])


class _Active(threading.local):
    streams: Streams | None = None


_active = _Active()


@contextlib.contextmanager
def not_watched() -> Iterator[None]:
    """Sums in the block are not the model's."""
    previous, _active.streams = _active.streams, None
    try:
        yield
    finally:
        _active.streams = previous


def _seeing(original: Any) -> Any:
    function = original.__func__

    def add(x: Any, y: Any) -> Any:
        total = function(x, y)
        streams = _active.streams
        if streams is not None:
            with not_watched():
                streams.add(x, y, total)
        return total

    return staticmethod(add)
