"""Co-spike: loss and gradient norm spike on the same step. Counted, with the magnitude of what happened."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from probes_jax.detect.counter import count_if, zero


class CoSpikeState(NamedTuple):
    """Cumulative since the start of the run. 0-d arrays.

    Attributes:
        count: uint32, co-spike steps.
        magnitude: float32, sum of min(z_L, z_G) over the co-spike steps where that is finite.
        nonfinite: uint32, co-spike steps where it is infinite (both signals NaN or infinite). They are in `count`, but
            add nothing to `magnitude`, which would be infinite ever after.
    """

    count: jax.Array
    magnitude: jax.Array
    nonfinite: jax.Array


def init_co_spike() -> CoSpikeState:
    """Nothing happened yet."""
    return CoSpikeState(zero(), jnp.zeros((), jnp.float32), zero())


def update_co_spike(state: CoSpikeState, z_loss: jax.Array, z_grad: jax.Array, co_spike: jax.Array) -> CoSpikeState:
    """Counts one step.

    Args:
        state: What happened so far.
        z_loss: float32, 0-d, score of the loss.
        z_grad: float32, 0-d, score of the gradient norm.
        co_spike: bool, 0-d, C_t: both have a score, and both scores exceed theta (`is_spike`).

    Example:
        >>> import jax.numpy as jnp
        >>> yes = jnp.asarray(True)
        >>> state = update_co_spike(init_co_spike(), jnp.asarray(9.0), jnp.asarray(7.0), yes)
        >>> state = update_co_spike(state, jnp.asarray(jnp.inf), jnp.asarray(jnp.inf), yes)
        >>> print(state.count, state.magnitude, state.nonfinite)
        2 7.0 1
    """
    least = jnp.minimum(z_loss, z_grad).astype(jnp.float32)
    finite = jnp.isfinite(least)
    return CoSpikeState(
        count_if(state.count, co_spike),
        state.magnitude + jnp.where(co_spike & finite, least, 0.0),
        count_if(state.nonfinite, co_spike & ~finite),
    )
