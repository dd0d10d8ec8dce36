"""Observes one evaluation of a linen model: what each method of each module returns."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core import tracers, unfreeze

from probes_jax.observe import linen_lift
from probes_jax.observe.binding import Measure
from probes_jax.observe.census import Visit
from probes_jax.observe.names import Path
from probes_jax.observe.record import Record, float_leaves

FLAG = "probes_jax"  # scope flag that marks the scopes of an observed model, also inside lifted transforms
_RECORDS = "="  # the variable that holds a module's records; no module can have this name

RAW = (
    "inside a JAX transform that Flax does not know (jax.checkpoint, jax.vmap, jax.lax.scan); use nn.remat, nn.vmap or "
    "nn.scan instead"
)
OUTSIDE = (
    "the model is called inside a JAX transform in loss_fn; call it outside of it, or put the transform in the model"
)
NOT_CARRIED = (
    "a lifted transform around the module does not pass new variables out; name variables=True in nn.jit, or move the "
    "module out of it"
)


@dataclasses.dataclass
class _Call:
    """One intercepted method call that has not returned yet."""

    module: nn.Module
    scope: Any
    method: str
    function: Any
    own: bool
    observed: bool

    @property
    def path(self) -> Path:
        return tuple(self.scope.path)


@dataclasses.dataclass
class _Lift:
    """One application of a lifted transform that has not returned yet."""

    name: str
    paths: tuple[Path, ...]
    myself: Path | None  # path of the module that lifts a function of itself
    axis: int | None
    mark: int  # number of visits when it was entered


class LinenRecorder:
    """Records of one binding.

    Attributes:
        collection: Name of our variable collection, unique to this evaluation, because `nn.jit` keeps what it traced
            by the names of the mutable collections.
        visits: Calls seen, in the order in which they returned.
        returned: Records that came back, with the path of the module they were found at.
        stacks: Paths of scanned scopes, with the layer axis of their parameters; a path that ends in `None` stands
            for each of the module's children.
    """

    def __init__(self, collection: str, measure: Measure, taps: Mapping[str, jax.Array] | None = None) -> None:
        self.collection = collection
        self.visits: list[Visit] = []
        self.returned: list[tuple[Path, Record]] = []
        self.stacks: dict[tuple[str | None, ...], int] = {}
        self.blocked: str | None = None  # why nothing at all can be recorded
        self._measure = measure
        self._taps = taps
        self._frames: list[_Call | _Lift] = []  # innermost last; the first is the root

    @contextlib.contextmanager
    def recording(self, root: nn.Module) -> Iterator[None]:
        """Intercepts method calls and lifted transforms while the block runs."""
        frames = self._frames
        self._frames = [_Call(root, root.scope, "", None, own=True, observed=False)]
        try:
            with linen_lift.carrying(self), nn.intercept_methods(self._intercept):
                yield
        finally:
            self._frames = frames

    def collect(self, tree: Any) -> None:
        """Takes the records out of our collection as the model returned it."""
        self.returned += [(path, record) for path, records in _take(unfreeze(tree)).items() for record in records]

    # ---- calls

    def _intercept(
        self, call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        scope = context.module.scope
        if scope is None:
            return call(*args, **kwargs)
        self._restart()
        frame = self._frame(context, scope)
        self._frames.append(frame)
        try:
            output = call(*args, **kwargs)
        finally:
            self._frames.pop()
        return self._observe(frame, output) if frame.observed else output

    def _restart(self) -> None:
        """A transform that enters its body traces it anew: what an earlier trace saw does not count."""
        top = self._frames[-1]
        if isinstance(top, _Lift) and top.name in linen_lift.CARRIED:
            del self.visits[top.mark :]

    def _frame(self, context: nn.module.InterceptorContext, scope: Any) -> _Call:
        module, method = context.module, context.method_name
        function = context.orig_method.func
        hidden = (
            (method.startswith("_") and method != "__call__")
            or method == "setup"
            or scope.flags.get("initializing", False)
            or not _is_method(type(module), method, function)
            or any(isinstance(f, _Call) and f.method == "setup" for f in self._frames)
            or self._is_super_call(module, method, function)
        )
        return _Call(module, scope, method, function, scope.flags.get(FLAG) == self.collection, not hidden)

    def _is_super_call(self, module: nn.Module, method: str, function: Any) -> bool:
        top = self._frames[-1]
        return isinstance(top, _Call) and top.module is module and top.method == method and top.function is not function

    def _observe(self, frame: _Call, output: Any) -> Any:
        leaves = float_leaves(output)
        if not leaves:
            return output
        owner, below = self._owner(frame)
        reason = self._reason(owner)
        visit = Visit((*owner.path, *below), type(frame.module).__name__, frame.method, tuple(leaves), reason)
        if reason:
            if not self._is_repeated(visit):
                self.visits.append(visit)
            return output
        values = {leaf: self._measure(array) for leaf, array in leaves.items()}
        record = Record(values, visit.class_name, visit.method, below)
        before = owner.scope.get_variable(self.collection, _RECORDS, ())
        owner.scope.put_variable(self.collection, _RECORDS, (*before, record))
        self.visits.append(visit)
        return output  # a tap on the gradient of `output` goes here

    def _owner(self, frame: _Call) -> tuple[_Call, Path]:
        """The call whose module holds the record: the call itself, or the one that called a nested `apply`."""
        if frame.own:
            return frame, ()
        outermost = frame
        for call in reversed([f for f in self._frames if isinstance(f, _Call)]):
            if call.own:
                break
            outermost = call
        root = outermost.module
        return call, (root.name or type(root).__name__, *frame.path)

    def _reason(self, owner: _Call) -> str | None:
        if self.blocked:
            return self.blocked
        refused = [f.name for f in self._frames if isinstance(f, _Lift) and f.name in linen_lift.REFUSED]
        if refused:
            return f"inside nn.{refused[-1]}, which is not observed; move the module out of nn.{refused[-1]}"
        if not owner.scope.is_mutable_collection(self.collection):
            return NOT_CARRIED
        if owner.scope.trace_level != tracers.current_trace():
            return RAW
        return None

    def _is_repeated(self, visit: Visit) -> bool:
        """Whether a transform traces the same call again; only its first trace is listed."""
        lifts = [f for f in self._frames if isinstance(f, _Lift)]
        return bool(lifts) and visit in self.visits[lifts[0].mark :]

    # ---- lifted transforms

    def owns(self, scopes: list[Any]) -> bool:
        return bool(scopes) and all(scope.flags.get(FLAG) == self.collection for scope in scopes)

    @contextlib.contextmanager
    def lifted(self, name: str, scopes: list[Any], axis: int | None) -> Iterator[None]:
        self._restart()
        paths = tuple(tuple(scope.path) for scope in scopes)
        caller = next((f.path for f in reversed(self._frames) if isinstance(f, _Call)), None)
        frame = _Lift(name, paths, caller if caller in paths else None, axis, len(self.visits))
        roots = list({id(scope.root): scope.root for scope in scopes}.values())
        before = [_take(self._tree(root)) for root in roots] if name in linen_lift.CARRIED else []
        self._frames.append(frame)
        try:
            yield
        finally:
            self._frames.pop()
        for root, earlier in zip(roots, before):
            self._merge(root, earlier, frame)
        if name in linen_lift.PER_LAYER and axis is not None:
            self.stacks |= {(*path, None) if path == frame.myself else path: axis for path in paths}

    def _tree(self, root: Any) -> Any:
        return root._variables.get(self.collection, {})

    def _merge(self, root: Any, earlier: dict[Path, tuple[Record, ...]], frame: _Lift) -> None:
        """Puts the records of one transform behind those that were there before it."""
        later = _take(self._tree(root))
        for path in {**earlier, **later}:
            records = tuple(self._after(frame, (*root.path, *path), record) for record in later.get(path, ()))
            node = root._mutable_collection(self.collection)
            for element in path:
                node = node.setdefault(element, {})
            node[_RECORDS] = (*earlier.get(path, ()), *records)

    def _after(self, frame: _Lift, path: Path, record: Record) -> Record:
        if frame.name not in linen_lift.PER_LAYER:
            return record
        if frame.axis is None:  # the same parameters in every iteration: time steps, or examples
            return record.collapsed()
        path = (*path, *record.below)
        lifted = max((p for p in frame.paths if path[: len(p)] == p), key=len, default=path)
        return record.stacked(len(lifted) + (lifted == frame.myself and len(path) > len(lifted)))


def _is_method(cls: type, name: str, function: Any) -> bool:
    """Whether `function` is a method of `cls`, and not a function that a transform runs in its place."""
    target = inspect.unwrap(function)
    return any(inspect.unwrap(base.__dict__[name]) is target for base in cls.__mro__ if name in base.__dict__)


def _take(tree: Any, path: Path = ()) -> dict[Path, tuple[Record, ...]]:
    """Removes all records from a tree of variables, leaving its dictionaries as they are."""
    found: dict[Path, tuple[Record, ...]] = {}
    if isinstance(tree, dict):
        records = tree.pop(_RECORDS, None)
        if records:
            found[path] = records
        for name, child in tree.items():
            found |= _take(child, (*path, name))
    return found
