"""Which numbers a narrower format loses: those that it rounds to zero, and those that are beyond its range.

Both are comparisons of bits: for positive float32 numbers the order of the bits, read as an integer, is the order of
the numbers, also where arithmetic flushes subnormal ones to zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.spec.summary import FORMATS
from probes_jax.stats.fold import Fold, How

_INF = 0x7F800000  # bits of infinity; those of a NaN are above
_DTYPES: dict[str, Any] = {"bf16": jnp.bfloat16, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


class Range(NamedTuple):
    """What of float32 a format keeps, as bits of |x|.

    Attributes:
        lost: The largest number that becomes zero.
        beyond: The smallest one that is rounded to infinity, or to NaN where the format has no infinity.
    """

    lost: int
    beyond: int


def range_of(dtype: Any) -> Range:
    """The range of a format, rounding to nearest, ties to even.

    A number is lost up to half of the smallest subnormal one: halfway, zero is the even one. It is beyond from halfway
    between the largest number and the one that would follow; there itself where the largest one's last bit is odd.

    >>> [np.uint32(bits).view(np.float32).item() for bits in range_of(jnp.float8_e4m3fn)]
    [0.0009765625, 464.0000305175781]
    """
    info = jnp.finfo(dtype)
    largest, smallest = float(info.max), float(info.smallest_subnormal)
    step = 2.0 ** (np.floor(np.log2(largest)) - info.nmant)
    odd = largest / step % 2 == 1
    return Range(_bits(smallest / 2), _bits(largest + step / 2) + (not odd))


def _bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def loss_folds() -> dict[str, Fold]:
    """How many elements each format loses at either end; NaN and infinite elements count as neither."""
    folds: dict[str, Fold] = {}
    for name in FORMATS:
        kept = range_of(_DTYPES[name])
        folds[f"underflow/{name}"] = Fold(How.COUNT, lambda x, top=kept.lost: _within(x, 1, top))
        folds[f"overflow/{name}"] = Fold(How.COUNT, lambda x, low=kept.beyond: _within(x, low, _INF - 1))
    return folds


def _within(x: jax.Array, low: int, high: int) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7FFFFFFF)
    return (bits >= np.uint32(low)) & (bits <= np.uint32(high))
