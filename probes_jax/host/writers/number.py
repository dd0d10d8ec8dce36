"""Whatever a user calls a number, as a Python float."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

_WHAT_FITS = "give a Python number, a NumPy scalar, or an array of shape () such as a JAX scalar"


def read_array(name: str, value: Any) -> np.ndarray:
    """`value` as a NumPy array; floats that NumPy has no type of its own for (bfloat16, float8) become float32.

    Raises:
        TypeError: The value cannot be read as an array of numbers (text, objects, a tracer, a donated array).
    """
    try:
        array = np.asarray(value)
        if array.dtype.kind == "V":  # ml_dtypes' floats and small integers
            array = array.astype(np.float32)
    except Exception as error:
        raise TypeError(f"{name!r}: cannot read a {type(value).__name__} as an array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name!r}: expected numbers, got a {type(value).__name__} of dtype {array.dtype}; {_WHAT_FITS}"
        )
    return array


def read_number(name: str, value: Any) -> float:
    """`value` as a float64. Every NaN, of whatever type, sign or payload, gives the same NaN.

    Args:
        name: Name of the metric, for the error.
        value: Python int, float or bool, NumPy scalar, or an array of shape `()` of any number type.

    Raises:
        TypeError: The value is no single real number.

    >>> read_number("loss", np.float32(2.5)), read_number("on", True)
    (2.5, 1.0)
    """
    if type(value) is not float:
        if isinstance(value, (bool, int, float)):
            try:
                value = float(value)
            except OverflowError:
                raise TypeError(f"{name!r}: the integer has more digits than a float64 holds") from None
        else:
            array = read_array(name, value)
            if array.shape != ():
                raise TypeError(f"{name!r}: expected one number, got an array of shape {array.shape}; {_WHAT_FITS}")
            value = float(array)
    return value if value == value else math.nan


def read_step(step: Any) -> int:
    """`step` as an int.

    Raises:
        TypeError: The step is not an integer: every record carries an explicit step.
    """
    if isinstance(step, (bool, np.bool_)):
        raise TypeError(f"step must be an integer, got {step!r}")
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an integer, got {step!r}; every record needs an explicit step") from None
