"""What a residual branch does to the stream, for each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.stats.per_token import NOTHING, RESIDUAL, PerToken

COLUMNS = ("stream_norm", "branch_norm", "ratio", "importance", "angle", "noop", "nonzero")


def measure_branch(stream: jax.Array, branch: jax.Array) -> PerToken:
    """N_s, N_b, R_b, B, A, and the share of channels that bfloat16 would lose, of each token.

    Args:
        stream: s, `[*positions, d]`, as the model computed it.
        branch: b, the same; a = s + b.

    Returns:
        `COLUMNS`. A ratio or an angle of a zero vector is no measurement; of one whose norm overflows float32 it is
        NaN.
    """
    stream, branch = jax.lax.stop_gradient((stream, branch))
    s, b = stream.astype(jnp.float32), branch.astype(jnp.float32)
    a = s + b
    norm_s, norm_b, norm_a = (jnp.sqrt(jnp.sum(jnp.square(x), axis=-1)) for x in (s, b, a))
    some = (norm_s != 0) & (norm_a != 0)  # a NaN is a measurement
    u, v = (x / jnp.where(some, norm, 1.0)[..., None] for x, norm in ((s, norm_s), (a, norm_a)))
    apart, along = (jnp.sqrt(jnp.sum(jnp.square(x), axis=-1)) for x in (u - v, u + v))
    apart = jnp.where(
        norm_b == 0, 0.0, apart
    )  # where two sums are ordered otherwise, equal vectors differ in a last bit
    beyond = jnp.where(jnp.isinf(norm_s) | jnp.isinf(norm_a), jnp.nan, 0.0)  # squares that overflow have no direction
    moved = b != 0
    lost = moved & (a.astype(jnp.bfloat16) == s.astype(jnp.bfloat16))
    columns = {
        "stream_norm": norm_s,
        "branch_norm": norm_b,
        "ratio": jnp.where(norm_s != 0, norm_b / jnp.where(norm_s != 0, norm_s, 1.0), NOTHING),
        "importance": jnp.where(some, jnp.square(apart) / 2 + beyond, NOTHING),  # 1 - cos, exact where cos is near 1
        "angle": jnp.where(some, jnp.arctan2(apart, along) * np.float32(2 / np.pi) + beyond, NOTHING),
        "noop": jnp.mean(lost.astype(jnp.float32), axis=-1),
        "nonzero": jnp.mean(moved.astype(jnp.float32), axis=-1),
    }
    values = jnp.stack([columns[name] for name in COLUMNS], axis=-1)
    return PerToken(values, RESIDUAL, COLUMNS, stream.ndim - 1)
