"""Values of tokens to mergeable rows: mean, maximum, and a sketch of their quantiles."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.spec.sketch import GROWTH, LOW, QUANTILES, SIZE, representatives
from probes_jax.stats.partial import WHOLE, Split, cut
from probes_jax.stats.summary import Summary


def summarize_spread(values: jax.Array, valid: jax.Array, split: Split = WHOLE, stack: int = 0) -> dict[str, Summary]:
    """Rows of one number a token.

    Args:
        values: Numbers that are not negative, `[*stack, *positions]`.
        valid: Which of them count, bool of the same shape.
        split: How the mesh shards them, the stack not at all.
        stack: How many axes are layers.

    Returns:
        `spread` rows (mean and maximum) and `sketch` rows (quantiles). A value that is not finite is in the first only,
        where it shows.
    """
    x = cut(jax.lax.stop_gradient(values).astype(jnp.float32), split)
    ok, rows = cut(valid, split).array, len(x.axes)
    axes = tuple(range(rows + stack, x.array.ndim))
    leaves = {
        "total": jnp.sum(jnp.where(ok, x.array, 0.0), axis=axes),
        "weight": jnp.sum(ok.astype(jnp.float32), axis=axes),
        "max": jnp.max(jnp.where(ok & ~jnp.isnan(x.array), x.array, -jnp.inf), axis=axes, initial=-jnp.inf),
    }
    kept = x.array.shape[: rows + stack]
    counted = (ok & jnp.isfinite(x.array)).reshape(*kept, -1)
    buckets = count_buckets(bucket_of(x.array).reshape(*kept, -1), counted)

    def stack_first(leaf: jax.Array) -> jax.Array:
        return jnp.moveaxis(leaf, range(rows), range(stack, stack + rows))

    return {
        "spread": Summary.of({name: stack_first(leaf) for name, leaf in leaves.items()}, "spread", x.axes),
        "sketch": Summary.of({"buckets": stack_first(buckets)}, "sketch", x.axes),
    }


def bucket_of(x: jax.Array) -> jax.Array:
    """The bucket of each value, int32. What is NaN falls anywhere."""
    inside = jnp.clip(x, LOW, LOW * GROWTH ** (SIZE - 2))
    number = jnp.ceil(jnp.log(inside / LOW) / np.float32(math.log(GROWTH))).astype(jnp.int32)
    number = jnp.clip(number, 1, SIZE - 2)
    return jnp.where(x < LOW, 0, jnp.where(x > LOW * GROWTH ** (SIZE - 2), SIZE - 1, number))


def count_buckets(bucket: jax.Array, counted: jax.Array, size: int = SIZE) -> jax.Array:
    """How many values fall into each bucket.

    Args:
        bucket: int32 `[*rows, n]`.
        counted: Which values count, bool of the same shape.
        size: Number of buckets.

    Returns:
        float32 `[*rows, size]`, exact up to 2^24 values a bucket.
    """
    add, multiply = functools.partial(_added, size), functools.partial(_multiplied, size)
    return jax.lax.platform_dependent(bucket, counted, cpu=add, cuda=add, rocm=add, default=multiply)


def _added(size: int, bucket: jax.Array, counted: jax.Array) -> jax.Array:
    """By adding each value where it belongs."""

    def of_row(bucket: jax.Array, counted: jax.Array) -> jax.Array:
        return jnp.zeros((size,), jnp.float32).at[bucket].add(counted.astype(jnp.float32))

    for _ in bucket.shape[:-1]:
        of_row = jax.vmap(of_row)
    return of_row(bucket, counted)


def _multiplied(size: int, bucket: jax.Array, counted: jax.Array) -> jax.Array:
    """By a product of two matrices of zeros and ones, for each value's two digits: a TPU adds one by one slowly."""
    side = math.isqrt(size - 1) + 1
    digits = jnp.arange(side, dtype=jnp.int32)
    high = ((bucket[..., None] // side == digits) & counted[..., None]).astype(jnp.bfloat16)
    low = (bucket[..., None] % side == digits).astype(jnp.bfloat16)
    square = jnp.einsum("...nh,...nl->...hl", high, low, preferred_element_type=jnp.float32)
    return square.reshape(*square.shape[:-2], side * side)[..., :size]


def sketched(buckets: jax.Array, highest: jax.Array) -> dict[str, jax.Array]:
    """The quantiles of `QUANTILES`, of merged counts.

    Args:
        buckets: float32 `[rows, SIZE]`.
        highest: The largest value, float32 `[rows]`.

    Returns:
        float32 `[rows]` for each. What they are without a value is of no meaning.
    """
    reached = jnp.cumsum(buckets, axis=-1)
    table = jnp.asarray(representatives(), jnp.float32)
    found = {}
    for name, share in QUANTILES.items():
        rank = jnp.ceil(np.float32(share) * reached[:, -1])
        bucket = jnp.sum(reached < rank[:, None], axis=-1)
        found[name] = jnp.minimum(table[jnp.minimum(bucket, SIZE - 1)], highest)
    return found
