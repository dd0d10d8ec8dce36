"""Several reductions of one tensor at the price of reading it once.

On TPU XLA fuses the reductions of a tensor, mostly into what makes it, so a reduction for each statistic is the fast
form. On GPU it fuses some of them: a decoder on H100s reads a third more with a reduction for each, a sixth more with
one for all. On CPU it fuses none: every mapped tensor is written to memory before it is reduced (nine statistics of a
float32 [2048, 1024] write 64 MB, and most of the time goes into fresh pages). There a loop over blocks of rows keeps
one accumulator of a block's shape per statistic, in cache, and reduces the accumulators at the end: about ten times
faster, the same values up to the order of additions.

The form is chosen when the program is lowered for its platform, not by the machine that traces it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.stats.exact import FLOAT_ONES, count_true, encode_count
from probes_jax.stats.manual import differing, spread
from probes_jax.stats.partial import Partial

Values = dict[str, jax.Array]
Beside = tuple[jax.Array, ...]

_TINY = 2**13  # elements of a part; up to this, one reduction of many operands is as fast, and compiles faster
_SMALL = 2**16  # elements of a part; below this the plain form is as good
_WORD = 2**32  # what a uint32 cannot count any more
_BLOCK = 2**14  # elements of an accumulator: a few of them stay in a second level cache
_UNROLL = 4  # blocks read before an accumulator is written,
_MANY = 2**6  # where there are so many blocks that it is worth a larger program
_HALF = 16  # bits of an accumulator for each of the two counts in it
_LARGEST_BLOCK = 2**17  # what is still accepted for a last axis that cannot be split
_LEAST_BLOCK = 2**9
_STEPS = 2**10  # additions in a row before the error of a float32 sum is worth a second level


class How(enum.Enum):
    """How mapped elements are reduced."""

    SUM = "sum"  # float32
    COUNT = "count"  # bool elements, to exact limbs
    MAX = "max"  # float32, -inf over nothing


@dataclasses.dataclass(frozen=True)
class Fold:
    """One statistic: `map` takes float32 `[*rows, ...]`, one of each array, to an array of the same shape.

    `how` reduces it.
    """

    how: How
    map: Callable[..., jax.Array]


def fold(part: Partial, folds: Mapping[str, Fold], *beside: jax.Array) -> Values:
    """Reduces every part over its inner axes, once for each statistic.

    Args:
        part: An array of any real dtype, cut into rows `[*rows, *inner]`.
        folds: Statistics by name. Their maps must be elementwise along the inner axes, and may broadcast values of
            shape `[*rows, 1, ...]`.
        *beside: More arrays cut the same way, which the maps get behind the first.

    Returns:
        float32 `[*rows]` for sums and maxima, limbs `[*rows, 4]` for counts.
    """
    size = part.part_size
    if not part.inner or not 0 < size < _WORD:
        return _apart(part, folds, beside)
    if size <= _TINY:
        return _together(part, folds, beside)
    block = _block_shape(part.array.shape[len(part.axes) :])

    def on(form: Callable[..., Values], *settings: Any) -> Callable[..., Values]:
        return lambda x, *beside: form(Partial(x, part.axes), folds, beside, *settings)

    return jax.lax.platform_dependent(
        part.array,
        *beside,
        cpu=on(_apart) if block is None else on(_loop, *block),
        cuda=on(_together),
        rocm=on(_together),
        default=on(_apart),
    )


def _widened(part: Partial, beside: Beside) -> list[jax.Array]:
    return [x.astype(jnp.float32) for x in (part.array, *beside)]


def _apart(part: Partial, folds: Mapping[str, Fold], beside: Beside = ()) -> Values:
    """A reduction for each statistic."""
    xs = _widened(part, beside)
    few = part.part_size <= FLOAT_ONES  # float additions vectorize better than integer ones
    reduce = {
        How.SUM: lambda y: jnp.sum(y, axis=part.inner),
        How.COUNT: lambda y: jnp.sum(y.astype(jnp.float32), axis=part.inner) if few else count_true(y, part.inner),
        How.MAX: lambda y: jnp.max(y, axis=part.inner, initial=-jnp.inf),
    }
    found = {name: reduce[f.how](f.map(*xs)) for name, f in folds.items()}
    return _encode_counts(found, folds) if few else found


def _together(part: Partial, folds: Mapping[str, Fold], beside: Beside = ()) -> Values:
    """All statistics by one reduction with an operand for each."""
    xs = _widened(part, beside)
    ones = jnp.float32 if part.part_size <= FLOAT_ONES else jnp.uint32
    kinds = {How.SUM: jnp.float32, How.COUNT: ones, How.MAX: jnp.float32}
    starts = {How.SUM: 0, How.COUNT: 0, How.MAX: -jnp.inf}
    found = jax.lax.reduce(
        {name: f.map(*xs).astype(kinds[f.how]) for name, f in folds.items()},
        {name: np.asarray(starts[f.how], kinds[f.how]) for name, f in folds.items()},
        lambda a, b: _join(folds, a, b),
        part.inner,
    )
    return _encode_counts(dict(found), folds)


def _join(folds: Mapping[str, Fold], a: Values, b: Values) -> Values:
    # Not jnp.maximum, which takes three times the instructions to hand NaN on.
    return {n: jnp.where(a[n] > b[n], a[n], b[n]) if folds[n].how is How.MAX else a[n] + b[n] for n in a}


def _encode_counts(found: Values, folds: Mapping[str, Fold]) -> Values:
    """Counts to limbs, all in one go: a program has thousands of them."""
    names = [name for name, f in folds.items() if f.how is How.COUNT]
    if not names:
        return found
    limbs = encode_count(jnp.stack([found[name] for name in names], axis=-1).astype(jnp.uint32))
    return {**found, **{name: limbs[..., index, :] for index, name in enumerate(names)}}


def _block_shape(inner: tuple[int, ...]) -> tuple[int, tuple[int, ...]] | None:
    """Steps of the loop and the shape of one block; None where the plain form is as good.

    A block is a run of the last axes, whole except for its first, so that the reshape moves nothing and a sharding of
    the last axes that nobody knows of is kept.
    """
    size = math.prod(inner)
    found, tail = None, 1
    for axis in reversed(range(len(inner))):
        length = inner[axis]
        whole = length * tail <= _BLOCK
        take = (
            length
            if whole
            else min(length & -length, 1 << ((_BLOCK // tail).bit_length() - 1 if tail <= _BLOCK else 0))
        )
        if take * tail >= _LEAST_BLOCK:
            found = inner[axis + 1 :] if take == 1 else (take, *inner[axis + 1 :])
        elif not whole and length * tail <= _LARGEST_BLOCK:
            found = inner[axis:]
        if not whole:
            break
        tail *= length
    if found is None or not max(_SMALL, 4 * math.prod(found)) <= size < min(2**_HALF * math.prod(found), 2**32):
        return None
    return size // math.prod(found), found


def _loop(part: Partial, folds: Mapping[str, Fold], beside: Beside, steps: int, block: tuple[int, ...]) -> Values:
    rows = len(part.axes)
    xs = tuple(jnp.reshape(x, (*x.shape[:rows], steps, *block)) for x in (part.array, *beside))
    narrow = any(x.dtype.itemsize < 4 for x in xs)
    unroll = _UNROLL if steps >= _MANY and steps % _UNROLL == 0 else 1

    def read(index: jax.Array) -> Values:
        # Behind the barrier, XLA cannot convert all of a bfloat16 array before the loop (nor gather it, where it must).
        arrays, index = jax.lax.optimization_barrier((xs, index)) if narrow else (xs, index)
        found = [of_block(arrays, index * unroll + k) for k in range(unroll)]
        while len(found) > 1:
            found = [_join(folds, a, b) for a, b in zip(found[::2], found[1::2])]
        return found[0]

    def of_block(arrays: Beside, index: jax.Array) -> Values:
        # A slice for each block: one slice of several would be a function of its own, which is not vectorized.
        slices = [jax.lax.dynamic_index_in_dim(x, index, axis=rows, keepdims=False) for x in arrays]
        here = [x.astype(jnp.float32) for x in slices]
        return _pack({name: f.map(*here) for name, f in folds.items()}, folds)

    shape = (*part.rows, *block)
    start = {How.SUM: np.float32(0), How.COUNT: np.uint32(0), How.MAX: np.float32(-np.inf)}
    nothing = {n: spread(jnp.full(shape, start[folds[n].how]), differing(*xs)) for n in jax.eval_shape(read, 0)}
    axes = tuple(range(rows, rows + len(block)))
    found = _unpack(_accumulate(read, functools.partial(_join, folds), nothing, steps // unroll), folds)
    reduced = {n: (jnp.max if folds[n].how is How.MAX else jnp.sum)(found[n], axis=axes) for n in folds}
    return _encode_counts(reduced, folds)


def _pairs(folds: Mapping[str, Fold]) -> list[tuple[str, str]]:
    counts = [name for name, f in folds.items() if f.how is How.COUNT]
    return list(zip(counts[::2], counts[1::2]))


def _pack(found: Values, folds: Mapping[str, Fold]) -> Values:
    """Two counts in one uint32, the second of each pair in its upper half."""
    found = {n: x.astype(jnp.uint32 if folds[n].how is How.COUNT else jnp.float32) for n, x in found.items()}
    for low, high in _pairs(folds):
        found[low] += found.pop(high) << _HALF
    return found


def _unpack(found: Values, folds: Mapping[str, Fold]) -> Values:
    for low, high in _pairs(folds):
        word = found[low]
        found = {**found, low: word & np.uint32(2**_HALF - 1), high: word >> _HALF}
    return found


def _accumulate(
    read: Callable[..., Values], join: Callable[[Values, Values], Values], nothing: Values, steps: int
) -> Values:
    """`join(nothing, read(0), ..., read(steps - 1))`, in two levels where there are many, so that errors stay small."""
    few = min(steps & -steps, _STEPS // 2)
    if steps > _STEPS and few > 1:
        return _accumulate(
            lambda i: _accumulate(lambda j: read(i * few + j), join, nothing, few), join, nothing, steps // few
        )
    return jax.lax.fori_loop(0, steps, lambda i, found: join(found, read(i)), nothing)
