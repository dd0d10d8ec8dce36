"""`pj.observe`: a point of one's own, anywhere in a model or in a loss function."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from jax.extend.core import get_opaque_trace_state

from probes_jax.observe.census import Result, Visit, settle
from probes_jax.observe.point import Point
from probes_jax.observe.record import Record, float_leaves, shapes_of, tapped
from probes_jax.observe.tap import Measure
from probes_jax.stats.summary import Summary

CLASS = "observe"  # stands for the class of the module in the identity of such a point
LOSS = "loss_fn"  # where points outside of the model are
OUTSIDE = "inside a JAX transform in loss_fn; observe the value where it comes out of the transform"


class Observer(Protocol):
    """Whoever records: a model while it runs, else the loss function."""

    def take(self, path: tuple[str, ...], value: Any) -> Any:
        """Records the float arrays of `value` and returns it, with taps where there are slots."""
        ...


class _Active(threading.local):
    observers: tuple[Observer, ...] = ()


_active = _Active()


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Makes `observe` hand its values to this observer while the block runs, in this thread only."""
    previous = _active.observers
    _active.observers = (*previous, observer)
    try:
        yield
    finally:
        _active.observers = previous


def observe(name: str, value: Any) -> Any:
    """Names a value: it is reported as `act/<module path>/<name>/...`, its gradient as `grad_act/...`.

    Write it where the value is made, in a linen or nnx module or in the loss function (there the path is `loss_fn`),
    and use what it returns. Outside of a monitored step, and in steps that do not scan, it returns `value` itself.

    Args:
        name: Its name below the module; `/` makes levels.
        value: An array, or a pytree of which the float arrays are taken.

    Raises:
        ValueError: The name is empty, or has an empty level.

    Example:
        >>> import jax.numpy as jnp
        >>> observe("attn/q_norm", jnp.ones(2))
        Array([1., 1.], dtype=float32)
    """
    path = tuple(name.split("/")) if isinstance(name, str) else ()
    if not all(path) or not path:
        raise ValueError(f"observe name must be words joined by '/', such as 'attn/q_norm', got {name!r}")
    return _active.observers[-1].take(path, value) if _active.observers else value


class LossObserver:
    """Points of the loss function itself, outside of the model.

    Args:
        measure: Summarizes an array.
        taps: Slots of their taps, in the order of the calls; None takes no gradient.
    """

    def __init__(self, measure: Measure, taps: tuple[Record, ...] | None = None) -> None:
        self.records: list[Record] = []
        self._visits: list[Visit] = []
        self._measure = measure
        self._taps = taps or ()
        self._trace = get_opaque_trace_state(convention="flax")

    def take(self, path: tuple[str, ...], value: Any) -> Any:
        """See `Observer.take`."""
        leaves = float_leaves(value)
        visit = Visit((LOSS, *path), CLASS, "__call__", shapes_of(leaves))
        if not leaves:
            return value
        if get_opaque_trace_state(convention="flax") != self._trace:
            self._visits.append(Visit(*visit.key, visit.leaves, OUTSIDE))
            return value
        record = Record({leaf: self._measure(array) for leaf, array in leaves.items()}, CLASS, "__call__")
        self._visits.append(Visit(*visit.key, visit.leaves, record=record))
        self.records.append(record)
        number = len(self.records) - 1
        return tapped(self._measure, value, record, self._taps[number]) if number < len(self._taps) else value

    def result(self) -> Result:
        """What was seen and measured."""
        return settle(self._visits, (), (), ())

    def backward(self, gradient: tuple[Record, ...]) -> dict[Point, Summary]:
        """From the gradient of the slots to a summary per point."""
        found = iter(gradient)
        visits = [v if v.record is None else Visit(*v.key, v.leaves, record=next(found)) for v in self._visits]
        return settle(visits, (), (), ()).points
