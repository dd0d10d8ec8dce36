"""Lifted linen transforms carry what is observed in their bodies.

`flax.core.lift` builds every lifted transform from two functions, `pack` and `_split_in_out_axes`. While a model is
traced under observation, both are wrapped, so that our collection leaves `scan`, `vmap`, `remat` and others as one more
output. They are looked up when a transform is applied, not when it is defined: a class made by `nn.scan` at import
time is reached too. Nothing else changes: no name, no random key, no argument.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from flax.core import lift
from flax.core.scope import Scope, in_filter, subtract_filters, union_filters

from probes_jax.observe.patch import patched

PER_LAYER = ("scan", "vmap")
# A derivative inside the model has its own backward pass: what the loss sends back does not come by.
FORWARD_ONLY = ("vjp", "jvp", "value_and_grad")
CARRIED = (*PER_LAYER, "remat", "map_variables", *FORWARD_ONLY)
# Branches, loops and rules of derivation return the same structure whichever way they run: nothing is observed inside.
REFUSED = ("cond", "switch", "while_loop", "custom_vjp")
PASSED = ("jit", "fold_rngs")  # hand all collections in and out by themselves


class Carrier(Protocol):
    """Whoever observes: owns a collection, and is told when a transform is entered."""

    collection: str
    slots: str

    def owns(self, scopes: list[Any]) -> bool:
        """Whether all scopes belong to the model that is observed."""
        ...

    def hidden(self, scopes: list[Any]) -> str | None:
        """The JAX transform that stands between what holds the variables of the scopes and now, None without one."""
        ...

    def lifted(self, name: str, scopes: list[Any], axis: int | None) -> contextlib.AbstractContextManager[None]:
        """Around one application of a transform; `axis` is the layer axis of its parameters, None without."""
        ...


class _Active(threading.local):
    carriers: tuple[Carrier, ...] = ()
    axes: dict[Any, int | None] | None = None  # the variable axes of the scan or vmap being built


_active = _Active()


@contextlib.contextmanager
def carrying(carrier: Carrier) -> Iterator[None]:
    """Makes lifted transforms carry `carrier.collection` while the block runs, in this thread only."""
    previous = _active.carriers
    _active.carriers = (*previous, carrier)
    try:
        with patched([(lift, name, make) for name, make in _MAKERS.items()]):
            yield
    finally:
        _active.carriers = previous


def _make_split(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def split_in_out_axes(xs: Any) -> tuple[dict[Any, Any], dict[Any, Any]]:
        in_axes, out_axes = original(xs)
        if _active.carriers:  # first: a later filter may match ours too
            _active.axes = in_axes = {_active.carriers[-1].slots: 0, **in_axes}
            out_axes = {_active.carriers[-1].collection: 0, **out_axes}
        return in_axes, out_axes

    return split_in_out_axes


def _make_is_filter_empty(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def is_filter_empty(filter_like: Any) -> bool:
        """`map_variables(init=True)` runs its function twice where anything is mutable: ours does not count."""
        for carrier in _active.carriers:
            filter_like = subtract_filters(filter_like, carrier.collection)
        return original(filter_like)

    return is_filter_empty


def _make_subtract_filters(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def subtract(a: Any, b: Any) -> Any:
        """`map_variables` makes what it maps immutable, by default all collections: ours is not mapped."""
        ours = [c.collection for c in _active.carriers if in_filter(a, c.collection)]
        return union_filters(original(a, b), ours) if ours else original(a, b)

    return subtract


def _make_pack(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def pack(
        fn: Any, in_variable_filters: Any, out_variable_filters: Any, rng_filters: Any, name: Any = None, **options: Any
    ) -> Callable[..., Any]:
        if not _active.carriers or name not in (*CARRIED, *REFUSED, *PASSED):
            return original(fn, in_variable_filters, out_variable_filters, rng_filters, name=name, **options)
        carrier = _active.carriers[-1]
        ins, outs = list(in_variable_filters), list(out_variable_filters)
        axis = _params_axis(ins, len(ins) - len(_active.axes or ())) if name in PER_LAYER else None
        _set_filters(name, carrier, ins, outs)
        passing = original(fn, in_variable_filters, out_variable_filters, rng_filters, name=name, **options)
        plain = original(fn, tuple(ins), tuple(outs), rng_filters, name=name, **options)

        @functools.wraps(plain)
        def carried(scope_tree: Any, *args: Any, **kwargs: Any) -> Any:
            scopes = _scopes(scope_tree)
            if not carrier.owns(scopes):
                return plain(scope_tree, *args, **kwargs)
            if name in PASSED and not carrier.hidden(scopes):
                return passing(scope_tree, *args, **kwargs)
            with carrier.lifted(name, scopes, axis):
                return plain(scope_tree, *args, **kwargs)

        return carried

    return pack


def _params_axis(ins: list[Any], groups_from: int) -> int | None:
    """The axis over which the transform maps parameters, None when every iteration has the same ones."""
    axes = list((_active.axes or {}).values())
    for index, group in enumerate(ins):
        if in_filter(group, "params"):
            return axes[index - groups_from] if index >= groups_from else None
    return None


def _set_filters(name: str, carrier: Carrier, ins: list[Any], outs: list[Any]) -> None:
    """Lets slots into the transform and records out of it, or neither (`REFUSED`)."""

    def without(filters: list[Any]) -> list[Any]:
        for ours in (carrier.collection, carrier.slots):
            filters = [subtract_filters(f, ours) if in_filter(f, ours) else f for f in filters]
        return filters

    if name == "scan":  # neither a broadcast nor a carry: its axis was added where axes are split
        ins[:2], outs[:2] = without(ins[:2]), without(outs[:2])
    elif name != "vmap":
        ins[:], outs[:] = without(ins), without(outs)
    if name in ("remat", "map_variables"):
        ins[-1] = union_filters(ins[-1], carrier.slots)
    if name in ("remat", "map_variables", *FORWARD_ONLY):
        outs[-1] = union_filters(outs[-1], carrier.collection)


def _scopes(scope_tree: Any) -> list[Any]:
    if isinstance(scope_tree, Scope):
        return [scope_tree]
    return [scope for scope in scope_tree if isinstance(scope, Scope)]


_MAKERS = {
    "pack": _make_pack,
    "_split_in_out_axes": _make_split,
    "is_filter_empty": _make_is_filter_empty,
    "subtract_filters": _make_subtract_filters,
}
