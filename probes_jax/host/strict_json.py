"""JSON that every strict parser reads, and that still holds NaN and infinities.

A float that JSON cannot write becomes an object of one key: `{"$float": "NaN"}`, `{"$float": "Infinity"}`,
`{"$float": "-Infinity"}`. Everything else is plain JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

_FLOAT = "$float"
_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _encode(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return {_FLOAT: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, Mapping):
        if _FLOAT in value:
            raise ValueError(f"a mapping to be stored has the key {_FLOAT!r}, which is kept for NaN and infinities")
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_encode(item) for item in value]
    raise TypeError(f"cannot store a {type(value).__name__} as JSON; give numbers, text, lists, dicts or NumPy arrays")


def _decode(value: dict[str, Any]) -> Any:
    if value.keys() != {_FLOAT}:
        return value
    if value[_FLOAT] not in _NAMES:
        raise ValueError(f"not strict JSON: no float is called {value[_FLOAT]!r}")
    return _NAMES[value[_FLOAT]]


def dumps(value: Any) -> bytes:
    """`value` as UTF-8 JSON, keys in the order given.

    Raises:
        TypeError: Something in it is neither number, text, list, dict, None nor NumPy.

    >>> dumps({"loss": float("nan"), "norm": 2.0})
    b'{"loss": {"$float": "NaN"}, "norm": 2.0}'
    """
    return json.dumps(_encode(value), allow_nan=False, ensure_ascii=False).encode()


def _refuse(token: str) -> None:
    raise ValueError(f"not strict JSON: bare token {token}")


def loads(data: bytes) -> Any:
    """The inverse of `dumps` (tuples come back as lists).

    Raises:
        ValueError: Not strict JSON.

    >>> loads(b'{"loss": {"$float": "NaN"}}')
    {'loss': nan}
    """
    try:
        return json.loads(data, object_hook=_decode, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("not strict JSON: nested too deeply") from None
