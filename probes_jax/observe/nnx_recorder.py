"""Observes one evaluation of an nnx model: what each method of each module returns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from flax.nnx import tracers

from probes_jax.observe.binding import Measure
from probes_jax.observe.census import Visit
from probes_jax.observe.names import Path
from probes_jax.observe.patch import Patch, patched
from probes_jax.observe.record import Record, float_leaves

_PATH = "_probes_jax_path"
_SLOT = "_probes_jax_slot"
_CONTAINERS = (nnx.List, nnx.Dict)  # their attributes are their items: nothing may be added
_BASES = (nnx.Module, nnx.Pytree, nnx.Object, *_CONTAINERS)

OUTSIDE = "the model is called inside a JAX transform in loss_fn; call it outside of it, or put nnx.remat in the model"
CLOSED_OVER = (
    "inside a JAX transform that does not hand the module's variables back; pass the module to nnx.remat instead of "
    "closing over it, or move it out of the transform"
)


class Slot(nnx.Variable):
    """Where a module inside a transform leaves its records. Of our own type: no filter of the model's names it."""


class _Active(threading.local):
    recorder: NNXRecorder | None = None


_active = _Active()
_numbers = itertools.count()


class NNXRecorder:
    """Records of one binding.

    What a module outside of every transform returns is measured and kept as it is. A module inside `nnx.remat` is
    another instance, and only its Variables come back: there a `Slot` on each module takes the records, and a static
    attribute says which module it is. Both are planted for one call and removed after it.

    Attributes:
        visits: Calls seen, in the order in which they returned.
        returned: Records that came back from transforms, with the path of their module.
        inner: Whether a module was called inside a transform.
        blocked: Why nothing at all can be recorded.
        refused: Why modules inside transforms cannot be recorded.
    """

    def __init__(self, measure: Measure, taps: Mapping[str, jax.Array] | None = None) -> None:
        self.visits: list[Visit] = []
        self.returned: list[tuple[Path, Record]] = []
        self.inner = False
        self.blocked: str | None = None
        self.refused: str | None = None
        self._measure = measure
        self._taps = taps
        self._token = next(_numbers)  # makes every evaluation's modules differ for the trace caches of transforms
        self._paths: dict[int, Path] = {}
        self._frames: list[tuple[Any, str, Any, Path]] = []  # module, method, function, path; innermost last
        self._trace = tracers.TraceState()

    @contextlib.contextmanager
    def recording(self, root: nnx.Module, *, slots: bool) -> Iterator[None]:
        """Observes the methods of the root's modules while the block runs.

        Args:
            root: The module that is called. It was made for this evaluation.
            slots: Also observe inside transforms.
        """
        modules = {tuple(map(str, path)): module for path, module in nnx.iter_modules(root, graph=True)}
        self._paths = {id(module): path for path, module in modules.items()}
        previous, _active.recorder = _active.recorder, self
        try:
            with patched(_patches({type(module) for module in modules.values()})):
                if slots:
                    self._plant(modules)
                yield
        finally:
            _active.recorder = previous
            self._frames = []
            self._harvest(modules)

    def forget(self, mark: tuple[int, int]) -> None:
        """Drops what was recorded since `mark`."""
        del self.visits[mark[0] :], self.returned[mark[1] :]
        self.inner = False

    @property
    def mark(self) -> tuple[int, int]:
        return len(self.visits), len(self.returned)

    # ---- slots

    def _plant(self, modules: Mapping[Path, nnx.Module]) -> None:
        for path, module in modules.items():
            if not isinstance(module, _CONTAINERS):
                setattr(module, _PATH, (self._token, path))
                setattr(module, _SLOT, Slot((), hijax=False, ref=False))

    def _harvest(self, modules: Mapping[Path, nnx.Module]) -> None:
        for path, module in modules.items():
            slot = vars(module).get(_SLOT)
            if slot is not None:
                self.returned += [(path, record) for record in slot.get_value()]
            for name in (_PATH, _SLOT):
                if name in vars(module):
                    delattr(module, name)

    # ---- calls

    def call(self, module: Any, method: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a method and records its output."""
        run = function.__get__(module, type(module))
        top = self._frames[-1] if self._frames else None
        if top is not None and top[0] is module and top[1] == method and top[2] is not function:
            return run(*args, **kwargs)  # super().method(): the same output
        path = self._path(module)
        self._frames.append((module, method, function, path))
        try:
            output = run(*args, **kwargs)
        finally:
            self._frames.pop()
        leaves = float_leaves(output)
        if leaves:
            self._observe(module, Visit(path, type(module).__name__, method, tuple(leaves)), leaves)
        return output  # a tap on the gradient of `output` goes here

    def _observe(self, module: Any, visit: Visit, leaves: dict[str, jax.Array]) -> None:
        here = self._trace.is_valid()
        self.inner |= not here
        slot = vars(module).get(_SLOT)
        reason = self.blocked or (None if here else self._reason(slot))
        if reason:
            self.visits.append(dataclasses.replace(visit, reason=reason))
            return
        values = {leaf: self._measure(array) for leaf, array in leaves.items()}
        record = Record(values, visit.class_name, visit.method)
        if not here:
            slot.set_value((*slot.get_value(), record))
        self.visits.append(dataclasses.replace(visit, record=record if here else None))

    def _reason(self, slot: Any) -> str | None:
        if slot is not None and slot._can_update:
            return None
        return self.refused or CLOSED_OVER

    def _path(self, module: Any) -> Path:
        token, path = vars(module).get(_PATH, (None, ()))
        if token == self._token:
            return path
        if id(module) in self._paths:
            return self._paths[id(module)]
        above = self._frames[-1][-1] if self._frames else ()  # made inside the model, or inside a transform
        return (*above, type(module).__name__)


def _patches(classes: set[type]) -> list[Patch]:
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
        recorder = _active.recorder
        if recorder is None:
            return function.__get__(self, type(self))(*args, **kwargs)
        return recorder.call(self, name, function, args, kwargs)

    return method
