"""Code under `jax.shard_map` or `jax.pmap` sees one shard of everything; what belongs to which device is said here.

Under `shard_map` the type of a value says over which mesh axes the devices differ in it. With `check_vma=False`, and
under `pmap`, types say nothing, and what is known of the value has to do.
"""

from __future__ import annotations

from typing import Any

import jax


def manual_axes() -> dict[str, int]:
    """The size of each mesh axis that a `shard_map` or `pmap` around this code has cut by; empty outside of both."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.manual_axes}


def differing(*values: Any) -> tuple[str, ...]:
    """The axes over which the types (or the types of these arrays) say that the devices differ, in mesh order."""
    kinds = [value if hasattr(value, "mat") else jax.typeof(value) for value in values if value is not None]
    found = {axis for kind in kinds if hasattr(kind, "mat") for axis in kind.mat.varying}
    return tuple(axis for axis in manual_axes() if axis in found)


def types_tell() -> bool:
    """Whether types say where devices differ: only where `shard_map` checks them."""
    return any(differing(jax.lax.axis_index(axis)) for axis in manual_axes())


def apart(guess: tuple[str, ...], *values: Any) -> tuple[str, ...]:
    """The axes over which the devices differ in one of these values: what types say, else the guess.

    Args:
        guess: Mesh axes; those that are not manual do not count.
        values: Arrays, or None.
    """
    axes = manual_axes()
    return differing(*values) if types_tell() else tuple(axis for axis in axes if axis in guess)


def spread(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x` as a value of which the type says that devices may differ in it over these axes, too."""
    missing = tuple(axis for axis in axes if axis not in differing(x)) if types_tell() else ()
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def add_up(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum of what the devices along these axes hold; `x` itself without axes."""
    return jax.lax.psum(spread(x, axes), axes) if axes else x
