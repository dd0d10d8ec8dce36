"""One pass over a tensor: every statistic of the Tensors section, as mergeable rows.

Everything is accumulated in float32. What that means at the ends of its range, for every summary here:

* A finite tensor whose squares or sums leave float32's range (|x| about 1e19 / sqrt(n) for squares) reports inf for the
  norm, RMS or mean concerned, with `inf_count` 0 and a finite absolute maximum beside it: an overflow shows, and shows
  as what it is.
* Squares of |x| < 1e-19 are zero, and so are their norm and RMS; the absolute mean and maximum are not.
* Subnormal elements count as zeros where the backend flushes them, as XLA's CPU and TPU backends do; a maximum may
  still show them.
* float64 elements are rounded to float32 first: beyond its range they count as infinite, or as zeros.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.spec.summary import KINDS, Reduce
from probes_jax.stats.exact import encode_static_count, split_weighted_mean
from probes_jax.stats.fold import Fold, How, fold
from probes_jax.stats.partial import WHOLE, Partial, Split, cut
from probes_jax.stats.summary import Summary

_PIVOT_ELEMENTS = 128
# A model has hundreds of points of a few shapes: each shape is traced and lowered once. The program is the same.
_once_a_shape = functools.partial(jax.jit, static_argnames="split", inline=False)

_ZEROS = Fold(How.COUNT, lambda x: x == 0)
_NAN = Fold(How.COUNT, jnp.isnan)
_INF = Fold(How.COUNT, jnp.isinf)
_SUM_ABS = Fold(How.SUM, jnp.abs)
_SUM_SQ = Fold(How.SUM, jnp.square)
_ABS_MAX = Fold(How.MAX, lambda x: jnp.where(jnp.isfinite(x), jnp.abs(x), -jnp.inf))


def _constant(part: Partial, width: tuple[int, ...], value: object) -> jax.Array:
    rows = part.array.shape[: len(part.axes)]
    return jnp.broadcast_to(jnp.asarray(value, jnp.float32), (*rows, *width))


def _size(part: Partial) -> jax.Array:
    limbs = encode_static_count(part.part_size)
    return _constant(part, limbs.shape, limbs)


def _cut(x: jax.Array, split: Split) -> Partial:
    return cut(jax.lax.stop_gradient(x), split)


def _pivot(part: Partial) -> jax.Array:
    """A value near each part's mean, from its first few elements; 0 where they are not finite. `[*rows]`."""
    head = part.array
    inner = head.ndim - len(part.axes)
    if inner:
        head = head[(..., *(slice(1),) * (inner - 1), slice(_PIVOT_ELEMENTS))]
    mean = jnp.mean(head.astype(jnp.float32), axis=part.inner)
    return jnp.where(jnp.isfinite(mean), mean, 0.0)


@_once_a_shape
def summarize_moments(x: jax.Array, split: Split = WHOLE) -> Summary:
    """All statistics of one tensor: absolute maximum, M_2, RMS, absolute mean, zero fraction, mean, std, min, max.

    The mean and the spread are taken about a pivot (the mean of a few elements), so they stay right when the mean is
    1e4 times the standard deviation, and merge as plain sums whatever the sizes of the parts (see
    `probes_jax.stats.exact`).

    Args:
        x: Real array of any shape, also empty or a scalar.
        split: How the mesh shards it.

    Returns:
        `moments` rows. An empty part is the identity of the merge.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from probes_jax.spec.summary import KINDS
        >>> summary = summarize_moments(jnp.asarray([3.0, -4.0]))
        >>> rows = {name: np.asarray(leaf)[None] for name, leaf in summary.leaves.items()}
        >>> columns = KINDS["moments"].finalize(rows)
        >>> print(*(round(float(columns[stat][0][0]), 4) for stat in ("mean", "rms", "std", "abs_max")))
        -0.5 3.5355 3.5 4.0
    """
    part = _cut(x, split)
    n = part.part_size
    if n == 0:
        return _empty_moments(part)
    pivot = _pivot(part)

    def centred(x: jax.Array) -> jax.Array:
        return x - pivot.reshape(pivot.shape + (1,) * (x.ndim - pivot.ndim))

    found = fold(
        part,
        {
            "zeros": _ZEROS,
            "nan": _NAN,
            "inf": _INF,
            "first": Fold(How.SUM, centred),
            "second": Fold(How.SUM, lambda x: jnp.square(centred(x))),
            "sum_abs": _SUM_ABS,
            "max": Fold(How.MAX, lambda x: x),  # where it is NaN, the count of NaN decides
            "neg_min": Fold(How.MAX, jnp.negative),
            "abs_max": _ABS_MAX,
        },
    )
    first, second = found.pop("first"), found.pop("second")
    shift = first / np.float32(n)
    leaves = {
        "count": _size(part),
        **found,
        **split_weighted_mean(pivot + shift, n),
        "m2": jnp.maximum(second - first * shift, 0.0),
    }
    return Summary.of(leaves, "moments", part.axes)


def _empty_moments(part: Partial) -> Summary:
    leaves = {
        leaf.name: _constant(part, (leaf.width,) if leaf.width else (), 0.0 if leaf.reduce is Reduce.SUM else -math.inf)
        for leaf in KINDS["moments"].leaves
    }
    return Summary.of(leaves, "moments", part.axes)


@_once_a_shape
def summarize_magnitude(x: jax.Array, split: Split = WHOLE) -> Summary:
    """Size of a gradient: norm, mean and maximum of |x|, zeros, non-finite elements. `magnitude` rows."""
    part = _cut(x, split)
    folds = {"zeros": _ZEROS, "nan": _NAN, "inf": _INF, "sum_sq": _SUM_SQ, "sum_abs": _SUM_ABS, "abs_max": _ABS_MAX}
    return Summary.of({"count": _size(part), **fold(part, folds)}, "magnitude", part.axes)


@_once_a_shape
def summarize_norm(x: jax.Array, split: Split = WHOLE) -> Summary:
    """Sum of squares only. `norm` rows; a tensor without elements has norm 0."""
    part = _cut(x, split)
    square = jnp.square(part.array.astype(jnp.float32))
    leaves = {"parts": _constant(part, (), 1.0), "sum_sq": jnp.sum(square, axis=part.inner)}
    return Summary.of(leaves, "norm", part.axes)


@_once_a_shape
def summarize_update(applied: jax.Array, requested: jax.Array, split: Split = WHOLE) -> dict[str, Summary]:
    """Sum of squares of the update that was applied, and how much of the requested one changed nothing.

    Args:
        applied: `w_new - w_old` in the parameter's dtype, or that in float32.
        requested: What the optimizer asked for, of the same shape.
        split: How the mesh shards both.

    Returns:
        `norm` rows, and `noop` rows of kind `fraction`: elements with `requested != 0` and `applied == 0`, over those
        with `requested != 0`.
    """
    part, asked = _cut(applied, split), _cut(requested, split)
    folds = {
        "sum_sq": Fold(How.SUM, lambda dw, u: jnp.square(dw)),
        "part": Fold(How.COUNT, lambda dw, u: (u != 0) & (dw == 0)),
        "whole": Fold(How.COUNT, lambda dw, u: u != 0),
    }
    found = fold(part, folds, asked.array)
    norm = {"parts": _constant(part, (), 1.0), "sum_sq": found.pop("sum_sq")}
    return {"norm": Summary.of(norm, "norm", part.axes), "noop": Summary.of(found, "fraction", part.axes)}


@_once_a_shape
def summarize_direction(x: jax.Array, raw: jax.Array, split: Split = WHOLE) -> Summary:
    """Size of `x`, and the angle between it and `raw`, of the same shape. `direction` rows."""
    part, beside = _cut(x, split), _cut(raw, split)
    folds = {
        "nan": Fold(How.COUNT, lambda x, raw: jnp.isnan(x)),
        "inf": Fold(How.COUNT, lambda x, raw: jnp.isinf(x)),
        "sum_sq": Fold(How.SUM, lambda x, raw: jnp.square(x)),
        "raw_sq": Fold(How.SUM, lambda x, raw: jnp.square(raw)),
        "dot": Fold(How.SUM, lambda x, raw: x * raw),
        "abs_max": Fold(How.MAX, lambda x, raw: jnp.where(jnp.isfinite(x), jnp.abs(x), -jnp.inf)),
    }
    leaves = {"parts": _constant(part, (), 1.0), **fold(part, folds, beside.array)}
    return Summary.of(leaves, "direction", part.axes)


@_once_a_shape
def summarize_extreme(x: jax.Array, split: Split = WHOLE) -> Summary:
    """Absolute maximum with NaN and inf counts. `extreme` rows."""
    part = _cut(x, split)
    return Summary.of(fold(part, {"nan": _NAN, "inf": _INF, "abs_max": _ABS_MAX}), "extreme", part.axes)
