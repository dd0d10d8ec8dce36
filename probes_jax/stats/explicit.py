"""Explicit-sharding meshes: there the type of an array says how it lies, and nothing needs to be guessed.

On such a mesh a reshape of a sharded dimension is refused. Measuring therefore goes on in automatic mode, as on any
other mesh, with the cut that the types state; training stays in explicit mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from probes_jax.stats.partial import Split
from probes_jax.stats.summary import Summary, is_summary

Dims = tuple[tuple[str, ...], ...]


def spec_dims(spec: Any) -> Dims:
    """PartitionSpec to one tuple of mesh axes per dimension."""
    return tuple(() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec)


def explicit_axes(mesh: Any) -> tuple[str, ...]:
    """The axes of a mesh (concrete or abstract) that types speak of."""
    return tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)


def stated(x: Any) -> tuple[AbstractMesh, Dims] | None:
    """The mesh and the sharding that the type of `x` states; None where it states none."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or not explicit_axes(sharding.mesh):
        return None
    return sharding.mesh, spec_dims(sharding.spec)


def in_automatic_mode(f: Callable[..., Any], lies: Callable[..., Dims], x: Any) -> Any:
    """`f(x)` for an `f` that reshapes sharded dimensions.

    Args:
        f: From one array to one array.
        lies: From how `x` is sharded, and the sizes of the mesh axes, to how `f(x)` is.
        x: An array of any sharding.
    """
    found = stated(x)
    if found is None:
        return f(x)
    mesh, dims = found
    spec = PartitionSpec(*(group or None for group in lies(dims, mesh.shape)))
    with jax.sharding.use_abstract_mesh(mesh):  # the caller may have set none
        return jax.sharding.auto_axes(f, out_sharding=spec)(x)


def summarize_where_it_lies(summarize: Callable[..., Any], split: Split, *arrays: Any) -> Any:
    """`summarize(*arrays, split=split)`, whatever kind of mesh the arrays are on.

    Args:
        summarize: Returns a pytree of `Summary`.
        split: The guess of how the mesh shards the first array. What its type states goes before the guess.
        arrays: Arrays or None, the one that is cut first.
    """
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


def _together(stated: Dims, guess: Dims, explicit: tuple[str, ...]) -> Dims:
    """What is stated, and of the guess the axes that nothing is stated of."""
    rest = [tuple(axis for axis in group if axis not in explicit) for group in guess]
    rest += [()] * (len(stated) - len(rest))
    return tuple((*a, *b) for a, b in zip(stated, rest))


def row_specs(summary: Summary, axes: tuple[str, ...] | None = None) -> Summary:
    """Where the rows of a summary lie, in the structure of the summary; only as far as these mesh axes tell."""
    lies = (axis if axes is None or axis in axes else None for axis in summary.axes)
    spec = PartitionSpec(*(None,) * len(summary.stack_shape()), *lies)
    return Summary(spec, None if summary.maxima is None else spec, summary.kind, summary.axes)  # pyright: ignore
