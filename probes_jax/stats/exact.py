"""Numbers that stay exact through a float32 all-reduce: counts in limbs, weighted means in two parts."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.spec.summary import LIMB_BITS, LIMBS

FLOAT_ONES = 2**24  # a float32 sum of this many ones is exact
_WRAP = 2**32  # a uint32 sum of this many ones wraps
_LIMB_PARTS = 2**16  # so many limbs sum exactly in float32
_HIGH_BITS = 12  # significant bits of a high part


def encode_count(count: jax.Array) -> jax.Array:
    """uint32 counts `[...]` to float32 limbs `[..., 4]`, lowest first. Sums of 65,536 of them stay exact."""
    count = jnp.asarray(count, jnp.uint32)[..., None]
    shifts = jnp.arange(LIMBS, dtype=jnp.uint32) * jnp.uint32(LIMB_BITS)
    return ((count >> shifts) & jnp.uint32(2**LIMB_BITS - 1)).astype(jnp.float32)


def encode_static_count(count: int) -> np.ndarray:
    """A Python count of any size to limbs `[4]`; the top limb takes what is left."""
    mask = 2**LIMB_BITS - 1
    low = [(count >> (LIMB_BITS * index)) & mask for index in range(LIMBS - 1)]
    return np.array([*low, count >> (LIMB_BITS * (LIMBS - 1))], np.float32)


def normalize_count(limbs: jax.Array) -> jax.Array:
    """Summed limbs `[..., 4]` of the same count, each carried back below 256; the top limb takes what is left.

    Exact while every limb is an exact float integer. After it, sums of 65,536 such counts are exact again.
    """
    words = limbs.astype(jnp.uint32)
    out, carry = [], jnp.zeros(words.shape[:-1], jnp.uint32)
    for index in range(LIMBS - 1):
        total = words[..., index] + carry
        out.append(total & jnp.uint32(2**LIMB_BITS - 1))
        carry = total >> jnp.uint32(LIMB_BITS)
    return jnp.stack([*out, words[..., -1] + carry], axis=-1).astype(jnp.float32)


def count_true(condition: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """How many elements of a bool array are true, reduced over `axes`, as limbs. Exact for every size.

    Args:
        condition: bool `[...]`.
        axes: The axes to reduce, not negative.

    Returns:
        float32 limbs `[kept axes, 4]`.
    """
    shape = condition.shape
    size = math.prod(shape[axis] for axis in axes)
    if size <= FLOAT_ONES:  # float additions vectorize better than integer ones
        return encode_count(jnp.sum(condition.astype(jnp.float32), axis=axes).astype(jnp.uint32))
    if size < _WRAP:
        return encode_count(jnp.sum(condition, axis=axes, dtype=jnp.uint32))
    outer = next((axis for axis in axes if 1 < shape[axis] <= _LIMB_PARTS), None)
    if outer is None:  # one enormous axis: in two halves
        axis = max(axes, key=lambda a: shape[a])
        half = shape[axis] // 2
        low, high = (
            count_true(jax.lax.slice_in_dim(condition, *at, axis=axis), axes) for at in ((0, half), (half, shape[axis]))
        )
        return normalize_count(low + high)
    inner = tuple(axis for axis in axes if axis != outer)
    return normalize_count(jnp.sum(count_true(condition, inner), axis=outer - sum(axis < outer for axis in inner)))


def truncate(x: jax.Array) -> jax.Array:
    """float32 cut to its top 12 significant bits. 4,096 of a common exponent sum exactly in float32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFF000), jnp.float32)


def split_weighted_mean(mean: jax.Array, weight: int) -> dict[str, jax.Array]:
    """`weight * mean` and `weight * mean^2`, each as a high part that sums exactly and the rest.

    The spread of part means is the small difference `E[mean^2] - E[mean]^2`. With a mean 1e4 times the spread it takes
    34 bits, which two float32 sums carry: the high parts (12 bits) of parts of like size sum without rounding, and the
    rest is 2^12 times smaller. Exact to that degree while `parts * (largest / smallest part)` is at most 4,096; beyond
    that the last bits round.

    Args:
        mean: float32 means of parts, any shape.
        weight: Elements in each part.

    Returns:
        `mean_hi + mean_lo = weight * mean` and `sq_hi + sq_lo = weight * mean^2`. An overflow shows as inf.
    """
    shift = max(weight.bit_length() - _HIGH_BITS, 0)
    heavy_int = (weight >> shift) << shift
    heavy, light, whole = (np.float32(part) for part in (heavy_int, weight - heavy_int, weight))
    high = truncate(mean)
    low = mean - high
    square = high * high  # exact: 12 + 12 bits
    square_high = truncate(square)
    first = heavy * high  # exact
    second = heavy * square_high  # exact
    mean_hi, sq_hi = truncate(first), truncate(second)
    mean_lo = (first - mean_hi) + (light * high + whole * low)
    sq_lo = (second - sq_hi) + (
        heavy * (square - square_high) + light * square + whole * (2.0 * high * low + low * low)
    )
    return {
        "mean_hi": mean_hi,
        "mean_lo": jnp.where(jnp.isfinite(mean_hi), mean_lo, 0.0),
        "sq_hi": sq_hi,
        "sq_lo": jnp.where(jnp.isfinite(sq_hi), sq_lo, 0.0),
    }
