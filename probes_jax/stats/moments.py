"""One pass over a tensor: every statistic of the Tensors section, as mergeable rows."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from probes_jax.stats.exact import encode_count, encode_static_count, split_mean
from probes_jax.stats.partial import WHOLE, Partial, Split, cut
from probes_jax.stats.summary import Summary

_PIVOT_ELEMENTS = 128


def _constant(part: Partial, width: tuple[int, ...], value: object) -> jax.Array:
    rows = part.array.shape[: len(part.axes)]
    return jnp.broadcast_to(jnp.asarray(value, jnp.float32), (*rows, *width))


def _counts(part: Partial, x: jax.Array) -> dict[str, jax.Array]:
    def count(condition: jax.Array) -> jax.Array:
        return encode_count(jnp.sum(condition, axis=part.inner, dtype=jnp.uint32))

    limbs = encode_static_count(part.part_size)
    return {
        "count": _constant(part, limbs.shape, limbs),
        "zeros": count(x == 0),
        "nan": count(jnp.isnan(x)),
        "inf": count(jnp.isinf(x)),
    }


def _finite_abs_max(part: Partial, x: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), -jnp.inf), axis=part.inner, initial=-jnp.inf)


def _pivot(part: Partial, x: jax.Array) -> jax.Array:
    """A value near each part's mean, from its first few elements; 0 where they are not finite."""
    rows = len(part.axes)
    head = x[(slice(None),) * rows + (slice(1),) * (x.ndim - rows - 1) + (slice(_PIVOT_ELEMENTS),)] if x.ndim > rows else x
    mean = jnp.mean(head, axis=part.inner, keepdims=True)
    return jax.lax.stop_gradient(jnp.where(jnp.isfinite(mean), mean, 0.0))


def _to_float32(x: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(x).astype(jnp.float32)


def summarize_moments(x: jax.Array, split: Split = WHOLE) -> Summary:
    """All statistics of one tensor: absolute maximum, M_2, RMS, absolute mean, zero fraction, mean, std, min, max.

    The mean and the spread are taken about a pivot (the mean of a few elements), so they stay right when the mean is
    1e4 times the standard deviation, and merge as plain sums (see `probes_jax.stats.exact`).

    Args:
        x: Floating-point array of any shape, also empty or a scalar.
        split: How the mesh shards it.

    Returns:
        `moments` rows. An empty part is the identity of the merge.
    """
    part = cut(_to_float32(x), split)
    x = part.array
    n = part.part_size
    if n == 0:
        return empty_moments(part)
    pivot = _pivot(part, x)
    centred = x - pivot
    first = jnp.sum(centred, axis=part.inner)
    second = jnp.sum(centred * centred, axis=part.inner)
    pivot = jnp.reshape(pivot, first.shape)
    mean = pivot + first / n
    leaves = {
        **_counts(part, x),
        "parts": _constant(part, (), 1.0),
        **split_mean(mean),
        "m2": jnp.maximum(second - first * (first / n), 0.0),
        "sum_abs": jnp.sum(jnp.abs(x), axis=part.inner),
        "max": jnp.max(jnp.where(jnp.isnan(x), -jnp.inf, x), axis=part.inner),
        "neg_min": jnp.max(jnp.where(jnp.isnan(x), -jnp.inf, -x), axis=part.inner),
        "abs_max": _finite_abs_max(part, x),
    }
    return Summary(leaves, "moments", part.axes)


def empty_moments(part: Partial) -> Summary:
    from probes_jax.spec.summary import KINDS, Reduce

    leaves = {
        leaf.name: _constant(part, (leaf.width,) if leaf.width else (), 0.0 if leaf.reduce is Reduce.SUM else -math.inf)
        for leaf in KINDS["moments"].leaves
    }
    return Summary(leaves, "moments", part.axes)


def summarize_magnitude(x: jax.Array, split: Split = WHOLE) -> Summary:
    """Size of a gradient: norm, mean and maximum of |x|, zeros, non-finite elements. `magnitude` rows."""
    part = cut(_to_float32(x), split)
    x = part.array
    leaves = {
        **_counts(part, x),
        "sum_sq": jnp.sum(x * x, axis=part.inner),
        "sum_abs": jnp.sum(jnp.abs(x), axis=part.inner),
        "abs_max": _finite_abs_max(part, x),
    }
    return Summary(leaves, "magnitude", part.axes)


def summarize_norm(x: jax.Array, split: Split = WHOLE) -> Summary:
    """Sum of squares only. `norm` rows; a tensor without elements has norm 0."""
    part = cut(_to_float32(x), split)
    leaves = {"parts": _constant(part, (), 1.0), "sum_sq": jnp.sum(part.array * part.array, axis=part.inner)}
    return Summary(leaves, "norm", part.axes)


def summarize_extreme(x: jax.Array, split: Split = WHOLE) -> Summary:
    """Absolute maximum with NaN and inf counts. `extreme` rows."""
    part = cut(_to_float32(x), split)
    counts = _counts(part, part.array)
    return Summary({"nan": counts["nan"], "inf": counts["inf"], "abs_max": _finite_abs_max(part, part.array)}, "extreme", part.axes)
