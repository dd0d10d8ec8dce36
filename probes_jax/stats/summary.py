"""A summary on the device: partial rows that merge by sums and maxima."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from probes_jax.spec.summary import KINDS, Leaf, Reduce


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("leaves",),
    meta_fields=("kind", "axes"),
)
@dataclasses.dataclass(frozen=True)
class Summary:
    """Partial rows of one kind of summary.

    Attributes:
        leaves: Name to float32 array of shape `[*stack, *rows, *width]`: `stack` are leading axes added by a scan
            over layers, `rows` has one axis per entry of `axes`, `width` is the leaf's own (limbs of a count).
        kind: Key of `probes_jax.spec.summary.KINDS`.
        axes: For each row axis, the mesh axis that shards it. Empty on one device, or once reduced.
    """

    leaves: dict[str, jax.Array]
    kind: str
    axes: tuple[str, ...] = ()

    def stack_shape(self) -> tuple[int, ...]:
        """Leading axes before the row axes."""
        leaf = KINDS[self.kind].leaves[0]
        array = self.leaves[leaf.name]
        return array.shape[: array.ndim - len(self.axes) - (1 if leaf.width else 0)]

    def merge(self, other: Summary) -> Summary:
        """The summary of both parts together. Associative and commutative.

        Raises:
            ValueError: The two are of different kinds or are sharded differently.
        """
        if (self.kind, self.axes) != (other.kind, other.axes):
            raise ValueError(f"cannot merge {self.kind} rows over {self.axes} with {other.kind} rows over {other.axes}")
        return dataclasses.replace(
            self, leaves={n: _MERGE[_reduce(self.kind, n)](a, other.leaves[n]) for n, a in self.leaves.items()}
        )

    def collapse(self, axis: int = 0) -> Summary:
        """Merges along one stack axis (microbatches, layers)."""
        fold = {Reduce.SUM: jnp.sum, Reduce.MAX: jnp.max}
        return dataclasses.replace(
            self, leaves={n: fold[_reduce(self.kind, n)](a, axis=axis) for n, a in self.leaves.items()}
        )

    def identity(self) -> Summary:
        """The summary of nothing, of the same shape: merging it changes nothing."""
        fill = {Reduce.SUM: 0.0, Reduce.MAX: -jnp.inf}
        return dataclasses.replace(
            self,
            leaves={n: jnp.full(a.shape, fill[_reduce(self.kind, n)], jnp.float32) for n, a in self.leaves.items()},
        )


_MERGE = {Reduce.SUM: jnp.add, Reduce.MAX: jnp.maximum}


@functools.cache
def _leaf(kind: str, name: str) -> Leaf:
    return next(leaf for leaf in KINDS[kind].leaves if leaf.name == name)


def _reduce(kind: str, name: str) -> Reduce:
    return _leaf(kind, name).reduce


def merge_all(summaries: Iterable[Summary]) -> Summary:
    """Merges one or more summaries."""
    return functools.reduce(Summary.merge, summaries)


def is_summary(node: object) -> bool:
    """Whether a node of a pytree is a whole summary (`is_leaf` of `jax.tree.map`)."""
    return isinstance(node, Summary)
