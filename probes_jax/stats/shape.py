"""Central moments of parts up to the fourth: right when the mean is far from zero, and merged pair by pair.

Sums of powers merge by plain sums only about a pivot that all parts share, and no part knows of one near the mean of
all. So each part keeps its moments about its own mean, and two of them merge by the formulas of Chan and Pébay, whose
terms cancel nothing. A part is seven numbers:

    count, pivot, shift    mean = pivot + shift; the difference of two means keeps bits that a mean rounds away
    scale                  what deviations are measured in: the fourth power of a gradient of 1e-10 is no float32
    m2, m3, m4             mean of ((x - mean) / scale)^k

Pébay 2008, Formulas for robust, one-pass parallel computation of covariances and arbitrary-order statistical moments.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.stats.fold import Fold, How
from probes_jax.stats.partial import Partial

COLUMNS = ("count", "pivot", "shift", "scale", "m2", "m3", "m4")
WIDTH = len(COLUMNS)


def deviation_folds(center: jax.Array, scale: jax.Array) -> dict[str, Fold]:
    """Sums of the powers of (x - center) / scale, one `center` and `scale` for each part, `[*rows]`."""
    inverse = _inverse(scale)

    def power(x: jax.Array, exponent: int) -> jax.Array:
        shape = center.shape + (1,) * (x.ndim - center.ndim)
        return jax.lax.integer_pow((x - center.reshape(shape)) * inverse.reshape(shape), exponent)

    return {f"t{k}": Fold(How.SUM, functools.partial(power, exponent=k)) for k in (1, 2, 3, 4)}


def _inverse(scale: jax.Array) -> jax.Array:
    return jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)


def shape_parts(
    part: Partial, sums: dict[str, jax.Array], center: jax.Array, scale: jax.Array, known: jax.Array
) -> jax.Array:
    """The parts of an array, `[*rows, 7]`.

    Args:
        part: The array; its parts have at least one element.
        sums: Of `deviation_folds`.
        center: A number near each part's mean, exact where all elements are equal.
        scale: About the width of each part's range; 0 where all elements are equal.
        known: Whether all elements are finite; else the moments are NaN.
    """
    n = np.float32(part.part_size)
    t1, t2, t3, t4 = (sums[f"t{power}"] / n for power in (1, 2, 3, 4))
    m2 = jnp.maximum(t2 - t1 * t1, 0.0)
    m3 = t3 - 3.0 * t1 * t2 + 2.0 * t1 * t1 * t1
    m4 = jnp.maximum(t4 - 4.0 * t1 * t3 + 6.0 * t1 * t1 * t2 - 3.0 * t1 * t1 * t1 * t1, 0.0)
    spread = known & (scale > 0)
    found = (jnp.where(spread, value, jnp.where(known, 0.0, jnp.nan)) for value in (m2, m3, m4))
    position = (jnp.where(known, value, 0.0) for value in (center, jnp.where(spread, t1 * scale, 0.0), scale))
    return jnp.stack([jnp.full_like(center, n), *position, *found], axis=-1)


def merge_parts(a: jax.Array, b: jax.Array) -> jax.Array:
    """Both parts together, `[..., 7]` each. A part of nothing changes nothing."""
    (na, pa, ha, sa, a2, a3, a4), (nb, pb, hb, sb, b2, b3, b4) = (jnp.moveaxis(x, -1, 0) for x in (a, b))
    n = na + nb
    some = jnp.where(n > 0, n, 1.0)
    wa, wb = na / some, nb / some
    delta = (pb - pa) + (hb - ha)
    scale = jnp.maximum(jnp.maximum(sa, sb), jnp.abs(delta))
    inverse = _inverse(scale)
    ra, rb, e = sa * inverse, sb * inverse, delta * inverse
    a2, b2 = a2 * ra * ra, b2 * rb * rb
    a3, b3 = a3 * ra * ra * ra, b3 * rb * rb * rb
    a4, b4 = a4 * ra * ra * ra * ra, b4 * rb * rb * rb * rb
    both = wa * wb
    m2 = wa * a2 + wb * b2 + both * e * e
    m3 = wa * a3 + wb * b3 + both * e * ((wa - wb) * e * e + 3.0 * (b2 - a2))
    m4 = (
        wa * a4
        + wb * b4
        + both * e * e * ((wa * wa - both + wb * wb) * e * e + 6.0 * (wa * b2 + wb * a2))
        + 4.0 * both * e * (b3 - a3)
    )
    merged = jnp.stack([n, pa, ha + wb * delta, scale, m2, m3, m4], axis=-1)
    return jnp.where((na == 0)[..., None], b, jnp.where((nb == 0)[..., None], a, merged))


def collapse_parts(x: jax.Array, axis: int) -> jax.Array:
    """All parts along an axis of `[..., 7]` together, as a tree, so that errors stay small."""
    x = jnp.moveaxis(x, axis, 0)
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        merged = merge_parts(x[:half], x[half : 2 * half])
        x = jnp.concatenate([merged, x[2 * half :]]) if x.shape[0] % 2 else merged
    return x[0] if x.shape[0] else jnp.zeros(x.shape[1:], x.dtype)


def scale_parts(x: jax.Array, factor: jax.Array) -> jax.Array:
    """The parts of the same elements times a positive number."""
    return x * jnp.stack([factor if name in ("pivot", "shift", "scale") else jnp.ones_like(factor) for name in COLUMNS])


def kurtosis(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Excess kurtosis of parts `[..., 7]`, and whether there is one: not of nothing, nor where all are equal.

    NaN where an element is NaN or infinite.
    """
    count, m2, m4 = x[..., 0], x[..., 4], x[..., 6]
    some = (count > 0) & (m2 != 0)
    return jnp.where(some, m4 / jnp.square(jnp.where(some, m2, 1.0)) - 3.0, 0.0), some
