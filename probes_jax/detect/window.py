"""The last values of a few signals, in a ring. Only finite values enter."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.detect.counter import turn_if


class WindowState(NamedTuple):
    """One ring for each of S signals.

    Attributes:
        values: float32 `[S, W]`, in the signal's unit. Slot `k % W` holds the k-th value that entered.
        count: uint32 `[S]`, values that ever entered (past 2^31: less a multiple of W, see `turn_if`).
    """

    values: jax.Array
    count: jax.Array

    @property
    def window(self) -> int:
        """Number of slots W."""
        return self.values.shape[-1]


def init_window(signals: int, window: int) -> WindowState:
    """Empty rings.

    Args:
        signals: Number of signals S.
        window: Slots W of each ring.

    Raises:
        ValueError: One of them is not at least 1 (an empty array cannot be checkpointed).
    """
    for name, value in (("signals", signals), ("window", window)):
        if value < 1:
            raise ValueError(f"init_window {name} must be at least 1, got {value}")
    return WindowState(jnp.zeros((signals, window), jnp.float32), jnp.zeros((signals,), jnp.uint32))


def filled(state: WindowState) -> jax.Array:
    """Which slots hold a value: bool `[S, W]`."""
    return jnp.arange(state.window, dtype=jnp.uint32) < state.count[:, None]


def push(state: WindowState, values: jax.Array, valid: jax.Array) -> WindowState:
    """Enters one value a signal; where it is not valid or not finite, that ring stays as it is.

    Args:
        state: The rings.
        values: float32 `[S]`.
        valid: bool `[S]`.

    Returns:
        The rings with the values in place of the oldest ones.

    Example:
        >>> import jax.numpy as jnp
        >>> state = init_window(signals=1, window=2)
        >>> for value in (1.0, 2.0, jnp.nan, 3.0):
        ...     state = push(state, jnp.asarray([value]), jnp.asarray([True]))
        >>> print(state.values.tolist(), state.count.tolist())
        [[3.0, 2.0]] [3]
    """
    enters = valid & jnp.isfinite(values)
    slot = state.count % np.uint32(state.window)
    here = (jnp.arange(state.window, dtype=jnp.uint32) == slot[:, None]) & enters[:, None]
    return WindowState(
        jnp.where(here, values.astype(jnp.float32)[:, None], state.values), turn_if(state.count, enters, state.window)
    )
