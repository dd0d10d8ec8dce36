"""A summary on the device: partial rows that merge by sums and maxima, and a few pair by pair."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from probes_jax.spec.summary import KINDS, LIMBS, Reduce
from probes_jax.stats.exact import normalize_count
from probes_jax.stats.manual import differing, manual_axes
from probes_jax.stats.shape import collapse_parts, merge_parts, scale_parts
from probes_jax.stats.types import filled

_MANY = 8  # summaries; fewer are merged without ado


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("sums", "maxima", "parts"), meta_fields=("kind", "axes")
)
@dataclasses.dataclass(frozen=True)
class Summary:
    """Partial rows of one kind of summary: all sum-leaves in one array, all max-leaves in another.

    Attributes:
        sums: float32 `[*stack, *rows, columns]`: `stack` are leading axes added by a scan over layers, `rows` has one
            axis per entry of `axes`, the columns are those of `SummaryKind.columns`.
        maxima: The same for the max-leaves, or None for a kind without.
        kind: Key of `probes_jax.spec.summary.KINDS`.
        axes: For each row axis, the mesh axis that shards it. Empty on one device, or once reduced.
        parts: float32 `[*stack, *rows, 7]`, what merges neither by sums nor by maxima (`stats.shape`); None for most.
    """

    sums: jax.Array
    maxima: jax.Array | None
    kind: str
    axes: tuple[str, ...] = ()
    parts: jax.Array | None = None

    @classmethod
    def of(cls, leaves: Mapping[str, Any], kind: str, axes: tuple[str, ...] = ()) -> Summary:
        """From leaves by name: float32 `[*stack, *rows]`, or `[*stack, *rows, width]` where the leaf has a width."""

        def join(reduce: Reduce) -> jax.Array | None:
            found = [(leaves[leaf.name], leaf.width) for leaf in KINDS[kind].leaves if leaf.reduce is reduce]
            columns = [x if width else jnp.asarray(x)[..., None] for x, width in found]
            return jnp.concatenate(columns, axis=-1) if columns else None

        sums = join(Reduce.SUM)
        assert sums is not None, kind  # every kind that merges has a sum
        return cls(sums, join(Reduce.MAX), kind, axes)

    @property
    def leaves(self) -> dict[str, jax.Array]:
        """The leaves by name, as `of` takes them."""
        arrays = {Reduce.SUM: self.sums, Reduce.MAX: self.maxima}
        return {name: arrays[reduce][..., column] for name, (reduce, column) in KINDS[self.kind].columns.items()}

    def stack_shape(self) -> tuple[int, ...]:
        """Leading axes before the row axes."""
        return self.sums.shape[: self.sums.ndim - len(self.axes) - 1]

    def _with(self, sums: jax.Array, maxima: jax.Array | None, parts: jax.Array | None) -> Summary:
        return Summary(sums, maxima, self.kind, self.axes, parts)

    def narrowed(self, kind: str) -> Summary:
        """The same with the leaves of another kind, all of which it has, and without parts."""
        return self if kind == self.kind else Summary.of(self.leaves, kind, self.axes)

    def over(self, axes: tuple[str, ...]) -> Summary:
        """The same as this device's row of several, one for each device along these mesh axes (`shard_map`)."""

        def row(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else x.reshape(*x.shape[:-1], *(1,) * len(axes), x.shape[-1])

        sums = row(self.sums)
        assert sums is not None
        return Summary(sums, row(self.maxima), self.kind, (*self.axes, *axes), row(self.parts))

    def with_own_layers(self, sizes: tuple[tuple[str, int], ...]) -> Summary:
        """The same where a mesh shards the one stack axis: each device has a row that speaks for its own layers only.

        Args:
            sizes: The mesh axes that shard the stack axis, with their sizes; what does not divide is left as it is.
        """
        parts = math.prod(size for _, size in sizes)
        layers = self.sums.shape[0] if self.stack_shape() else 0
        if parts == 1 or layers % parts:
            return self

        def spread(x: jax.Array | None, nothing: float) -> jax.Array | None:
            if x is None:
                return None
            mine = x.reshape(parts, 1, layers // parts, *x.shape[1:])  # the first axis is sharded
            own = np.eye(parts, dtype=bool).reshape(parts, parts, *(1,) * (x.ndim))
            rows = jnp.where(own, mine, nothing).reshape(parts, layers, *x.shape[1:])
            return jnp.moveaxis(rows, 0, 1).reshape(layers, *(size for _, size in sizes), *x.shape[1:])

        sums = spread(self.sums, 0.0)
        assert sums is not None
        axes = tuple(axis for axis, _ in sizes)
        return Summary(sums, spread(self.maxima, -np.inf), self.kind, (*axes, *self.axes), spread(self.parts, 0.0))

    @property
    def row_count(self) -> int:
        """Rows over all devices, of one layer."""
        here = self.sums.shape[self.sums.ndim - 1 - len(self.axes) : -1]
        sizes = manual_axes()
        return math.prod(sizes.get(axis, length) for axis, length in zip(self.axes, here, strict=True))

    def merge(self, other: Summary) -> Summary:
        """The summary of both parts together. Associative and commutative.

        Raises:
            ValueError: The two are of different kinds or are sharded differently.
        """
        if (self.kind, self.axes) != (other.kind, other.axes):
            raise ValueError(f"cannot merge {self.kind} rows over {self.axes} with {other.kind} rows over {other.axes}")
        maxima = None if self.maxima is None or other.maxima is None else jnp.maximum(self.maxima, other.maxima)
        parts = None if self.parts is None or other.parts is None else merge_parts(self.parts, other.parts)
        return self._with(self.sums + other.sums, maxima, parts)

    def collapse(self, axis: int = 0) -> Summary:
        """Merges along one stack axis (microbatches, layers); of no entry at all, the summary of nothing."""
        maxima = None if self.maxima is None else jnp.max(self.maxima, axis=axis, initial=-jnp.inf)
        parts = None if self.parts is None else collapse_parts(self.parts, axis)
        return self._with(jnp.sum(self.sums, axis=axis), maxima, parts)

    def identity(self) -> Summary:
        """The summary of nothing, of the same shape and lying the same way: merging it changes nothing."""
        maxima = None if self.maxima is None else filled(self.maxima, -np.inf)
        return self._with(filled(self.sums, 0.0), maxima, None if self.parts is None else filled(self.parts, 0.0))

    def scaled(self, factor: jax.Array) -> Summary:
        """The summary of the same elements times a positive number (float32, 0-d)."""

        def scale(x: jax.Array, reduce: Reduce) -> jax.Array:
            power = np.array(KINDS[self.kind].powers(reduce))
            return x * jnp.where(power == 0, 1.0, jnp.where(power == 1, factor, factor * factor))

        maxima = None if self.maxima is None else scale(self.maxima, Reduce.MAX)
        parts = None if self.parts is None else scale_parts(self.parts, factor)
        return self._with(scale(self.sums, Reduce.SUM), maxima, parts)

    def carried(self) -> Summary:
        """The same with its counts carried, so that any number of further merges stays exact."""
        columns = KINDS[self.kind].count_columns
        if not columns:
            return self
        limbs = self.sums[..., :columns]
        exact = normalize_count(limbs.reshape(*limbs.shape[:-1], columns // LIMBS, LIMBS)).reshape(limbs.shape)
        return self._with(jnp.concatenate([exact, self.sums[..., columns:]], axis=-1), self.maxima, self.parts)


def merge_all(summaries: Iterable[Summary]) -> Summary:
    """Merges one or more summaries."""
    parts = tuple(summaries)
    if len(parts) > _MANY and not differing(*jax.tree.leaves(parts)):
        # Behind the barrier each is made once. XLA on CPU would pick the columns of hundreds apart in the kernel that
        # adds them, and compile that one for seconds. On TPU it would wait for the last and hold what others read.
        parts = jax.lax.platform_dependent(parts, cpu=jax.lax.optimization_barrier, default=lambda parts: parts)
    return functools.reduce(Summary.merge, parts)


def is_summary(node: object) -> bool:
    """Whether a node of a pytree is a whole summary (`is_leaf` of `jax.tree.map`)."""
    return isinstance(node, Summary)
