"""A step under a `shard_map` or `pmap` of the user's: whether it is where it should be, and what holds there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from probes_jax.signals.parameters import ParameterInfo
from probes_jax.stats.manual import add_up, differing, manual_axes, types_tell
from probes_jax.stats.types import spec_dims
from probes_jax.step.partition import Partition
from probes_jax.step.select import Path, flatten


def check_place(said: tuple[str, ...]) -> None:
    """Refuses a call from elsewhere than from inside of a `shard_map` or `pmap` over these axes; `()`: of none.

    Raises:
        ValueError: With what to do.
    """
    here = tuple(manual_axes())
    if here and not said:
        raise ValueError(
            f"the step is under shard_map or pmap over {here}; make the monitor for that: "
            f"pj.Monitor.create(axis_names={here}, ...)"
        )
    if set(here) != set(said):
        place = f"under shard_map or pmap over {here}" if here else "outside of shard_map and pmap"
        raise ValueError(
            f"the monitor was made with axis_names={said}, but is called {place}; axis_names are the axes of the one "
            "that the call is inside of, and () outside of both"
        )


def check_shards(params: Any, gradients: Any, infos: dict[Path, ParameterInfo]) -> None:
    """Refuses what could only be measured wrongly under `shard_map`.

    That is a gradient that differs between devices of which the parameter does not (where types tell), and a stack of
    layers of which a device holds some.

    Raises:
        ValueError: With what to do.
    """
    held = flatten(params)
    for path, info in infos.items():
        layers = held[path].shape[info.stack_axis] if info.stack_axis is not None else len(info.names)
        if layers != len(info.names):
            raise ValueError(
                f"parameter {'/'.join(map(str, path))} stacks {len(info.names)} layers, of which this device holds "
                f"{layers}; call measure outside of shard_map, where all of them are"
            )
    for path, gradient in flatten(gradients).items():
        own = [axis for axis in differing(gradient) if axis not in differing(held[path])]
        if own:
            raise ValueError(
                f"the gradient of {'/'.join(map(str, path))} differs over the mesh axis {own[0]!r}, the parameter does "
                f"not; measure the gradient that all devices have together: jax.lax.pmean(gradients, {own[0]!r})"
            )


def of_all_devices(gradients: Any, axes: tuple[str, ...], infos: dict[Path, ParameterInfo]) -> Any:
    """Gradients of each device's share of the loss, added up; JAX has done that already where types tell.

    A parameter that lies in shards over an axis (`infos`) was added up over it by the transpose of its `all_gather`.
    """
    if types_tell():
        return gradients
    leaves = [
        add_up(gradient, tuple(axis for axis in axes if axis not in infos[path].split.axes))
        for path, gradient in flatten(gradients).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(gradients), leaves)


def under(partition: Partition, trace: Callable[..., Any], args: Any) -> Callable[..., None]:
    """`trace` inside of a `shard_map` like the user's, so that the model may name its axes.

    Every array is cut as it lies. Without a mesh (`pmap`) an axis has size 1, and the batch is that of one device.
    """
    manual = partition.manual
    mesh = partition.mesh or AbstractMesh((1,) * len(manual), manual)

    def spec(x: Any) -> PartitionSpec:
        found = getattr(x, "sharding", None)
        dims = spec_dims(found.spec) if isinstance(found, NamedSharding) else ()
        return PartitionSpec(*(tuple(axis for axis in group if axis in manual) or None for group in dims))

    def run(*args: Any) -> None:
        trace(*args)

    return jax.shard_map(
        run, mesh=mesh, in_specs=jax.tree.map(spec, args), out_specs=None, axis_names=set(manual), check_vma=False
    )
