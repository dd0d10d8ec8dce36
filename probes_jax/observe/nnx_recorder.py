"""Observes one evaluation of an nnx model: what each method of each module returns."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.nnx.nn import attention

from probes_jax.observe.attention import watching
from probes_jax.observe.census import NEVER_CALLED, Returned, Visit
from probes_jax.observe.evaluation import Evaluation, Run, runs_in
from probes_jax.observe.hiding import RULES
from probes_jax.observe.instead import instead_in_nnx
from probes_jax.observe.lift import Level
from probes_jax.observe.lifted import lifting
from probes_jax.observe.named import CLASS, observing
from probes_jax.observe.names import Path
from probes_jax.observe.nnx_layers import (
    Axes,
    axes_below,
    axes_of,
    find_stacks,
    is_layered,
    note_axes,
    own_params,
    place_layers,
)
from probes_jax.observe.nnx_marks import Marks, brought, clear, is_open, path_of, plant, put, slot_of
from probes_jax.observe.nnx_methods import calling
from probes_jax.observe.point import INPUT, Point
from probes_jax.observe.probes import Probes
from probes_jax.observe.record import Record, float_leaves, is_record, shapes_of, tapped
from probes_jax.observe.roles import role_of, takes_input
from probes_jax.observe.streams import Streams, is_stream, not_watched
from probes_jax.observe.tap import Measure
from probes_jax.stats.per_token import ROUTER, PerToken
from probes_jax.stats.summary import Summary

_LEVEL = "level"  # `Visit.place` of a record that comes out of its transforms by itself

CLOSED_OVER = "inside {0}, which does not hand the module's variables back; {1}"
RULED = (
    "used in {0}, which knows what the module holds and has no place for more; call it outside of {0}, or "
    "observe what comes out of it: pj.observe(name, x)"
)

_numbers = itertools.count()


class Raw(NamedTuple):
    """What one run left behind, or the slots of the taps of such a run."""

    here: tuple[Any, ...]  # `Level.records` of the run
    inside: dict[Path, tuple[Record, ...]]  # from the `Slot` of each module that has one


class _Frame(NamedTuple):
    """A method that runs: the `number`-th call. `level` is None inside a transform that is not lifted."""

    module: Any
    method: str
    function: Any
    path: Path
    level: Level | None
    number: int


class NNXRecorder:
    """Records of one binding.

    Records are kept in the trace that they are made in. JAX's transforms bring them out of it (`lifted`). Of a
    transform that was applied before the model is called, such as `nnx.jit` or a decorated method, only Variables come
    back: there a `Slot` on the module takes the records.

    Attributes:
        levels: See `lift.Carrier`. They are of one run; what it leaves behind is kept in `evaluation`.
        evaluation: Everything observed in the loss function.
        blocked: Why nothing at all can be recorded.
        without: Modules in a transform that is not lifted, as far as they have no `Slot`; as `Marks.slots`.
        fixed: Modules that may not have a `Slot`, nor any module in them, and why.
    """

    def __init__(self, measure: Measure | Probes, evaluation: Evaluation) -> None:
        self.levels: list[Level] = []
        self.evaluation = evaluation
        self.blocked: str | None = None
        self.without: dict[Path, Path] = {}
        self.fixed: dict[Path, str] = {}
        self._probes = Probes.of(measure)
        self._streams = Streams(self._take_branch)
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
        self._marks, self.without, self.fixed, self._token = marks, {}, {}, next(_numbers)
        classes = {type(module) for module in self._modules.values()}
        homes = [sys.modules[name] for name in {cls.__module__ for cls in classes} if name in sys.modules]
        slots = self.evaluation.level.next_slots
        taps = slots.records if isinstance(slots, Run) and not self.blocked else Raw((), {})
        self.levels = [Level(slots=taps.here)]
        self._frames = [_Frame(root, "", None, (), self.levels[0], next(_numbers))]
        self._streams = Streams(self._take_branch)
        try:
            with contextlib.ExitStack() as stack:
                if self._probes.branch is not None:
                    stack.enter_context(self._streams.watching())
                for around in (calling(self, classes), lifting(self if marks.lifted else None, homes), observing(self)):
                    stack.enter_context(around)
                take = None if self._probes.attention is None else self._take_attention
                stack.enter_context(watching(take, attention))
                plant(self._modules, marks, self._token, taps.inside)
                yield
                raw = Raw(tuple(self.levels[0].records), brought(self._modules))
                self.evaluation.keep(None if self.blocked else Run(raw), self.levels[0].visits)
        finally:
            clear(self._modules)
            self.levels, self._frames, self._modules, self._paths = [], [], {}, {}

    def forget(self, mark: tuple[int, int]) -> None:
        """Drops what was recorded since `mark`: the model is run again with other marks."""
        level = self.evaluation.level
        del level.visits[mark[0] :], level.records[mark[1] :]

    @property
    def mark(self) -> tuple[int, int]:
        """How much was recorded so far."""
        level = self.evaluation.level
        return len(level.visits), len(level.records)

    def found(self, raw: Any) -> tuple[list[Visit], list[Returned]]:
        """Visits with what was measured, and what came back in slots; `raw` is `Evaluation.raw`, or its gradient."""
        runs, seen = runs_in(raw), self.evaluation.visits(of_model=True)
        kept = [record for run in runs for record in _flat(run.here)]
        slots = [(path, record) for run in runs for path, records in run.inside.items() for record in records]
        paths = [visit.path for visit in seen if visit.place == _LEVEL]
        records = place_layers([*zip(paths, kept, strict=True), *slots])
        here = iter(records)
        visits = [
            dataclasses.replace(visit, record=next(here).merged()) if visit.place == _LEVEL else visit for visit in seen
        ]
        return visits, [(path, "", record) for (path, _), record in zip(slots, here, strict=True)]

    def stacks(self, params: Mapping[Path, Any]) -> tuple[dict[Path, tuple[int, int]], dict[Path, int]]:
        """See `find_stacks`."""
        visits, returned = self.found(self.evaluation.raw)
        records = [(visit.path, visit.record) for visit in visits if visit.record is not None]
        return find_stacks(self._inside, params, records + [(path, record) for path, _, record in returned])

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
            note_axes(self.levels, path, module)
        self._frames.append(_Frame(module, method, function, path, level, next(_numbers)))
        role = role_of(Point(path, type(module).__name__, method), self._probes.roles)
        try:
            args = self._with_input(module, method, path, args)
            if role == "residual" and self._probes.entry is not None and is_stream(args):
                self._keep_tokens(module, path, self._probes.entry(args[0]), ())
            with self._streams.inside(args[0] if args else None):
                output = run(*args, **kwargs)
        finally:
            self._frames.pop()
        leaves, cls = float_leaves(output), type(module).__name__
        output = self._observe(module, Visit(path, cls, method, shapes_of(leaves)), leaves, output)
        name = "/".join(path[len(top.path) :])
        if role == "router" and self._probes.routing is not None:
            self._take_routing(module, path, self._probes.routing(output))
        self._streams.returned(name, role, output, args[0] if args else None)
        return output

    def fix(self, arguments: Any) -> None:
        """See `Caller.fix`."""
        nodes = jax.tree.leaves(arguments, is_leaf=lambda node: isinstance(node, nnx.Module))
        self.fixed |= {
            self._path(node): RULED.format("nnx.custom_vjp") for node in nodes if isinstance(node, nnx.Module)
        }

    def _with_input(self, module: Any, method: str, path: Path, args: Any) -> Any:
        """The arguments, the first one observed where it is a point too."""
        cls = type(module).__name__
        leaves = float_leaves(args[0]) if args and method == "__call__" and takes_input(Point(path, cls)) else {}
        if not args:
            return args
        return (self._observe(module, Visit(path, cls, INPUT, shapes_of(leaves)), leaves, args[0]), *args[1:])

    def take(self, path: Path, value: Any) -> Any:
        """A value that the model names itself: below the module whose method runs."""
        leaves, top = float_leaves(value), self._frames[-1]
        visit = Visit((*top.path, *path), CLASS, "__call__", shapes_of(leaves))
        return self._observe(top.module, visit, leaves, value, path)

    def _observe(self, module: Any, visit: Visit, leaves: dict[str, jax.Array], output: Any, below: Path = ()) -> Any:
        """Measures an output and taps it."""
        measure = self._probes.activation
        if not leaves or measure is None:
            return output

        def values() -> dict[str, Summary]:
            return {leaf: measure(array) for leaf, array in leaves.items()}

        record, slots = self._keep(module, visit, values, below)
        return tapped(measure, output, record, slots) if record is not None and isinstance(slots, Record) else output

    def _take_branch(self, name: str, stream: jax.Array, branch: jax.Array) -> None:
        """A residual sum in the module whose method runs."""
        if self._probes.branch is not None:
            top = self._frames[-1]
            self._keep_tokens(top.module, top.path, self._probes.branch(stream, branch), tuple(name.split("/")))

    def _take_attention(self, *args: Any, **options: Any) -> None:
        """Attention in the module whose method runs."""
        top = self._frames[-1]
        if self._probes.attention is not None:
            with not_watched():
                self._keep_tokens(top.module, top.path, self._probes.attention(*args, **options), ())

    def take_tokens(self, found: PerToken, path: Path) -> None:
        """Numbers of each token that the model names itself: below the module whose method runs."""
        top = self._frames[-1]
        if self._probes.wants(found.family):
            self._keep_tokens(top.module, top.path, found, path)

    def _take_routing(self, module: Any, path: Path, found: PerToken | str) -> None:
        if isinstance(found, PerToken):
            self._keep_tokens(module, path, found, ())
        else:
            self.levels[-1].visits.append(Visit(path, ROUTER, "__call__", {"": ()}, found))

    def _keep_tokens(self, module: Any, path: Path, found: PerToken, name: Path) -> None:
        visit = Visit((*path, *name), found.family, "__call__", {"": found.values.shape[:-1]})
        self._keep(module, visit, lambda: {"": found}, name)

    def _keep(self, module: Any, visit: Visit, values: Callable[[], Any], below: Path) -> tuple[Record | None, Any]:
        """Measures, and leaves the record where it comes back from; the record, and the slots of its taps, if any."""
        level, path = self.levels[-1], visit.path[: len(visit.path) - len(below)]
        here = level.is_current
        reason = self.blocked or (None if here else self._reason(path, module))
        through = level.through if here else (*level.through, level.hiding)
        visit = dataclasses.replace(visit, reason=reason, through=through, place=_LEVEL if here and not reason else "")
        if here or not self._is_traced_again(visit):
            level.visits.append(visit)
        if reason:
            return None, None
        if not here or level is not self.levels[0]:
            self._inside |= {name: axes_of(param) for name, param in own_params(path, module).items()}
        record = Record(values(), *visit.key[1:], below)
        return record, level.keep(record) if here else put(module, record)

    def _is_traced_again(self, visit: Visit) -> bool:
        """Whether JAX traces a call once more.

        Where it is another call after all, its record comes back, and is reported as one more.
        """
        call = (self._owner().number, *visit.key, tuple(visit.leaves.items()), visit.reason)
        return self.levels[-1].is_traced_again(call)

    def _owner(self) -> _Frame:
        """The method that applies the transform that is running."""
        return next(frame for frame in reversed(self._frames) if frame.level is not None)

    def _reason(self, path: Path, module: Any) -> str | None:
        """Why the record of a module cannot come out of the transform that is running."""
        slot, name, part = slot_of(module), self.levels[-1].hiding, _part(path, self._owner().path)
        if name in RULES:
            known = (why for part, why in self.fixed.items() if path[: len(part)] == part)
            return next(known, None) or self.fixed.setdefault(part, RULED.format(name))
        if slot is None and path not in self._marks.refused:
            self.without[path] = part
        if slot is not None and is_open(slot):
            return None
        return self._marks.refused.get(path) or CLOSED_OVER.format(name, instead_in_nnx(name))

    def _path(self, module: Any) -> Path:
        path = path_of(module, self._token)
        path = self._paths.get(id(module)) if path is None else path
        if path is not None:
            return path
        self._anonymous |= not self._marks.paths
        return (*self._frames[-1].path, type(module).__name__)  # made inside the model, or inside a transform

    # ---- transforms

    def join(self, bodies: Sequence[Level], records: Any, axis: bool) -> None:
        """See `lift.Carrier`: an axis of iterations is one of layers where they have parameters of their own."""
        around = self.levels[-1]
        visits = [visit for body in bodies for visit in body.visits]
        inside = {path: axes for body in bodies for path, axes in body.notes.items()}
        seen = {path: self._axes_around(path) for path in inside}
        if axis:
            leaves, structure = jax.tree.flatten(records, is_leaf=is_record)
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


def _flat(records: Any) -> list[Record]:
    return jax.tree.leaves(records, is_leaf=is_record)
