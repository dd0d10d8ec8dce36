"""Observes one evaluation of a linen model: what each method of each module returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import flax.linen as nn
import jax

from probes_jax.observe import linen_lift
from probes_jax.observe.attention import watching
from probes_jax.observe.census import NEVER_CALLED, Returned, Visit, find_uncalled
from probes_jax.observe.instead import instead_in_linen
from probes_jax.observe.lift import carried_by
from probes_jax.observe.linen_frames import Call, Lift, hidden_by, is_method
from probes_jax.observe.linen_places import RECORDS, Places, of_transform, path_of, put, take
from probes_jax.observe.named import CLASS, observing
from probes_jax.observe.names import Path
from probes_jax.observe.point import INPUT, Point
from probes_jax.observe.probes import Probes
from probes_jax.observe.record import Record, float_leaves, shapes_of, tapped
from probes_jax.observe.roles import role_of, takes_input
from probes_jax.observe.streams import Streams, is_stream, not_watched
from probes_jax.observe.tap import Measure
from probes_jax.stats.per_token import ROUTER, PerToken
from probes_jax.stats.summary import Summary

FLAG = "probes_jax"  # scope flag that marks the scopes of an observed model, also inside lifted transforms
RAW = "inside {0}, which Flax does not know of; {1}"
REFUSED = "inside {0}, which is not observed; {1}"
NOT_CARRIED = (
    "a lifted transform around the module does not pass new variables out; name variables=True in nn.jit, or move the "
    "module out of it"
)


class LinenRecorder:
    """Records of one binding.

    Attributes:
        collection: Name of our variable collection, unique to this evaluation, because `nn.jit` keeps what it traced
            by the names of the mutable collections.
        slots: Name of the collection that holds the slots of taps: zeros in the structure of the records.
        visits: Calls seen in one run, in the order in which they returned.
        stacks: Paths of scanned scopes, with the layer axis of their parameters, several where a scan has another one
            around it at the same path (the outermost first); a path that ends in `None` stands for each of the
            module's children.
    """

    def __init__(self, collection: str, measure: Measure | Probes) -> None:
        self.collection = collection
        self.slots = collection + "_slots"
        self.visits: list[Visit] = []
        self.stacks: dict[tuple[str | None, ...], tuple[int, ...]] = {}
        self.blocked: str | None = None  # why nothing at all can be recorded
        self._ran: set[Path] = set()  # modules
        self._called: set[Path] = set()  # those of them that ran a method of the kind that is observed
        self._variables: set[Path] = set()  # parameters
        self._lent: set[Path] = set()  # parameters that a nested `apply` was given
        self._probes = Probes.of(measure)
        self._streams = Streams(self._take_branch)
        self._frames: list[Call | Lift] = []  # innermost last; the first is the root
        self._entered = 0  # transforms entered outside of any other

    @contextlib.contextmanager
    def recording(self, root: nn.Module) -> Iterator[None]:
        """Intercepts method calls and lifted transforms while the block runs."""
        frames = self._frames
        self._frames = [Call(root, root.scope, "", None, own=True, observed=False)]
        self._entered = 0
        self._streams = Streams(self._take_branch)
        try:
            with contextlib.ExitStack() as stack:
                if self._probes.branch is not None:
                    stack.enter_context(self._streams.watching())
                for around in (linen_lift.carrying(self), nn.intercept_methods(self._intercept), observing(self)):
                    stack.enter_context(around)
                take = None if self._probes.attention is None else self._take_attention
                stack.enter_context(watching(take, nn.attention))
                stack.enter_context(carried_by(None))
                yield
        finally:
            self._frames = frames

    # ---- calls

    def _intercept(
        self, call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        scope = context.module.scope
        if scope is None:
            return call(*args, **kwargs)
        self._restart()
        frame = self._frame(context, scope)
        around = self._running()
        self._frames.append(frame)
        role = role_of(Point(frame.path, type(context.module).__name__, frame.method), self._probes.roles)
        try:
            args = self._with_input(frame, args)
            if role == "residual" and frame.observed and self._probes.entry is not None and is_stream(args):
                self._keep_tokens(frame, self._probes.entry(args[0]), ())
            with self._streams.inside(args[0] if args else None):
                output = call(*args, **kwargs)
        finally:
            self._frames.pop()
        self._note(frame)
        if not frame.observed:
            return output
        cls = type(frame.module).__name__
        output = self._observe(frame, output, cls, frame.method)
        name = "/".join(frame.path[len(around.path) :])
        if role == "router" and self._probes.routing is not None:
            self._take_routing(frame, self._probes.routing(output))
        self._streams.returned(name, role, output, args[0] if args else None)
        return output

    def _running(self) -> Call:
        """The module whose method runs."""
        return next(f for f in reversed(self._frames) if isinstance(f, Call))

    def _with_input(self, frame: Call, args: Any) -> Any:
        """The arguments, the first one observed where it is a point too."""
        cls = type(frame.module).__name__
        wanted = frame.observed and frame.method == "__call__" and takes_input(Point(frame.path, cls))
        return (self._observe(frame, args[0], cls, INPUT), *args[1:]) if args and wanted else args

    def take(self, path: Path, value: Any) -> Any:
        """A value that the model names itself: below the module whose method runs."""
        frame = self._running()
        if frame.scope.flags.get("initializing", False):
            return value
        return self._observe(frame, value, CLASS, "__call__", path)

    def _note(self, frame: Call) -> None:
        """Which modules ran, which were called, and which of their names are parameters."""
        if not frame.own:
            self._lend(frame)
            return
        self._ran.add(frame.path)
        self._variables |= {
            (*frame.path, name) for name, kinds in frame.scope.reservations.items() if "params" in kinds
        }
        if frame.observed:
            self._called.add(frame.path)

    def _lend(self, frame: Call) -> None:
        """The parameters that a nested `apply` was given are used by what runs there."""
        given = {id(leaf) for leaf in jax.tree.leaves(frame.scope.root._variables.get("params", {}))}
        for root in {id(f.scope.root): f.scope.root for f in self._frames if isinstance(f, Call) and f.own}.values():
            found = jax.tree_util.tree_leaves_with_path(root._variables.get("params", {}))
            self._lent |= {(*root.path, *path_of(keys)) for keys, leaf in found if id(leaf) in given}

    def uncalled(self, params: Iterable[Path], visits: Iterable[Visit], returned: Iterable[Returned]) -> list[Visit]:
        """Modules that hold parameters and whose calls the trace never saw, as calls without a value."""
        points = [visit.path for visit in visits]
        points += [(*path, *record.below) for path, _, record in returned]
        used = [path for path in params if path not in self._lent]
        found = find_uncalled(used, {*self._called, *points}, self._variables, self._ran)
        return [Visit(path, "", "__call__", {"": ()}, NEVER_CALLED) for path in found]

    def _restart(self) -> None:
        """A transform that enters its body traces it anew: what an earlier trace saw does not count."""
        top = self._frames[-1]
        if isinstance(top, Lift) and top.name in linen_lift.CARRIED:
            del self.visits[top.mark :]
            top.inner = 0

    def _frame(self, context: nn.module.InterceptorContext, scope: Any) -> Call:
        module, method = context.module, context.method_name
        function = context.orig_method.func
        hidden = (
            (method.startswith("_") and method != "__call__")
            or method == "setup"
            or scope.flags.get("initializing", False)
            or not is_method(type(module), method, function)
            or any(isinstance(f, Call) and f.method == "setup" for f in self._frames)
            or self._is_super_call(module, method, function)
        )
        return Call(module, scope, method, function, scope.flags.get(FLAG) == self.collection, not hidden)

    def _is_super_call(self, module: nn.Module, method: str, function: Any) -> bool:
        top = self._frames[-1]
        return isinstance(top, Call) and top.module is module and top.method == method and top.function is not function

    def _take_branch(self, name: str, stream: jax.Array, branch: jax.Array) -> None:
        """A residual sum in the module whose method runs."""
        frame = self._running()
        if not frame.scope.flags.get("initializing", False) and self._probes.branch is not None:
            self._keep_tokens(frame, self._probes.branch(stream, branch), tuple(name.split("/")))

    def _take_attention(self, *args: Any, **options: Any) -> None:
        """Attention in the module whose method runs."""
        frame = self._running()
        if not frame.scope.flags.get("initializing", False) and self._probes.attention is not None:
            with not_watched():
                self._keep_tokens(frame, self._probes.attention(*args, **options), ())

    def take_tokens(self, found: PerToken, path: Path) -> None:
        """Numbers of each token that the model names itself: below the module whose method runs."""
        frame = self._running()
        if not frame.scope.flags.get("initializing", False) and self._probes.wants(found.family):
            self._keep_tokens(frame, found, path)

    def _take_routing(self, frame: Call, found: PerToken | str) -> None:
        if isinstance(found, PerToken):
            self._keep_tokens(frame, found, ())
        else:
            visit = Visit(frame.path, ROUTER, "__call__", {"": ()}, found)
            self.visits += [] if self._is_repeated(visit) else [visit]

    def _keep_tokens(self, frame: Call, found: PerToken, name: Path) -> None:
        shapes = {"": found.values.shape[:-1]}
        self._keep(frame, shapes, lambda: {"": found}, found.family, "__call__", name)

    def _observe(self, frame: Call, output: Any, class_name: str, method: str, name: Path = ()) -> Any:
        measure, leaves = self._probes.activation, float_leaves(output)
        if not leaves or measure is None:
            return output

        def values() -> dict[str, Summary]:
            return {leaf: measure(array) for leaf, array in leaves.items()}

        record, slots = self._keep(frame, shapes_of(leaves), values, class_name, method, name)
        return output if record is None or slots is None else tapped(measure, output, record, slots)

    def _keep(
        self, frame: Call, shapes: Any, values: Callable[[], Any], class_name: str, method: str, name: Path
    ) -> tuple[Record | None, Record | None]:
        """Measures, and leaves the record where it comes back from; the record and the slots of its taps, if any."""
        owner, below = self._owner(frame)
        below = (*below, *name)
        reason, place = self._reason(owner), self._variable()
        through = tuple(f"nn.{f.name}" for f in self._frames if isinstance(f, Lift))
        visit = Visit((*owner.path, *below), class_name, method, shapes, reason, place, through=through)
        if reason:
            if not self._is_repeated(visit):
                self.visits.append(visit)
            return None, None
        record = Record(values(), visit.class_name, visit.method, below)
        before = owner.scope.get_variable(self.collection, place, ())
        owner.scope.put_variable(self.collection, place, (*before, record))
        self.visits.append(visit)
        slots = owner.scope.get_variable(self.slots, place, ())
        return record, slots[len(before)] if len(before) < len(slots) else None

    def _variable(self) -> str:
        """Where records of this place go: scans and other transforms each have a variable of their own.

        Records of one transform have axes that others do not have, and so have the slots of their taps.
        """
        lift = self._innermost()
        return lift.variable if lift else RECORDS

    def _innermost(self) -> Lift | None:
        carried = (f for f in reversed(self._frames) if isinstance(f, Lift) and f.name in linen_lift.CARRIED)
        return next(carried, None)

    def _owner(self, frame: Call) -> tuple[Call, Path]:
        """The call whose module holds the record: the call itself, or the one that called a nested `apply`."""
        if frame.own:
            return frame, ()
        outermost = frame
        for call in reversed([f for f in self._frames if isinstance(f, Call)]):
            if call.own:
                break
            outermost = call
        root = outermost.module
        return call, (root.name or type(root).__name__, *frame.path)

    def _reason(self, owner: Call) -> str | None:
        if self.blocked:
            return self.blocked
        refused = [f.name for f in self._frames if isinstance(f, Lift) and f.name in linen_lift.REFUSED]
        if refused:
            name = f"nn.{refused[-1]}"
            return REFUSED.format(name, instead_in_linen(name))
        if hidden := self.hidden([owner.scope]):
            return RAW.format(hidden, instead_in_linen(hidden))
        return None if owner.scope.is_mutable_collection(self.collection) else NOT_CARRIED

    def _is_repeated(self, visit: Visit) -> bool:
        """Whether a transform traces the same call again; only its first trace is listed."""
        lifts = [f for f in self._frames if isinstance(f, Lift)]
        return bool(lifts) and visit in self.visits[lifts[0].mark :]

    # ---- lifted transforms

    def owns(self, scopes: list[Any]) -> bool:
        return bool(scopes) and all(scope.flags.get(FLAG) == self.collection for scope in scopes)

    def hidden(self, scopes: list[Any]) -> str | None:
        around = (f.hidden for f in self._frames if isinstance(f, Lift))
        return next(filter(None, (*around, *map(hidden_by, scopes))), None)

    @contextlib.contextmanager
    def lifted(self, name: str, scopes: list[Any], axis: int | None) -> Iterator[None]:
        self._restart()
        paths = tuple(tuple(scope.path) for scope in scopes)
        caller = next((f.path for f in reversed(self._frames) if isinstance(f, Call)), None)
        hidden = self.hidden(scopes)
        myself = caller if caller in paths else None
        frame = Lift(name, paths, myself, axis, len(self.visits), self._enter(name), hidden)
        roots = list({id(scope.root): scope.root for scope in scopes}.values())
        roots = roots if name in linen_lift.CARRIED else []
        before = [take(root._variables.get(self.collection, {})) for root in roots]
        slots = [scope._collection(self.slots) for scope in scopes] if roots else []
        self._frames.append(frame)
        try:
            for scope, there in zip(scopes, slots):
                scope._variables[self.slots] = of_transform(there, frame.variable)
            yield
        finally:
            self._frames.pop()
            for scope, there in zip(scopes, slots):
                scope._variables[self.slots] = there
        for root, earlier in zip(roots, before):
            self._merge(root, earlier, frame)
        for where in frame.stacked:
            nested = [f for f in (*self._frames, frame) if isinstance(f, Lift) and where in f.stacked]
            axes = tuple(f.axis for f in nested if f.axis is not None)
            self.stacks[where] = max(self.stacks.get(where, ()), axes, key=len)

    def _enter(self, name: str) -> str:
        """The variable of a transform that is entered: numbered in the order of the trace, so the same every time."""
        if name not in linen_lift.CARRIED:
            return RECORDS
        outer = self._innermost()
        if outer is None:
            self._entered += 1
            return f"{RECORDS}{self._entered}"
        outer.inner += 1
        return f"{outer.variable}.{outer.inner}"

    def _merge(self, root: Any, earlier: Places, frame: Lift) -> None:
        """Puts the records of one transform behind those that were there before it."""
        later = take(root._variables.get(self.collection, {}))
        together = {
            place: (
                *earlier.get(place, ()),
                *(self._after(frame, (*root.path, *place[0]), record) for record in later.get(place, ())),
            )
            for place in {**earlier, **later}
        }
        if together:
            put(root._mutable_collection(self.collection), together)

    def _after(self, frame: Lift, path: Path, record: Record) -> Record:
        if frame.name not in linen_lift.PER_LAYER:
            return record
        if frame.axis is None:  # the same parameters in every iteration: time steps, or examples
            return record.repeated()
        path = (*path, *record.below)
        lifted = max((p for p in frame.paths if path[: len(p)] == p), key=len, default=path)
        return record.stacked(len(lifted) + (lifted == frame.myself and len(path) > len(lifted)))
