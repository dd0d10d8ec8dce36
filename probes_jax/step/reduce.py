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
from probes_jax.stats.shape import WIDTH, collapse_parts
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
        parts: `Summary.parts` of the entries that have some, `[labels, 7]` by their keys.
    """

    def __init__(
        self, layout: Layout, sums: jax.Array, maxima: jax.Array, parts: dict[str, jax.Array], visible: int
    ) -> None:
        self.layout = layout
        self.visible = visible
        self.sums = sums
        self.maxima = maxima
        self.parts = parts
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
        array = _apart(array.reshape(1, width), part.axes, sizes, fill)
    # `where`, not a product: 0 * NaN is NaN.
    return jnp.where(owner[part.axes], array, fill).reshape(-1) if part.axes in owner else array.reshape(-1)


def _apart(array: jax.Array, axes: tuple[str, ...], sizes: dict[str, int], fill: float) -> jax.Array:
    """What this device holds, `[1, ...]`, as its row of `[rows, ...]`, the others at the identity."""
    index = jnp.int32(0)
    for axis in axes:
        index = index * sizes[axis] + jax.lax.axis_index(axis)
    rows = jnp.arange(math.prod(sizes[axis] for axis in axes), dtype=jnp.int32)
    return jnp.where(rows.reshape(-1, *(1,) * (array.ndim - 1)) == index, array, fill)


def has_parts(item: Measured) -> bool:
    """Whether an entry has what merges pair by pair. It then has one summary."""
    return any(part.parts is not None for part in item.parts)


def _owner(items: Sequence[Measured], sizes: dict[str, int]) -> Owner:
    owner: Owner = {}
    for axes in {part.axes for item in items for part in item.parts}:
        absent = [axis for axis in sizes if axis not in axes]
        if absent:
            owner[axes] = jnp.stack([jax.lax.axis_index(axis) == 0 for axis in absent]).all()
    return owner


def _pack_parts(items: Sequence[Measured], sizes: dict[str, int], owner: Owner) -> dict[tuple[str, ...], jax.Array]:
    """`Summary.parts` of all entries by their row axes, `[rows, labels, 7]`, with this device's row filled."""
    by_axes: dict[tuple[str, ...], list[jax.Array]] = {}
    for (part,) in (item.parts for item in items if has_parts(item)):
        assert part.parts is not None
        by_axes.setdefault(part.axes, []).append(part.parts.reshape(-1, WIDTH))
    found = {axes: _apart(jnp.concatenate(rows)[None], axes, sizes, 0.0) for axes, rows in by_axes.items()}
    return {axes: jnp.where(owner[axes], rows, 0.0) if axes in owner else rows for axes, rows in found.items()}


def _merged(items: Sequence[Measured], rows: dict[tuple[str, ...], jax.Array]) -> dict[str, jax.Array]:
    """The merged parts `[labels, 7]` of each entry that has some, from `_pack_parts` of all devices together."""
    whole = {axes: collapse_parts(found, 0) for axes, found in rows.items()}
    starts, out = dict.fromkeys(whole, 0), {}
    for item in items:
        if has_parts(item):
            axes, length = item.parts[0].axes, len(item.entry.labels)
            out[item.entry.key] = whole[axes][starts[axes] : starts[axes] + length]
            starts[axes] += length
    return out


def _pack(items: Sequence[Measured], reduce: Reduce, sizes: dict[str, int], owner: Owner) -> jax.Array:
    """All leaves of one reduction as one vector, in the order of the layout."""
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


def _add_up(
    sums: jax.Array, rows: dict[tuple[str, ...], jax.Array], names: tuple[str, ...]
) -> tuple[jax.Array, dict[tuple[str, ...], jax.Array]]:
    """The sums and the rows of all devices, by one psum."""
    joined = jnp.concatenate([sums, *(x.reshape(-1) for x in rows.values())]) if rows else sums
    joined = jax.lax.psum(spread(joined, names), names)
    start, found = sums.size, {}
    for axes, x in rows.items():
        found[axes] = joined[start : start + x.size].reshape(x.shape)
        start += x.size
    return joined[: sums.size], found


def reduce_measured(items: Sequence[Measured], program: str, mesh: Mesh | None, *, maxima: bool = True) -> Reduced:
    """Merges every entry over all devices.

    Values replicated over a mesh axis are counted on one device of that axis only. On a mesh this costs one psum and
    one pmax, whatever is measured; without a mesh nothing. Parts that do not add up go through the psum a row for each
    device that has one, and every device merges them. Under a `shard_map` of the caller's it goes over that one's
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

    def local(parts: list[tuple[Summary, ...]]) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        here = [dataclasses.replace(item, parts=found) for item, found in zip(items, parts, strict=True)]
        owner = _owner(here, sizes)
        sums = _pack(here, Reduce.SUM, sizes, owner)
        highest = _pack(here, Reduce.MAX, sizes, owner) if maxima else jnp.zeros((0,), jnp.float32)
        rows = _pack_parts(here, sizes, owner)
        if names:
            sums, rows = _add_up(sums, rows, names)
            highest = jax.lax.pmax(spread(highest, names), names) if highest.size else highest
        return sums, highest, _merged(here, rows)

    parts = [item.parts for item in items]
    if mesh is None or manual:
        return Reduced(layout, *local(parts), visible)
    specs = jax.tree.map(row_specs, parts, is_leaf=is_summary)
    whole = PartitionSpec()
    lies = (whole, whole, {item.entry.key: whole for item in items if has_parts(item)})
    run = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=lies, check_vma=False)
    return Reduced(layout, *run(parts), visible)
