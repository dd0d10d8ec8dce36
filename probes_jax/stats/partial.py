"""Partial rows: reduce each shard's part of an array where it lies, without resharding it.

Each sharded dimension `d` is split by reshape into (size of the mesh axis, d / size). Reducing all but the new axes
keeps every shard's part on its device, and the row comes out sharded over those mesh axes. A wrong guess of the
sharding costs a small collective, never a wrong number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from probes_jax.stats.barrier import sharding_barrier


@dataclasses.dataclass(frozen=True)
class Split:
    """How an array is cut into rows.

    Attributes:
        dims: For each array dimension, the mesh axes that shard it (major first); shorter than the array is padded.
        sizes: Size of each mesh axis used.
    """

    dims: tuple[tuple[str, ...], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, dims: tuple[tuple[str, ...], ...], mesh_shape: Mapping[str, int]) -> Split:
        """The cut by these mesh axes; axes of size 1 cut nothing and are left out.

        Args:
            dims: Mesh axes per dimension.
            mesh_shape: Size of every axis of the mesh (`mesh.shape`).

        Raises:
            ValueError: The mesh has no such axis, or one axis cuts two dimensions.
        """
        named = [axis for group in dims for axis in group]
        for axis in named:
            if axis not in mesh_shape:
                raise ValueError(f"Split dims name the mesh axis {axis!r}; the mesh has {tuple(mesh_shape)}")
            if named.count(axis) > 1:
                raise ValueError(f"Split dims name the mesh axis {axis!r} twice in {dims}; one axis cuts one dimension")
        used = [axis for group in dims for axis in group if mesh_shape[axis] > 1]
        dims = tuple(tuple(axis for axis in group if axis in used) for group in dims)
        return cls(dims, tuple((axis, mesh_shape[axis]) for axis in used))

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that cut."""
        return tuple(axis for group in self.dims for axis in group)


WHOLE = Split()


@dataclasses.dataclass(frozen=True)
class Partial:
    """An array cut into rows: `array` has the row axes first, then what is left to reduce."""

    array: jax.Array
    axes: tuple[str, ...]

    @property
    def inner(self) -> tuple[int, ...]:
        """The axes to reduce."""
        return tuple(range(len(self.axes), self.array.ndim))

    @property
    def rows(self) -> tuple[int, ...]:
        """Lengths of the row axes."""
        return self.array.shape[: len(self.axes)]

    @property
    def part_size(self) -> int:
        """Elements in one part."""
        return math.prod(self.array.shape[len(self.axes) :])


def cut(x: jax.Array, split: Split = WHOLE) -> Partial:
    """Cuts `x` into rows by `split`.

    Args:
        x: Any array.
        split: Mesh axes per dimension. A dimension that its axes do not divide is left whole.

    Returns:
        The array with one leading axis per mesh axis that really cuts it.
    """
    sizes = dict(split.sizes)
    shape: list[int] = []
    rows: list[int] = []
    axes: list[str] = []
    for index, length in enumerate(x.shape):
        group = split.dims[index] if index < len(split.dims) else ()
        total = math.prod(sizes[axis] for axis in group)
        if not group or length == 0 or length % total:
            shape.append(length)
            continue
        for axis in group:
            rows.append(len(shape))
            axes.append(axis)
            shape.append(sizes[axis])
        shape.append(length // total)
    if not axes:
        return Partial(x, ())
    x = jnp.reshape(sharding_barrier(x), shape)
    return Partial(jnp.moveaxis(x, rows, range(len(rows))), tuple(axes))
