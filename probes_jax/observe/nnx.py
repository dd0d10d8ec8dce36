"""nnx models: bound and observed without an edit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import tracers

from probes_jax.observe.attribute import Attribute, Reach
from probes_jax.observe.binding import Binding, Bound, Captured, LossFn, ModelParts
from probes_jax.observe.census import settle, without_backward
from probes_jax.observe.compare import check_arrays
from probes_jax.observe.evaluation import OUTSIDE, Evaluation
from probes_jax.observe.names import Path
from probes_jax.observe.nnx_attempts import Attempts, Saved
from probes_jax.observe.nnx_marks import NO_MARKS, Marks
from probes_jax.observe.nnx_recorder import NNXRecorder
from probes_jax.observe.point import Point
from probes_jax.observe.probes import Probes
from probes_jax.observe.rngs import Rngs
from probes_jax.observe.tap import Measure
from probes_jax.stats.summary import Summary

DERIVATIVES = ("jax.grad",)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One array of the module: where it is, and the Variable that holds it (None: a plain array)."""

    where: tuple[Any, ...]  # with the integers of lists
    variable: nnx.Variable | None
    value: Any

    def holding(self, value: Any) -> Any:
        return value if self.variable is None else self.variable.replace(value)


class NNXBinding(Binding):
    """An nnx module, wrapped. The module itself stays as it is: the binding works on copies.

    Random states of the module are not part of its arrays: each `bind` makes them from the keys it is given, so that
    a step is a pure function of its key.

    Args:
        module: A module instance with its weights.
        take_ownership: Hand the module's own arrays out instead of copies. A step that donates them makes the module
            unusable.
    """

    has_arrays = True

    def __init__(self, module: nnx.Module, take_ownership: bool = False) -> None:
        self._graphdef, state = nnx.split(module, graph=True)
        self._leaves = {tuple(map(str, where)): _leaf(where, x) for where, x in nnx.to_flat_state(state)}
        self._take_ownership = take_ownership
        self.marks = Marks()

    def _select(self, kind: Callable[[_Leaf], bool]) -> dict[Path, _Leaf]:
        return {path: leaf for path, leaf in self._leaves.items() if kind(leaf)}

    @property
    def params(self) -> dict[Path, _Leaf]:
        """Trained arrays: `nnx.Param` and its subclasses."""
        return self._select(lambda leaf: isinstance(leaf.variable, nnx.Param))

    @property
    def state(self) -> dict[Path, _Leaf]:
        """Carried arrays: all the rest but random states."""
        return self._select(lambda leaf: not isinstance(leaf.variable, nnx.Param | nnx.RngState))

    def init(self, loss_fn: LossFn, batch: Any, key: jax.Array, variables: Any = None) -> ModelParts:
        """See `Binding.init`. The weights are the module's; `variables` (dict or `nnx.State`) replaces parameters."""
        copy = (lambda x: x) if self._take_ownership else jnp.copy
        params = _nest({path: jax.tree.map(copy, leaf.value) for path, leaf in self.params.items()})
        state = _nest({path: jax.tree.map(copy, leaf.value) for path, leaf in self.state.items()})
        if variables is not None:
            params = jax.tree.map(copy, _check(variables, params))
        return ModelParts(params, state)

    def partition_specs(self, params: Any, state: Any) -> ModelParts:
        """See `Binding.partition_specs`."""
        known = {path: _spec(leaf.variable) for path, leaf in self._leaves.items()}

        def specs(tree: Any) -> Any:
            return jax.tree_util.tree_map_with_path(lambda keys, _: known.get(tuple(k.key for k in keys)), tree)

        return ModelParts(specs(params), specs(state))

    def bind(
        self,
        params: Any,
        state: Any,
        *,
        rngs: Rngs | None = None,
        measure: Measure | Probes | None = None,
        taps: Any = None,
        evaluation: Evaluation | None = None,
    ) -> NNXBound:
        """See `Binding.bind`."""
        recorder = None if measure is None else NNXRecorder(measure, evaluation or Evaluation(taps))
        return NNXBound(self, self._merge(params, state, rngs), state, recorder)

    def module(self, params: Any, state: Any, *, copy: bool = True) -> Any:
        """A fresh module with these weights."""
        if copy:
            params, state = jax.tree.map(jnp.copy, (params, state))
        return self._merge(params, state, None)

    def _merge(self, params: Any, state: Any, rngs: Rngs | None) -> Any:
        given = {**_flatten(params), **_flatten(state)}
        lacking = [path for path, leaf in self._leaves.items() if path not in given and not _is_random(leaf)]
        if lacking:
            raise ValueError(f"params and state lack {'/'.join(lacking[0])}, which the wrapped module has")
        flat = {
            leaf.where: leaf.holding(_random(path, leaf, rngs) if _is_random(leaf) else given[path])
            for path, leaf in self._leaves.items()
        }
        return nnx.merge(self._graphdef, nnx.from_flat_state(flat))


class NNXBound(Bound):
    """An nnx module made for one evaluation of the loss function."""

    def __init__(self, binding: NNXBinding, module: Any, state: Any, recorder: NNXRecorder | None) -> None:
        self._binding = binding
        self._module = module
        self._state = state
        self._recorder = recorder
        self._outputs: list[Any] = []
        self._finished = False
        self._trace = tracers.TraceState()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self._run(lambda root: root, args, kwargs, root=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if hasattr(nnx.Module, name):
            return getattr(self._module, name)
        return Attribute(self._call_part, lambda reach: reach(self._module), _follows, (name,)).resolve()

    def _call_part(self, reach: Reach, args: Any, kwargs: Any) -> Any:
        return self._run(reach, args, kwargs, root=_owner(reach(self._module)) is self._module)

    def _run(self, reach: Reach, args: Any, kwargs: Any, *, root: bool) -> Any:
        if self._finished:
            raise RuntimeError("this bound model is finished; bind the parameters again for another evaluation")
        within = self._trace.is_valid()
        if self._recorder is None:
            output = reach(self._module)(*args, **kwargs)
        elif within:
            output, self._module = self._observe(self._recorder, reach, args, kwargs, self._module)
        else:
            output = self._observe_inside(self._recorder, reach, args, kwargs)
        if root and within:
            self._outputs.append(output)
        return output

    def _observe(
        self, recorder: NNXRecorder, reach: Reach, args: Any, kwargs: Any, module: Any
    ) -> tuple[Any, nnx.Module]:
        """Runs the model with as many marks as it takes; what cannot be reported so is named.

        Returns:
            Its output, and the module that ran: another one where it had to run again.
        """
        saved = Saved(module, (args, kwargs))

        def run(marks: Marks) -> Any:
            with recorder.recording(module, marks):
                return reach(module)(*args, **kwargs)

        def undo() -> None:
            nonlocal module
            module = saved.restore()

        output, self._binding.marks = Attempts(recorder, run, undo).search(self._binding.marks)
        return output, module

    def _observe_inside(self, recorder: NNXRecorder, reach: Reach, args: Any, kwargs: Any) -> Any:
        """Runs the model inside a transform in the loss function.

        Marks can only be put on a module made in there. What such a module changes in itself would be lost without a
        word: then the bound one runs, to which nnx says what it says without observation.
        """
        if recorder.evaluation.level.is_current:
            saved, start = Saved(self._module, (args, kwargs)), recorder.mark
            output, module = self._observe(recorder, reach, args, kwargs, saved.restore())
            if saved.is_of(module):
                return output
            recorder.forget(start)
            saved.restore()
        recorder.blocked = OUTSIDE.format(recorder.evaluation.level.hiding)
        try:
            with recorder.recording(self._module, NO_MARKS):
                return reach(self._module)(*args, **kwargs)
        finally:
            recorder.blocked = None

    def finish(self) -> Captured:
        """See `Bound.finish`."""
        if self._finished:
            raise RuntimeError("finish() was called before; bind the parameters again for another evaluation")
        self._finished = True
        now = {tuple(map(str, where)): x for where, x in nnx.to_flat_state(nnx.split(self._module, graph=True)[1])}
        old = _flatten(self._state)
        state = _nest({path: _leaf((), now[path]).value if path in now else value for path, value in old.items()})
        if self._recorder is None:
            return Captured({}, state, self._outputs, (), {}, {})
        recorder, params = self._recorder, self._binding.params
        recorder.evaluation.keep(None, recorder.unreached(self._module))
        stacks, axes = recorder.stacks({path: leaf.variable for path, leaf in params.items()})

        def backward(gradient: Any) -> dict[Point, Summary]:
            return settle(*recorder.found(gradient), params, ()).points

        raw = recorder.evaluation.raw
        result = settle(*recorder.found(raw), params, ())
        tapped = bool(recorder.evaluation.levels[0].slots)
        missing = {**result.missing, **(without_backward(result.points, DERIVATIVES) if tapped else {})}
        seen = tuple(result.seen)
        return Captured(result.points, state, self._outputs, seen, missing, stacks, raw, backward, axes, result.tokens)


def _leaf(where: tuple[Any, ...], x: Any) -> _Leaf:
    if not isinstance(x, nnx.Variable):
        return _Leaf(where, None, x)
    value = x.get_value()
    return _Leaf(where, x.replace(value), value)


def _follows(value: Any) -> bool:
    """Whether a value is a module, a method of one, or a container of modules."""
    leaves = jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, nnx.Module | nnx.Variable))
    return any(isinstance(leaf, nnx.Module) or isinstance(_owner(leaf), nnx.Module) for leaf in leaves)


def _owner(value: Any) -> Any:
    """The module whose method `value` is, None otherwise. A method under `nnx.jit` comes as a partial function."""
    if isinstance(value, functools.partial) and value.args:
        return value.args[0]
    return getattr(value, "__self__", None)


def _flatten(tree: Any, path: Path = ()) -> dict[Path, Any]:
    if not isinstance(tree, Mapping):
        return {path: tree}
    return {p: leaf for key, value in tree.items() for p, leaf in _flatten(value, (*path, str(key))).items()}


def _nest(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def _check(variables: Any, params: Any) -> Any:
    if isinstance(variables, nnx.State):
        variables = nnx.to_pure_dict(nnx.filter_state(variables, nnx.Param))
    if not isinstance(variables, Mapping):
        raise TypeError(
            "variables of an nnx model must be a nested dict or an nnx.State of parameters, "
            f"got {type(variables).__name__}"
        )
    given = _nest(_flatten(variables))
    check_arrays("variables", given, params)
    return jax.tree.map(jnp.asarray, given)


def _spec(variable: nnx.Variable | None) -> Any:
    if variable is None or not variable.get_metadata("out_sharding", None):
        return None
    return nnx.get_partition_spec(variable).get_raw_value()


def _is_random(leaf: _Leaf) -> bool:
    return isinstance(leaf.variable, nnx.RngState)


def _random(path: Path, leaf: _Leaf, rngs: Rngs | None) -> Any:
    """A module's random state for one step: its counters at 0, its keys from the step's key and their path."""
    if rngs is None:
        return leaf.value
    if isinstance(leaf.variable, nnx.RngCount):
        return jnp.zeros_like(leaf.value)
    key = rngs["/".join(path)]
    typed = jnp.issubdtype(leaf.value.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(leaf.value) if typed else leaf.value
    bits = jax.random.bits(key, data.shape, data.dtype)
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf.value)) if typed else bits
