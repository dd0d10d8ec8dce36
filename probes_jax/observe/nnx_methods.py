"""Methods of nnx modules, replaced while a model is observed: each call goes by the recorder of its thread."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from flax import nnx

from probes_jax.observe.patch import Patch, patched

CONTAINERS = (nnx.List, nnx.Dict)  # their attributes are their items: nothing may be added
_RULED = {type(nnx.custom_vjp(lambda x: x, graph_updates=updates)) for updates in (True, False)}
_BASES = (nnx.Module, nnx.Pytree, nnx.Object, *CONTAINERS)


class Caller(Protocol):
    """Whoever runs the methods."""

    def call(self, module: Any, method: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs `function`, the method of that name, on the module."""
        ...

    def fix(self, arguments: Any) -> None:
        """Hears of modules that are handed to `nnx.custom_vjp`, which knows what they hold."""
        ...


class _Active(threading.local):
    caller: Caller | None = None


_active = _Active()


@contextlib.contextmanager
def calling(caller: Caller, classes: Iterable[type]) -> Iterator[None]:
    """Hands the calls of all public methods of these classes to `caller` while the block runs, in this thread only."""
    previous, _active.caller = _active.caller, caller
    try:
        with patched([*_patches(classes), *((cls, "__call__", _fixing) for cls in _RULED)]):
            yield
    finally:
        _active.caller = previous


def _patches(classes: Iterable[type]) -> list[Patch]:
    """Every public method of these classes and of their bases, each where it is defined."""
    found: dict[tuple[type, str], Patch] = {}
    for cls in classes:
        for owner in cls.__mro__:
            if owner in _BASES or owner.__module__.partition(".")[0] in sys.stdlib_module_names:
                continue
            for name, value in vars(owner).items():
                if (name == "__call__" or not name.startswith("_")) and _is_method(value):
                    found[owner, name] = (owner, name, functools.partial(_observed, name))
    return list(found.values())


def _is_method(value: Any) -> bool:
    if inspect.isfunction(value):
        return True
    plain = (staticmethod, classmethod, property, type)
    return callable(value) and hasattr(type(value), "__get__") and not isinstance(value, plain)  # nnx.jit on a method


def _observed(name: str, function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _active.caller is None:
            return function.__get__(self, type(self))(*args, **kwargs)
        return _active.caller.call(self, name, function, args, kwargs)

    return method


def _fixing(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _active.caller is not None:
            _active.caller.fix((args, kwargs))
        return function(self, *args, **kwargs)

    return call
