"""Median by rank counting: for a hundred values cheaper in the graph than a sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def masked_median(values: jax.Array, valid: jax.Array) -> jax.Array:
    """Median of the valid values of each row; the mean of the two middle ones where their number is even.

    The rank of a value is the number of valid values before it in sorted order, ties broken by position, so ranks are
    0, 1, ..., n - 1 without a sort. W * W comparisons a row.

    Args:
        values: float32 `[S, W]`, finite where valid.
        valid: bool `[S, W]`.

    Returns:
        float32 `[S]`; 0 for a row without a valid value (its number of values says that it is absent).

    Example:
        >>> import jax.numpy as jnp
        >>> values = jnp.asarray([[5.0, 1.0, 3.0, 9.0]])
        >>> print(masked_median(values, jnp.asarray([[True, True, True, False]])))
        [3.]
    """
    width = values.shape[-1]
    mine, other = values[..., :, None], values[..., None, :]
    earlier = np.tri(width, k=-1, dtype=bool)  # [i, j]: j < i
    before = (other < mine) | ((other == mine) & earlier)
    rank = jnp.sum(before & valid[..., None, :], axis=-1, dtype=jnp.uint32)
    number = jnp.sum(valid, axis=-1, dtype=jnp.uint32)[..., None]
    lower = jnp.where(number > np.uint32(0), number - np.uint32(1), number) // np.uint32(2)
    upper = number // np.uint32(2)

    def at(wanted: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(valid & (rank == wanted), values, 0.0), axis=-1)

    return 0.5 * (at(lower) + at(upper))
