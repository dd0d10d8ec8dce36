"""Observes one evaluation of an nnx model: what each method of each module returns."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.nnx import tracers

from probes_jax.observe.binding import Measure
from probes_jax.observe.census import Returned, Visit
from probes_jax.observe.named import CLASS, observing
from probes_jax.observe.names import Path
from probes_jax.observe.patch import Patch, patched
from probes_jax.observe.point import INPUT, Point
from probes_jax.observe.record import Record, float_leaves, shapes_of, tapped
from probes_jax.observe.roles import takes_input

_PATH = "_probes_jax_path"
_SLOT = "_probes_jax_slot"
_TAPS = "_probes_jax_taps"
_CONTAINERS = (nnx.List, nnx.Dict)  # their attributes are their items: nothing may be added
_BASES = (nnx.Module, nnx.Pytree, nnx.Object, *_CONTAINERS)

OUTSIDE = "the model is called inside a JAX transform in loss_fn; call it outside of it, or put nnx.remat in the model"
CLOSED_OVER = (
    "inside a JAX transform that does not hand the module's variables back; pass the module to nnx.remat instead of "
    "closing over it, or move it out of the transform"
)


class Slot(nnx.Variable):
    """Where a module inside a transform leaves its records. Of our own type: no filter of the model's names it.

    A second one on the module holds the slots of its taps: zeros in the structure of the records.
    """


class Raw(NamedTuple):
    """What one run left behind, or the slots of the taps of such a run."""

    here: tuple[Record, ...]  # from outside of every transform, in the order of the calls
    inside: dict[Path, tuple[Record, ...]]  # from inside of one, by module


class _Active(threading.local):
    recorder: NNXRecorder | None = None


_active = _Active()
_numbers = itertools.count()


class Marks(enum.IntEnum):
    """What is put on the modules of one evaluation while they run."""

    NONE = 0
    PATHS = 1  # a static attribute that says which module it is, also where a transform makes a new instance of it
    SLOTS = 2  # and a Variable that brings records out of the transform


class NNXRecorder:
    """Records of one binding.

    What a module outside of every transform returns is measured and kept as it is. A module inside `nnx.remat` is
    another instance, and only its Variables come back: there a `Slot` on each module takes the records.

    Transforms keep what they have traced, by the structure of their modules: traced before without marks, they would
    not run the modules again, and nobody would notice. So the static attribute differs from evaluation to evaluation.

    Attributes:
        visits: Calls seen, in the order in which they returned.
        runs: What each run left behind.
        blocked: Why nothing at all can be recorded.
    """

    def __init__(self, measure: Measure, taps: Sequence[Raw] | None = None) -> None:
        self.visits: list[Visit] = []
        self.runs: list[Raw] = []
        self.blocked: str | None = None
        self._refused: str | None = None  # why modules inside transforms have no slots
        self._measure = measure
        self._taps = taps or ()  # slots of each run
        self._here: list[Record] = []
        self._layers: dict[Path, Axes] = {}  # parameters as modules inside of transforms have them
        self._token = next(_numbers)
        self._paths: dict[int, Path] = {}
        self._frames: list[tuple[Any, str, Any, Path]] = []  # module, method, function, path; innermost last
        self._trace = tracers.TraceState()

    @contextlib.contextmanager
    def recording(self, root: nnx.Module, marks: Marks) -> Iterator[None]:
        """Observes the methods of the root's modules while the block runs.

        Args:
            root: The module that is called. It was made for this evaluation.
            marks: What to put on its modules meanwhile.
        """
        modules = {tuple(map(str, path)): module for path, module in nnx.iter_modules(root, graph=True)}
        self._paths = {id(module): path for path, module in modules.items()}
        self._here = []
        previous, _active.recorder = _active.recorder, self
        try:
            with patched(_patches({type(module) for module in modules.values()})), observing(self):
                self._plant(modules, marks)
                yield
        finally:
            _active.recorder = previous
            self._frames = []
            self._harvest(modules)

    def refuse(self, mark: tuple[int, int], error: Exception) -> None:
        """Drops what was recorded since `mark`: the model does not run with the marks it had."""
        del self.visits[mark[0] :], self.runs[mark[1] :]
        text = str(error).strip().partition("\n")[0]
        self._refused = self._refused or (
            f"inside a transform that does not take a Variable more ({type(error).__name__}: {text}); move the module "
            "out of it, or let its filters end with `...`"
        )

    @property
    def mark(self) -> tuple[int, int]:
        """How much was recorded so far."""
        return len(self.visits), len(self.runs)

    def found(self, runs: Sequence[Raw]) -> tuple[list[Visit], list[Returned]]:
        """The visits with what was measured, and what came back from transforms: `runs`, or their gradient."""
        here = iter([record for run in runs for record in run.here])
        visits = [v if v.record is None else dataclasses.replace(v, record=next(here)) for v in self.visits]
        return visits, self._placed([(path, r) for run in runs for path, rs in run.inside.items() for r in rs])

    def _placed(self, returned: list[tuple[Path, Record]]) -> list[Returned]:
        """Records with layer axes, knowing which module of their path was scanned.

        It is the first one, and no list, below which everything came out of the scan.
        """
        single = {path for path, record in returned if not _layer_axes(record)}

        def place(path: Path, record: Record) -> Record:
            return dataclasses.replace(record, stack=(self._scanned(path, single),) * _layer_axes(record))

        return [(path, "", place(path, record)) for path, record in returned]

    def _scanned(self, path: Path, single: Collection[Path]) -> int:
        """How much of the path of a module in a scan is the path of the module that is scanned."""
        outside = {*single, *(visit.path for visit in self.visits if visit.record is not None)}
        outside = {path[:depth] for path in outside for depth in range(len(path) + 1)}
        starts = [n for n in range(1, len(path)) if path[:n] not in outside and not path[n].isdecimal()]
        return starts[0] if starts else len(path)

    def stacks(self, params: Mapping[Path, Any]) -> tuple[dict[Path, tuple[int, int]], dict[Path, int]]:
        """Scanned modules with their layer axis and number of layers, and the axis of each parameter below them.

        The axis is the one that a scan took away: told by the names in the metadata, else by the shapes.
        """
        single = {path for run in self.runs for path, records in run.inside.items() if not _layer_axes(records[0])}
        stacks: dict[Path, tuple[int, int]] = {}
        axes: dict[Path, int] = {}
        for path, inside in self._layers.items():
            whole = _axes(params[path]) if path in params else inside
            axis = _axis_taken(whole, inside)
            if axis is not None:
                axes[path] = axis
                stacks.setdefault(path[: self._scanned(path[:-1], single)], (axis, whole.shape[axis]))
        return stacks, axes

    # ---- slots

    def _plant(self, modules: Mapping[Path, nnx.Module], marks: Marks) -> None:
        number = len(self.runs)
        slots = self._taps[number].inside if number < len(self._taps) else {}
        for path, module in modules.items():
            if marks >= Marks.PATHS and not isinstance(module, _CONTAINERS):
                setattr(module, _PATH, (self._token, path))
            if marks >= Marks.SLOTS and not isinstance(module, _CONTAINERS):
                setattr(module, _SLOT, Slot((), hijax=False, ref=False))
                if path in slots:
                    setattr(module, _TAPS, Slot(slots[path], hijax=False, ref=False))

    def _harvest(self, modules: Mapping[Path, nnx.Module]) -> None:
        inside: dict[Path, tuple[Record, ...]] = {}
        for path, module in modules.items():
            slot = vars(module).get(_SLOT)
            if slot is not None and slot.get_value():
                inside[path] = slot.get_value()
            for name in (_PATH, _SLOT, _TAPS):
                if name in vars(module):
                    delattr(module, name)
        self.runs.append(Raw(tuple(self._here), inside))

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
            output = run(*self._with_input(module, method, path, args), **kwargs)
        finally:
            self._frames.pop()
        leaves = float_leaves(output)
        if not leaves:
            return output
        return self._observe(module, Visit(path, type(module).__name__, method, shapes_of(leaves)), leaves, output)

    def _with_input(self, module: Any, method: str, path: Path, args: Any) -> Any:
        """The arguments, the first one observed where it is a point too."""
        cls = type(module).__name__
        leaves = float_leaves(args[0]) if args and method == "__call__" and takes_input(Point(path, cls)) else {}
        if not leaves:
            return args
        return (self._observe(module, Visit(path, cls, INPUT, shapes_of(leaves)), leaves, args[0]), *args[1:])

    def take(self, path: Path, value: Any) -> Any:
        """A value that the model names itself: below the module whose method runs."""
        leaves = float_leaves(value)
        if not leaves or not self._frames:
            return value
        module, _, _, above = self._frames[-1]
        return self._observe(module, Visit((*above, *path), CLASS, "__call__", shapes_of(leaves)), leaves, value, path)

    def _observe(self, module: Any, visit: Visit, leaves: dict[str, jax.Array], output: Any, below: Path = ()) -> Any:
        here = self._trace.is_valid()
        visit = visit if here else dataclasses.replace(visit, through=("transform",))
        slot = vars(module).get(_SLOT)
        reason = self.blocked or (None if here else self._reason(slot))
        if reason:
            self.visits.append(dataclasses.replace(visit, reason=reason))
            return output
        if not here:
            own = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Param)}
            self._layers |= {(*visit.path, name): _axes(value) for name, value in own.items()}
        values = {leaf: self._measure(array) for leaf, array in leaves.items()}
        record = Record(values, visit.class_name, visit.method, below)
        taps = self._taps_of(module, here)
        before = len(self._here) if here else len(slot.get_value())
        if here:
            self._here.append(record)
        else:
            slot.set_value((*slot.get_value(), record))
        self.visits.append(dataclasses.replace(visit, record=record if here else None))
        return tapped(self._measure, output, record, taps[before]) if before < len(taps) else output

    def _taps_of(self, module: Any, here: bool) -> Sequence[Record]:
        """The slots of the calls outside of transforms, or of the calls of one module inside of one."""
        if here:
            return self._taps[len(self.runs)].here if len(self.runs) < len(self._taps) else ()
        slots = vars(module).get(_TAPS)
        return () if slots is None else slots.get_value()

    def _reason(self, slot: Any) -> str | None:
        if slot is not None and slot._can_update:
            return None
        return self._refused or CLOSED_OVER

    def _path(self, module: Any) -> Path:
        token, path = vars(module).get(_PATH, (None, ()))
        if token == self._token:
            return path
        if id(module) in self._paths:
            return self._paths[id(module)]
        above = self._frames[-1][-1] if self._frames else ()  # made inside the model, or inside a transform
        return (*above, type(module).__name__)


class Axes(NamedTuple):
    """Shape of a parameter, and the names of its axes in its metadata."""

    shape: tuple[int, ...]
    names: tuple[Any, ...]


def _axes(variable: nnx.Param) -> Axes:
    return Axes(variable.get_value().shape, tuple(variable.get_metadata("out_sharding", None) or ()))


def _axis_taken(whole: Axes, layer: Axes) -> int | None:
    """The axis of a parameter that a scan over layers took away; None where it took none."""

    def without(axis: int, x: tuple[Any, ...]) -> tuple[Any, ...]:
        return x[:axis] + x[axis + 1 :]

    axes = [axis for axis in range(len(whole.shape)) if without(axis, whole.shape) == layer.shape]
    named = [axis for axis in axes if whole.names and without(axis, whole.names) == layer.names]
    return (named or axes or [None])[0]


def _layer_axes(record: Record) -> int:
    return len(next(iter(record.values.values())).stack_shape())


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
