"""Counters that neither wrap nor lose a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_LARGEST = np.uint32(2**32 - 1)
_TURN = 2**31


def zero() -> jax.Array:
    """A counter at zero: uint32, 0-d."""
    return jnp.zeros((), jnp.uint32)


def count_if(counter: jax.Array, condition: jax.Array) -> jax.Array:
    """`counter` plus one where `condition` holds. Stays at 2^32 - 1 once there.

    Args:
        counter: uint32, any shape.
        condition: bool of the same shape.
    """
    return counter + (condition & (counter < _LARGEST)).astype(jnp.uint32)


def turn_if(counter: jax.Array, condition: jax.Array, window: int) -> jax.Array:
    """The counter of a ring of `window` slots, one further where `condition` holds.

    `counter % window` is the next slot and `min(counter, window)` the number of filled ones, for ever: past 2^31 a
    multiple of `window` is taken off.

    Args:
        counter: uint32, any shape.
        condition: bool of the same shape.
        window: Number of slots.
    """
    taken_off = np.uint32(_TURN // window * window - window)
    counter = jnp.where(counter >= np.uint32(_TURN), counter - taken_off, counter)
    return counter + condition.astype(jnp.uint32)
