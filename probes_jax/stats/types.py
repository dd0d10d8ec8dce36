"""What the types of arrays say on a mesh with explicit axes: there nothing about sharding needs to be guessed.

On such a mesh a reshape of a sharded dimension is refused. Measuring therefore goes on in automatic mode, as on any
other mesh, with the cut that the types state; training stays in explicit mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from probes_jax.stats.manual import differing, spread

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


def types_of(f: Callable[..., Any], *args: Any) -> Any:
    """`jax.eval_shape` whose leaves are types: they also say how the results lie on explicit axes."""
    jaxpr, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr.out_avals)


def filled(like: Any, value: float) -> jax.Array:
    """A float32 array of one value, of the shape of an array or a type, and lying as that does."""
    kind = like if isinstance(like, ShapedArray) else jax.typeof(like)
    sharding = getattr(kind, "sharding", None)
    if sharding is None or not explicit_axes(sharding.mesh):
        return spread(jnp.full(kind.shape, value, jnp.float32), differing(kind))
    with jax.sharding.use_abstract_mesh(sharding.mesh):  # the caller may have set none
        return jax.lax.full(kind.shape, value, jnp.float32, sharding=sharding)


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
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.sharding.auto_axes(f, out_sharding=spec)(x)
