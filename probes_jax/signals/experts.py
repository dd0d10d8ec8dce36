"""Balance of experts, of loads that are merged over shards and microbatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from probes_jax.spec.summary import LIMB_BITS, LIMBS

Values = dict[str, tuple[jax.Array, jax.Array]]  # statistic -> (float32 [layers], present [layers])


def to_loads(limbs: jax.Array, experts: int) -> jax.Array:
    """Limbs `[layers * E, 4]` to valid tokens float32 `[layers, E]`, exact below 2^24."""
    weights = jnp.asarray([2.0 ** (LIMB_BITS * index) for index in range(LIMBS)], jnp.float32)
    return (limbs * weights).sum(axis=-1).reshape(-1, experts)


def balance(loads: jax.Array, shards: int | None) -> Values:
    """What every step tells: I, MaxVio, and the imbalance of expert-parallel shards.

    Args:
        loads: c_i, float32 `[layers, E]`.
        shards: Into how many shards of neighbours the experts are cut; None where that is not known.

    Returns:
        Absent for a layer that got no valid token.
    """
    total = loads.sum(axis=-1)
    some = total > 0

    def imbalance(parts: jax.Array) -> jax.Array:
        return parts.max(axis=-1) * parts.shape[-1] / jnp.where(some, total, 1.0)

    found = {"imbalance": (imbalance(loads), some), "max_violation": (imbalance(loads) - 1.0, some)}
    if shards is not None:
        found["shard_imbalance"] = (imbalance(loads.reshape(loads.shape[0], shards, -1).sum(axis=-1)), some)
    return found


def spread(loads: jax.Array) -> Values:
    """What a scan tells besides: H, H_norm, experts without a token, exp(H)."""
    total = loads.sum(axis=-1, keepdims=True)
    some = total[:, 0] > 0
    p = loads / jnp.where(total > 0, total, 1.0)
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0), axis=-1)
    return {
        "entropy": (entropy, some),
        "entropy_norm": (entropy / jnp.log(jnp.float32(loads.shape[-1])), some),
        "dead_experts": (jnp.sum(loads == 0, axis=-1).astype(jnp.float32), some),
        "effective_experts": (jnp.exp(entropy), some),
    }
