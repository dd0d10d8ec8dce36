"""The one reduction over the mesh: all sums in one psum, all maxima in one pmax, outside every loop."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from probes_jax.signals.measured import Measured
from probes_jax.spec.layout import HEADER, Layout
from probes_jax.spec.summary import KINDS, Reduce
from probes_jax.stats.explicit import row_specs
from probes_jax.stats.manual import manual_axes, spread
from probes_jax.stats.summary import Summary, is_summary

_IDENTITY = {Reduce.SUM: 0.0, Reduce.MAX: -jnp.inf}
_JOINED = 32  # pieces joined at once
_MERGE = {Reduce.SUM: jnp.add, Reduce.MAX: jnp.maximum}
Owner = dict[tuple[str, ...], jax.Array]  # row axes -> whether this device speaks for values replicated over the rest


class Reduced:
    """Fully merged leaves of a report, readable in the graph by entry and leaf name.

    Attributes:
        layout: All entries; those that are no part of the report are the last ones.
        visible: Number of the others.
        sums, maxima: All leaves, in the order of the layout.
    """

    def __init__(self, layout: Layout, sums: jax.Array, maxima: jax.Array, visible: int) -> None:
        self.layout = layout
        self.visible = visible
        self.sums = sums
        self.maxima = maxima
        self._slots = {(layout.entries[slot.entry].key, slot.reduce): slot for slot in layout.slots}
        self._kinds = {entry.key: KINDS[entry.kind] for entry in layout.entries}

    def leaf(self, key: str, name: str) -> jax.Array:
        """Merged leaf `[rows]` or `[rows, width]` of the entry whose first label is `key`."""
        reduce, column = self._kinds[key].columns[name]
        slot = self._slots[key, reduce]
        vector, start = (self.sums, HEADER) if reduce is Reduce.SUM else (self.maxima, HEADER + self.sums.size)
        words = jax.lax.slice_in_dim(vector, slot.offset - start, slot.offset - start + slot.size)
        return words.reshape(slot.shape)[:, column]


def _row(part: Summary, reduce: Reduce, gather: bool, sizes: dict[str, int], owner: Owner) -> jax.Array:
    """This device's share of a summary, flat, with everything it does not own at the identity."""
    fill = _IDENTITY[reduce]
    array = part.sums if reduce is Reduce.SUM else part.maxima
    assert array is not None  # asked for by kind
    width = array.shape[-1]
    if gather:
        rows = math.prod(sizes[axis] for axis in part.axes)
        index = jnp.int32(0)
        for axis in part.axes:
            index = index * sizes[axis] + jax.lax.axis_index(axis)
        hot = jnp.arange(rows, dtype=jnp.int32)[:, None] == index
        array = jnp.where(hot, array.reshape(1, width), fill)
    # `where`, not a product: 0 * NaN is NaN.
    return jnp.where(owner[part.axes], array, fill).reshape(-1) if part.axes in owner else array.reshape(-1)


def _pack(items: Sequence[Measured], reduce: Reduce, sizes: dict[str, int]) -> jax.Array:
    """All leaves of one reduction as one vector, in the order of the layout."""
    owner: Owner = {}
    for axes in {part.axes for item in items for part in item.parts}:
        absent = [axis for axis in sizes if axis not in axes]
        if absent:
            owner[axes] = jnp.stack([jax.lax.axis_index(axis) == 0 for axis in absent]).all()
    pieces = []
    for item in items:
        if KINDS[item.entry.kind].width(reduce):
            rows = [_row(part, reduce, item.gather, sizes, owner) for part in item.parts]
            pieces.append(functools.reduce(_MERGE[reduce], rows))
    return _join(pieces) if pieces else jnp.zeros((0,), jnp.float32)


def _join(pieces: list[jax.Array]) -> jax.Array:
    """Concatenates by groups.

    XLA would make one kernel that picks from thousands of scalars, and compile that one for longer than the rest of the
    program: the barriers keep the pieces whole, and the groups apart.
    """
    while len(pieces) > 1:
        pieces = jax.lax.optimization_barrier(pieces)
        groups = [pieces[start : start + _JOINED] for start in range(0, len(pieces), _JOINED)]
        pieces = [jnp.concatenate(group) for group in groups]
    return pieces[0]


def reduce_measured(items: Sequence[Measured], program: str, mesh: Mesh | None, *, maxima: bool = True) -> Reduced:
    """Merges every entry over all devices.

    Values replicated over a mesh axis are counted on one device of that axis only. On a mesh this costs one psum and
    one pmax, whatever is measured; without a mesh nothing. Under a `shard_map` of the caller's it goes over that one's
    axes, in place.

    Args:
        items: What was measured, as partial rows.
        program: Name of the program, for the layout.
        mesh: The mesh that the rows' axes belong to, or None on one device.
        maxima: False leaves the pmax out (for what must be known before the update).
    """
    items = sorted(items, key=lambda item: item.hidden)
    layout = Layout(program, tuple(item.entry for item in items))
    visible = sum(not item.hidden for item in items)
    manual = manual_axes()
    sizes = manual or (dict(mesh.shape) if mesh is not None else {})
    names = tuple(sizes)

    def local(parts: list[tuple[Summary, ...]]) -> tuple[jax.Array, jax.Array]:
        here = [dataclasses.replace(item, parts=found) for item, found in zip(items, parts, strict=True)]
        sums = _pack(here, Reduce.SUM, sizes)
        highest = _pack(here, Reduce.MAX, sizes) if maxima else jnp.zeros((0,), jnp.float32)
        if names:
            sums = jax.lax.psum(spread(sums, names), names)
            highest = jax.lax.pmax(spread(highest, names), names) if highest.size else highest
        return sums, highest

    parts = [item.parts for item in items]
    if mesh is None or manual:
        return Reduced(layout, *local(parts), visible)
    specs = jax.tree.map(row_specs, parts, is_leaf=is_summary)
    whole = PartitionSpec()
    run = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(whole, whole), check_vma=False)
    return Reduced(layout, *run(parts), visible)
