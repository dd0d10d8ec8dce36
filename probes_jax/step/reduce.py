"""The one reduction over the mesh: all sums in one psum, all maxima in one pmax, outside every loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from probes_jax.signals.measured import Measured
from probes_jax.spec.layout import HEADER, Layout
from probes_jax.spec.summary import KINDS, Leaf, Reduce
from probes_jax.stats.summary import Summary

_IDENTITY = {Reduce.SUM: 0.0, Reduce.MAX: -jnp.inf}
_MERGE = {Reduce.SUM: jnp.add, Reduce.MAX: jnp.maximum}


class Reduced:
    """Fully merged leaves of a report, readable in the graph by entry and leaf name."""

    def __init__(self, layout: Layout, sums: jax.Array, maxima: jax.Array) -> None:
        self.layout = layout
        self.sums = sums
        self.maxima = maxima
        self._slots = {(layout.entries[s.entry].key, s.leaf.name): s for s in layout.slots}

    def leaf(self, key: str, name: str) -> jax.Array:
        """Merged leaf `[rows]` or `[rows, width]` of the entry whose first label is `key`."""
        slot = self._slots[key, name]
        vector, start = (
            (self.sums, HEADER) if slot.leaf.reduce is Reduce.SUM else (self.maxima, HEADER + self.sums.size)
        )
        return jax.lax.dynamic_slice_in_dim(vector, slot.offset - start, slot.size).reshape(slot.shape)


def _row(
    summary: Summary, leaf: Leaf, gather: bool, sizes: dict[str, int], owner: dict[tuple[str, ...], jax.Array]
) -> jax.Array:
    """This device's share of one leaf, flat, with everything it does not own at the identity."""
    fill = _IDENTITY[leaf.reduce]
    x = summary.leaves[leaf.name]
    tail = (leaf.width,) if leaf.width else ()
    if not gather:
        x = x.reshape(-1)
    else:
        rows = math.prod(sizes[axis] for axis in summary.axes)
        index = jnp.int32(0)
        for axis in summary.axes:
            index = index * sizes[axis] + jax.lax.axis_index(axis)
        hot = (jnp.arange(rows, dtype=jnp.int32) == index).reshape((rows,) + (1,) * len(tail))
        x = jnp.where(hot, x.reshape((1, *tail)), fill).reshape(-1)
    # `where`, not a product: 0 * NaN is NaN.
    return jnp.where(owner[summary.axes], x, fill) if summary.axes in owner else x


def _pack(items: Sequence[Measured], reduce: Reduce, sizes: dict[str, int]) -> jax.Array:
    """All leaves of one reduction as one vector, in the order of the layout."""
    owner: dict[tuple[str, ...], jax.Array] = {}
    for axes in {part.axes for item in items for part in item.parts}:
        absent = [axis for axis in sizes if axis not in axes]
        if absent:
            owner[axes] = jnp.stack([jax.lax.axis_index(axis) == 0 for axis in absent]).all()
    pieces = []
    for item in items:
        for leaf in KINDS[item.entry.kind].leaves:
            if leaf.reduce is reduce:
                rows = [_row(part, leaf, item.gather, sizes, owner) for part in item.parts]
                total = rows[0]
                for row in rows[1:]:
                    total = _MERGE[reduce](total, row)
                pieces.append(total)
    return jnp.concatenate(pieces) if pieces else jnp.zeros((0,), jnp.float32)


def reduce_measured(items: Sequence[Measured], program: str, mesh: Mesh | None, *, maxima: bool = True) -> Reduced:
    """Merges every entry over all devices.

    Values replicated over a mesh axis are counted on one device of that axis only. On a mesh this costs one psum and
    one pmax, whatever is measured; without a mesh nothing.

    Args:
        items: What was measured, as partial rows.
        program: Name of the program, for the layout.
        mesh: The mesh that the rows' axes belong to, or None on one device.
        maxima: False leaves the pmax out (for what must be known before the update).
    """
    layout = Layout(program, tuple(item.entry for item in items))
    sizes = dict(mesh.shape) if mesh is not None else {}

    def local(parts: list[list[dict[str, jax.Array]]]) -> tuple[jax.Array, jax.Array]:
        here = [
            Measured(
                item.entry, tuple(Summary(leaves, p.kind, p.axes) for leaves, p in zip(found, item.parts)), item.gather
            )
            for found, item in zip(parts, items)
        ]
        sums = _pack(here, Reduce.SUM, sizes)
        highest = _pack(here, Reduce.MAX, sizes) if maxima else jnp.zeros((0,), jnp.float32)
        if mesh is not None:
            names = tuple(sizes)
            sums = jax.lax.psum(sums, names)
            highest = jax.lax.pmax(highest, names) if highest.size else highest
        return sums, highest

    leaves = [[part.leaves for part in item.parts] for item in items]
    if mesh is None:
        sums, highest = local(leaves)
    else:
        specs = [[{name: _spec(part, name) for name in part.leaves} for part in item.parts] for item in items]
        whole = PartitionSpec()
        sums, highest = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(whole, whole), check_vma=False)(
            leaves
        )
    return Reduced(layout, sums, highest)


def _spec(summary: Summary, name: str) -> PartitionSpec:
    width = next(leaf.width for leaf in KINDS[summary.kind].leaves if leaf.name == name)
    stack = summary.leaves[name].ndim - len(summary.axes) - (1 if width else 0)
    return PartitionSpec(*(None,) * stack, *summary.axes)
