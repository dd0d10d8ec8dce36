"""What the outputs of a traced function are made of: its jaxpr is walked forward once, and nothing runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from probes_jax.observe.marks import UNKNOWN, ZERO, Mark, Uniform, apply_primitive, join, number_key

_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_CALL_PARAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# Elements keep their order and their value: any mark passes.
_PASS = {"copy", "copy_p", "reshape", "squeeze", "broadcast_in_dim", "expand_dims", "sharding_constraint", "reshard"}
_PASS |= {"device_put", "optimization_barrier", "pvary", "pcast", "layout_constraint", "mesh_cast"}
_CONSTANT_LIMIT = 1 << 20  # elements of a captured array that are looked at


def trace_marks(function: Callable[..., Any], args: Sequence[Any], marks: Sequence[Mark]) -> list[Mark]:
    """Marks of the output leaves of `function(*args)`.

    Args:
        function: Traceable function; only its form is looked at.
        args: Positional arguments: trees of arrays or of `jax.ShapeDtypeStruct`.
        marks: One mark per leaf of `args`, in order.

    Returns:
        One mark per output leaf.

    Example:
        >>> import jax.numpy as jnp
        >>> from probes_jax.observe.marks import Scaled
        >>> trace_marks(lambda x: (x * 0.5, jnp.zeros_like(x), x + 1.0), (jnp.ones(3),), [Scaled(0)])
        [Scaled(leaf=0, factor=(('mul', 0.5),)), <Plain.ZERO: 'zero'>, <Plain.UNKNOWN: 'unknown'>]
    """
    return flow(jax.make_jaxpr(function)(*args), marks)


def flow(closed: core.ClosedJaxpr, marks: Sequence[Mark]) -> list[Mark]:
    """Marks of the outputs of a closed jaxpr, given the marks of its inputs."""
    return _walk(closed.jaxpr, [_mark_value(value) for value in closed.consts], marks)


def _walk(jaxpr: core.Jaxpr, consts: Iterable[Mark], marks: Iterable[Mark]) -> list[Mark]:
    known = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, marks, strict=True))

    def read(atom: Any) -> Mark:
        return _mark_value(atom.val) if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _apply(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _mark_value(value: Any) -> Mark:
    """Mark of a literal or of a captured array."""
    if isinstance(value, Tracer):
        return Uniform(("captured", id(value))) if value.size == 1 else UNKNOWN
    dtype = getattr(value, "dtype", np.asarray(value).dtype if np.isscalar(value) else None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended) or np.size(value) > _CONSTANT_LIMIT:
        return UNKNOWN
    if not getattr(value, "is_fully_addressable", True):
        return UNKNOWN
    array = np.asarray(value)
    if not array.any():
        return ZERO
    return Uniform(array.item()) if array.size == 1 else UNKNOWN


def _apply(eqn: core.JaxprEqn, marks: list[Mark]) -> list[Mark]:
    """Marks of one equation's outputs."""
    name = eqn.primitive.name
    if name == "cond":
        return _number(eqn, marks, _branch(eqn, marks[1:]))
    if name in _CALLS and (inner := _inner(eqn, marks)) is not None:
        return inner
    if name in _PASS and len(marks) == len(eqn.outvars):
        return marks
    return _number(eqn, marks, [apply_primitive(name, eqn.params, marks)] * len(eqn.outvars))


def _inner(eqn: core.JaxprEqn, marks: list[Mark]) -> list[Mark] | None:
    """Marks through a call: what is called is walked in its place."""
    inner = next((eqn.params[key] for key in _CALL_PARAMS if key in eqn.params), None)
    if isinstance(inner, core.ClosedJaxpr) and len(inner.jaxpr.invars) == len(marks):
        return flow(inner, marks)
    if isinstance(inner, core.Jaxpr) and len(inner.invars) == len(marks) and not inner.constvars:
        return _walk(inner, (), marks)
    return None


def _branch(eqn: core.JaxprEqn, marks: list[Mark]) -> list[Mark]:
    """What all branches of a `cond` agree on, whichever runs."""
    rows = [flow(branch, marks) for branch in eqn.params["branches"]]
    return [functools.reduce(join, column) for column in zip(*rows, strict=True)]


def _number(eqn: core.JaxprEqn, marks: list[Mark], result: list[Mark]) -> list[Mark]:
    """Names single numbers computed from single numbers by how they are: the same sum twice has one name."""
    keys = tuple(number_key(mark) for mark in marks)
    if None in keys or UNKNOWN not in result:
        return result
    how = id(eqn) if _nested(eqn.params) else tuple(sorted((name, repr(value)) for name, value in eqn.params.items()))
    return [
        Uniform((eqn.primitive.name, how, keys, index))
        if mark is UNKNOWN and getattr(var.aval, "size", 0) == 1
        else mark
        for index, (mark, var) in enumerate(zip(result, eqn.outvars, strict=True))
    ]


def _nested(params: dict[str, Any]) -> bool:
    parts = [part for value in params.values() for part in (value if isinstance(value, tuple) else (value,))]
    return any(isinstance(part, core.ClosedJaxpr | core.Jaxpr) for part in parts)
