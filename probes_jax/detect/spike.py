"""Spike scores of a few positive signals: log, rolling median, rolling deviation. State is the window alone.

    u_t = ln(x_t + eps)
    q_t = median(W_t)                  W_t: the earlier u in the window, the current one not among them
    D_t = median(|u_i - q_t|, i in W_t)
    z_t = 0.6745 (u_t - q_t) / max(D_t, floor)

Signed: only upward moves are spikes. A value that is NaN or infinite scores +inf and never enters the window, so it
rejects its own step and no other; a spike that does enter moves a median by at most one rank.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.detect.median import masked_median
from probes_jax.detect.window import WindowState, filled, push

EPSILON = 1e-30  # floor of x inside the logarithm: far below every loss or norm that means anything
NORMAL_MAD = 0.6745  # MAD of a standard normal: makes z count standard deviations where the values are normal


class SpikeScores(NamedTuple):
    """What one step's values are worth against their own history. All `[S]`.

    Attributes:
        u: float32, ln(x + eps); measured where `applicable`.
        q: float32, the median q_t; exists where `has_history`.
        deviation: float32, D_t before the floor; exists where `has_history`.
        z: float32, the score; exists where `scored`. +inf for a NaN or infinite value, with or
            without a history.
        applicable: bool, the value was there and is positive, NaN or infinite. Zero and below have no logarithm and
            are not spikes.
        has_history: bool, the window held the stated minimum of values.
        scored: bool, there is a score.
    """

    u: jax.Array
    q: jax.Array
    deviation: jax.Array
    z: jax.Array
    applicable: jax.Array
    has_history: jax.Array
    scored: jax.Array


def score_spikes(
    state: WindowState, x: jax.Array, present: jax.Array, *, min_history: int, floor: float
) -> tuple[WindowState, SpikeScores]:
    """Scores one step's values, then lets them into the window.

    Args:
        state: The last u-values, one ring a signal.
        x: float32 `[S]`, positive signals: loss, gradient norm, update norm.
        present: bool `[S]`, which of them were measured on this step. An absent one leaves its ring alone.
        min_history: Values the ring must hold before there is a score.
        floor: Floor of D, in log units. After a quiet stretch it alone decides: a rise by 1 % scores 0.67 over a floor
            of 1e-2 and 6.7 over one of 1e-3.

    Returns:
        The rings with this step's values, and the scores against the rings without them.

    Raises:
        ValueError: `min_history` exceeds the window, or a setting is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from probes_jax.detect.window import init_window
        >>> state = init_window(signals=1, window=8)
        >>> for x in (2.0, 2.1, 1.9, 2.0, 20.0):
        ...     state, scores = score_spikes(
        ...         state, jnp.asarray([x]), jnp.asarray([True]), min_history=4, floor=3e-3)
        >>> print(bool(scores.scored[0]), round(float(scores.z[0]), 1))
        True 63.7
    """
    if not 1 <= min_history <= state.window:
        raise ValueError(f"score_spikes min_history must be between 1 and the window {state.window}, got {min_history}")
    if not floor > 0:
        raise ValueError(f"score_spikes floor must be positive (it divides), got {floor}")
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x)
    applicable = present & ((x > 0) | ~finite)
    u = jnp.log(x + np.float32(EPSILON))
    there = filled(state)
    q = masked_median(state.values, there)
    deviation = masked_median(jnp.abs(state.values - q[:, None]), there)
    has_history = state.count >= np.uint32(min_history)
    z = np.float32(NORMAL_MAD) * (u - q) / jnp.maximum(deviation, np.float32(floor))
    z = jnp.where(finite, z, jnp.inf)
    scored = applicable & (has_history | ~finite)
    return push(state, u, applicable), SpikeScores(u, q, deviation, z, applicable, has_history, scored)


def is_spike(scores: SpikeScores, theta: float) -> jax.Array:
    """Which signals spike upward: bool `[S]`, `z > theta` where there is a score."""
    return scores.scored & (scores.z > np.float32(theta))
