"""Points seen while tracing against points that came back: what is missing has a name and a reason."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set

from probes_jax.observe.names import Names, Path
from probes_jax.observe.point import Point, point_name
from probes_jax.observe.record import Record
from probes_jax.stats.per_token import FAMILIES, PerToken
from probes_jax.stats.summary import Summary

Key = tuple[Path, str, str]  # module path, class, method
Returned = tuple[Path, str, Record]  # module path, `Visit.place`, what was measured there

LOST = (
    "the value did not come back from {0}; call the module outside of it, or use Flax's own lifted transform (nn.scan, "
    "nn.remat, nnx.remat)"
)
NEVER_CALLED = (
    "never called: the loss reads the module's parameters without calling it, or does not use it at all; call the "
    "module, or name the value where it is made with pj.observe"
)
NO_BACKWARD = (
    "inside {0}, whose backward pass is its own; for the gradient of the loss observe what {0} returns: "
    "pj.observe(name, x)"
)


@dataclasses.dataclass(frozen=True)
class Visit:
    """One call seen while tracing.

    Attributes:
        path: Module path.
        class_name: Class of the module.
        method: Name of the method.
        leaves: Shapes of the float arrays in its output, by their path in it.
        reason: Why no value can come back, and what to do; None when one should.
        place: Which transform it was seen in; records of different ones come back apart.
        record: The value itself where it is known which one it is: nothing stands between the module and the loss
            function, or what stands there keeps its records apart.
        through: Names of the transforms it was seen in, the outermost first.
    """

    path: Path
    class_name: str
    method: str
    leaves: Mapping[str, tuple[int, ...]]
    reason: str | None = None
    place: str = ""
    record: Record | None = None
    through: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return self.path, self.class_name, self.method


@dataclasses.dataclass
class Result:
    """Points of one evaluation, in the order in which the values were computed."""

    points: dict[Point, Summary] = dataclasses.field(default_factory=dict)
    tokens: dict[Point, PerToken] = dataclasses.field(default_factory=dict)
    seen: list[Point] = dataclasses.field(default_factory=list)
    missing: dict[Point, str] = dataclasses.field(default_factory=dict)


def settle(
    visits: Sequence[Visit], returned: Iterable[Returned], params: Iterable[Path], stacks: Iterable[Path]
) -> Result:
    """Matches the calls seen with the records that came back.

    Args:
        visits: Calls in the order in which they returned.
        returned: Records with where they were found, those of one module in call order. A compiled block that is
            traced once and used twice returns more records than calls were seen.
        params: Parameter paths; they have the first word in naming.
        stacks: Scanned parameter subtrees.
    """
    records: dict[tuple[Key, str], collections.deque[Record]] = {}
    for path, place, record in returned:
        key = ((*path, *record.below), record.class_name, record.method)
        records.setdefault((key, place), collections.deque()).append(record.merged())
    places = [(key[0], record) for (key, _), found in records.items() for record in found]
    places += [(visit.path, visit.record) for visit in visits if visit.record is not None]
    layers = {path[:at] for path, record in places for at in record.layers}
    paths = [visit.path for visit in visits] + [key[0] for key, _ in records]
    namer = _Namer(Names(params, {*stacks, *layers}, also=paths))
    result = Result()
    calls: collections.Counter[Key] = collections.Counter()
    for visit, record in _pair(visits, records):
        key = (visit.path, visit.class_name, visit.method)
        for leaf in visit.leaves if record is None else _in_order(visit.leaves, record):
            summary = None if record is None else record.values[leaf]
            layers = () if record is None else record.layers
            shape = visit.leaves.get(leaf, ())
            point = namer.name(
                Point(*key, calls[key], leaf, layers, "?", shape, visit.through),
                () if summary is None else summary.stack_shape(),
            )
            result.seen.append(point)
            if summary is None:
                around = " and ".join(visit.through) or "a transform around the module"
                result.missing[point] = visit.reason or LOST.format(around)
            elif isinstance(summary, PerToken):
                result.tokens[point] = summary
            else:
                result.points[point] = summary
        calls[key] += 1
    return result


def find_uncalled(
    params: Iterable[Path], called: Iterable[Path], variables: Set[Path], entered: Set[Path]
) -> list[Path]:
    """The outermost modules that hold parameters and that no call was seen of.

    Args:
        params: Paths of parameters.
        called: Paths of modules that were called.
        variables: Paths known to be parameters, also those that are trees and look like modules.
        entered: Paths of modules that ran. What is below another one says nothing: a compiled block runs once for all.
    """
    called = set(called)
    reached = {path[:depth] for path in called for depth in range(len(path) + 1)}
    found: dict[Path, None] = {}
    for leaf in params:
        names = range(1, len(leaf) + 1)
        depth = next(depth for depth in names if depth == len(leaf) or leaf[:depth] in variables)
        holder = leaf[: depth - 1]
        outermost = next((leaf[:d] for d in range(1, depth) if leaf[:d] not in reached), holder)
        if outermost and outermost not in called and outermost[:-1] in entered:
            found[outermost] = None
    return list(found)


def without_backward(points: Iterable[Point], derivatives: Collection[str]) -> dict[Point, str]:
    """Points whose gradient of the loss cannot be seen, named after the gradient.

    Args:
        points: Those that report.
        derivatives: Names of transforms that have a backward pass of their own.
    """
    inside = {point: [name for name in point.through if name in derivatives] for point in points}
    return {
        dataclasses.replace(point, name=f"grad_act/{point}"): NO_BACKWARD.format(found[-1])
        for point, found in inside.items()
        if found
    }


def _pair(
    visits: Iterable[Visit], records: dict[tuple[Key, str], collections.deque[Record]]
) -> Iterator[tuple[Visit, Record | None]]:
    for visit in visits:
        waiting = records.get((visit.key, visit.place))
        if visit.record is not None or visit.reason is not None or not waiting:
            yield visit, visit.record
        else:
            yield visit, waiting.popleft()
    for (key, _), waiting in records.items():  # from a block traced once and used several times
        for record in waiting:
            yield Visit(*key, dict.fromkeys(record.values, ())), record


def _in_order(leaves: Iterable[str], record: Record) -> list[str]:
    """A record that went through a transform has its leaves sorted; the order of the output is the better one."""
    order = list(leaves)
    return sorted(record.values, key=lambda leaf: order.index(leaf) if leaf in order else len(order))


class _Namer:
    """Gives each point a name no other point's layers have."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._taken: dict[str, set[str]] = {}  # by family: what is measured of tokens has names of its own

    def name(self, point: Point, stack_shape: tuple[int, ...]) -> Point:
        base = point_name(point, self._names)
        taken = self._taken.setdefault(point.class_name if point.class_name in FAMILIES else "", set())
        for name in _variants(base, point.class_name):
            named = dataclasses.replace(point, name=name)
            labels = named.labels(stack_shape)
            if not taken.intersection(labels):
                break
        taken.update(labels)
        return named


def _variants(name: str, class_name: str) -> Iterator[str]:
    yield name
    yield f"{name}~{class_name}"
    number = 2
    while True:
        yield f"{name}~{class_name}~{number}"
        number += 1
