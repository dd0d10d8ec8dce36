"""Numbers that stay exact through a float32 all-reduce: counts in limbs, means in two parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.spec.summary import LIMB_BITS, LIMBS


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


def truncate(x: jax.Array) -> jax.Array:
    """float32 cut to its top 12 significant bits. 4,096 of a common exponent sum exactly in float32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFFF000), jnp.float32)


def split_mean(mean: jax.Array) -> dict[str, jax.Array]:
    """A float32 mean and its square, each as a part that sums exactly and the rest."""
    high = truncate(mean)
    low = mean - high
    square = high * high  # exact: 12 + 12 bits
    square_high = truncate(square)
    return {
        "mean_hi": high,
        "mean_lo": low,
        "sq_hi": square_high,
        "sq_lo": (square - square_high) + (2.0 * high * low + low * low),
    }
