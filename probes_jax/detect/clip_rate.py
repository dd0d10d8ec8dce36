"""How often the gradient was clipped lately: (1/W') sum over the last W steps of 1[G_2 > c]."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.detect.counter import turn_if, zero


class ClipState(NamedTuple):
    """The last W answers, in a ring.

    Attributes:
        flags: uint8 `[W]`, 1 where clipped. Slot `k % W` holds the k-th answer; unfilled slots are 0.
        steps: uint32, 0-d, answers so far (past 2^31: less a multiple of W).
    """

    flags: jax.Array
    steps: jax.Array


def init_clip(window: int) -> ClipState:
    """An empty ring of `window` slots.

    Raises:
        ValueError: `window` is below 1.
    """
    if window < 1:
        raise ValueError(f"init_clip window must be at least 1, got {window}")
    return ClipState(jnp.zeros((window,), jnp.uint8), zero())


def push_clip(state: ClipState, clipped: jax.Array, present: jax.Array) -> tuple[ClipState, jax.Array, jax.Array]:
    """Enters one step's answer, and gives the rate with it: over W' answers, those so far up to W.

    Args:
        state: The ring.
        clipped: bool, 0-d, whether the gradient norm exceeded the threshold.
        present: bool, 0-d. False (an empty step, no clip stage) enters nothing.

    Returns:
        The ring; the rate, float32, 0-d, in [0, 1]; and whether there was an answer at all, bool, 0-d.

    Example:
        >>> import jax.numpy as jnp
        >>> state = init_clip(window=2)
        >>> for clipped in (True, True, False):
        ...     state, rate, known = push_clip(state, jnp.asarray(clipped), jnp.asarray(True))
        >>> print(rate, known)
        0.5 True
    """
    window = state.flags.shape[0]
    here = (jnp.arange(window, dtype=jnp.uint32) == state.steps % np.uint32(window)) & present
    flags = jnp.where(here, clipped.astype(jnp.uint8), state.flags)
    steps = turn_if(state.steps, present, window)
    seen = jnp.minimum(steps, np.uint32(window)).astype(jnp.float32)
    rate = jnp.sum(flags, dtype=jnp.uint32).astype(jnp.float32) / jnp.maximum(seen, 1.0)
    return ClipState(flags, steps), rate, steps > np.uint32(0)
