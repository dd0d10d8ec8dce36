"""Records of one trace leave it together: those made in the body of a transform are one more output of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from jax.extend.core import get_opaque_trace_state

from probes_jax.observe.census import Visit
from probes_jax.observe.hiding import hiding


@dataclasses.dataclass
class Level:
    """One trace in which records are kept: that around the model, or that of the body of a transform.

    Attributes:
        through: Names of the transforms around it, the outermost first.
        slots: Slots of taps, in the structure of `records`; `()` without taps.
        visits: Calls seen, in the order in which they returned.
        records: A record per call that is kept here, a tuple per application of a transform.
        notes: What the carrier wants to know of this level once the transform has returned.
        seen: Calls seen in transforms that bring nothing out by themselves, with the trace of each.
    """

    through: tuple[str, ...] = ()
    slots: Sequence[Any] = ()
    visits: list[Visit] = dataclasses.field(default_factory=list)
    records: list[Any] = dataclasses.field(default_factory=list)
    notes: dict[Any, Any] = dataclasses.field(default_factory=dict)
    seen: dict[Any, Any] = dataclasses.field(default_factory=dict)
    trace: Any = dataclasses.field(default_factory=lambda: get_opaque_trace_state(convention="flax"))

    @property
    def is_current(self) -> bool:
        """Whether this is the trace that is running: a value made now may be kept here."""
        return get_opaque_trace_state(convention="flax") == self.trace

    @property
    def hiding(self) -> str:
        """The transform between this trace and the one that is running, as a message names it."""
        return hiding(self.trace)

    @property
    def next_slots(self) -> Any:
        """The slots of what is recorded next; `()` without taps."""
        return self.slots[len(self.records)] if len(self.records) < len(self.slots) else ()

    def keep(self, record: Any) -> Any:
        """Records something; what comes back are its slots."""
        slots = self.next_slots
        self.records.append(record)
        return slots

    def is_traced_again(self, call: Any) -> bool:
        """Whether a call was seen here before, in an earlier trace of the same body."""
        trace = get_opaque_trace_state(convention="flax")
        return self.seen.setdefault(call, trace) != trace


class Carrier(Protocol):
    """Whoever observes.

    Attributes:
        levels: The traces that are running, the innermost last.
    """

    levels: list[Level]

    def join(self, bodies: Sequence[Level], records: Any, axis: bool) -> None:
        """Takes what came out of a transform into the level around it.

        Args:
            bodies: The level of each body (more than one for branches).
            records: Their records as they came out of the transform.
            axis: Whether they have one row per iteration.
        """
        ...


class _Active(threading.local):
    carrier: Carrier | None = None


_active = _Active()


@contextlib.contextmanager
def carried_by(carrier: Carrier | None) -> Iterator[None]:
    """Makes transforms carry the carrier's records while the block runs, in this thread only; None: nobody's."""
    previous, _active.carrier = _active.carrier, carrier
    try:
        yield
    finally:
        _active.carrier = previous


def not_carried(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` in whose transforms nobody observes: it is ours, not the model's."""

    @functools.wraps(f)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with carried_by(None):
            return f(*args, **kwargs)

    return alone


class Application:
    """One application of a transform, from the moment it is called."""

    def __init__(self, carrier: Carrier, name: str) -> None:
        self._carrier = carrier
        self._through = (*carrier.levels[-1].through, name)
        self._bodies: dict[int, Level] = {}
        slots = carrier.levels[-1].next_slots
        self.slots: tuple[Any, ...] = slots if isinstance(slots, tuple) else ()

    @classmethod
    def begin(cls, name: str) -> Application | None:
        """None where nobody observes, or a transform around this one does not bring anything out."""
        carrier = _active.carrier
        return cls(carrier, name) if carrier is not None and carrier.levels[-1].is_current else None

    def run(self, slots: Any, f: Callable[..., Any], *args: Any, branch: int = 0, **kwargs: Any) -> tuple[Any, Any]:
        """Traces a body: its output and its records. Of a body that JAX traces twice, the last trace counts."""
        level = Level(self._through, slots)
        self._carrier.levels.append(level)
        try:
            output = f(*args, **kwargs)
        finally:
            self._carrier.levels.pop()
        records, level.records, level.slots = tuple(level.records), [], ()
        self._bodies[branch] = level
        return output, records

    def end(self, records: Any, axis: bool = False) -> None:
        """Hands over what came out, also where it is nothing: slots are told apart by their number."""
        bodies = [self._bodies[branch] for branch in sorted(self._bodies)]
        self._carrier.join(bodies, records, axis)
