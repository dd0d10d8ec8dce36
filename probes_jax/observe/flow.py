"""What an output of a traced function is made of: zeros, a number times one input, or anything else.

The jaxpr is walked forward once; nothing runs. Each value carries one mark:

* `ZERO`: zero in every element, for every finite input.
* `Uniform(key)`: one number, the same in every element, that no watched input changes. Equal keys are equal numbers.
* `Scaled(leaf, factor)`: watched input `leaf` times a number. Equal factors are equal numbers; `()` is 1.
* `UNKNOWN`: anything else. It is the safe answer: what the rules do not know never reads as zero or as scaled.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core


class Plain(enum.Enum):
    """The two marks without a payload."""

    ZERO = "zero"
    UNKNOWN = "unknown"


ZERO, UNKNOWN = Plain.ZERO, Plain.UNKNOWN


@dataclasses.dataclass(frozen=True)
class Uniform:
    """One number, in every element."""

    key: Hashable


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Watched input `leaf` times the number that `factor` spells; `()` is the input itself."""

    leaf: int
    factor: tuple[Hashable, ...] = ()


Mark = Plain | Uniform | Scaled

_CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"}
_CALLS |= {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_CALL_PARAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# Element order and value stay (a cast rounds): any mark passes.
_PASS = {"copy", "copy_p", "reshape", "squeeze", "broadcast_in_dim", "expand_dims", "sharding_constraint", "reshard"}
_PASS |= {"device_put", "optimization_barrier", "pvary", "pcast", "layout_constraint", "mesh_cast"}
# Zero in every operand gives zero.
_ZERO_IN_ZERO_OUT = {
    "neg",
    "abs",
    "sign",
    "sqrt",
    "cbrt",
    "square",
    "sin",
    "tan",
    "asin",
    "atan",
    "sinh",
    "tanh",
    "asinh",
}
_ZERO_IN_ZERO_OUT |= {"expm1", "log1p", "erf", "floor", "ceil", "round", "real", "imag", "conj", "reduce_precision"}
_ZERO_IN_ZERO_OUT |= {
    "max",
    "min",
    "add_any",
    "concatenate",
    "pad",
    "scatter",
    "scatter-add",
    "rev",
    "transpose",
    "slice",
}
_ZERO_IN_ZERO_OUT |= {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "cumsum", "cummax", "cummin", "psum"}
_CONSTANT_LIMIT = 1 << 20  # elements of a captured array that are looked at


def join(first: Mark, second: Mark) -> Mark:
    """What holds for a value that is either of the two."""
    return first if first == second else UNKNOWN


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
        >>> trace_marks(lambda x: (x * 0.5, jnp.zeros_like(x), x + 1.0), (jnp.ones(3),), [Scaled(0)])
        [Scaled(leaf=0, factor=(('mul', 0.5),)), <Plain.ZERO: 'zero'>, <Plain.UNKNOWN: 'unknown'>]
    """
    return flow(jax.make_jaxpr(function)(*args), marks)


def flow(closed: Any, marks: Sequence[Mark]) -> list[Mark]:
    """Marks of the outputs of a `ClosedJaxpr`, given the marks of its inputs."""
    return _walk(closed.jaxpr, [_mark_value(value) for value in closed.consts], marks)


def _walk(jaxpr: Any, consts: Iterable[Mark], marks: Iterable[Mark]) -> list[Mark]:
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


def _apply(eqn: Any, marks: list[Mark]) -> list[Mark]:
    """Marks of one equation's outputs."""
    name = eqn.primitive.name
    if name == "cond":
        return _number(eqn, marks, _branch(eqn, marks))
    if name in _CALLS and (inner := _inner(eqn, marks)) is not None:
        return inner
    if name in _PASS and len(marks) == len(eqn.outvars):
        return marks
    return _number(eqn, marks, [_rule(eqn, marks)] * len(eqn.outvars))


def _inner(eqn: Any, marks: list[Mark]) -> list[Mark] | None:
    """Marks through a call: what is called is walked in its place."""
    inner = next((eqn.params[key] for key in _CALL_PARAMS if key in eqn.params), None)
    if isinstance(inner, core.ClosedJaxpr) and len(inner.in_avals) == len(marks):
        return flow(inner, marks)
    if isinstance(inner, core.Jaxpr) and len(inner.invars) == len(marks) and not inner.constvars:
        return _walk(inner, (), marks)
    return None


def _branch(eqn: Any, marks: list[Mark]) -> list[Mark]:
    result = _fold([flow(branch, marks[1:]) for branch in eqn.params["branches"]])
    fixed = _key(marks[0]) is not None  # no watched input decides which branch runs
    return [mark if fixed or not isinstance(mark, Scaled) else UNKNOWN for mark in result]


def _rule(eqn: Any, marks: list[Mark]) -> Mark:
    name = eqn.primitive.name
    if name == "convert_element_type":
        return _cast(marks[0], eqn.params["new_dtype"])
    if name == "integer_pow" and eqn.params["y"] > 0:
        return marks[0] if eqn.params["y"] == 1 or marks[0] is ZERO else UNKNOWN
    if name in _ZERO_IN_ZERO_OUT and all(mark is ZERO for mark in marks):
        return ZERO
    return _RULES[name](marks) if name in _RULES else UNKNOWN


def _fold(rows: list[list[Mark]]) -> list[Mark]:
    result = rows[0]
    for row in rows[1:]:
        result = [join(first, second) for first, second in zip(result, row, strict=True)]
    return result


def _cast(mark: Mark, dtype: Any) -> Mark:
    keeps = jnp.issubdtype(dtype, jnp.inexact) or mark is ZERO or isinstance(mark, Uniform)
    return mark if keeps else UNKNOWN  # a scaled value cut to integers is not scaled


def _number(eqn: Any, marks: list[Mark], result: list[Mark]) -> list[Mark]:
    """Names single numbers computed from single numbers by how they are: the same sum twice has one name."""
    keys = tuple(_key(mark) for mark in marks)
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


def _key(mark: Mark) -> Hashable | None:
    if mark is ZERO:
        return 0.0
    return mark.key if isinstance(mark, Uniform) else None


def _multiply(marks: list[Mark]) -> Mark:
    first, second = marks
    if ZERO in (first, second):
        return ZERO  # for finite numbers; 0 * NaN shows in the counts of non-finite elements
    if isinstance(second, Scaled):
        first, second = second, first
    return _times(first, "mul", second)


def _divide(marks: list[Mark]) -> Mark:
    return ZERO if marks[0] is ZERO else _times(marks[0], "div", marks[1])


def _times(value: Mark, how: str, number: Mark) -> Mark:
    if isinstance(value, Scaled) and isinstance(number, Uniform):
        return Scaled(value.leaf, (*value.factor, (how, number.key)))
    return UNKNOWN


def _add(marks: list[Mark]) -> Mark:
    first, second = marks
    if first is ZERO or second is ZERO:
        return second if first is ZERO else first
    if isinstance(first, Scaled) and isinstance(second, Scaled) and first.leaf == second.leaf:
        return Scaled(first.leaf, (("add", first.factor, second.factor),))
    return UNKNOWN


def _negate(marks: list[Mark]) -> Mark:
    mark = marks[0]
    return mark if mark is ZERO else _times(mark, "mul", Uniform(-1.0))


def _subtract(marks: list[Mark]) -> Mark:
    return _add([marks[0], _negate([marks[1]])])


def _select(marks: list[Mark]) -> Mark:
    """Cases that agree, whatever the predicate; a scaled one needs a predicate that no input changes."""
    which, mark = marks[0], _fold([[case] for case in marks[1:]])[0]
    return mark if mark is ZERO or isinstance(mark, Uniform) or _key(which) is not None else UNKNOWN


def _first(marks: list[Mark]) -> Mark:
    return ZERO if marks[0] is ZERO else UNKNOWN


_RULES: dict[str, Callable[[list[Mark]], Mark]] = {
    "mul": _multiply,
    "dot_general": lambda marks: ZERO if ZERO in marks else UNKNOWN,
    "div": _divide,
    "add": _add,
    "sub": _subtract,
    "neg": _negate,
    "select_n": _select,
    "gather": _first,
    "dynamic_slice": _first,
}
