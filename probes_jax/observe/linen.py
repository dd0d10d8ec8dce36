"""linen models: bound, initialized and observed without an edit."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import core
from flax.core import meta, tracers, unfreeze
from flax.core.scope import DenyList, in_filter, subtract_filters, union_filters
from flax.linen import module as linen_module

from probes_jax.observe.attribute import Attribute, Reach
from probes_jax.observe.binding import Binding, Bound, Captured, LossFn, ModelParts
from probes_jax.observe.census import Returned, settle, without_backward
from probes_jax.observe.evaluation import OUTSIDE, Evaluation, Run, runs_in
from probes_jax.observe.hiding import hiding
from probes_jax.observe.linen_lift import FORWARD_ONLY
from probes_jax.observe.linen_places import path_of, records_in
from probes_jax.observe.linen_recorder import FLAG, LinenRecorder
from probes_jax.observe.linen_variables import check_variables, conform, specs_of, without_sow
from probes_jax.observe.names import Path
from probes_jax.observe.point import Point
from probes_jax.observe.probes import Probes
from probes_jax.observe.rngs import Rngs
from probes_jax.observe.tap import Measure
from probes_jax.stats.summary import Summary

PREFIX = f"{FLAG}_"  # how the names of our collections begin
DERIVATIVES = tuple(f"nn.{name}" for name in FORWARD_ONLY)
NOT_STATE = ("intermediates", "perturbations")  # outputs of one call, never carried from step to step
_numbers = itertools.count()


class CalledInTransform(ValueError):
    """The model's variables cannot be made where loss_fn calls it."""


class LinenBinding(Binding):
    """A linen module, wrapped.

    Args:
        module: An unbound module instance.
        streams: Random streams to provide. Any other name falls back to `params`, as in linen itself; a call may add
            its own with `rngs=`.
    """

    def __init__(self, module: nn.Module, streams: tuple[str, ...] = ("params", "dropout")) -> None:
        if module.scope is not None:
            raise ValueError(
                "wrap() got a linen module that is bound to variables; pass the unbound module (m.unbind()[0])"
            )
        self.wrapped = module
        self.streams = tuple(dict.fromkeys(("params", *streams)))
        self._specs: ModelParts | None = None

    def init(self, loss_fn: LossFn, batch: Any, key: jax.Array, variables: Any = None) -> ModelParts:
        """See `Binding.init`.

        `variables` is a dict with `params` and all other collections, or the tree of parameters alone (then the
        other collections start anew). Values that modules `sow` are outputs, not state: they are left out.
        """
        if variables is None:
            boxed = self._initialize(loss_fn, batch, key)
        else:
            boxed = self._given(loss_fn, batch, key, _without_ours(variables))
        self._specs = _parts(specs_of(boxed))
        return _parts(meta.unbox(boxed))

    def _given(self, loss_fn: LossFn, batch: Any, key: jax.Array, variables: Any) -> dict[str, Any]:
        """Pretrained variables, checked against what the model would make where it can be asked."""
        try:
            expected = jax.eval_shape(lambda: self._initialize(loss_fn, batch, key))
        except CalledInTransform:
            if not isinstance(variables, Mapping) or "params" not in variables:
                raise
            return {name: value for name, value in unfreeze(dict(variables)).items() if name not in NOT_STATE}
        boxed = check_variables(variables, expected, NOT_STATE)
        return {**self._initialize(loss_fn, batch, key), **boxed} if boxed.keys() < expected.keys() else boxed

    def _initialize(self, loss_fn: LossFn, batch: Any, key: jax.Array) -> dict[str, Any]:
        rngs = Rngs(key)
        model = _Initializing(self, rngs)
        with without_sow(lambda module: module.scope is not None and module.scope.flags.get(FLAG) == "init"):
            loss_fn(model, batch, rngs)
        return {"params": {}, **model.made}

    def partition_specs(self, params: Any, state: Any) -> ModelParts:
        """See `Binding.partition_specs`. Known once `init` has run, also under `jax.eval_shape`."""
        unknown = jax.tree.map(lambda _: None, ModelParts(params, state))
        known = self._specs or unknown

        def structure(tree: Any) -> Any:
            return jax.tree.structure(tree, is_leaf=lambda x: x is None or isinstance(x, jax.sharding.PartitionSpec))

        return ModelParts(*(k if structure(k) == structure(u) else u for k, u in zip(known, unknown)))

    def bind(
        self,
        params: Any,
        state: Any,
        *,
        rngs: Rngs | None = None,
        measure: Measure | Probes | None = None,
        taps: Any = None,
        evaluation: Evaluation | None = None,
    ) -> LinenBound:
        """See `Binding.bind`."""
        recorder = None if measure is None else LinenRecorder(f"{PREFIX}{next(_numbers)}", measure)
        return LinenBound(self, params, state, rngs, recorder, evaluation or Evaluation(taps))

    def module(self, params: Any, state: Any, *, copy: bool = True) -> dict[str, Any]:
        """Variables for `module.apply`."""
        variables = {"params": params, **state}
        return jax.tree.map(jax.numpy.copy, variables) if copy else variables


class LinenBound(Bound):
    """A linen module with its variables, for one evaluation of the loss function."""

    def __init__(
        self,
        binding: LinenBinding,
        params: Any,
        state: Any,
        rngs: Rngs | None,
        recorder: LinenRecorder | None,
        evaluation: Evaluation,
    ) -> None:
        self._binding = binding
        self._params = params
        self._state = _without_ours(state)
        self._rngs = rngs
        self._recorder = recorder
        self._evaluation = evaluation  # of each run, our collection as it came back
        self._outputs: list[Any] = []
        self._finished = False
        self._trace = tracers.current_trace()

    def __call__(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        """Calls the module, as `module.apply` does without its first argument.

        Args:
            *args: Arguments of the module.
            method: Method to call, by name or as a function of the module; `__call__` by default.
            **kwargs: Arguments of the module, and three of `apply`: `rngs` (more streams), `mutable` (collections to
                return beside the output), `capture_intermediates`.
        """
        function = _resolve(self._binding.wrapped, method)
        output, mutated, wanted = self._run(function, args, kwargs, root=True)
        return output if wanted is False else (output, mutated)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        module = self._binding.wrapped
        attribute = Attribute(self._call_part, self._read_part, _follows, (name,))
        if name in type(module).__dataclass_fields__:
            value = getattr(module, name)
            return attribute if _follows(value) else value
        static = inspect.getattr_static(type(module), name, None)
        if name in nn.Module.__dict__ and not isinstance(static, property):
            return getattr(module, name)
        if inspect.isfunction(static):
            return lambda *args, **kwargs: self(*args, method=name, **kwargs)
        return attribute.resolve()

    def _call_part(self, reach: Reach, args: Any, kwargs: Any) -> Any:
        def function(root: Any, *a: Any, **k: Any) -> Any:
            return reach(root)(*a, **k)

        output, mutated, wanted = self._run(function, args, kwargs, root=False)
        return output if wanted is False else (output, mutated)

    def _read_part(self, reach: Reach) -> Any:
        return self._run(reach, (), {}, root=False, observe=False)[0]

    def _run(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, root: bool, observe: bool = True
    ) -> tuple[Any, dict[str, Any], Any]:
        """Runs `function(bound module, *args, **kwargs)`; the output, what the caller asked for, and the asking."""
        if self._finished:
            raise RuntimeError("this bound model is finished; bind the parameters again for another evaluation")
        options = {name: kwargs.pop(name) for name in ("rngs", "mutable", "capture_intermediates") if name in kwargs}
        wanted, capture = options.get("mutable", False), options.get("capture_intermediates", False)
        wanted = union_filters(wanted, "intermediates") if capture else wanted
        within = tracers.current_trace() == self._trace
        recorder = self._recorder if observe else None
        level = self._evaluation.level
        apply = core.apply(
            self._scope_function(function, capture, recorder),
            mutable=self._mutable(wanted, recorder if level.is_current else None, within),
            flags=self._flags(recorder),
        )
        variables = self._variables()
        if recorder is not None:
            recorder.visits, recorder.blocked = [], None if level.is_current else OUTSIDE.format(level.hiding)
            if isinstance(slots := level.next_slots, Run) and level.is_current:
                variables = {**variables, recorder.slots: slots.records}
        output, mutated = apply(variables, *args, rngs=self._streams(options.get("rngs")), **kwargs)
        mutated = unfreeze(mutated)
        if recorder is not None:
            raw = mutated.pop(recorder.collection, {})
            self._evaluation.keep(None if recorder.blocked else Run(raw), recorder.visits)
        if within:
            self._carry(mutated)
            if root:
                self._outputs.append(output)
        return output, {name: value for name, value in mutated.items() if in_filter(wanted, name)}, wanted

    def _scope_function(
        self, function: Callable[..., Any], capture: Any, recorder: LinenRecorder | None
    ) -> Callable[..., Any]:
        """What `flax.linen.apply` runs, under observation."""
        capture = linen_module.capture_call_intermediates if capture is True else capture

        def run(scope: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                linen_module._context.capture_stack.append(capture)
                stack.callback(linen_module._context.capture_stack.pop)
                module = self._binding.wrapped.clone(parent=scope, _deep_clone=True)
                if recorder is not None:
                    stack.enter_context(recorder.recording(module))
                return function(module, *args, **kwargs)

        return run

    def _mutable(self, wanted: Any, recorder: LinenRecorder | None, within: bool) -> Any:
        """Carried collections are mutable where their new values can be kept, ours exactly while it observes."""
        kept = list(self._state) if within else []
        if recorder is None:
            return union_filters(wanted, kept)
        return subtract_filters(union_filters(wanted, [*kept, recorder.collection]), recorder.slots)

    def _flags(self, recorder: LinenRecorder | None) -> dict[str, Any]:
        return {} if recorder is None else {FLAG: recorder.collection}

    def _variables(self) -> dict[str, Any]:
        return {"params": self._params, **self._state}

    def _streams(self, more: Any) -> dict[str, jax.Array]:
        streams = self._rngs.streams(self._binding.streams) if self._rngs is not None else {}
        if isinstance(more, Rngs):
            return more.streams(self._binding.streams)
        if more is not None and not isinstance(more, Mapping):
            more = {"params": more}
        return {**streams, **(more or {})}

    def _carry(self, mutated: Mapping[str, Any]) -> None:
        self._state = {name: conform(old, mutated.get(name, old)) for name, old in self._state.items()}

    def finish(self) -> Captured:
        """See `Bound.finish`."""
        if self._finished:
            raise RuntimeError("finish() was called before; bind the parameters again for another evaluation")
        self._finished = True
        if self._recorder is None:
            return Captured({}, self._state, self._outputs, (), {}, {})
        leaves = {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(self._params)}
        stacks = _stacks(self._recorder.stacks, leaves)
        visits, raw = self._evaluation.visits(of_model=True), self._evaluation.raw
        visits += self._recorder.uncalled(leaves, visits, _returned(raw))

        def backward(gradient: Any) -> dict[Point, Summary]:
            return settle(visits, _returned(gradient), leaves, stacks).points

        result = settle(visits, _returned(raw), leaves, stacks)
        tapped = bool(self._evaluation.levels[0].slots)
        missing = {**result.missing, **(without_backward(result.points, DERIVATIVES) if tapped else {})}
        seen = tuple(result.seen)
        found = result.points, self._state, self._outputs, seen, missing, stacks, raw, backward, {}, result.tokens
        return Captured(*found)


class _Initializing(LinenBound):
    """A bound model that makes what it lacks: variables appear as the loss function calls it."""

    def __init__(self, binding: LinenBinding, rngs: Rngs) -> None:
        super().__init__(binding, {}, {}, rngs, None, Evaluation())
        self.made: dict[str, Any] = {}

    def _variables(self) -> dict[str, Any]:
        return self.made

    def _mutable(self, wanted: Any, recorder: LinenRecorder | None, within: bool) -> Any:
        if not within and not self.made:
            raise CalledInTransform(
                f"the model is first called inside {hiding(self._trace)} in loss_fn, where its variables cannot be "
                "made; call it outside of that, put the transform in the model (nn.remat, nn.vmap), or pass all of "
                "them: variables={'params': ..., ...}"
            )
        return union_filters(wanted, DenyList(NOT_STATE))

    def _flags(self, recorder: LinenRecorder | None) -> dict[str, Any]:
        return {"initializing": True, FLAG: "init"}

    def _carry(self, mutated: Mapping[str, Any]) -> None:
        self.made = {name: value for name, value in mutated.items() if name not in NOT_STATE}


def _returned(raw: Any) -> list[Returned]:
    """The model's records in everything observed, with where they were found."""
    return [found for run in runs_in(raw) for found in records_in(jax.tree.map(lambda x: x, run))]


def _follows(value: Any) -> bool:
    """Whether a value is a module, a method of one, or a container of modules."""
    leaves = jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, nn.Module))
    return any(isinstance(leaf, nn.Module) or isinstance(getattr(leaf, "__self__", None), nn.Module) for leaf in leaves)


def _without_ours(variables: Any) -> Any:
    """Collections without one of ours that a caller carried along."""
    if not isinstance(variables, Mapping):
        return variables
    return {name: value for name, value in variables.items() if not name.startswith(PREFIX)}


def _parts(variables: Mapping[str, Any]) -> ModelParts:
    state = {name: value for name, value in variables.items() if name != "params"}
    return ModelParts(variables["params"], state)


def _stacks(
    lifted: Mapping[tuple[str | None, ...], tuple[int, ...]], leaves: Mapping[Path, Any]
) -> dict[Path, tuple[int, ...]]:
    """Layer axes and numbers of layers by path prefix, as names are made of them."""
    stacks: dict[Path, tuple[int, ...]] = {}
    for path, leaf in leaves.items():
        shape = list(leaf.shape)
        for where, axes in sorted(lifted.items(), key=lambda item: len(item[0])):
            prefix = tuple(element for element in where if element is not None)
            if path[: len(prefix)] != prefix:
                continue
            found = [(axis, shape.pop(axis)) for axis in axes if -len(shape) <= axis < len(shape)]
            if found:
                stacks.setdefault(path[: len(where)], sum(found, ()))
    return stacks


def _resolve(module: nn.Module, method: Any) -> Callable[..., Any]:
    """The unbound function behind `method`, as `module.apply` finds it."""
    name = method if isinstance(method, str) else "__call__" if method is None else None
    if name is not None:
        if not hasattr(type(module), name):
            return lambda bound, *args, **kwargs: getattr(bound, name)(*args, **kwargs)  # a submodule made in setup
        method = getattr(type(module), name)
    if not callable(method):
        raise TypeError(f"method must be the name of a method or a function of the module, got {method!r}")
    return getattr(method, "__func__", method)
