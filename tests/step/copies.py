"""States in which one device's copy is not what it should be."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np


def with_copy(x: jax.Array, device: int, change) -> jax.Array:
    """The same array, with the copy of one device replaced by `change` of it."""
    shards = []
    for shard in x.addressable_shards:
        here = np.array(shard.data)
        shards.append(jax.device_put(change(here) if shard.device.id == device else here, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def flip(x: np.ndarray) -> np.ndarray:
    """The lowest bit of the last element, flipped."""
    raw = np.ascontiguousarray(x).copy().reshape(-1)
    raw[-1:].view(np.uint8)[0] ^= 1
    return raw.reshape(x.shape)


def swap(x: np.ndarray) -> np.ndarray:
    """Its first two elements the other way round."""
    flat = x.reshape(-1).copy()
    flat[[0, 1]] = flat[[1, 0]]
    return flat.reshape(x.shape)


def corrupted(state, where, device: int, change=flip):
    """A state in which one device has another copy of the tensor that `where` picks from (params, opt_state)."""
    parts = {"params": state.params, "opt_state": state.opt_state}
    target = where(parts)
    replace = lambda x: with_copy(x, device, change) if x is target else x  # noqa: E731
    return dataclasses.replace(state, **{name: jax.tree.map(replace, tree) for name, tree in parts.items()})
