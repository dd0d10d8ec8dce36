"""`pj.observe`: a point of one's own, anywhere in a model or in a loss function."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import jax.numpy as jnp

from probes_jax.observe.census import Result, Visit, settle
from probes_jax.observe.evaluation import LOSS, Evaluation, named_in
from probes_jax.observe.lift import not_carried
from probes_jax.observe.point import Point
from probes_jax.observe.record import Record, float_leaves, shapes_of, tapped
from probes_jax.observe.tap import Measure
from probes_jax.spec import check
from probes_jax.stats.gate import measure_gate
from probes_jax.stats.per_token import RESIDUAL, ROUTER, PerToken
from probes_jax.stats.routing import of_tokens
from probes_jax.stats.summary import Summary

CLASS = "observe"  # stands for the class of the module in the identity of such a point
OUTSIDE = (
    "inside {0} in loss_fn, which does not bring it out; apply jax.vmap, jax.checkpoint or jax.lax.scan in loss_fn "
    "itself, or observe the value where it comes out of {0}"
)
IN_LOSS = {
    ROUTER: "pj.observe_routing is called in loss_fn; call it in the module that chooses the experts",
    RESIDUAL: "pj.observe_gate is called in loss_fn; call it in the module that has the gate",
}


class Observer(Protocol):
    """Whoever records: a model while it runs, else the loss function."""

    def take(self, path: tuple[str, ...], value: Any) -> Any:
        """Records the float arrays of `value` and returns it, with taps where there are slots."""
        ...

    def take_tokens(self, found: PerToken, path: tuple[str, ...]) -> None:
        """Records numbers of each token, if their family is measured."""
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
    path = _path(name, "observe")
    return _active.observers[-1].take(path, value) if _active.observers else value


def observe_routing(name: str, indices: Any, *, experts: int, scores: Any = None, bias: Any = None) -> None:
    """Names the experts that tokens go to: load and balance are reported as `router/<module path>/<name>/...`.

    For routers that are no module of their own, or whose output does not tell. Write it in a linen or nnx module where
    the experts are chosen. Outside of a monitored step it does nothing.

    Args:
        name: Its name below the module; `/` makes levels.
        indices: Numbers of the chosen experts, int `[*positions, k]`.
        experts: How many experts there are, E.
        scores: Float `[*positions, E]`: by how much the last of the k was chosen is reported, too.
        bias: Float `[E]`, what is added to the scores to balance the experts: reported for each of them.

    Raises:
        ValueError: The name is empty, or the arrays are not of these shapes.

    Example:
        >>> import jax.numpy as jnp
        >>> observe_routing("top2", jnp.zeros((4, 2), jnp.int32), experts=8)
    """
    path = _path(name, "observe_routing")
    experts, indices = check.integer("observe_routing experts", experts, 1), jnp.asarray(indices)
    shape, kind = tuple(indices.shape), indices.dtype
    if len(shape) < 2 or not jnp.issubdtype(kind, jnp.integer) or not 0 < shape[-1] <= experts:
        raise ValueError(
            f"observe_routing indices must be int [*positions, k] with 0 < k <= experts={experts}, got "
            f"{kind}{list(shape)}"
        )
    if scores is not None and tuple(jnp.shape(scores)) != (*shape[:-1], experts):
        raise ValueError(
            f"observe_routing scores must have the shape {[*shape[:-1], experts]}, got {list(jnp.shape(scores))}"
        )
    if bias is not None and tuple(jnp.shape(bias)) != (experts,):
        raise ValueError(f"observe_routing bias must have the shape {[experts]}, got {list(jnp.shape(bias))}")
    if _active.observers:
        _active.observers[-1].take_tokens(of_tokens(indices, experts, scores, bias), path)


def observe_gate(name: str, gate: Any, *, temperature: float = 1.0) -> None:
    """Names the gate of a residual branch: `residual/<module path>/<name>/saturation/...` says how much of it is shut.

    Write it in a linen or nnx module, where `sigmoid(gate / temperature)` multiplies the branch. It is measured where
    residual paths are, `Plan(more=("residual",))`; elsewhere, and outside of a monitored step, it does nothing.

    Args:
        name: Its name below the module; `/` makes levels.
        gate: What the sigmoid is given, float `[*positions, channels]`.
        temperature: What it is divided by before the sigmoid.

    Raises:
        ValueError: The name is empty, the array is not of this shape, or the temperature is not above 0.

    Example:
        >>> import jax.numpy as jnp
        >>> observe_gate("gate", jnp.zeros((4, 8)))
    """
    path = _path(name, "observe_gate")
    temperature = check.number("observe_gate temperature (divide the gate by one that is trained)", temperature)
    shape, kind = jnp.shape(gate), jnp.result_type(gate)
    if len(shape) < 2 or not jnp.issubdtype(kind, jnp.floating):
        raise ValueError(
            f"observe_gate gate must be float [*positions, channels], got {kind}{list(shape)}; broadcast one that is "
            "the same for all tokens: jnp.broadcast_to(gate, x.shape)"
        )
    if _active.observers:
        _active.observers[-1].take_tokens(measure_gate(gate, temperature), path)


def _path(name: Any, function: str) -> tuple[str, ...]:
    path = tuple(name.split("/")) if isinstance(name, str) else ()
    if not all(path) or not path:
        raise ValueError(f"{function} name must be words joined by '/', such as 'attn/q_norm', got {name!r}")
    return path


class LossObserver:
    """Points of the loss function itself, outside of the model.

    Args:
        measure: Summarizes an array.
        evaluation: Keeps what is measured, and has the slots of taps.
    """

    def __init__(self, measure: Measure, evaluation: Evaluation) -> None:
        self._measure = not_carried(measure)
        self._evaluation = evaluation

    def take(self, path: tuple[str, ...], value: Any) -> Any:
        """See `Observer.take`."""
        leaves = float_leaves(value)
        if not leaves:
            return value
        visit = Visit((LOSS, *path), CLASS, "__call__", shapes_of(leaves), place=LOSS)
        level = self._evaluation.level
        if not level.is_current:
            self._evaluation.keep(None, [dataclasses.replace(visit, reason=OUTSIDE.format(level.hiding))])
            return value
        record = Record({leaf: self._measure(array) for leaf, array in leaves.items()}, CLASS, "__call__")
        slots = level.next_slots
        self._evaluation.keep(record, [visit])
        return tapped(self._measure, value, record, slots) if isinstance(slots, Record) else value

    def take_tokens(self, found: PerToken, path: tuple[str, ...]) -> None:
        """See `Observer.take_tokens`: what is measured of tokens is in the model."""
        visit = Visit((LOSS, *path), found.family, "__call__", {"": ()}, IN_LOSS[found.family], LOSS)
        self._evaluation.keep(None, [visit])

    def result(self) -> Result:
        """What was seen and measured."""
        return self._settle(self._evaluation.raw)

    def backward(self, gradient: Any) -> dict[Point, Summary]:
        """From the gradient of the slots to a summary per point."""
        return self._settle(gradient).points

    def _settle(self, raw: Any) -> Result:
        found = (record.merged() for record in named_in(raw))
        visits = self._evaluation.visits(of_model=False)
        return settle([v if v.reason else dataclasses.replace(v, record=next(found)) for v in visits], (), (), ())
