"""Checks of settings: each gives the value back as a plain Python one, or says which setting is wrong and how."""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

from probes_jax.spec.roles import ROLES

_MOST = 2**31 - 1


def integer(name: str, value: Any, least: int) -> int:
    """A whole number of at least `least` that fits in int32; NumPy's too, but no bool and no float.

    >>> integer("Plan window", 128, 2)
    128
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if int(value) > _MOST:
        raise ValueError(f"{name} must be below 2**31, got {value!r}")
    return int(value)


def number(name: str, value: Any, *, zero: bool = False) -> float:
    """A positive number, or also 0 with `zero`. Infinity is one, NaN is none.

    >>> number("Plan theta", 6)
    6.0
    """
    fits = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not fits or math.isnan(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be {'a number of at least 0' if zero else 'a positive number'}, got {value!r}")
    return float(value)


def share(name: str, value: Any) -> float:
    """A number between 0 and 1, neither of them.

    >>> share("Recorder budget", 0.02)
    0.02
    """
    if number(name, value) >= 1:
        raise ValueError(f"{name} must be below 1, got {value!r}; write 0.02 for 2 %")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def names(name: str, value: Any) -> tuple[str, ...]:
    """A tuple of texts, from a tuple or a list: what has no order is refused.

    >>> names("Plan groups", ["code", "law"])
    ('code', 'law')
    """
    if isinstance(value, str):
        raise ValueError(f"{name} must be a tuple of names, got the string {value!r}; write ({value!r},)")
    if not isinstance(value, tuple | list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f'{name} must be a tuple of names, got {value!r}; write for example ("code", "docs")')
    return tuple(value)


def pattern(name: str, value: Any) -> str:
    """A regular expression."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a regular expression, got {value!r}; write it as a string")
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{name} is not a regular expression, got {value!r}: {error}") from None
    return value


def chosen(name: str, value: Any, more: tuple[str, ...] = ()) -> str:
    """A regular expression, or `role:` and one of `ROLES` or of `more`."""
    if not isinstance(value, str) or not value.startswith("role:"):
        return pattern(name, value)
    if value.removeprefix("role:") not in (*ROLES, *more):
        own = f", and {', '.join(more)} of Plan roles" if more else ", and those of Plan roles"
        raise ValueError(f"{name} {value!r} names no role; the roles are {', '.join(ROLES)}{own}")
    return value


def roles(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Pairs of a regular expression and a role.

    >>> roles("Plan roles", [("mixer$", "attention_output")])
    (('mixer$', 'attention_output'),)
    """
    pairs = tuple(value) if isinstance(value, tuple | list) else (value,)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise ValueError(
                f'{name} must be (regular expression, role) pairs, got {value!r}; write (("mixer", "query"),)'
            )
        pattern(name, pair[0])
    return tuple((str(first), str(second)) for first, second in pairs)
