"""The gradient noise scale: how many tokens a batch takes before its gradient is more signal than noise.

S is the covariance of one token's gradient, G the gradient that a batch of all tokens would have. A microbatch of b_k
of a batch's B tokens has E|g_k|^2 = |G|^2 + tr(S) / b_k. With K microbatches, two numbers of one step tell both:

    A = sum_k b_k |g_k|^2 / B,  E A = |G|^2 + K tr(S) / B;      E |g|^2 = |G|^2 + tr(S) / B  of the whole batch's g

Both estimates are without bias and noisy, so numerator and denominator of the scale are smoothed apart (McCandlish et
al. 2018, "An Empirical Model of Large-Batch Training", appendix A).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

KEEP = np.float32(0.9)  # of the mean so far, at every measurement


class NoiseState(NamedTuple):
    """Exponential means; both began at zero at the same time, so that their ratio needs no correction."""

    trace: jax.Array  # float32 []: of tr(S)
    square: jax.Array  # float32 []: of |G|^2


def init_noise() -> NoiseState:
    """Before the first measurement."""
    return NoiseState(jnp.float32(0.0), jnp.float32(0.0))


def estimate_noise(
    parts: jax.Array, whole: jax.Array, tokens: jax.Array, microbatches: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """tr(S) and |G|^2 of one step. All arguments are float32, 0-d.

    Args:
        parts: A.
        whole: |g|^2 of the whole batch.
        tokens: B, the sum of token weights.
        microbatches: K, those that hold a valid token.

    Returns:
        tr(S), |G|^2 (either may come out negative), and whether they are known: not for K < 2, nor when the gradient is
        not finite.

    Example:
        >>> [float(x) for x in estimate_noise(*map(jnp.float32, (5.0, 3.0, 8.0, 2.0)))]
        [16.0, 1.0, 1.0]
    """
    known = (microbatches > 1) & (tokens > 0) & jnp.isfinite(parts) & jnp.isfinite(whole)
    between = (parts - whole) / jnp.where(known, microbatches - 1, 1.0)  # tr(S) / B
    return between * tokens, whole - between, known


def update_noise(state: NoiseState, trace: jax.Array, square: jax.Array, known: jax.Array) -> NoiseState:
    """Takes one estimate into the means, where it is known."""
    means = (KEEP * old + (1 - KEEP) * new for old, new in zip(state, (trace, square)))
    return NoiseState(*(jnp.where(known, mean, old) for mean, old in zip(means, state)))


def noise_scale(state: NoiseState) -> tuple[jax.Array, jax.Array]:
    """tr(S) / |G|^2 of the means, in tokens, and whether there is one: not while the mean of |G|^2 is not positive."""
    some = state.square > 0
    return state.trace / jnp.where(some, state.square, 1.0), some
