"""Which axes of an nnx model are axes of layers: told by the parameters that a transform takes an axis from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flax import nnx

from probes_jax.observe.lift import Level
from probes_jax.observe.names import Path
from probes_jax.observe.record import Record


class Axes(NamedTuple):
    """Shape of a parameter, and the names of its axes in its metadata."""

    shape: tuple[int, ...]
    names: tuple[Any, ...]


def axes_of(variable: nnx.Variable) -> Axes:
    """The axes of a parameter as it is now, inside of a scan or outside of it."""
    return Axes(variable.get_value().shape, tuple(variable.get_metadata("out_sharding", None) or ()))


def own_params(path: Path, module: Any) -> dict[Path, nnx.Param]:
    """The parameters that a module itself holds."""
    own = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Param)}
    return {(*path, name): value for name, value in own.items() if hasattr(value.get_value(), "shape")}


def some_params(path: Path, module: Any) -> dict[Path, nnx.Param]:
    """The parameters that a module itself holds, else those of the first module in it that has some."""
    own = own_params(path, module)
    parts = () if own else nnx.iter_modules(module, graph=True)
    found = (own_params((*path, *map(str, below)), part) for below, part in parts)
    return own or next((params for params in found if params), {})


def axes_below(module: Any, path: Path) -> Axes | None:
    """The axes of the parameter at `path` below a module; None where there is none."""
    for key in path:
        if isinstance(module, list | tuple | nnx.List):
            module = module[int(key)] if key.isdecimal() and int(key) < len(module) else None
        else:
            items = module if isinstance(module, dict) else getattr(module, "__dict__", {})
            module = items.get(key)
    return axes_of(module) if isinstance(module, nnx.Param) else None


def axis_taken(whole: Axes, layer: Axes) -> int | None:
    """The axis of a parameter that a scan over layers took away; None where it took none."""

    def without(axis: int, x: tuple[Any, ...]) -> tuple[Any, ...]:
        return x[:axis] + x[axis + 1 :]

    axes = [axis for axis in range(len(whole.shape)) if without(axis, whole.shape) == layer.shape]
    named = [axis for axis in axes if whole.names and without(axis, whole.names) == layer.names]
    return (named or axes or [None])[0]


def note_axes(levels: Sequence[Level], path: Path, module: Any) -> None:
    """Keeps the axes of parameters in the body of a transform; a parameter made around it is the same there."""
    for name, param in some_params(path, module).items():
        for level in levels[-1:] if param._can_update else levels[-2:]:
            level.notes[name] = axes_of(param)


def find_stacks(
    inside: Mapping[Path, Axes], params: Mapping[Path, Any], records: Iterable[tuple[Path, Record]]
) -> tuple[dict[Path, tuple[int, int]], dict[Path, int]]:
    """Scanned modules with their layer axis and number of layers, and the axis of each parameter below them.

    The axis is the one that a scan took away: told by the names in the metadata, else by the shapes.

    Args:
        inside: Axes of parameters as modules inside of transforms have them.
        params: The parameters themselves.
        records: Everything that was measured, by module.
    """
    outside = _outside(records)
    stacks: dict[Path, tuple[int, int]] = {}
    axes: dict[Path, int] = {}
    for path, layer in inside.items():
        whole = axes_of(params[path]) if path in params else layer
        axis = axis_taken(whole, layer)
        if axis is not None:
            axes[path] = axis
            stacks.setdefault(path[: scanned(path[:-1], outside)], (axis, whole.shape[axis]))
    return stacks, axes


def is_layered(path: Path, outside: Mapping[Path, Axes | None], inside: Mapping[Path, Axes]) -> bool:
    """Whether a transform gave each iteration parameters of its own.

    A module without parameters goes with those that are nearest to it in the model.

    Args:
        path: The module.
        outside: Axes of parameters where the transform is called.
        inside: Axes of the same parameters in its body.
    """

    def near(parameter: Path) -> int:
        return next((n for n, (a, b) in enumerate(zip(path, parameter)) if a != b), min(len(path), len(parameter)))

    known = {parameter: axes for parameter in inside if (axes := outside.get(parameter)) is not None}
    if not known:
        return False
    nearest = max(known, key=near)
    return len(known[nearest].shape) > len(inside[nearest].shape)


def place_layers(found: Iterable[tuple[Path, Record]]) -> list[Record]:
    """Records of which each layer axis knows which module of the path was scanned.

    It is the first one, and no list, below which everything came out of the scan.

    Args:
        found: Records with the path of their module. `stack` tells layers from time steps by None; where it is
            shorter than the axes there are, the rest are of layers.
    """
    found = list(found)
    outside = _outside(found)
    return [record if not _stack(record) else _placed(record, scanned(path, outside)) for path, record in found]


def scanned(path: Path, outside: Collection[Path]) -> int:
    """How much of the path of a module in a scan is the path of the module that is scanned.

    Args:
        path: The module.
        outside: Every module, and every list of modules, with something in it that is in no scan over layers.
    """
    starts = [n for n in range(1, len(path)) if path[:n] not in outside and not path[n].isdecimal()]
    return starts[0] if starts else len(path)


def _outside(records: Iterable[tuple[Path, Record]]) -> set[Path]:
    single = [path for path, record in records if all(axis is None for axis in _stack(record))]
    return {path[:depth] for path in single for depth in range(len(path) + 1)}


def _stack(record: Record) -> Sequence[int | None]:
    return (*record.stack, *(0,) * (len(record.stack_shape) - len(record.stack)))


def _placed(record: Record, position: int) -> Record:
    stack = tuple(None if axis is None else position for axis in _stack(record))
    return Record(record.values, record.class_name, record.method, record.below, stack)
