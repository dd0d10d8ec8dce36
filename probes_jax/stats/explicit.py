"""Summaries of arrays on any kind of mesh, and inside of `shard_map`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from probes_jax.stats.barrier import sharding_barrier
from probes_jax.stats.manual import apart, manual_axes
from probes_jax.stats.partial import WHOLE, Split
from probes_jax.stats.summary import Summary, is_summary
from probes_jax.stats.types import Dims, explicit_axes, stated


def summarize_where_it_lies(summarize: Callable[..., Any], split: Split, *arrays: Any) -> Any:
    """`summarize(*arrays, split=split)`, whatever kind of mesh the arrays are on.

    Args:
        summarize: Returns a pytree of `Summary`.
        split: The guess of how the mesh shards the first array. What its type states goes before the guess.
        arrays: Arrays or None, the one that is cut first.
    """
    if manual_axes():
        return of_this_device(summarize(*arrays, split=WHOLE), split.axes, *arrays)
    found = stated(arrays[0])
    if found is None:
        return summarize(*arrays, split=split)
    mesh, dims = found
    known = explicit_axes(mesh)
    exact = Split.of(_together(dims, split.dims, known), mesh.shape)

    def run(*arrays: Any) -> Any:
        return summarize(*arrays, split=exact)

    with jax.sharding.use_abstract_mesh(mesh):
        shapes = jax.eval_shape(run, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays))
        lies = jax.tree.map(lambda rows: row_specs(rows, known), shapes, is_leaf=is_summary)
        return jax.sharding.auto_axes(run, out_sharding=lies)(*arrays)


def summarize_on_each_device(summarize: Callable[..., Any], split: Split, mesh: Mesh | None, *arrays: jax.Array) -> Any:
    """As `summarize_where_it_lies`, but each device computes the rows of its own part, whatever the compiler thinks.

    For what is more than a few reductions: left to itself, XLA spreads that over mesh axes that cut nothing here, and
    pays with an exchange for each step.

    Args:
        summarize: Returns a pytree of `Summary`.
        split: How the mesh shards the first array; of the others as many last dimensions as they have.
        mesh: The mesh; None on one device.
        arrays: Arrays, the one that is cut first.
    """
    if mesh is None or not split.axes or manual_axes() or stated(arrays[0]) is not None:
        return summarize_where_it_lies(summarize, split, *arrays)
    shape, sizes = arrays[0].shape, dict(split.sizes)
    if any(length % math.prod(sizes[axis] for axis in group) for length, group in zip(shape, split.dims)):
        return summarize_where_it_lies(summarize, split, *arrays)
    dims = [group or None for group in (*split.dims, *((),) * (len(shape) - len(split.dims)))]
    axes = tuple(axis for axis in mesh.axis_names if axis in split.axes)

    def run(*arrays: jax.Array) -> Any:
        rows = summarize(*arrays, split=WHOLE)
        return jax.tree.map(lambda summary: summary.over(axes), rows, is_leaf=is_summary)

    lies = jax.tree.map(row_specs, jax.eval_shape(run, *arrays), is_leaf=is_summary)
    given = tuple(PartitionSpec(*dims[len(shape) - x.ndim :]) for x in arrays)
    return jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=lies)(*map(sharding_barrier, arrays))


def of_this_device(rows: Any, guess: tuple[str, ...], *values: Any) -> Any:
    """Summaries as this device's rows, of as many as there are devices that differ; as they are outside of `shard_map`.

    Args:
        rows: Pytree of `Summary`, of what this device holds.
        guess: Mesh axes over which the devices differ, for where types do not tell.
        values: What was measured.
    """
    axes = apart(guess, *values)
    return jax.tree.map(lambda summary: summary.over(axes), rows, is_leaf=is_summary)


def _together(stated: Dims, guess: Dims, explicit: tuple[str, ...]) -> Dims:
    """What is stated, and of the guess the axes that nothing is stated of."""
    rest = [tuple(axis for axis in group if axis not in explicit) for group in guess]
    rest += [()] * (len(stated) - len(rest))
    return tuple((*a, *b) for a, b in zip(stated, rest))


def row_specs(summary: Summary, axes: tuple[str, ...] | None = None) -> Summary:
    """Where the rows of a summary lie, in the structure of the summary; only as far as these mesh axes tell."""
    lies = (axis if axes is None or axis in axes else None for axis in summary.axes)
    spec = PartitionSpec(*(None,) * len(summary.stack_shape()), *lies)
    maxima, parts = (None if x is None else spec for x in (summary.maxima, summary.parts))
    return Summary(spec, maxima, summary.kind, summary.axes, parts)  # pyright: ignore
