"""How much of a gate is shut, for each token."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from probes_jax.spec.catalog.residual import THETAS
from probes_jax.stats.per_token import RESIDUAL, PerToken

COLUMNS = tuple(f"saturation/{theta}" for theta in THETAS)


def measure_gate(gate: jax.Array, temperature: float = 1.0) -> PerToken:
    """#{j: beta_j < theta} / d of each token, beta = sigmoid(g / T): a channel below it lets next to nothing through.

    Args:
        gate: g, what the sigmoid is given, `[*positions, d]`.
        temperature: T.

    Returns:
        `COLUMNS`, one for each of `THETAS`. A NaN is not below.
    """
    g = jax.lax.stop_gradient(gate).astype(jnp.float32) / temperature
    below = [g < math.log(theta / (1.0 - theta)) for theta in THETAS]  # the sigmoid rises
    shares = [jnp.mean(each.astype(jnp.float32), axis=-1) for each in below]
    return PerToken(jnp.stack(shares, axis=-1), RESIDUAL, COLUMNS, gate.ndim - 1)
