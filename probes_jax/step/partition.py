"""What is known of the mesh: which axes shard tokens, and how each parameter is cut."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from probes_jax.spec.plan import Plan
from probes_jax.stats.manual import apart
from probes_jax.stats.partial import WHOLE, Split
from probes_jax.stats.types import Dims, spec_dims


def find_mesh(*trees: Any) -> Mesh | None:
    """The mesh of the first array or sharding in the trees that has one with more than one device.

    Raises:
        ValueError: Two different meshes are in use, or this is inside of a JAX transform.
    """
    found: list[Mesh] = []
    for leaf in jax.tree.leaves(trees, is_leaf=lambda x: isinstance(x, NamedSharding)):
        sharding = leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            found.append(sharding.mesh)
    current = _current_mesh()
    if isinstance(current, Mesh) and not current.empty:
        found.append(current)
    meshes = list(dict.fromkeys(mesh for mesh in found if mesh.size > 1))
    if len(meshes) > 1:
        raise ValueError(f"batch and shardings use different meshes ({meshes[0]}, {meshes[1]}); use one mesh for both")
    return meshes[0] if meshes else None


def _current_mesh() -> Any:
    try:
        return jax.sharding.get_mesh()
    except ValueError as error:
        raise ValueError(
            "TrainState.create and Monitor.create are called outside of jax.jit, vmap and shard_map; for a population "
            "make a state for every seed and stack them (docs/own_loop.md)"
        ) from error


class Feature(NamedTuple):
    """A mesh axis that does not shard tokens."""

    axis: str
    lengths: frozenset[int]  # of the parameter axes that it shards
    last: bool  # whether one of them is a parameter's last or last but one: then an activation's may be cut by it


@dataclasses.dataclass(frozen=True)
class Partition:
    """The mesh and the guess of how activations lie on it.

    Attributes:
        mesh: None on one device.
        token_axes: For each leading dimension of a token array, the mesh axes that shard it.
        features: Mesh axes that shard features, heads or experts of activations, the last axes of parameters first.
        device: Where everything is without a mesh; None: the default device.
        manual: Axes of the `shard_map` or `pmap` of the user's that the step is under.
    """

    mesh: Mesh | None = None
    token_axes: Dims = ()
    features: tuple[Feature, ...] = ()
    device: Any = None
    manual: tuple[str, ...] = ()

    def everywhere(self) -> Sharding:
        """Replicated over the mesh, or on the one device."""
        if self.mesh is not None:
            return NamedSharding(self.mesh, PartitionSpec())
        return SingleDeviceSharding(self.device or jax.devices()[0])

    @property
    def shards(self) -> int:
        """Number of token shards that one program sees."""
        if self.manual:
            return 1
        return math.prod(self.mesh.shape[axis] for group in self.token_axes for axis in group) if self.mesh else 1

    @contextlib.contextmanager
    def advice(self) -> Iterator[None]:
        """Adds to an error about types on an explicit mesh what to do about it."""
        try:
            yield
        except Exception as error:
            if self.mesh is not None and type(error).__name__ == "ShardingTypeError":
                error.add_note(
                    f"The mesh {dict(self.mesh.shape)} has explicit axes, which this layer or loss is not made for. "
                    "Give it out_sharding= where it has one, or make the mesh automatic: "
                    "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
                )
            raise

    def apart(self, *values: Any) -> tuple[str, ...]:
        """Under the user's `shard_map`, the axes over which devices hold tokens of their own; else none."""
        return apart(self._tokens.axes, *values)

    @property
    def _tokens(self) -> Split:
        return Split(self.token_axes)

    def _split(self, dims: Dims) -> Split:
        return WHOLE if self.mesh is None else Split.of(dims, self.mesh.shape)

    def tokens(self, shape: tuple[int, ...]) -> Split:
        """Split of a token array `[batch, ...]`."""
        if self.manual:
            return self._tokens
        return self._split(self.token_axes[: len(shape)])

    def activation(self, shape: tuple[int, ...], batch: int) -> Split:
        """Split of an activation: tokens are cut where the batch is, features where a parameter is cut at that length.

        Cutting what is not sharded is free (every device keeps one of the rows that it has), and not cutting what is
        costs a collective. So in doubt it is cut: tokens on the first axis where none has the batch's length (tokens of
        all examples in one axis), features on the last, of four axes on the last but one (heads).
        """
        if self.manual:
            return self._tokens
        if self.mesh is None or not shape:
            return WHOLE
        dims: list[tuple[str, ...]] = [()] * len(shape)
        at = shape.index(batch) if batch in shape else 0
        dims[at : at + len(self.token_axes)] = self.token_axes[: len(shape) - at]
        ends = [len(shape) - 2, len(shape) - 1] if len(shape) > 3 else [len(shape) - 1]
        free = [index for index in (*ends, *range(len(shape))) if not dims[index]]
        for feature in self.features:
            if any(feature.axis in group for group in dims):
                continue
            likely = [index for index in free if shape[index] in feature.lengths]
            for index in (*likely, *(ends if feature.last else ())):
                group = (*dims[index], feature.axis)
                if index in free and shape[index] % math.prod(self.mesh.shape[axis] for axis in group) == 0:
                    dims[index] = group
                    break
        return self._split(tuple(dims))

    def heads(self, shape: tuple[int, ...]) -> Split:
        """Split of numbers of each query and head, `[*batch, T, heads]`: heads by the axes that shard features."""
        if self.manual or self.mesh is None:
            return self.tokens(shape)
        tokens = self.token_axes[: len(shape) - 1]
        used = [axis for group in tokens for axis in group]
        cut: tuple[str, ...] = ()
        for axis in (each.axis for each in self.features if each.last and each.axis not in used):
            if shape[-1] % math.prod(self.mesh.shape[name] for name in (*cut, axis)) == 0:
                cut = (*cut, axis)
        return self._split((*tokens, *((),) * (len(shape) - 1 - len(tokens)), cut))

    def with_features(self, params: Any, said: tuple[str, ...] | None = None) -> Partition:
        """The same with what the parameters' shardings tell of the axes that do not shard tokens.

        Args:
            params: Arrays, or shapes with shardings.
            said: The axes that the plan names; None for all.
        """
        if self.mesh is None or self.manual:
            return self
        tokens = {axis for group in self.token_axes for axis in group}
        found = {feature.axis: feature for feature in self.features}
        for leaf in jax.tree.leaves(params):
            sharding = getattr(leaf, "sharding", None)
            if not isinstance(sharding, NamedSharding):
                continue
            for index, group in enumerate(spec_dims(sharding.spec)):
                for axis in group:
                    if axis not in tokens and (said is None or axis in said):
                        old = found.get(axis, Feature(axis, frozenset(), False))
                        last = old.last or index >= max(leaf.ndim - 2, 1)  # the first may be one of layers
                        found[axis] = Feature(axis, old.lengths | {leaf.shape[index]}, last)
        return dataclasses.replace(self, features=tuple(sorted(found.values(), key=lambda feature: not feature.last)))

    def parameter(self, array: Any) -> Split:
        """Split of a parameter, from its own sharding.

        A last axis that is whole is cut where other parameters are cut at that length: the gradient of a replicated
        bias lies as the activation that it was added to.
        """
        sharding = getattr(array, "sharding", None)
        if self.mesh is None or not isinstance(sharding, NamedSharding):
            return WHOLE
        dims = [*spec_dims(sharding.spec), *[()] * array.ndim][: array.ndim]
        for feature in self.features:
            used = any(feature.axis in group for group in dims)
            if dims and not dims[-1] and not used and array.shape[-1] in feature.lengths:
                dims[-1] = (feature.axis,)
        return self._split(tuple(dims))


def _home(batch: Any) -> Any:
    """The device of a batch that lies on one."""
    for leaf in jax.tree.leaves(batch):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, Sharding) and len(sharding.device_set) == 1:
            return next(iter(sharding.device_set))
    return None


def find_partition(plan: Plan, batch: Any, mesh: Mesh | None, manual: tuple[str, ...] = ()) -> Partition:
    """Which mesh axes shard tokens: the plan's word, else the sharding of the example batch.

    Args:
        plan: What the user says.
        batch: An example batch.
        mesh: From `find_mesh`.
        manual: Axes of the `shard_map` or `pmap` that the step is under: unless said, all of them shard tokens.

    Raises:
        ValueError: The plan or `manual` names an axis that the mesh does not have.
    """
    for axis in manual:
        if mesh is not None and axis not in mesh.shape:
            raise ValueError(f"axis_names names the mesh axis {axis!r}; the mesh has {tuple(mesh.shape)}")
    if manual and plan.token_axes is None:
        return Partition(mesh, (manual,), device=_home(batch), manual=manual)
    if manual:
        absent = [axis for axis in plan.token_axes or () if axis not in manual]
        if absent:
            raise ValueError(f"Plan token_axes names {absent[0]!r}, which is not among axis_names={manual}")
        return Partition(mesh, (plan.token_axes or (),), device=_home(batch), manual=manual)
    if mesh is None:
        if plan.token_axes:
            raise ValueError(
                f"Plan token_axes={plan.token_axes}, but no mesh was found: shard the example batch, or pass shardings="
            )
        return Partition(device=_home(batch))
    for axis in (*(plan.token_axes or ()), *(plan.feature_axes or ())):
        if axis not in mesh.shape:
            raise ValueError(f"Plan names the mesh axis {axis!r}; the mesh has {tuple(mesh.shape)}")
    said = tuple(Feature(axis, frozenset(), True) for axis in plan.feature_axes or ())
    if plan.token_axes is not None:
        return Partition(mesh, (plan.token_axes,), said)
    specs = [
        spec_dims(leaf.sharding.spec)
        for leaf in jax.tree.leaves(batch)
        if isinstance(getattr(leaf, "sharding", None), NamedSharding) and leaf.ndim
    ]
    token_axes = max(specs, key=lambda dims: sum(len(group) for group in dims), default=())[:2]
    return Partition(mesh, token_axes, said)
