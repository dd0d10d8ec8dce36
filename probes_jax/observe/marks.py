"""Marks: what is known of a value from its form alone, and what each primitive makes of them.

* `ZERO`: zero in every element, for every finite input.
* `Uniform(key)`: one number, the same in every element, that no watched input changes. Equal keys are equal numbers.
* `Scaled(leaf, factor)`: watched input `leaf` times a number. Equal factors are equal numbers; `()` is 1.
* `UNKNOWN`: anything else. It is the safe answer: what the rules do not know never reads as zero or as scaled.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax.numpy as jnp


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

# Zero in every operand gives zero.
_ODD = {"neg", "sign", "sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "erf", "cbrt", "expm1", "log1p"}
_VALUES = {"abs", "sqrt", "square", "floor", "ceil", "round", "real", "imag", "conj", "reduce_precision", "max", "min"}
_PLACES = {"add_any", "concatenate", "pad", "scatter", "scatter-add", "rev", "transpose", "slice"}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "cumsum", "cummax", "cummin", "psum"}
_ZERO_FROM_ZEROS = frozenset(_ODD | _VALUES | _PLACES | _REDUCTIONS)


def join(first: Mark, second: Mark) -> Mark:
    """What holds for a value that is either of the two."""
    return first if first == second else UNKNOWN


def number_key(mark: Mark) -> Hashable | None:
    """Name of the number that the value is, or None where it is not known to be one."""
    if mark is ZERO:
        return 0.0
    return mark.key if isinstance(mark, Uniform) else None


def apply_primitive(name: str, params: Mapping[str, Any], marks: list[Mark]) -> Mark:
    """Mark of what a primitive computes.

    Args:
        name: Name of the primitive.
        params: Its parameters.
        marks: Marks of its operands.

    Returns:
        The mark, `UNKNOWN` for every primitive without a rule.
    """
    if name == "convert_element_type":
        return _cast(marks[0], params["new_dtype"])
    if name == "integer_pow" and params["y"] > 0:
        return marks[0] if params["y"] == 1 or marks[0] is ZERO else UNKNOWN
    if name in _ZERO_FROM_ZEROS and all(mark is ZERO for mark in marks):
        return ZERO
    return _RULES[name](marks) if name in _RULES else UNKNOWN


def _cast(mark: Mark, dtype: Any) -> Mark:
    # A scaled value cut to integers is not scaled.
    return UNKNOWN if isinstance(mark, Scaled) and not jnp.issubdtype(dtype, jnp.inexact) else mark


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
    """What all cases agree on, whatever the predicate."""
    return functools.reduce(join, marks[1:])


def _zero_operand(marks: list[Mark]) -> Mark:
    return ZERO if marks[0] is ZERO else UNKNOWN  # whatever the indices


def _product(marks: list[Mark]) -> Mark:
    return ZERO if ZERO in marks else UNKNOWN


_RULES: dict[str, Callable[[list[Mark]], Mark]] = {
    "mul": _multiply,
    "div": _divide,
    "add": _add,
    "sub": _subtract,
    "neg": _negate,
    "select_n": _select,
    "dot_general": _product,
    "gather": _zero_operand,
    "dynamic_slice": _zero_operand,
}
