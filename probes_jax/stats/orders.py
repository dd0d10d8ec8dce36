"""A tensor to mergeable rows of how many orders of magnitude it spans: extremes, and counts by exponent."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.spec.orders import QUANTILES, SHIFT, SIZE
from probes_jax.stats.exact import encode_static_count
from probes_jax.stats.fold import Fold, How, fold
from probes_jax.stats.partial import WHOLE, Partial, Split, cut
from probes_jax.stats.sketch import count_buckets
from probes_jax.stats.summary import Summary

SAMPLE = 2**16  # elements of a shard that are counted, of more than that every k-th along each axis
_FOLDS = {
    "zeros": Fold(How.COUNT, lambda x: x == 0),
    "nan": Fold(How.COUNT, jnp.isnan),
    "inf": Fold(How.COUNT, jnp.isinf),
    "abs_max": Fold(How.MAX, lambda x: jnp.where(jnp.isfinite(x), jnp.abs(x), -jnp.inf)),
}


@functools.partial(jax.jit, static_argnames="split", inline=False)  # each shape is traced and lowered once
def summarize_orders(x: jax.Array, split: Split = WHOLE) -> dict[str, Summary]:
    """Rows of |x|.

    Args:
        x: Any real array.
        split: How the mesh shards it.

    Returns:
        `orders` rows (maximum and zeros, of every element) and `histogram` rows (of the finite elements that are not
        zero, of at most `SAMPLE` elements of each shard).
    """
    part = cut(jax.lax.stop_gradient(x), split)
    size = encode_static_count(part.part_size)
    leaves = {"count": jnp.broadcast_to(size, (*part.rows, *size.shape)), **fold(part, _FOLDS)}
    taken = jnp.abs(_sample(part).astype(jnp.float32)).reshape(*part.rows, -1)
    bits = jax.lax.bitcast_convert_type(taken, jnp.uint32)
    buckets = count_buckets((bits >> SHIFT).astype(jnp.int32), (bits != 0) & jnp.isfinite(taken), SIZE)
    return {
        "orders": Summary.of(leaves, "orders", part.axes),
        "histogram": Summary.of({"buckets": buckets}, "histogram", part.axes),
    }


def sample_steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Every how many elements of each axis one is taken: odd, so that heads and blocks of a power of two all show.

    Example:
        >>> sample_steps((512, 4)), sample_steps((2048, 1024))
        ((1, 1), (7, 5))
    """
    steps = [1] * len(shape)

    def left(axis: int) -> int:
        return -(-shape[axis] // steps[axis])

    while math.prod(map(left, range(len(shape)))) > SAMPLE:
        steps[max(range(len(shape)), key=left)] += 2
    return tuple(steps)


def _sample(part: Partial) -> jax.Array:
    steps = sample_steps(part.array.shape[len(part.axes) :])
    return part.array[(*(slice(None) for _ in part.rows), *(slice(None, None, step) for step in steps))]


def read_orders(buckets: jax.Array, highest: jax.Array) -> dict[str, jax.Array]:
    """Quantiles by nearest rank, and `spread`, the decades between the median and the maximum.

    Args:
        buckets: Merged counts, float32 `[rows, SIZE]`.
        highest: The largest finite value, float32 `[rows]`.

    Returns:
        float32 `[rows]` for each. What they are without a value is of no meaning; subnormal values are told as the
        smallest normal one.
    """
    reached = jnp.cumsum(buckets, axis=-1)
    found = {}
    for name, share in QUANTILES.items():
        rank = jnp.ceil(np.float32(share) * reached[:, -1])
        bucket = jnp.sum(reached < rank[:, None], axis=-1).astype(jnp.uint32)
        middle = jax.lax.bitcast_convert_type((bucket << SHIFT) | np.uint32(2 ** (SHIFT - 1)), jnp.float32)
        found[name] = jnp.minimum(jnp.maximum(middle, np.finfo(np.float32).tiny), highest)
    return {**found, "spread": jnp.log10(highest) - jnp.log10(found["p50"])}
