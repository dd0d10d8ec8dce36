"""Observes one evaluation of an nnx model: what each method of each module returns."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from probes_jax.observe.binding import Measure
from probes_jax.observe.census import NEVER_CALLED, Returned, Visit
from probes_jax.observe.lift import Level, lifting
from probes_jax.observe.named import CLASS, observing
from probes_jax.observe.names import Path
from probes_jax.observe.nnx_layers import (
    Axes,
    axes_below,
    axes_of,
    axis_taken,
    is_layered,
    own_params,
    place_layers,
    scanned,
    some_params,
)
from probes_jax.observe.nnx_methods import CONTAINERS, calling
from probes_jax.observe.record import Record, float_leaves, shapes_of, tapped

_PATH = "_probes_jax_path"
_SLOT = "_probes_jax_slot"
_TAPS = "_probes_jax_taps"
_LEVEL = "level"  # `Visit.place` of a record that comes out of its transforms by itself

OUTSIDE = "the model is called inside a JAX transform in loss_fn; call it outside of it, or put nnx.remat in the model"
CLOSED_OVER = (
    "inside a JAX transform that does not hand the module's variables back; apply jax.checkpoint, jax.vmap or "
    "jax.lax.scan in the model's own call, pass the module to nnx.remat or nnx.jit instead of closing over it, or move "
    "it out of the transform"
)

_numbers = itertools.count()


class Slot(nnx.Variable):
    """Where a module inside a transform leaves its records. Of our own type: no filter of the model's names it.

    A second one on the module holds the slots of its taps: zeros in the structure of the records.
    """


class Raw(NamedTuple):
    """What one run left behind, or the slots of the taps of such a run."""

    here: tuple[Any, ...]  # `Level.records` of the run
    inside: dict[Path, tuple[Record, ...]]  # from the `Slot` of each module that has one


@dataclasses.dataclass(frozen=True)
class Marks:
    """How the modules of one model are observed.

    Attributes:
        paths: Each module has a static attribute that says which one it is: a transform makes new instances.
        lifted: JAX's transforms bring records out (`lift`).
        slots: Modules with a Variable that brings records out of a transform which is not lifted, with the part of
            the model that takes them or refuses them together.
        refused: Modules in a transform that takes no Variable more, and why.
    """

    paths: bool = True
    lifted: bool = True
    slots: Mapping[Path, Path] = dataclasses.field(default_factory=dict)
    refused: Mapping[Path, str] = dataclasses.field(default_factory=dict)


NO_MARKS = Marks(paths=False, lifted=False)


class _Frame(NamedTuple):
    """A method that runs.

    `level` is None inside a transform that is not lifted; `seen` has the calls seen in such transforms that this method
    applies, with the trace of each.
    """

    module: Any
    method: str
    function: Any
    path: Path
    level: Level | None
    seen: dict[Any, Any]


class NNXRecorder:
    """Records of one binding.

    Records are kept in the trace that they are made in. JAX's transforms bring them out of it (`lift`). Of a transform
    that was applied before the model is called, such as `nnx.jit` or a decorated method, only Variables come back:
    there a `Slot` on the module takes the records.

    Transforms keep what they have traced, by the structure of their modules: traced before without marks, they would
    not run the modules again, and nobody would notice. So the static attribute differs from run to run.

    Attributes:
        levels: See `lift.Carrier`.
        visits: Calls seen, in the order in which they returned.
        runs: What each run left behind.
        blocked: Why nothing at all can be recorded.
        without: Modules in a transform that is not lifted, as far as they have no `Slot`; as `Marks.slots`.
    """

    def __init__(self, measure: Measure, taps: Sequence[Raw] | None = None) -> None:
        self.levels: list[Level] = []
        self.visits: list[Visit] = []
        self.runs: list[Raw] = []
        self.blocked: str | None = None
        self.without: dict[Path, Path] = {}
        self._measure = measure
        self._taps = taps or ()  # slots of each run
        self._inside: dict[Path, Axes] = {}  # parameters as modules inside of transforms have them
        self._called: set[Path] = set()
        self._anonymous = False  # whether a module inside a transform could not say who it is
        self._token = -1
        self._modules: dict[Path, nnx.Module] = {}
        self._paths: dict[int, Path] = {}
        self._frames: list[_Frame] = []
        self._marks = Marks()

    @contextlib.contextmanager
    def recording(self, root: nnx.Module, marks: Marks) -> Iterator[None]:
        """Observes the methods of the root's modules while the block runs.

        Args:
            root: The module that is called. It was made for this evaluation.
            marks: What to put on its modules meanwhile.
        """
        self._modules = {tuple(map(str, path)): module for path, module in nnx.iter_modules(root, graph=True)}
        self._paths = {id(module): path for path, module in self._modules.items()}
        self._marks, self.without, self._token = marks, {}, next(_numbers)
        classes = {type(module) for module in self._modules.values()}
        homes = [sys.modules[name] for name in {cls.__module__ for cls in classes} if name in sys.modules]
        taps = self._taps[len(self.runs)] if len(self.runs) < len(self._taps) else Raw((), {})
        self.levels = [Level(slots=taps.here)]
        self._frames = [_Frame(root, "", None, (), self.levels[0], {})]
        try:
            with calling(self, classes), lifting(self if marks.lifted else None, homes), observing(self):
                self._plant(taps.inside)
                yield
                self.visits += self.levels[0].visits
                self.runs.append(Raw(tuple(self.levels[0].records), self._brought()))
        finally:
            self._clear()

    def forget(self, mark: tuple[int, int]) -> None:
        """Drops what was recorded since `mark`: the model is run again with other marks."""
        del self.visits[mark[0] :], self.runs[mark[1] :]

    @property
    def mark(self) -> tuple[int, int]:
        """How much was recorded so far."""
        return len(self.visits), len(self.runs)

    def found(self, runs: Sequence[Raw]) -> tuple[list[Visit], list[Returned]]:
        """The visits with what was measured, and what came back from transforms: `runs`, or their gradient."""
        kept = [record for run in runs for record in _flat(run.here)]
        slots = [(path, record) for run in runs for path, records in run.inside.items() for record in records]
        paths = [visit.path for visit in self.visits if visit.place == _LEVEL]
        records = place_layers([*zip(paths, kept, strict=True), *slots])
        here = iter(records)
        visits = [
            dataclasses.replace(visit, record=next(here).merged()) if visit.place == _LEVEL else visit
            for visit in self.visits
        ]
        return visits, [(path, "", record) for (path, _), record in zip(slots, here, strict=True)]

    def stacks(self, params: Mapping[Path, Any]) -> tuple[dict[Path, tuple[int, int]], dict[Path, int]]:
        """Scanned modules with their layer axis and number of layers, and the axis of each parameter below them.

        The axis is the one that a scan took away: told by the names in the metadata, else by the shapes.
        """
        visits, returned = self.found(self.runs)
        single = [v.path for v in visits if v.record is not None and not v.record.stack]
        single += [path for path, _, record in returned if not record.stack]
        outside = {path[:depth] for path in single for depth in range(len(path) + 1)}
        stacks: dict[Path, tuple[int, int]] = {}
        axes: dict[Path, int] = {}
        for path, inside in self._inside.items():
            whole = axes_of(params[path]) if path in params else inside
            axis = axis_taken(whole, inside)
            if axis is not None:
                axes[path] = axis
                stacks.setdefault(path[: scanned(path[:-1], outside)], (axis, whole.shape[axis]))
        return stacks, axes

    def unreached(self, root: nnx.Module) -> list[Visit]:
        """The modules with parameters of their own of which no method was called."""
        if self._anonymous:
            return []
        modules = {tuple(map(str, path)): module for path, module in nnx.iter_modules(root, graph=True)}
        return [
            Visit(path, type(module).__name__, "__call__", {"": ()}, NEVER_CALLED)
            for path, module in modules.items()
            if path not in self._called and own_params(path, module)
        ]

    # ---- slots

    def _plant(self, taps: Mapping[Path, Any]) -> None:
        for path, module in self._modules.items():
            if isinstance(module, CONTAINERS):
                continue
            if self._marks.paths:
                setattr(module, _PATH, (self._token, path))
            if path in self._marks.slots:
                setattr(module, _SLOT, Slot((), hijax=False, ref=False))
                if path in taps:
                    setattr(module, _TAPS, Slot(taps[path], hijax=False, ref=False))

    def _brought(self) -> dict[Path, tuple[Record, ...]]:
        slots = {path: vars(module).get(_SLOT) for path, module in self._modules.items()}
        return {path: slot.get_value() for path, slot in slots.items() if slot is not None and slot.get_value()}

    def _clear(self) -> None:
        for module in self._modules.values():
            for name in (_PATH, _SLOT, _TAPS):
                if name in vars(module):
                    delattr(module, name)
        self.levels, self._frames, self._modules, self._paths = [], [], {}, {}

    # ---- calls

    def call(self, module: Any, method: str, function: Any, args: Any, kwargs: Any) -> Any:
        """See `Caller.call`: runs a method and records its output."""
        run = function.__get__(module, type(module))
        top = self._frames[-1]
        if top.module is module and top.method == method and top.function is not function:
            return run(*args, **kwargs)  # super().method(): the same output
        path = self._path(module)
        self._called.add(path)
        level = self.levels[-1] if self.levels[-1].is_current else None
        if level is not None and level is not self.levels[0]:
            self._note(path, module)
        self._frames.append(_Frame(module, method, function, path, level, {}))
        try:
            output = run(*args, **kwargs)
        finally:
            self._frames.pop()
        leaves = float_leaves(output)
        if not leaves:
            return output
        return self._observe(module, Visit(path, type(module).__name__, method, shapes_of(leaves)), leaves, output)

    def take(self, path: Path, value: Any) -> Any:
        """A value that the model names itself: below the module whose method runs."""
        leaves = float_leaves(value)
        if not leaves:
            return value
        top = self._frames[-1]
        visit = Visit((*top.path, *path), CLASS, "__call__", shapes_of(leaves))
        return self._observe(top.module, visit, leaves, value, path)

    def _observe(self, module: Any, visit: Visit, leaves: dict[str, jax.Array], output: Any, below: Path = ()) -> Any:
        level, path = self.levels[-1], visit.path[: len(visit.path) - len(below)]
        here = level.is_current
        slot = None if here else vars(module).get(_SLOT)
        reason = self.blocked or (None if here else self._reason(path, slot))
        through = level.through if here else (*level.through, "transform")
        visit = dataclasses.replace(visit, through=through, reason=reason, place=_LEVEL if here and not reason else "")
        if here or not self._is_traced_again(visit):
            level.visits.append(visit)
        if reason:
            return output
        if not here or level is not self.levels[0]:
            self._inside |= {name: axes_of(param) for name, param in own_params(path, module).items()}
        with lifting(None):
            record = Record({leaf: self._measure(array) for leaf, array in leaves.items()}, *visit.key[1:], below)
        if here:
            slots = level.next_slots
            level.records.append(record)
        else:
            slots = self._slots_of(module, len(slot.get_value()))
            slot.set_value((*slot.get_value(), record))
        return tapped(self._measure, output, record, slots) if isinstance(slots, Record) else output

    def _is_traced_again(self, visit: Visit) -> bool:
        """Whether this is a call seen before, in an earlier trace of the same body.

        Where it is another call after all, its record comes back, and is reported as one more.
        """
        key = (*visit.key, tuple(visit.leaves.items()), visit.reason)
        trace = get_opaque_trace_state(convention="nnx")
        return self._owner().seen.setdefault(key, trace) != trace

    def _owner(self) -> _Frame:
        """The method that applies the transform that is running."""
        return next(frame for frame in reversed(self._frames) if frame.level is not None)

    def _slots_of(self, module: Any, number: int) -> Record | None:
        """The slots of the taps of one call of a module that has a `Slot`."""
        slots = vars(module).get(_TAPS)
        return None if slots is None or number >= len(slots.get_value()) else slots.get_value()[number]

    def _reason(self, path: Path, slot: Any) -> str | None:
        if slot is not None and slot._can_update:
            return None
        if slot is None and path not in self._marks.refused:
            self.without[path] = _part(path, self._owner().path)
        return self._marks.refused.get(path, CLOSED_OVER)

    def _path(self, module: Any) -> Path:
        token, path = vars(module).get(_PATH, (None, ()))
        if token == self._token:
            return path
        if id(module) in self._paths:
            return self._paths[id(module)]
        self._anonymous |= not self._marks.paths
        return (*self._frames[-1].path, type(module).__name__)  # made inside the model, or inside a transform

    # ---- transforms

    def _note(self, path: Path, module: Any) -> None:
        """Keeps the axes of parameters in the body of a transform; one that was made outside is the same there."""
        for name, param in some_params(path, module).items():
            for level in self.levels[-1:] if param._can_update else self.levels[-2:]:
                level.notes[name] = axes_of(param)

    def join(self, bodies: Sequence[Level], records: Any, axis: bool) -> None:
        """See `lift.Carrier`: an axis of iterations is one of layers where they have parameters of their own."""
        around = self.levels[-1]
        visits = [visit for body in bodies for visit in body.visits]
        inside = {path: axes for body in bodies for path, axes in body.notes.items()}
        seen = {path: self._axes_around(path) for path in inside}
        if axis:
            leaves, structure = jax.tree.flatten(records, is_leaf=_is_record)
            length = leaves[0].stack_shape[0] if leaves else 0
            whole = {path: axes or self._axes_at_most(path, length) for path, axes in seen.items()}
            layered = [is_layered(visit.path, whole, inside) for visit in visits if visit.place == _LEVEL]
            leaves = [r.stacked(0) if layers else r.repeated() for r, layers in zip(leaves, layered, strict=True)]
            records = jax.tree.unflatten(structure, leaves)
            inside = {
                path: Axes((0, *axes.shape), axes.names) if is_layered(path, whole, inside) else axes
                for path, axes in inside.items()
            }
        around.visits += visits
        around.records.append(records)
        around.notes |= inside | {path: axes for path, axes in seen.items() if axes is not None}

    def _axes_around(self, path: Path) -> Axes | None:
        """The axes of a parameter in the trace that a transform is called from, if it can be seen there."""
        around = self.levels[-1]
        if path in around.notes:
            return around.notes[path]
        frames = [
            (f.path, f.module) for f in reversed(self._frames) if f.level is around and path[: len(f.path)] == f.path
        ]
        frames += [((), self._modules[()])] if around is self.levels[0] else []
        found = (axes_below(module, path[len(start) :]) for start, module in frames)
        return next((axes for axes in found if axes is not None), None)

    def _axes_at_most(self, path: Path, length: int) -> Axes | None:
        """The axes of a parameter outside of every transform, if one of them may be the axis of this one."""
        axes = axes_below(self._modules[()], path)
        return axes if axes is not None and length in axes.shape else None


def _part(path: Path, owner: Path) -> Path:
    """The path of the child of `owner` that `path` belongs to; an item of a list is a child."""
    end = len(owner) + 1
    while end < len(path) and path[end].isdecimal():
        end += 1
    return path[:end] if path[: len(owner)] == owner else path


def _is_record(node: Any) -> bool:
    return isinstance(node, Record)


def _flat(records: Any) -> list[Record]:
    return jax.tree.leaves(records, is_leaf=_is_record)
